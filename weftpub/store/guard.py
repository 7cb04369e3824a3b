"""Who may read or write a store, and when: one generation at a time, and readers hold the next one off.

    EMPTY ----begin----> WRITING ----seal----> SEALED ----begin----> WRITING ...
                            |  ^                  |
                  mark_torn |  | begin_recovery   | mark_torn
                            v  |                  v TORN <----------------+

* WRITING goes back to where it came from by `cancel`, as long as nothing was written.
* Reading needs SEALED. A reader that must see one generation for a while holds a lease (`reading`); `begin` waits for
  all leases to end, with a deadline, and so does everything else that changes or moves the bytes.
* Where other processes map the memory, a witness is told of every move before a byte changes, and may refuse `begin`:
  an engine may be serving from these very bytes.
* TORN is left by `begin_recovery` alone, which any state allows: every byte is rewritten, from a checkpoint or from
  masters that a checkpoint made whole. It gives up what was there, so it cannot be cancelled.
"""

import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum

from weftpub.errors import DeadlineError, GenerationError, StateError, TornError
from weftpub.memory import Witness

__all__ = ["GenerationGuard", "StoreState"]


class StoreState(StrEnum):
    EMPTY = "empty"
    WRITING = "writing"
    SEALED = "sealed"
    TORN = "torn"


@dataclass(frozen=True)
class _Lease:
    purpose: str
    thread: int
    since: float


