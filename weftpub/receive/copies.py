"""How the pieces of one plan part are put in place: compiled when first needed, from layouts only, and kept over
publishes.
"""

import numpy as np

from weftpub.errors import ManifestError
from weftpub.plan import PieceTable, PlanPart, ViewSpec, cut_pieces
from weftpub.plan.views import listing
from weftpub.transport import CopyTable, RegionTable, narrow_view
from weftpub.wire.messages import ChunkMessage, KnownLayout, ListedLayout, PackedLayout, layout_name
from weftpub.wire.offers import Offer

__all__ = ["CopyPlans", "LayoutMemory"]

type Indices = np.ndarray[tuple[int], np.dtype[np.int64]]

_REMEMBERED_BYTES = 64 << 20  # of listed layouts; a large model's are some 200 KB in all, the same at every publish
_REMEMBERED = 1024


class LayoutMemory:
    """Listed layouts by name, alone and with the offers that they came with, those used last: senders need not list
    again what is remembered here."""

    def __init__(self) -> None:
        self._layouts: dict[str, tuple[str, ListedLayout, tuple[Offer, ...]]] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all layouts."""
        return tuple(self._layouts)

    def resolve(
        self, layout: ListedLayout | KnownLayout, offers: tuple[Offer, ...]
    ) -> tuple[str, ListedLayout, tuple[Offer, ...]]:
        """The name of a layout without offers, the layout, and its offers; ManifestError if it is not remembered."""
        if isinstance(layout, KnownLayout):
            known = self._layouts.pop(layout.digest, None)
            if known is None:
                raise ManifestError(f"a chunk refers to layout {layout.digest[:12]}, which is not remembered here")
            self._remember(layout.digest, known)
            return known[0], known[1], offers or known[2]
        name = layout_name(layout)
        self._remember(name, (name, layout, ()))
        self._remember(layout_name(layout, offers), (name, layout, offers))
        return name, layout, offers

    def _remember(self, name: str, known: tuple[str, ListedLayout, tuple[Offer, ...]]) -> None:
        self._layouts[name] = known
        while len(self._layouts) > _REMEMBERED or self._nbytes() > _REMEMBERED_BYTES:
            del self._layouts[next(iter(self._layouts))]

    def _nbytes(self) -> int:
        return sum(_size(layout) for _, layout, _ in self._layouts.values())


def _size(layout: ListedLayout) -> int:
    return len(layout.pieces) + len(layout.buffers) + len(layout.offsets)


class CopyPlans:
    """Copy tables of one plan part, compiled when first needed: layouts only, no tensor.

    Args:
        part: the plan part.
        limit: most bytes of a chunk.
        layouts: the receiver's memory of listed layouts.

    Attributes:
        table: the pieces.
        regions: where they lie in the parameters.
    """

    def __init__(self, part: PlanPart, limit: int, layouts: LayoutMemory) -> None:
        self.table: PieceTable = cut_pieces(part, limit)
        self._views = _piece_views(self.table)
        self.regions = RegionTable(self._views)
        self._packed: dict[tuple[int, int], tuple[Indices, CopyTable]] = {}
        self._layouts = layouts
        self._listed: dict[str, tuple[Indices, CopyTable, int]] = {}

    def of(self, chunk: ChunkMessage) -> tuple[Indices, CopyTable, tuple[Offer, ...]]:
        """The pieces in a chunk, the copies that place them, and the memory to copy from; ManifestError if the chunk is
        none of this plan's.
        """
        if not isinstance(chunk.layout, PackedLayout):
            name, layout, offers = self._layouts.resolve(chunk.layout, chunk.offers)
            return *self._of_listed(name, layout, len(offers)), offers
        key = (chunk.sender, chunk.sequence)
        if key not in self._packed:
            chunks = self.table.chunks.get(chunk.sender, ())
            if chunk.sequence >= len(chunks) or len(chunk.offers) != 1:
                raise ManifestError(
                    f"sender rank {chunk.sender} has {len(chunks)} packed chunks for this receiver, chunk "
                    f"{chunk.sequence} with "
                    f"{len(chunk.offers)} offers is none of them"
                )
            planned = chunks[chunk.sequence]
            copies = CopyTable.compile([self._views[i] for i in planned.pieces], planned.offsets)
            self._packed[key] = np.array(planned.pieces, dtype=np.int64), copies
        return *self._packed[key], chunk.offers

    def _of_listed(self, name: str, layout: ListedLayout, offers: int) -> tuple[Indices, CopyTable]:
        if name not in self._listed:
            if len(self._listed) >= _REMEMBERED:
                self._listed.clear()
            self._listed[name] = self._compile(layout)
        pieces, copies, buffers = self._listed[name]
        if buffers > offers:
            raise ManifestError(f"a listed chunk names {buffers} buffers and offers {offers}")
        return pieces, copies

    def _compile(self, layout: ListedLayout) -> tuple[Indices, CopyTable, int]:
        if any(len(data) % 8 for data in (layout.pieces, layout.buffers, layout.offsets)):
            raise ManifestError("a listed chunk's lists are 64-bit integers; do both sides run the same release?")
        pieces, buffers, offsets = (
            np.frombuffer(data, dtype="<i8") for data in (layout.pieces, layout.buffers, layout.offsets)
        )
        if not (len(pieces) == len(buffers) == len(offsets) > 0) or len(np.unique(pieces)) != len(pieces):
            raise ManifestError(
                "a listed chunk needs one buffer and one offset for each of its pieces, and each piece once"
            )
        count = len(self.table.pieces)
        if pieces.min() < 0 or pieces.max() >= count or buffers.min() < 0:
            raise ManifestError(
                f"a listed chunk names pieces outside the {count} of this receiver, or buffers below the first"
            )
        copies = CopyTable.compile([self._views[i] for i in pieces.tolist()], offsets.tolist(), buffers.tolist())
        return pieces, copies, int(buffers.max()) + 1

    def require_all(self, received: "np.ndarray[tuple[int], np.dtype[np.bool_]]") -> None:
        """ManifestError that lists the pieces which have not arrived, if any."""
        absent = np.flatnonzero(~received)
        if len(absent):
            names = [self.table.describe(int(i)) for i in absent]
            raise ManifestError(f"{len(absent)} of {len(self.table.pieces)} pieces never arrived: {listing(names)}")


def _piece_views(table: PieceTable) -> tuple[ViewSpec, ...]:
    """Where each piece of a receiver's table lies in its parameters."""
    views: list[ViewSpec] = []
    for piece in table.pieces:
        move = table.part.moves[piece.move]
        view = table.part.destinations[table.part.targets[piece.move]].view
        start = tuple(a + b for a, b in zip(move.recv_start, piece.start, strict=True))
        views.append(narrow_view(view, start, piece.shape))
    return tuple(views)
