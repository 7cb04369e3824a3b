"""What one sender rank sends to one receiver: its pieces, their chunks, and the copies that pack them.

Compiled from layouts, kept over publishes.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from weftpub.plan import Chunk, PieceTable, Plan, ViewSpec, cut_pieces
from weftpub.publisher.sources import SourceIndex
from weftpub.transport import CopyTable, narrow_view
from weftpub.transport.tensors import dense_offset
from weftpub.wire.messages import KnownLayout, ListedLayout, PackedLayout, layout_name
from weftpub.wire.offers import Offer

__all__ = ["Lane", "NamedLayout", "Parcel", "Shown", "build_lanes"]

type Indices = np.ndarray[tuple[int], np.dtype[np.int64]]


@dataclass(frozen=True, eq=False)
class Parcel:
    """One chunk message to be.

    Attributes:
        nbytes: bytes of its pieces, gaps included where it is packed.
        layout: how the receiver finds the pieces; None: listed once the offers' offsets are known.
        pack: copies into the staging buffer; None for pieces that are shown where they are.
        shown: the pieces that are shown where they are; None for others.
    """

    nbytes: int
    layout: "PackedLayout | NamedLayout | None"
    pack: CopyTable | None
    shown: "Shown | None" = None


class Shown:
    """Pieces that are shown where they lie in the sender's buffers.

    Args:
        pieces: indices in the receiver's piece table.
        places: for each of them buffer name and byte offset.
        shared_nbytes: bytes of those in buffers that the receiver maps too.
    """

    def __init__(self, pieces: Sequence[int], places: Sequence[tuple[str, int]], *, shared_nbytes: int = 0) -> None:
        self.shared_nbytes = shared_nbytes
        numbers: dict[str, int] = {}
        self._pieces = np.array(pieces, dtype="<i8").tobytes()
        self._buffer = np.array([numbers.setdefault(name, len(numbers)) for name, _ in places], dtype=np.int64)
        self._offset = np.array([offset for _, offset in places], dtype=np.int64)
        self.names = tuple(numbers)
        self._last: tuple[list[tuple[Offer, int]], tuple[Offer, ...], NamedLayout] | None = None

    def offer(self, exports: Mapping[str, tuple[Offer, int]]) -> "tuple[tuple[Offer, ...], NamedLayout]":
        """What to offer, each allocation once, and where the pieces lie therein.

        Args:
            exports: buffer name to the offer of its allocation, and its byte offset in it.
        """
        exported = [exports[name] for name in self.names]
        if self._last is not None and all(map(_same_place, exported, self._last[0])):
            return self._last[1:]
        numbers: dict[str, int] = {}
        offers: list[Offer] = []
        for offer, _ in exported:
            if numbers.setdefault(offer.allocation, len(offers)) == len(offers):
                offers.append(offer)
        allocation = np.array([numbers[offer.allocation] for offer, _ in exported], dtype="<i8")[self._buffer]
        offset = np.array([offset for _, offset in exported], dtype=np.int64)[self._buffer] + self._offset
        layout = ListedLayout(
            pieces=self._pieces, buffers=allocation.tobytes(), offsets=offset.astype("<i8", copy=False).tobytes()
        )
        self._last = exported, tuple(offers), NamedLayout.of(layout, tuple(offers))
        return self._last[1:]


def _same_place(one: tuple[Offer, int], other: tuple[Offer, int]) -> bool:
    return one[0] is other[0] and one[1] == other[1]


@dataclass(frozen=True, eq=False)
class NamedLayout:
    """A listed layout, and the short message for receivers that remember it.

    Attributes:
        whole: whether the short message stands for the offers, too.
    """

    listed: ListedLayout
    known: KnownLayout
    whole: bool

    @classmethod
    def of(cls, layout: ListedLayout, offers: tuple[Offer, ...] = ()) -> "NamedLayout":
        """The layout with its name; with offers, if it always comes with the same."""
        return cls(layout, KnownLayout(digest=layout_name(layout, offers)), bool(offers))

    def for_receiver(
        self, remembered: Collection[str], offers: tuple[Offer, ...]
    ) -> tuple[ListedLayout | KnownLayout, tuple[Offer, ...]]:
        """Layout and offers to send to a receiver that remembers the layouts of these names."""
        if self.known.digest not in remembered:
            return self.listed, offers
        return self.known, () if self.whole else offers


@dataclass(eq=False)
class Lane:
    """One sender to one receiver.

    Attributes:
        receiver: receiver rank.
        table: the receiver's piece table.
        pieces: indices in it of the pieces that this sender sends.
        regions: for each, the number of its region in the source index.
        views: for each, where it lies in the sender's buffers.
    """

    receiver: int
    table: PieceTable
    pieces: tuple[int, ...]
    regions: Indices
    views: tuple[ViewSpec, ...]
    _packed: tuple[Parcel, ...] | None = None
    _in_place: dict[tuple[frozenset[str], ...], tuple[Parcel, ...]] = field(
        default_factory=dict[tuple[frozenset[str], ...], tuple[Parcel, ...]]
    )

    def parcels(
        self, sender: int, in_place: frozenset[str] = frozenset(), shared: frozenset[str] = frozenset()
    ) -> Sequence[Parcel]:
        """The parcels of a publish, in order.

        Args:
            sender: this sender rank.
            in_place: buffers that can be shown where they are.
            shared: buffers that the receiver maps too, whether it serves from them or not.
        """
        if not in_place and not shared:
            if self._packed is None:
                self._packed = tuple(self._pack_all(sender))
            return self._packed
        if (shared, in_place) not in self._in_place:
            self._in_place = {(shared, in_place): tuple(self._show(shared, in_place))}
        return self._in_place[shared, in_place]

    def _pack_all(self, sender: int) -> Iterator[Parcel]:
        views = dict(zip(self.pieces, self.views, strict=True))
        for chunk in self.table.chunks.get(sender, ()):
            yield Parcel(chunk.nbytes, PackedLayout(), _copies(chunk, views))

    def _show(self, shared: frozenset[str], in_place: frozenset[str]) -> Iterator[Parcel]:
        """One parcel with everything that is dense in a buffer that is shared or shown where it is, then the rest,
        packed."""
        views = dict(zip(self.pieces, self.views, strict=True))
        shown = shared | in_place
        places = {
            piece: (view.param, offset)
            for piece, view in views.items()
            if view.param in shown and (offset := dense_offset(view)) is not None
        }
        if places:
            sizes = {piece: self.table.pieces[piece].nbytes for piece in places}
            mapped = sum(sizes[piece] for piece, (name, _) in places.items() if name in shared)
            where = Shown(tuple(places), tuple(places.values()), shared_nbytes=mapped)
            yield Parcel(sum(sizes.values()), None, None, where)
            views = {piece: view for piece, view in views.items() if piece not in places}
        for chunk in self.table.pack(list(views)):
            yield Parcel(
                chunk.nbytes, listed(chunk.pieces, [0] * len(chunk.pieces), chunk.offsets), _copies(chunk, views)
            )


def build_lanes(plan: Plan, sender: int, index: SourceIndex, limit: int) -> dict[int, Lane]:
    """Lanes of a sender rank, by receiver rank; adds every piece's region to `index`."""
    lanes: dict[int, Lane] = {}
    for receiver in dict.fromkeys(move.recv_rank for move in plan.for_sender(sender)):
        table = cut_pieces(plan.for_receiver(receiver), limit)
        pieces: list[int] = []
        numbers: list[int] = []
        views: list[ViewSpec] = []
        for position, piece in enumerate(table.pieces):
            move = table.part.moves[piece.move]
            if move.send_rank != sender:
                continue
            start = tuple(a + b for a, b in zip(move.send_start, piece.start, strict=True))
            view = narrow_view(index.views[move.name], start, piece.shape)
            pieces.append(position)
            views.append(view)
            numbers.append(index.add(move.name, view))
        lanes[receiver] = Lane(receiver, table, tuple(pieces), np.array(numbers, dtype=np.int64), tuple(views))
    return lanes


def listed(pieces: Sequence[int], buffers: Sequence[int], offsets: Sequence[int]) -> NamedLayout:
    """A listed layout from plain numbers."""
    layout = ListedLayout(pieces=_packed(pieces), buffers=_packed(buffers), offsets=_packed(offsets))
    return NamedLayout.of(layout)


def _packed(numbers: Sequence[int]) -> bytes:
    return np.array(numbers, dtype="<i8").tobytes()


def _copies(chunk: Chunk, views: Mapping[int, ViewSpec]) -> CopyTable:
    return CopyTable.compile([views[piece] for piece in chunk.pieces], chunk.offsets)