class GenerationGuard:
    """The state machine above, for threads of one process.

    Args:
        owner: names the store in errors.
        timeout: seconds that a wait may take unless the call says otherwise.
        witness: told of every move, if the memory is shared.
    """

    def __init__(self, owner: str, timeout: float, witness: Witness | None = None) -> None:
        self.owner = owner
        self._witness = witness
        self.timeout = timeout
        self.torn_reason = ""
        self._state = StoreState.EMPTY
        self._generation: int | None = None  # last sealed
        self._writing: int | None = None
        self._writer: int | None = None  # thread that began
        self._recovering = False
        self._resident = True
        self._leases: dict[int, _Lease] = {}
        self._next_lease = 0
        self._changed = threading.Condition()

    @property
    def state(self) -> StoreState:
        return self._state

    @property
    def generation(self) -> int | None:
        """The sealed generation that can be read, or None."""
        return self._generation if self._state is StoreState.SEALED else None

    @property
    def writing(self) -> int | None:
        return self._writing

    @property
    def resident(self) -> bool:
        return self._resident

    def begin(self, generation: int, timeout: float | None = None) -> None:
        """EMPTY or SEALED -> WRITING, after all leases ended.

        Raises:
            GenerationError: `generation` is not greater than the sealed one.
            StateError, TornError: the state forbids it. DeadlineError: a reader did not end in time.
        """
        with self._changed:
            self._require_can_begin(generation)
            self._wait_for_readers(f"begin({generation})", timeout)
            self._require_can_begin(generation)  # the wait let other threads in
            if self._witness is not None:
                self._witness.begin(generation)
            self._start_writing(generation)

    def begin_recovery(self, generation: int, timeout: float | None = None) -> None:
        """Any state -> WRITING, with any generation: the caller rewrites every byte."""
        with self._changed:
            self._require_resident("recovery")
            self._wait_for_readers(f"recovery of generation {generation}", timeout)
            self._require_resident("recovery")
            if self._witness is not None:
                self._witness.begin(generation, recover=True)
            self._generation = None
            self._start_writing(generation)
            self._recovering = True

    def cancel(self) -> None:
        """WRITING -> where it came from; the caller knows that nothing was written."""
        with self._changed:
            generation = self.require_writing("cancel")
            if self._recovering:
                raise StateError(
                    f"{self.owner}: the recovery of generation {generation} has given up what was there; finish it, or "
                    "mark_torn"
                )
            if self._witness is not None:
                self._witness.cancel()
            self._state = StoreState.EMPTY if self._generation is None else StoreState.SEALED
            self._writing = None
            self._changed.notify_all()

    def seal(self, digest: str = "") -> int:
        """WRITING -> SEALED; returns the generation.

        Args:
            digest: for the witness: hex sha256 over the generation's checksums.
        """
        with self._changed:
            generation = self.require_writing("seal")
            if self._witness is not None:
                self._witness.seal(digest)
            self._state, self._generation, self._writing = StoreState.SEALED, generation, None
            self._changed.notify_all()
            return generation

    def tear(self, reason: str) -> None:
        """Any state -> TORN. Readers with a lease are not waited for: their next check fails."""
        with self._changed:
            self._state, self._writing, self.torn_reason = StoreState.TORN, None, reason
            self._changed.notify_all()
            if self._witness is not None:
                self._witness.tear(reason)

    def require_writing(self, action: str) -> int:
        """The generation being written; StateError or TornError if none is."""
        self._require_whole(action)
        if self._state is not StoreState.WRITING or self._writing is None:
            raise StateError(f"{self.owner}: {action} needs a generation that is being written; call begin first")
        return self._writing

    def require_sealed(self, action: str, generation: int | None = None) -> int:
        """The sealed generation; errors unless it can be read, and is `generation` where one is given."""
        self._require_whole(action)
        self._require_resident(action)
        if self._state is not StoreState.SEALED or self._generation is None:
            found = f"generation {self._writing} is being written" if self._writing is not None else "it is empty"
            raise GenerationError(f"{self.owner}: {action} needs a sealed generation, but {found}; seal it first")
        if generation is not None and generation != self._generation:
            raise GenerationError(
                f"{self.owner}: {action} wants generation {generation}, but {self._generation} is sealed; "
                "its bytes were overwritten, take the sealed one"
            )
        return self._generation

    @contextmanager
    def reading(self, purpose: str, generation: int | None = None, timeout: float | None = None) -> Generator[int]:
        """Hold the sealed generation: nothing changes or moves its bytes inside the block.

        Waits, up to the deadline, while a generation is being written. Yields the generation held.
        """
        with self._changed:
            self._wait_for_seal(purpose, timeout)
            held = self.require_sealed(purpose, generation)
            key = self._next_lease
            self._next_lease += 1
            self._leases[key] = _Lease(purpose, threading.get_ident(), time.monotonic())
        try:
            yield held
        finally:
            with self._changed:
                del self._leases[key]
                self._changed.notify_all()

    @contextmanager
    def moving(self, action: str, *, resident: bool, timeout: float | None = None) -> Generator[Callable[[], None]]:
        """Move the bytes away (`resident` False) or back: no reader, no writer, and never twice in one direction.

        If the block fails the store is torn. It calls what is yielded when the memory has gone or come, so that a torn
        store whose memory is there can be loaded into.
        """
        with self._changed:
            self._require_movable(action, resident)
            self._wait_for_readers(action, timeout)
            self._require_movable(action, resident)

            def moved() -> None:
                self._resident = resident

            try:
                yield moved
            except BaseException as error:
                self.tear(f"{action} failed half-way: {error}")
                raise
            moved()

    def _require_can_begin(self, generation: int) -> None:
        self._require_whole("begin")
        self._require_resident("begin")
        if self._state is StoreState.WRITING:
            raise StateError(f"{self.owner}: begin({generation}) while generation {self._writing} is being written")
        if self._generation is not None and generation <= self._generation:
            raise GenerationError(
                f"{self.owner}: begin({generation}), but generation {self._generation} is sealed; "
                "generations grow, give a greater one"
            )

    def _start_writing(self, generation: int) -> None:
        self._state, self._writing, self._writer = StoreState.WRITING, generation, threading.get_ident()
        self._recovering = False

    def _require_whole(self, action: str) -> None:
        if self._state is StoreState.TORN:
            raise TornError(
                f"{self.owner}: {action} refused, the store is torn: {self.torn_reason}; "
                "load the last checkpoint (weftpub.checkpoint.load_state) to open it again"
            )

    def _require_resident(self, action: str) -> None:
        if not self._resident:
            raise StateError(f"{self.owner}: {action} refused, its memory is offloaded; call reload first")

    def _require_movable(self, action: str, resident: bool) -> None:
        if self._state is StoreState.WRITING:
            raise StateError(f"{self.owner}: {action} while generation {self._writing} is being written; seal it first")
        if self._resident is resident:
            where = "already on the device" if resident else "already offloaded"
            raise StateError(f"{self.owner}: {action}, but its memory is {where}")

    def _wait_for_readers(self, action: str, timeout: float | None) -> None:
        me = threading.get_ident()
        own = [lease.purpose for lease in self._leases.values() if lease.thread == me]
        if own:
            raise StateError(f"{self.owner}: {action} inside this thread's own lease ({own[0]}) would wait for itself")
        started = time.monotonic()
        allowed = self.timeout if timeout is None else timeout
        if not self._changed.wait_for(lambda: not self._leases, timeout=allowed):
            now = time.monotonic()
            held = ", ".join(f"{lease.purpose} for {now - lease.since:.1f} s" for lease in self._leases.values())
            raise DeadlineError(
                f"{self.owner}: {action} waited {now - started:.1f} s of {allowed:.1f} s for readers that still "
                f"hold the sealed generation: {held}; likely a checkpoint or publish that hangs, or too short a timeout"
            )

    def _wait_for_seal(self, purpose: str, timeout: float | None) -> None:
        if self._state is StoreState.WRITING and self._writer == threading.get_ident():
            raise GenerationError(
                f"{self.owner}: {purpose} inside this thread's own generation {self._writing} would wait for itself; "
                "seal it first"
            )
        started = time.monotonic()
        allowed = self.timeout if timeout is None else timeout
        if not self._changed.wait_for(lambda: self._state is not StoreState.WRITING, timeout=allowed):
            raise DeadlineError(
                f"{self.owner}: {purpose} waited {time.monotonic() - started:.1f} s of {allowed:.1f} s for generation "
                f"{self._writing} to be sealed; likely a step that hangs, or a timeout shorter than a step"
            )
