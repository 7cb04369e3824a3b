"""How the pieces of one plan part are put in place: compiled when first needed, from layouts only, and kept over
publishes.
"""

import numpy as np

from weftpub.errors import ManifestError
from weftpub.plan import PieceTable, PlanPart, ViewSpec, cut_pieces
from weftpub.plan.views import listing
from weftpub.transport import CopyTable, RegionTable, narrow_view
from weftpub.wire.messages import ChunkMessage, ListedLayout

__all__ = ["CopyPlans"]

type Indices = np.ndarray[tuple[int], np.dtype[np.int64]]

_LISTED_PLANS = 64  # listed layouts that are remembered; a trainer uses the same few at every publish


class CopyPlans:
    """Copy tables of one plan part, compiled when first needed: layouts only, no tensor.

    Args:
        part: the plan part.
        limit: most bytes of a chunk.

    Attributes:
        table: the pieces.
        regions: where they lie in the parameters.
    """

    def __init__(self, part: PlanPart, limit: int) -> None:
        self.table: PieceTable = cut_pieces(part, limit)
        self._views = _piece_views(self.table)
        self.regions = RegionTable(self._views)
        self._packed: dict[tuple[int, int], tuple[Indices, CopyTable]] = {}
        self._listed: dict[bytes, tuple[Indices, CopyTable]] = {}

    def of(self, chunk: ChunkMessage) -> tuple[Indices, CopyTable]:
        """The pieces in a chunk and the copies that place them; ManifestError if the chunk is none of this plan's."""
        if isinstance(chunk.layout, ListedLayout):
            return self._of_listed(chunk.layout, len(chunk.offers))
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
        return self._packed[key]

    def _of_listed(self, layout: ListedLayout, offers: int) -> tuple[Indices, CopyTable]:
        key = b"|".join((layout.pieces, layout.buffers, layout.offsets))
        if key in self._listed:
            return self._listed[key]
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
        if pieces.min() < 0 or pieces.max() >= count or buffers.min() < 0 or buffers.max() >= offers:
            raise ManifestError(
                f"a listed chunk names pieces outside the {count} of this receiver, or buffers outside the {offers} "
                "offered"
            )
        copies = CopyTable.compile([self._views[i] for i in pieces.tolist()], offsets.tolist(), buffers.tolist())
        if len(self._listed) >= _LISTED_PLANS:
            self._listed.clear()
        self._listed[key] = pieces, copies
        return self._listed[key]

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
