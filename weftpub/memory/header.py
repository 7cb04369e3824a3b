"""The header of a shared allocation: which generation its bytes are, whether they are whole, and who serves from them.

    EMPTY ----begin----> WRITING ----seal----> SEALED ----begin----> WRITING ...
                            |  ^                  |
               tear, death  |  | begin(recover)   | tear
                            v  |                  v TORN <-------------+

It is a memory file of its own beside the tensors, handed over with them, so it lives exactly as long. A trainer that is
killed in the middle of a step leaves WRITING behind: that word, and not the trainer, is what an engine asks before it
serves. Two rules keep the two sides apart: `begin` is refused while a living process serves, serving is refused unless
the sealed generation is the committed one.

The state is a text with a checksum, kept twice. A change goes to the older copy, and counts once it is whole: whoever
dies in between leaves the other copy valid. Changes hold a lock on the file, which the kernel drops with the process.
"""

import fcntl
import mmap
import os
import struct
import threading
import time
import zlib
from collections.abc import Callable, Generator
from contextlib import contextmanager
from enum import StrEnum

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from weftpub.errors import ConfigError, DeadlineError, StateError, TornError, TransportError
from weftpub.memory.catalogue import Catalogue
from weftpub.memory.pages import memory_file, require_memory_file
from weftpub.wire.identity import Identity, local_identity, process_alive

__all__ = ["Committed", "Header", "SharedState", "Standing"]

_MAGIC = b"weftpub-shared-1"
_HEAD = struct.Struct("<16sQQ")  # magic, bytes of the tensors' memory, bytes of the catalogue
_COPY = struct.Struct("<QII")  # number of the change, bytes of the text, its CRC-32
_COPIES, _COPY_BYTES = 4096, 16384
_CATALOGUE = _COPIES + 2 * _COPY_BYTES
_LARGEST_CATALOGUE = 16 << 20
_POLL_S = 0.002
_FILL_S = 1.0  # that an engine may take to put the weights there that it loaded, when a trainer wants to begin
_DIGEST = r"^([0-9a-f]{64})?$"
_PLAIN = ConfigDict(frozen=True, extra="forbid")


class _BusyError(StateError):
    """A living process writes."""


class SharedState(StrEnum):
    """State of the bytes."""

    EMPTY = "empty"
    WRITING = "writing"
    SEALED = "sealed"
    TORN = "torn"


class Committed(BaseModel):
    """The version that engines were last told to serve, and the generation whose bytes it is.

    Attributes:
        digest: of that generation. A trainer that went back to a checkpoint comes to the same number with other bytes.
    """

    model_config = _PLAIN

    version: int = Field(ge=0)
    generation: int = Field(ge=0)
    digest: str = Field(default="", pattern=_DIGEST)


class Standing(BaseModel):
    """All that the header says.

    Attributes:
        generation: last sealed one; its bytes are there unless `state` is WRITING or TORN.
        writing, writer: generation being written, and by whom.
        reason: why the bytes are torn.
        digest: hex sha256 of the sealed generation's checksums, "" if its writer gave none.
        committed: what may be served.
        serving: processes that serve from the bytes now.
    """

    model_config = _PLAIN

    state: SharedState = SharedState.EMPTY
    generation: int | None = None
    writing: int | None = None
    writer: Identity | None = None
    reason: str = ""
    digest: str = Field(default="", pattern=_DIGEST)
    committed: Committed | None = None
    serving: tuple[Identity, ...] = ()

    @property
    def servable(self) -> bool:
        """Whether the bytes are whole and those of the committed version."""
        return (
            self.state is SharedState.SEALED
            and self.committed is not None
            and (self.committed.generation, self.committed.digest) == (self.generation, self.digest)
        )

    def obstacle(self, here: Identity) -> str | None:
        """Why the bytes must not be served, in words; None if they may be."""
        if self.servable:
            return None
        if self.state is SharedState.WRITING:
            writer = self.writer
            if writer is not None and not process_alive(writer, here):
                return f"its trainer ({writer}) died while it wrote generation {self.writing}"
            return f"generation {self.writing} is being written by {writer}"
        if self.state is SharedState.TORN:
            return self.reason
        if self.state is SharedState.EMPTY:
            return "nothing was ever written to it"
        if self.committed is not None and self.committed.generation == self.generation:
            return (
                f"it holds other bytes of generation {self.generation} than those that were committed as version "
                f"{self.committed.version}"
            )
        found = "no version" if self.committed is None else f"version {self.committed.version}"
        return f"it holds generation {self.generation}, which is not committed; {found} was committed last"


