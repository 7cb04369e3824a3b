"""How several sender ranks agree: gather to rank 0, broadcast from rank 0, each with a deadline that names the rank
which is missing.

Only plain bytes pass. A group is used in rounds, one per publish: whatever a failed round left behind cannot be taken
for something of the next.
"""

import threading
from abc import ABC, abstractmethod
from typing import Any, Protocol

import torch.distributed as dist

from weftpub.channel import Deadline
from weftpub.errors import ChannelError, ConfigError
from weftpub.publisher.mail import StoreMail

__all__ = ["RankGroup", "SoloGroup", "ThreadGroup", "TorchGroup", "barrier"]


class RankGroup(Protocol):
    """Sender ranks that publish together. Every rank calls the same operations in the same order."""

    @property
    def rank(self) -> int:
        """This rank; 0 coordinates."""
        ...

    @property
    def size(self) -> int:
        """Number of ranks."""
        ...

    def begin(self, round_name: str) -> None:
        """Begin a round; all ranks give the same name, never used before."""
        ...

    def gather(self, payload: bytes, phase: str, seconds: float) -> list[bytes] | None:
        """Payloads of all ranks in their order, on rank 0; None elsewhere.

        DeadlineError on rank 0 names the missing rank.
        """
        ...

    def broadcast(self, payload: bytes | None, phase: str, seconds: float) -> bytes:
        """Rank 0's payload, on every rank. DeadlineError on the others if rank 0 does not come."""
        ...


def barrier(group: RankGroup, phase: str, seconds: float) -> None:
    """Return on every rank once all have come, or raise DeadlineError naming who has not."""
    group.gather(b"", phase, seconds)
    group.broadcast(b"" if group.rank == 0 else None, phase, seconds * 2)


class SoloGroup:
    """One sender."""

    rank = 0
    size = 1

    def begin(self, round_name: str) -> None:
        """Nothing to agree on."""

    def gather(self, payload: bytes, phase: str, seconds: float) -> list[bytes] | None:
        """The payload itself."""
        return [payload]

    def broadcast(self, payload: bytes | None, phase: str, seconds: float) -> bytes:
        """The payload itself."""
        return b"" if payload is None else payload


class _Board:
    """What threads of a group have posted."""

    def __init__(self) -> None:
        self.posted: dict[tuple[str, int, int], bytes] = {}
        self.changed = threading.Condition()


class _KeyedGroup(ABC):
    """Gather and broadcast over any place where bytes can be posted under a key and waited for."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self._round = ""
        self._step = 0

    def begin(self, round_name: str) -> None:
        """Begin a round: keys of earlier ones are never looked at again."""
        self._round = round_name
        self._step = 0

    def gather(self, payload: bytes, phase: str, seconds: float) -> list[bytes] | None:
        """See `RankGroup`."""
        self._step += 1
        if self.rank != 0:
            self._post(self.rank, payload)
            return None
        payloads = [payload]
        deadline = Deadline("", phase, seconds)
        for rank in range(1, self.size):
            deadline.peer = f"sender rank {rank}"
            payloads.append(
                self._take(rank, deadline, f"it never reported under {self._key(rank)}; did it raise, or is it stuck?")
            )
        return payloads

    def broadcast(self, payload: bytes | None, phase: str, seconds: float) -> bytes:
        """See `RankGroup`."""
        self._step += 1
        if self.rank == 0:
            data = b"" if payload is None else payload
            for rank in range(1, self.size):
                self._post(rank, data)
            return data
        cause = f"rank 0 never answered under {self._key(self.rank)}; did it raise, or does it wait for another rank?"
        return self._take(self.rank, Deadline("sender rank 0", phase, seconds), cause)

    def _key(self, rank: int) -> str:
        return f"weftpub/{self._round}/{self._step}/{rank}"

    @abstractmethod
    def _post(self, rank: int, payload: bytes) -> None:
        """Put a payload under this step's key of `rank`."""

    @abstractmethod
    def _take(self, rank: int, deadline: Deadline, cause: str) -> bytes:
        """Wait for the payload under this step's key of `rank` and remove it; the deadline's error with `cause` if it
        never comes.
        """


class ThreadGroup(_KeyedGroup):
    """Threads of one process. Made by `ThreadGroup.of_size`."""

    def __init__(self, rank: int, size: int, board: _Board) -> None:
        super().__init__(rank, size)
        self._board = board

    @classmethod
    def of_size(cls, size: int) -> "list[ThreadGroup]":
        """One group object for each of `size` threads."""
        board = _Board()
        return [cls(rank, size, board) for rank in range(size)]

    def _post(self, rank: int, payload: bytes) -> None:
        with self._board.changed:
            self._board.posted[self._round, self._step, rank] = payload
            self._board.changed.notify_all()

    def _take(self, rank: int, deadline: Deadline, cause: str) -> bytes:
        key = (self._round, self._step, rank)
        with self._board.changed:
            if not self._board.changed.wait_for(lambda: key in self._board.posted, deadline.left):
                raise deadline.error(cause)
            return self._board.posted.pop(key)


class TorchGroup(_KeyedGroup):
    """Ranks of a torch.distributed process group, whatever its backend: bytes go through the group's store, not through
    collectives.

    A collective that times out leaves its group unusable and does not say who was missing; a key in the store does
    neither.

    Args:
        process_group: the group; None is the default one. ConfigError if torch.distributed is not initialised.
        run_id: part of the keys.
    """

    def __init__(self, process_group: Any = None, *, run_id: str = "run") -> None:
        if not dist.is_initialized():
            raise ConfigError(
                "TorchGroup needs torch.distributed; call init_process_group first, or use SoloGroup with one sender"
            )
        super().__init__(dist.get_rank(process_group), dist.get_world_size(process_group))
        self._mail = StoreMail.of_group(process_group)
        self._run_id = run_id

    def _key(self, rank: int) -> str:
        return f"weftpub/{self._run_id}/{self._round}/{self._step}/{rank}"

    def _post(self, rank: int, payload: bytes) -> None:
        self._mail.post(self._key(rank), payload)

    def _take(self, rank: int, deadline: Deadline, cause: str) -> bytes:
        key = self._key(rank)
        try:
            self._mail.wait(key, deadline.left)
            return self._mail.take(key)
        except RuntimeError as error:  # torch's store errors, a timeout among them
            if deadline.passed:
                raise deadline.error(cause) from error
            raise ChannelError(
                f"{deadline.peer}: the group's store failed in phase {deadline.phase}: {error}; has rank 0's host gone?"
            ) from error
