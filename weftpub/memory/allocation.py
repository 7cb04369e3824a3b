"""One allocation that trainer and engine both map: joined by name, whoever comes first makes it.

    memory = SharedAllocation.join(folder, "experts", device, catalogue)
    memory.tensor("layers.0.w13")            the same bytes in every process that joined

All of a name and a GPU meet in one folder. A newcomer asks every process that listens there until one answers; only if
none does, it makes the memory. So either side may start first, either may die and come back, and the memory is freed
when the last one leaves or dies. What may be written and served when is the business of `weftpub.memory.header`.
"""

import fcntl
import os
import re
import secrets
import time
import weakref
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch

from weftpub.channel.address import socket_path, unix_address
from weftpub.device import resolve_device
from weftpub.errors import ConfigError, DeadlineError, TransportError
from weftpub.memory.catalogue import Catalogue
from weftpub.memory.handover import Facts, HandoverServer, take
from weftpub.memory.header import Header, Standing
from weftpub.memory.pages import Pages, make_pages, open_pages
from weftpub.memory.vmm import Access
from weftpub.plan import torch_dtype
from weftpub.wire.identity import gpu_uuid

__all__ = ["SharedAllocation", "joined", "joined_allocations"]

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,31}")
_joined: "weakref.WeakValueDictionary[str, SharedAllocation]" = weakref.WeakValueDictionary()


