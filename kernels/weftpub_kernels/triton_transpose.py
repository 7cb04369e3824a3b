"""The GPU kernel of transposes.py: matrices of bytes turned in registers, in words of 16 bytes on either side.

One program per 128x128 block, all matrices of a batch in one launch. Each thread holds 16 rows x 16 columns (tuning.py
has others), so it loads 16 neighbours of a row at once, turns 4x4 bytes at a time by eight byte permutes, and stores 16
neighbours of a column. No byte changes thread, and none goes through shared memory. All that the machine does, loads
and stores included, is less than one instruction for each byte.

There is no conversion in it, so what triton_quantize.py says of ptxas and e4m3 does not touch it. Every compiled
variant still passes its self-test before it is used.
"""

# ruff: noqa: SIM108 (constexpr conditions choose code at compile time, so they stand in statements of their own)
from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .recipe import BLOCK

__all__ = ["Layouts", "layouts", "transpose_tiles", "turn"]

_ROWS = 16  # of each thread


class Layouts(NamedTuple):
    """One tile in the same threads, its registers numbered along the rows, by 4x4 bytes, and down the columns."""

    read: gl.DistributedLinearLayout
    turn: gl.DistributedLinearLayout
    write: gl.DistributedLinearLayout
    warps: int


def layouts(columns: int, down: int) -> Layouts:
    """Threads of 16 rows x ``columns`` (4, 8 or 16), ``down`` (4 or 8) of them one below the other in a warp. A warp
    then reads ``columns * 32 / down`` neighbouring bytes of each of its rows, and writes ``16 * down`` of each
    column."""
    across = columns * 32 // down
    row_bits, column_bits = ([[1 << i, 0] for i in range(4)], [[0, 1 << i] for i in range(columns.bit_length() - 1)])
    lanes = [*_doubled(0, columns, across), *_doubled(_ROWS, 0, _ROWS * down)]
    warps = [*_doubled(0, across, BLOCK), *_doubled(_ROWS * down, 0, BLOCK)]

    def numbered(registers: list[list[int]]) -> gl.DistributedLinearLayout:
        return gl.DistributedLinearLayout(registers, lanes, warps, [], [BLOCK, BLOCK])

    return Layouts(
        numbered(column_bits + row_bits),
        numbered(column_bits[:2] + row_bits + column_bits[2:]),
        numbered(row_bits + column_bits),
        1 << len(warps),
    )


def _doubled(row: int, column: int, end: int) -> list[list[int]]:
    """The step (row, column), and twice, four times and so on as much, up to ``end``."""
    found: list[list[int]] = []
    while max(row, column) < end:
        found.append([row, column])
        row, column = 2 * row, 2 * column
    return found


@gluon.jit(do_not_specialize=["s_e", "s_m", "s_n", "st_e", "st_n", "st_m"])
def transpose_tiles(
    w, wt, scale, scale_t, M, N,
    w_e: gl.int64, w_m: gl.int64, w_n: gl.int64, wt_e: gl.int64, wt_n: gl.int64, wt_m: gl.int64,
    s_e: gl.int64, s_m: gl.int64, s_n: gl.int64, st_e: gl.int64, st_n: gl.int64, st_m: gl.int64,
    EVEN: gl.constexpr, READ_WORDS: gl.constexpr, WRITE_WORDS: gl.constexpr, SCALES: gl.constexpr,
    CACHE: gl.constexpr, DOWN_FIRST: gl.constexpr, READ: gl.constexpr, TURN: gl.constexpr, WRITE: gl.constexpr,
):  # fmt: skip
    """Turn one block of matrix (program 2) of ``w [E, M, N]``, whose bytes are ``uint8``, and its scale.

    ``*_e``, ``*_m`` and ``*_n`` are element strides. READ_WORDS: rows of ``w`` are dense, and begin and end at
    multiples of 16 bytes; WRITE_WORDS: so are rows of ``wt``. Neighbouring programs take neighbours of a row of blocks,
    with DOWN_FIRST of a column.
    """
    if DOWN_FIRST:
        mb, nb = gl.program_id(0), gl.program_id(1)
    else:
        nb, mb = gl.program_id(0), gl.program_id(1)
    e = gl.program_id(2).to(gl.int64)
    top, left = mb * 128, nb * 128
    if SCALES:  # asked for first, so that nobody waits for it at the end
        value = gl.load(scale + (e * s_e + mb * s_m + nb * s_n))
    rows, columns = _indices(READ)
    at = w + (e * w_e + top * w_m + left * w_n)
    if READ_WORDS:
        at = gl.multiple_of(at + rows * w_m, 16)[:, None] + columns[None, :]
    else:
        at = at + rows[:, None] * w_m + columns[None, :] * w_n
    if EVEN:
        tile = gl.load(at)
    else:
        tile = gl.load(at, mask=((top + rows) < M)[:, None] & ((left + columns) < N)[None, :], other=0)

    turned = turn(gl.convert_layout(tile, TURN, assert_trivial=True), WRITE)

    rows, columns = _indices(WRITE)
    at = wt + (e * wt_e + left * wt_n + top * wt_m)
    if WRITE_WORDS:
        at = gl.multiple_of(at + columns * wt_n, 16)[None, :] + rows[:, None]
    else:
        at = at + columns[None, :] * wt_n + rows[:, None] * wt_m
    if EVEN:
        gl.store(at, turned, cache_modifier=CACHE)
    else:
        mask = ((top + rows) < M)[:, None] & ((left + columns) < N)[None, :]
        gl.store(at, turned, mask=mask, cache_modifier=CACHE)
    if SCALES:
        gl.store(scale_t + (e * st_e + nb * st_n + mb * st_m), value)


@gluon.jit
def _indices(LAYOUT: gl.constexpr):
    """Row and column numbers within the tile; times a stride, which has 64 bits, since a tile may span 2^31 bytes."""
    return gl.arange(0, 128, gl.SliceLayout(1, LAYOUT)), gl.arange(0, 128, gl.SliceLayout(0, LAYOUT))


@gluon.jit
def turn(tile, LAYOUT: gl.constexpr):
    """The same uint8 tile [128, 128] with registers numbered down the columns (LAYOUT), from registers of which each
    sixteen hold 4x4 bytes: four words of a row's neighbours become four of a column's."""
    blocks = gl.inline_asm_elementwise(
        """
        {
        .reg .b32 a, b, c, d;
        prmt.b32 a, $4, $5, 0x5140;
        prmt.b32 b, $6, $7, 0x5140;
        prmt.b32 c, $4, $5, 0x7362;
        prmt.b32 d, $6, $7, 0x7362;
        prmt.b32 $0, a, b, 0x5410;
        prmt.b32 $1, a, b, 0x7632;
        prmt.b32 $2, c, d, 0x5410;
        prmt.b32 $3, c, d, 0x7632;
        }
        """,
        "=&r,=&r,=&r,=&r,r,r,r,r",
        [tile],
        dtype=gl.uint8,
        is_pure=True,
        pack=16,
    )
    # The block's element (i, j) now stands where (j, i) stood; renaming the indices costs nothing.
    turned = gl.reshape(gl.permute(gl.reshape(blocks, [32, 4, 32, 4]), [0, 3, 2, 1]), [128, 128])
    return gl.convert_layout(turned, LAYOUT, assert_trivial=True)