class Header:
    """The header, mapped.

    Args:
        descriptor: of the memory file; owned from here on.
        name: for messages.

    Raises:
        TransportError: the file is no header. ConfigError: its catalogue cannot be read.
    """

    def __init__(self, descriptor: int, name: str) -> None:
        self.descriptor = descriptor
        self.name = name
        self._here = local_identity()
        self._me = self._here.model_copy(update={"gpus": ()})
        size = os.fstat(descriptor).st_size
        if size < _CATALOGUE or size > _CATALOGUE + _LARGEST_CATALOGUE:
            raise TransportError(f"{name}: a file of {size} bytes is no header of a shared allocation")
        require_memory_file(descriptor, size)
        self._map = mmap.mmap(descriptor, size, flags=mmap.MAP_SHARED)
        magic, self.nbytes, length = _HEAD.unpack_from(self._map, 0)
        if magic != _MAGIC or length > size - _CATALOGUE:
            raise TransportError(f"{name}: not a header of this release of weftpub; both sides must run the same one")
        self.catalogue = Catalogue.from_json(self._map[_CATALOGUE : _CATALOGUE + length], self.nbytes)
        self._last: tuple[bytes, int, Standing] | None = None  # heads of both copies, and what they said
        self._mine = threading.Lock()  # the file's lock keeps other processes out, not other threads of this one
        # A description of its own: locks of one that was handed over would be everybody's.
        self._lock = os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)

    @classmethod
    def make(cls, catalogue: Catalogue, nbytes: int, name: str) -> "Header":
        """A new header, EMPTY, for memory of `nbytes`."""
        text = catalogue.to_json().encode()
        if len(text) > _LARGEST_CATALOGUE:
            raise ConfigError(f"{name}: a catalogue of {len(text)} bytes exceeds the limit of {_LARGEST_CATALOGUE}")
        size = -(-(_CATALOGUE + len(text)) // mmap.PAGESIZE) * mmap.PAGESIZE
        descriptor = memory_file("weftpub-header", size)
        with mmap.mmap(descriptor, size, flags=mmap.MAP_SHARED) as fresh:
            _HEAD.pack_into(fresh, 0, _MAGIC, nbytes, len(text))
            fresh[_CATALOGUE : _CATALOGUE + len(text)] = text
            _write_copy(fresh, 1, Standing())
        return cls(descriptor, name)

    def read(self) -> Standing:
        """What it says now; TornError if neither copy is whole, which no death of one process can cause."""
        return self._newest()[1]

    def begin(self, generation: int, *, recover: bool = False, first: bool = False, seconds: float = 10.0) -> None:
        """-> WRITING: from here on the bytes may be anything.

        Args:
            recover: also from TORN, and from a WRITING whose writer is dead: every byte is written again.
            first: only if nobody has written yet. An engine that made the memory puts its weights there, unless a
                trainer that joined meanwhile was quicker.

        Raises:
            StateError: a living process serves from the bytes, or has been writing them for a while; or somebody was
                `first`. TornError: torn, and not `recover`.
        """

        def change(now: Standing) -> Standing:
            if first and now.state is not SharedState.EMPTY:
                raise StateError(f"{self.name}: somebody has written to it already; it is {now.state}")
            serving = [who for who in now.serving if process_alive(who, self._here)]
            if serving:
                raise StateError(
                    f"{self.name}: generation {generation} cannot be written while {_listed(serving)} serves from the "
                    "same memory; pause the engine first"
                )
            if now.state is SharedState.WRITING and now.writer != self._me:
                assert now.writer is not None, "WRITING names its writer"
                if process_alive(now.writer, self._here):
                    raise _BusyError(f"{self.name}: {now.writer} writes generation {now.writing} at this moment")
            if now.state in (SharedState.WRITING, SharedState.TORN) and not recover:
                raise TornError(f"{self.name}: {now.obstacle(self._here)}; load the last checkpoint to open it again")
            return now.model_copy(
                update={
                    "state": SharedState.WRITING,
                    "generation": None if recover else now.generation,
                    "writing": generation,
                    "writer": self._me,
                    "reason": "",
                    "serving": (),
                }
            )

        patience = time.monotonic() + min(seconds, _FILL_S)
        while True:
            try:
                self._change(change, seconds)
                return
            except _BusyError as error:
                if time.monotonic() > patience:
                    raise StateError(str(error)) from None
                time.sleep(_POLL_S)

    def seal(self, digest: str = "", *, seconds: float = 10.0) -> None:
        """WRITING -> SEALED. The caller has waited for the device.

        Args:
            digest: hex sha256 of the checksums, so that whoever maps the bytes later can prove them.
        """

        def change(now: Standing) -> Standing:
            self._require_mine(now, "seal")
            return now.model_copy(
                update={
                    "state": SharedState.SEALED,
                    "generation": now.writing,
                    "writing": None,
                    "writer": None,
                    "digest": digest,
                }
            )

        self._change(change, seconds)

    def cancel(self, *, seconds: float = 10.0) -> None:
        """WRITING -> where it came from; the caller knows that nothing was written."""

        def change(now: Standing) -> Standing:
            self._require_mine(now, "cancel")
            state = SharedState.EMPTY if now.generation is None else SharedState.SEALED
            return now.model_copy(update={"state": state, "writing": None, "writer": None})

        self._change(change, seconds)

    def tear(self, reason: str, *, seconds: float = 10.0) -> None:
        """-> TORN, whoever says so."""
        update = {"state": SharedState.TORN, "generation": None, "writing": None, "writer": None, "digest": ""}
        self._change(lambda now: now.model_copy(update={**update, "reason": reason[:2000]}), seconds)

    def commit(self, version: int, *, seconds: float = 10.0) -> None:
        """The sealed generation is `version` from now on, and may be served; StateError unless it is sealed."""

        def change(now: Standing) -> Standing:
            if now.state is not SharedState.SEALED or now.generation is None:
                raise StateError(f"{self.name}: version {version} cannot be committed: {now.obstacle(self._here)}")
            return now.model_copy(
                update={"committed": Committed(version=version, generation=now.generation, digest=now.digest)}
            )

        self._change(change, seconds)

    def start_serving(self, *, seconds: float = 10.0) -> int:
        """Register this process as one that serves; the version that it serves.

        Raises:
            TornError: the bytes are not those of the committed version, with the reason.
        """

        def change(now: Standing) -> Standing:
            obstacle = now.obstacle(self._here)
            if obstacle is not None:
                raise TornError(f"{self.name}: must not be served: {obstacle}; publish a complete version")
            others = [who for who in now.serving if who != self._me and process_alive(who, self._here)]
            return now.model_copy(update={"serving": (*others, self._me)})

        after = self._change(change, seconds)
        assert after.committed is not None, "servable means committed"
        return after.committed.version

    def stop_serving(self, *, seconds: float = 10.0) -> None:
        """This process serves no more: nothing of it reads the bytes. Nothing if it did not."""
        if self._me in self.read().serving:
            self._change(lambda now: now.model_copy(update={"serving": self._without_me(now)}), seconds)

    def close(self) -> None:
        """Close the descriptors."""
        if self.descriptor >= 0:
            self._map.close()
            os.close(self._lock)
            os.close(self.descriptor)
            self.descriptor = self._lock = -1

    def _without_me(self, now: Standing) -> tuple[Identity, ...]:
        return tuple(who for who in now.serving if who != self._me)

    def _require_mine(self, now: Standing, action: str) -> None:
        if now.state is not SharedState.WRITING or now.writer != self._me:
            raise StateError(
                f"{self.name}: {action} by a process that does not write it; it is {now.state}"
                + (f", written by {now.writer}" if now.writer is not None else "")
            )

    def _change(self, change: Callable[[Standing], Standing], seconds: float) -> Standing:
        with self._locked(seconds):
            number, now = self._newest()
            after = change(now)
            _write_copy(self._map, number + 1, after)
            self._last = _heads(self._map), number + 1, after
            return after

    @contextmanager
    def _locked(self, seconds: float) -> Generator[None]:
        started = time.monotonic()
        if not self._mine.acquire(timeout=seconds):
            raise DeadlineError(
                f"{self.name}: its header was locked for {seconds:g} s by another thread of this process"
            )
        try:
            while True:
                try:
                    fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() - started > seconds:
                        raise DeadlineError(
                            f"{self.name}: its header was locked for {seconds:g} s by another process that maps it; is "
                            "one of them stopped?"
                        ) from None
                    time.sleep(_POLL_S)
            try:
                yield
            finally:
                fcntl.flock(self._lock, fcntl.LOCK_UN)
        finally:
            self._mine.release()

    def _newest(self) -> tuple[int, Standing]:
        """Number of the last change, and the state after it. Asked for at every reply of an engine, so it is read again
        only when a change has gone to either copy: that writes its head, last of all and with a new number."""
        heads = _heads(self._map)
        if self._last is None or self._last[0] != heads:
            self._last = heads, *self._parse()
        return self._last[1:]

    def _parse(self) -> tuple[int, Standing]:
        for _ in range(100):  # a reader without the lock may meet a copy that is being written
            found = [copy for copy in (_read_copy(self._map, 0), _read_copy(self._map, 1)) if copy is not None]
            if found:
                number, text = max(found)
                try:
                    return number, Standing.model_validate_json(text)
                except ValidationError as error:
                    raise TornError(
                        f"{self.name}: its header holds {error.error_count()} faults; both sides must run one release"
                    ) from None
            time.sleep(_POLL_S)
        raise TornError(f"{self.name}: its header is damaged; end every process that maps it and start again")


def _write_copy(target: mmap.mmap, number: int, standing: Standing) -> None:
    text = standing.model_dump_json().encode()
    if len(text) > _COPY_BYTES - _COPY.size:
        raise StateError(f"the header's state of {len(text)} bytes does not fit; too many processes serve from it")
    start = _COPIES + number % 2 * _COPY_BYTES
    target[start + _COPY.size : start + _COPY.size + len(text)] = text
    _COPY.pack_into(target, start, number, len(text), _crc(number, text))


def _heads(source: mmap.mmap) -> bytes:
    """The heads of both copies: number, length and checksum."""
    starts = _COPIES, _COPIES + _COPY_BYTES
    return b"".join(source[start : start + _COPY.size] for start in starts)


def _read_copy(source: mmap.mmap, which: int) -> tuple[int, bytes] | None:
    start = _COPIES + which * _COPY_BYTES
    number, length, crc = _COPY.unpack_from(source, start)
    if not 0 < length <= _COPY_BYTES - _COPY.size:
        return None
    text = source[start + _COPY.size : start + _COPY.size + length]
    return (number, text) if crc == _crc(number, text) else None


def _crc(number: int, text: bytes) -> int:
    return zlib.crc32(text, number & 0xFFFFFFFF)


def _listed(processes: list[Identity]) -> str:
    return ", ".join(str(who) for who in processes)