class SharedAllocation:
    """Memory of several processes. Made by `join`.

    Attributes:
        id: name of the memory, drawn when it was made and never used twice.
        device: where it is.
        gpu: "cpu", or the UUID of the GPU.
        catalogue: what lies where.
        created: whether this process made it.
        protected: debug mode, see `join`.
    """

    def __init__(
        self, pages: Pages, header: Header, facts: Facts, device: torch.device, *, created: bool, protected: bool
    ) -> None:
        self.id = facts.allocation
        self.device = device
        self.gpu = facts.device
        self.created = created
        self.protected = protected
        self.catalogue = header.catalogue
        self._facts = facts
        self._pages = pages
        self._header = header
        self._servers: list[HandoverServer] = []
        self._end = weakref.finalize(self, _close, pages, header, self._servers, os.getpid())
        self._users = 1  # joins of this process that have not left
        self._access = Access.WRITE
        self._allow(Access.READ)

    @classmethod
    def join(
        cls,
        folder: str | os.PathLike[str],
        name: str,
        device: torch.device | str,
        catalogue: Catalogue | None = None,
        *,
        create: bool = True,
        protected: bool = False,
        seconds: float = 60.0,
    ) -> "SharedAllocation":
        """Map the allocation of this name on this device, or make it.

        Args:
            folder: where its processes meet; owner-only, made if it is missing. The same for both sides.
            name: of the memory; with several devices, each has its own of the same name.
            device: "cpu" or a CUDA device.
            catalogue: what this process needs in it; None takes what is there.
            create: make it if nobody has it.
            protected: debug mode: map it so that a write outside of a generation being written, and any access of an
                engine that does not serve, ends the process that tries. Costs a change of the mapping at each step.
            seconds: to wait for another process that is joining at the same time.

        Raises:
            ConfigError: it holds something else than `catalogue` says; names the first difference. Or nobody has it,
                and it is not to be made, or there is no catalogue to make it from.
            TransportError: driver or system refuse; names the call. ChannelError: folder or peer cannot be trusted.
            DeadlineError: another process takes too long to join.
        """
        where = resolve_device(device)
        gpu = "cpu" if where.type == "cpu" else gpu_uuid(where.index)
        meeting = _Meeting(Path(folder), name, gpu)
        with meeting.locked(seconds):
            found = meeting.ask()
            known = None if found is None else joined(found[0].allocation)
            if found is not None and known is not None:
                memory = known._join_again(found, name, protected)
            elif found is not None:
                memory = cls._open(found, where, gpu, name, protected)
            elif create and catalogue is not None:
                memory = cls._make(catalogue, where, gpu, name, protected)
            else:
                raise ConfigError(
                    f"no process holds shared memory {name!r} for {gpu} in {folder}; start the other side first, or "
                    "give a catalogue and let this side make it"
                )
            if catalogue is not None and (difference := catalogue.difference(memory.catalogue)) is not None:
                memory.leave()
                raise ConfigError(f"shared memory {name!r} for {gpu} was made for something else: {difference}")
            if memory is not known:
                memory._listen(meeting)
        _joined[memory.id] = memory
        return memory

    @classmethod
    def _make(
        cls, catalogue: Catalogue, device: torch.device, gpu: str, name: str, protected: bool
    ) -> "SharedAllocation":
        pages = make_pages(device, catalogue.nbytes)
        header = Header.make(catalogue, pages.nbytes, f"shared memory {name!r} ({gpu})")
        facts = Facts(allocation=secrets.token_hex(16), device=gpu, nbytes=pages.nbytes)
        return cls(pages, header, facts, device, created=True, protected=protected)

    @classmethod
    def _open(
        cls, found: tuple[Facts, int, int], device: torch.device, gpu: str, name: str, protected: bool
    ) -> "SharedAllocation":
        facts, memory, header = found
        if facts.device != gpu:
            os.close(memory)
            os.close(header)
            raise TransportError(f"shared memory {name!r} is on {facts.device}, this process asked for {gpu}")
        try:
            opened = Header(header, f"shared memory {name!r} ({gpu})")
        except BaseException:
            os.close(memory)
            raise
        if opened.nbytes != facts.nbytes:
            os.close(memory)
            opened.close()
            raise TransportError(f"shared memory {name!r}: {facts.nbytes} bytes offered, its header says otherwise")
        pages = open_pages(device, memory, facts.nbytes)
        return cls(pages, opened, facts, device, created=False, protected=protected)

    def _join_again(self, found: tuple[Facts, int, int], name: str, protected: bool) -> "SharedAllocation":
        """This process maps it already: one mapping serves all of its parts."""
        os.close(found[1])
        os.close(found[2])
        if protected != self.protected:
            raise ConfigError(f"shared memory {name!r}: this process maps it with protected={self.protected} already")
        self._users += 1
        return self

    @property
    def address(self) -> int:
        """Where it is mapped in this process, until its last tensor is gone."""
        return self._pages.address

    @property
    def writable(self) -> bool:
        """Whether this process may write to it now. One that may not would be ended by trying."""
        return self._access is Access.WRITE

    @property
    def nbytes(self) -> int:
        """Bytes of the mapping."""
        return self._pages.nbytes

    def tensor(self, name: str) -> torch.Tensor:
        """A tensor of the catalogue, with a storage of its own that keeps the mapping alive; ConfigError if unknown."""
        entry = self.catalogue.by_name.get(name)
        if entry is None:
            raise ConfigError(f"{name}: not in this shared memory, which holds {len(self.catalogue.entries)} tensors")
        return self._pages.tensor(entry.offset, entry.nbytes).view(torch_dtype(entry.dtype)).view(entry.shape)

    def tensors(self) -> Mapping[str, torch.Tensor]:
        """Every tensor of the catalogue."""
        return {name: self.tensor(name) for name in self.catalogue.by_name}

    def whole(self) -> torch.Tensor:
        """All bytes, as uint8 ``[nbytes]``."""
        return self._pages.tensor(0, self._pages.nbytes)

    def offset_of(self, tensor: torch.Tensor) -> int | None:
        """Byte offset of a tensor's first element in this memory, None if it lies elsewhere."""
        offset = tensor.data_ptr() - self._pages.address if tensor.numel() else -1
        return offset if 0 <= offset < self._pages.nbytes else None

    # Writing: the trainer's side, called by its store.

    def begin(self, generation: int, *, recover: bool = False, first: bool = False) -> None:
        """A generation is about to be written; see `Header.begin`."""
        self._header.begin(generation, recover=recover, first=first)
        self._allow(Access.WRITE)

    def seal(self, digest: str = "") -> None:
        """The generation is whole; see `Header.seal`."""
        self._allow(Access.READ)
        self._header.seal(digest)

    def cancel(self) -> None:
        """Nothing was written; see `Header.cancel`."""
        self._allow(Access.READ)
        self._header.cancel()

    def tear(self, reason: str) -> None:
        """The bytes are of no generation; see `Header.tear`."""
        self._allow(Access.READ)
        self._header.tear(reason)

    # Serving: the engine's side.

    def standing(self) -> Standing:
        """What the header says now."""
        return self._header.read()

    def commit(self, version: int) -> None:
        """The sealed generation is `version`; see `Header.commit`."""
        self._header.commit(version)

    def start_serving(self) -> int:
        """This process serves from now on; the version. Errors as `Header.start_serving`."""
        version = self._header.start_serving()
        self._allow(Access.READ)
        return version

    def stop_serving(self) -> None:
        """Nothing of this process reads the bytes from now on."""
        self._allow(Access.NONE)
        self._header.stop_serving()

    def admit_reading(self) -> None:
        """Reading is due outside of serving: checksums before a commit."""
        self._allow(Access.READ)

    # Leaving.

    def leave(self) -> None:
        """Answer nobody any more and close the descriptors, once every part of this process that joined has left. The
        mapping goes with the last tensor over it, the memory with the last process. One that nothing refers to any more
        leaves by itself.
        """
        self._users -= 1
        if self._users > 0:
            return
        self._end()
        _joined.pop(self.id, None)

    def __enter__(self) -> "SharedAllocation":
        return self

    def __exit__(self, *_: object) -> None:
        self.leave()

    def _listen(self, meeting: "_Meeting") -> None:
        path = meeting.new_path()
        self._servers.append(HandoverServer(path, self._facts, (self._pages.descriptor, self._header.descriptor)))

    def _allow(self, access: Access) -> None:
        if self.protected:
            self._pages.protect(access)
            self._access = access


