"""Cut a receiver's moves into pieces that fit a staging buffer, and the pieces of one sender into chunks.

A piece is the unit of checking: the manifest holds one checksum per piece. Nearly every piece is a whole move; only a
move larger than the limit is
cut, by rows, so that one huge tensor never needs a huge buffer. A chunk is the unit of transfer: consecutive pieces
that lie packed in one staging buffer. Sender and receiver compute both from the same part and the same limit, so
neither travels.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from weftpub.errors import ConfigError
from weftpub.plan.boxes import Box, Index
from weftpub.plan.dtypes import itemsize
from weftpub.plan.types import PlanPart

__all__ = ["ALIGNMENT", "Chunk", "Piece", "PieceTable", "cut_pieces"]

ALIGNMENT = (
    16  # bytes: every packed piece starts at a multiple, so that it can be viewed as any dtype and copied in wide words
)


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of one move.

    Attributes:
        move: index of the move in the part.
        start: first element, relative to the move.
        shape: extent.
        nbytes: bytes.
        whole: whether the piece is the whole move.
    """

    move: int
    start: Index
    shape: Index
    nbytes: int
    whole: bool


@dataclass(frozen=True, slots=True)
class Chunk:
    """Pieces, by index in the table, packed at `offsets`; `nbytes` is where the last one ends."""

    pieces: tuple[int, ...]
    offsets: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True)
class PieceTable:
    """All pieces of one receiver's part, and for each sender the chunks in which it sends its own.

    Attributes:
        part: the part that was cut.
        limit: most bytes of a chunk.
        pieces: in the order of the part's moves; this is the order of the manifest's checksums.
    """

    part: PlanPart
    limit: int
    pieces: tuple[Piece, ...]

    @cached_property
    def by_sender(self) -> dict[int, "np.ndarray[tuple[int], np.dtype[np.int64]]"]:
        """Sender rank to the indices of its pieces, in the table's order."""
        found: dict[int, list[int]] = {}
        for index, piece in enumerate(self.pieces):
            found.setdefault(self.part.moves[piece.move].send_rank, []).append(index)
        return {sender: np.array(indices, dtype=np.int64) for sender, indices in found.items()}

    @cached_property
    def chunks(self) -> dict[int, tuple[Chunk, ...]]:
        """Sender rank to its chunks, in the order in which it sends them."""
        return {sender: tuple(self.pack(indices.tolist())) for sender, indices in self.by_sender.items()}

    def describe(self, index: int) -> str:
        """The piece in words, for error messages: name, and which part of it if it is not whole."""
        piece = self.pieces[index]
        move = self.part.moves[piece.move]
        target = self.part.destinations[self.part.targets[piece.move]].shard
        first = tuple(a + b + c for a, b, c in zip(target.offset, move.recv_start, piece.start, strict=True))
        if piece.shape == target.global_shape:
            return move.name
        return f"{move.name}[{', '.join(f'{a}:{a + n}' for a, n in zip(first, piece.shape, strict=True))}]"

    def pack(self, indices: Sequence[int]) -> Iterator[Chunk]:
        """Chunks of the given pieces, in their order, none larger than the limit."""
        members: list[int] = []
        offsets: list[int] = []
        end = 0
        for index in indices:
            start = -(-end // ALIGNMENT) * ALIGNMENT
            nbytes = self.pieces[index].nbytes
            if members and start + nbytes > self.limit:
                yield Chunk(tuple(members), tuple(offsets), end)
                members, offsets, start = [], [], 0
            members.append(index)
            offsets.append(start)
            end = start + nbytes
        if members:
            yield Chunk(tuple(members), tuple(offsets), end)


def cut_pieces(part: PlanPart, limit: int) -> PieceTable:
    """Cut the moves of `part` so that no piece is larger than `limit` bytes.

    Raises:
        ConfigError: `limit` cannot hold one element.
    """
    if limit < ALIGNMENT:
        raise ConfigError(
            f"a chunk of {limit} bytes cannot hold one element; set max_staging_bytes to a few MiB or more"
        )
    pieces: list[Piece] = []
    for index, move in enumerate(part.moves):
        if move.nbytes <= limit:
            pieces.append(Piece(index, (0,) * len(move.shape), move.shape, move.nbytes, True))
            continue
        size = itemsize(move.dtype)
        pieces.extend(
            Piece(index, start, shape, math.prod(shape) * size, False)
            for start, shape in _cut((0,) * len(move.shape), move.shape, limit // size)
        )
    return PieceTable(part, limit, tuple(pieces))


def _cut(start: Index, shape: Index, most: int, dimension: int = 0) -> Iterator[Box]:
    """Boxes of at most `most` elements that tile a box, in row-major order: each is dense within the box."""
    inner = math.prod(shape[dimension + 1 :])
    length = shape[dimension]
    if inner > most:
        for index in range(length):
            row_start = (*start[:dimension], start[dimension] + index, *start[dimension + 1 :])
            row_shape = (*shape[:dimension], 1, *shape[dimension + 1 :])
            yield from _cut(row_start, row_shape, most, dimension + 1)
        return
    step = max(1, most // max(1, inner))
    for first in range(0, length, step):
        rows = min(step, length - first)
        yield (
            (*start[:dimension], start[dimension] + first, *start[dimension + 1 :]),
            (*shape[:dimension], rows, *shape[dimension + 1 :]),
        )
