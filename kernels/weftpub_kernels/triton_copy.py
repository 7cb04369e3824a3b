"""The GPU kernel of copies.py: many copies between addresses in one launch, at the speed of one large copy.

A table says where each piece lies; a piece is a number of equally long rows with a pitch on either side, one row if it
is dense. Every program copies 64 KiB of one piece, in words of 16 bytes where addresses, pitches and lengths allow it,
else of 4, else byte by byte.
"""

import numpy as np
import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .errors import ShapeError

__all__ = ["WARPS", "copy_chunks", "launch", "work"]

WARPS = 4
_CHUNK = 1 << 16  # bytes that one program copies, in words of 16; a quarter of that in words of 4
_UNITS = gl.constexpr(512)  # words of one step: four per thread, so that four loads are under way
_STEPS = gl.constexpr(_CHUNK // (16 * _UNITS.value))
_WIDE = gl.constexpr(gl.BlockedLayout([1, 4], [32, 1], [WARPS, 1], [1, 0]))
_ROW = gl.constexpr(gl.SliceLayout(1, _WIDE.value))


@gluon.jit
def copy_chunks(table, owner, first_chunk, WORD: gl.constexpr):
    """Copy one chunk; ``owner`` gives its piece, ``first_chunk`` where that one's chunks start, WORD is 16, 4 or 1."""
    program = gl.program_id(0)
    piece = gl.load(owner + program)
    chunk = program - gl.load(first_chunk + piece)
    entry = table + piece.to(gl.int64) * 6
    source = gl.load(entry)
    target = gl.load(entry + 1)
    width = (gl.load(entry + 2) // WORD).to(gl.uint32)
    rows = gl.load(entry + 3)
    units = (width.to(gl.int64) * rows).to(gl.uint32)
    from_pitch = gl.load(entry + 4)
    to_pitch = gl.load(entry + 5)
    start = chunk.to(gl.uint32) * (_STEPS * _UNITS) + gl.arange(0, _UNITS, _ROW).to(gl.uint32)
    for step in range(_STEPS):
        unit = start + step * _UNITS
        row = unit // width
        inside = (unit - row * width).to(gl.int64) * WORD
        origin = source + row.to(gl.int64) * from_pitch + inside
        place = target + row.to(gl.int64) * to_pitch + inside
        valid = unit < units
        if WORD == 16:
            lane = gl.arange(0, 4, gl.SliceLayout(0, _WIDE))[None, :]
            reading = gl.multiple_of(origin.to(gl.pointer_type(gl.int32)), 16)[:, None] + lane
            writing = gl.multiple_of(place.to(gl.pointer_type(gl.int32)), 16)[:, None] + lane
            mask = valid[:, None] & (lane >= 0)
            gl.store(writing, gl.load(reading, mask=mask, other=0), mask=mask)
        elif WORD == 4:
            value = gl.load(origin.to(gl.pointer_type(gl.int32)), mask=valid, other=0)
            gl.store(place.to(gl.pointer_type(gl.int32)), value, mask=valid)
        else:
            value = gl.load(origin.to(gl.pointer_type(gl.int8)), mask=valid, other=0)
            gl.store(place.to(gl.pointer_type(gl.int8)), value, mask=valid)


def work(table: np.ndarray, word: int) -> tuple[np.ndarray, np.ndarray, int]:
    """The piece of each chunk, the first chunk of each piece, and how many programs that makes, for int64 [n, 6] of
    pieces that are copied in words of ``word`` bytes."""
    units = table[:, 2] // word * table[:, 3]
    chunks = -(-units // (_STEPS.value * _UNITS.value))
    first = np.concatenate(([0], np.cumsum(chunks)))
    if first[-1] >= 1 << 31 or units.max(initial=0) >= 1 << 32:
        raise ShapeError(f"{int((table[:, 2] * table[:, 3]).sum())} bytes are too many for one copy; split it")
    owner = np.repeat(np.arange(len(table), dtype=np.int32), chunks)
    return owner, first[:-1].astype(np.int32), int(first[-1])


def launch(table: torch.Tensor, owner: torch.Tensor, first: torch.Tensor, programs: int, word: int) -> None:
    """Start the copies of one word size on the current stream of the tables' device."""
    copy_chunks[(programs,)](table, owner, first, WORD=word, num_warps=WARPS)
