"""The few buffers that a sender packs into: never more than their budget, and never written again before the receiver
let go.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from weftpub.errors import TransportError
from weftpub.publisher.peers import PeerLink
from weftpub.transport import SendBuffer, SendTransport, TransportKind

__all__ = ["BUFFERS", "Staged", "StagingPool"]

BUFFERS = 2  # one is packed while the receiver copies out of the other


@dataclass(eq=False)
class Staged:
    """A staging buffer.

    Attributes:
        reader: the receiver that may be reading it; None if it is free.
        opened: receivers that have had it open.
    """

    kind: TransportKind
    buffer: SendBuffer
    reader: PeerLink | None = None
    opened: set[PeerLink] = field(default_factory=set[PeerLink])


class StagingPool:
    """At most `BUFFERS` buffers, of whatever transports are asked for.

    Args:
        transports: opens the sender's side of a transport, or finds it open.
    """

    def __init__(self, transports: Callable[[TransportKind], SendTransport]) -> None:
        self._transports = transports
        self._staged: list[Staged] = []
        self._sizes: dict[TransportKind, int] = {}

    def prepare(self, sizes: Mapping[TransportKind, int], drop: Callable[[Staged], None]) -> None:
        """Before a transfer: say what it needs, and free what does not fit, before anything is under way.

        Args:
            sizes: bytes of a buffer, for each transport that will be used. Several share the budget.
            drop: tells every receiver that has a buffer open to let go of it.

        Raises:
            TransportError: more transports than buffers.
        """
        if len(sizes) > BUFFERS:
            raise TransportError(
                f"{len(sizes)} transports in one publish share {BUFFERS} buffers; name one: {', '.join(sizes)}"
            )
        self._sizes = dict(sizes)
        kept: dict[TransportKind, int] = {}
        for staged in list(self._staged):
            kept[staged.kind] = kept.get(staged.kind, 0) + 1
            fits = kept[staged.kind] <= self._quota and staged.buffer.tensor.numel() >= sizes.get(staged.kind, 1 << 62)
            if staged.reader is None and not fits:
                drop(staged)
                self._staged.remove(staged)
                self._transports(staged.kind).free(staged.buffer)
                kept[staged.kind] -= 1

    @property
    def _quota(self) -> int:
        """Buffers that one transport may have."""
        return BUFFERS // max(1, len(self._sizes))

    def take(self, kind: TransportKind, reader: PeerLink) -> Staged | None:
        """A free buffer for `reader`, None while none can be had."""
        same = [staged for staged in self._staged if staged.kind == kind]
        for staged in same:
            if staged.reader is None:
                staged.reader = reader
                return staged
        if len(self._staged) >= BUFFERS or len(same) >= self._quota:
            return None
        staged = Staged(kind, self._transports(kind).allocate(self._sizes[kind]), reader)
        self._staged.append(staged)
        return staged

    def release(self, staged: Staged, users: set[PeerLink]) -> None:
        """The reader let go. Once all of `users` have had the buffer open, its name may go too."""
        if staged.reader is not None:
            staged.opened.add(staged.reader)
        staged.reader = None
        if staged.opened >= users:
            self._transports(staged.kind).everyone_opened(staged.buffer)

    def reclaim(self, gone: Callable[[PeerLink], bool]) -> None:
        """Take back buffers that a failed publish left with a reader which no longer reads."""
        for staged in self._staged:
            if staged.reader is not None and gone(staged.reader):
                staged.reader = None

    def require_progress(self) -> None:
        """TransportError if no buffer can ever come back in this publish."""
        readers = sorted({staged.reader.label for staged in self._staged if staged.reader is not None})
        if readers:
            raise TransportError(
                f"staging buffers are still with receivers that failed: {', '.join(readers)}; end these processes and "
                "publish again"
            )

    def forget(self, kind: TransportKind) -> None:
        """Forget buffers that the transport itself has freed."""
        self._staged = [staged for staged in self._staged if staged.kind != kind]

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(staged.buffer.tensor.numel() for staged in self._staged)