def _close(pages: Pages, header: Header, servers: list[HandoverServer], owner: int) -> None:
    """End what a process holds of an allocation; a forked child only has copies, which end with it."""
    if os.getpid() == owner:
        for server in servers:
            server.close()
        header.close()
        pages.close()


class _Meeting:
    """The folder in which the processes of one allocation find each other."""

    def __init__(self, folder: Path, name: str, gpu: str) -> None:
        if not _NAME.fullmatch(name):
            raise ConfigError(
                f"name {name!r}: expected 1 to 32 letters, digits, dots, dashes or underscores, and no sign in front"
            )
        self._folder = folder
        self._stem = f"{name}@{gpu.removeprefix('GPU-')[:13]}"

    def ask(self) -> tuple[Facts, int, int] | None:
        """The memory from the first process that hands it over; sockets of dead ones are removed.

        Raises:
            TransportError: nobody does, and one that is alive does not answer: it may have the memory.
        """
        silent: TransportError | None = None
        for path in sorted(self._folder.glob(f"{self._stem}.*.s")):
            try:
                found = take(str(path))
            except TransportError as error:  # stopped, or on its way out: another one may have it, too
                silent = error
                continue
            if found is not None:
                return found
            path.unlink(missing_ok=True)
        if silent is not None:
            raise silent
        return None

    def new_path(self) -> str:
        """A socket path for this process."""
        return socket_path(unix_address(self._folder, f"{self._stem}.{secrets.token_hex(4)}.s"))

    @contextmanager
    def locked(self, seconds: float) -> Generator[None]:
        """One process joins at a time; the lock goes with its process."""
        unix_address(self._folder, "x")  # makes the folder, or refuses it
        path = self._folder / f"{self._stem}.lock"
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        started = time.monotonic()
        try:
            while True:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() - started > seconds:
                        raise DeadlineError(
                            f"{path}: another process has been joining this shared memory for {seconds:g} s; is it "
                            "stopped?"
                        ) from None
                    time.sleep(0.01)
            yield
        finally:
            os.close(lock)


def joined(allocation: str) -> SharedAllocation | None:
    """The allocation of this id, if this process has joined it."""
    return _joined.get(allocation)


def joined_allocations() -> list[SharedAllocation]:
    """Every allocation that this process has joined."""
    return list(_joined.values())
