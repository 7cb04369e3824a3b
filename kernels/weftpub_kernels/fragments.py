"""The checksum sum of a tile on the tensor cores: the PTX and the weights that go with it.

Summing ``byte * A^place`` over 16384 bytes by 64-bit multiplies costs the quantizer 14% of its bandwidth. The tensor
cores do it for nothing: with the weights cut into eight byte limbs, the sum is a product of byte matrices, exact in
int32. Each warp multiplies the packed codes that its threads hold anyway (16 rows of 4 columns each, in ROWS_FIRST
order) by

    B[k, n] = limb n of A^(N * row + column + 4 * lane in group)      k = row of the word, n = 0..7

with ``mma.m16n8k32``, whose fragments are laid out like this (PTX ISA, "Matrix fragments for mma.m16n8k32"): thread 4
g + t holds row g of the left matrix, bytes 4t..4t+3 of its first and of its second half, and row g + 8 likewise;
column g of the right matrix, rows likewise; and columns 2t, 2t+1 of rows g and g + 8 of the result. The four words of
a column, as W^T stores them, are one left fragment: its first and third word make row g, the other two, four rows
further down, row g + 8. So one product adds up the four threads of a group, and four, one for each column and its own
B, accumulate in place. What is left per thread are two limbs of each row, and two 64-bit weights, the second A^(4N)
times the first, place the group, the limbs and the warp.
"""

import numpy as np
import torch

from .checksum import power

__all__ = ["LOAD_ASM", "LOAD_CONSTRAINTS", "SUM_ASM", "SUM_CONSTRAINTS", "THREADS", "sum_weights"]

THREADS = 256
_LIMB_BYTES = 32 * 8 * 4
_MMA = "mma.sync.aligned.m16n8k32.row.col.s32.u8.u8.s32"


def sum_weights(columns: int) -> torch.Tensor:
    """int64 [128 + 512] for tiles of a matrix with that many columns: right fragments of 32 lanes, two words for each
    of four columns, then two weights per thread."""
    limbs = np.empty((32, 4, 2, 4), dtype=np.uint8)
    for lane, column, word, byte in np.ndindex(limbs.shape):
        group, member = divmod(lane, 4)
        limbs[lane, column, word, byte] = power(columns * (8 * word + byte) + column + 4 * member) >> 8 * group & 255
    places = np.empty((THREADS, 2), dtype=np.uint64)
    for thread, half in np.ndindex(places.shape):
        warp, lane = divmod(thread, 32)
        group, member = divmod(lane, 4)
        row, column = 16 * (group // 2) + 64 * (warp // 4) + 4 * half, 16 * (group % 2) + 32 * (warp % 4)
        places[thread, half] = (power(columns * row + column) << 16 * member) % (1 << 64)
    return torch.from_numpy(np.concatenate([limbs.reshape(-1).view(np.int64), places.reshape(-1).view(np.int64)]))


LOAD_ASM = f"""
{{
.reg .b32 thread, lane;
.reg .b64 at;
mov.u32 thread, %tid.x;
and.b32 lane, thread, 31;
mad.wide.u32 at, lane, 32, $16;
ld.global.L1::evict_last.v4.b32 {{$0, $1, $2, $3}}, [at];
ld.global.L1::evict_last.v4.b32 {{$4, $5, $6, $7}}, [at + 16];
mad.wide.u32 at, thread, 16, $16;
ld.global.L1::evict_last.v4.b32 {{$8, $9, $10, $11}}, [at + {_LIMB_BYTES}];
}}
"""
"""$0..$7: a thread's limbs, two words per column; $8 to $11: the halves of its two places; $16: the address of the
weights, which every program reads, and so should stay close. Four more outputs are unused."""

LOAD_CONSTRAINTS = ",".join(["=r"] * 16 + ["l"] * 16)


def _sum_asm() -> str:
    """$0: this thread's part of the sum; $16..$31: its words, four rows each, four words per column; $32..$43:
    LOAD_ASM's."""
    parts = "{part0, part1, part2, part3}"
    lines = ["{", ".reg .b32 part<4>;", ".reg .b64 place<2>, total<2>;"]
    lines += ["mov.b64 place0, {$40, $41};", "mov.b64 place1, {$42, $43};"]
    for column in range(4):
        words = "{" + ", ".join(f"${16 + 4 * column + i}" for i in range(4)) + "}"
        limbs = f"{{${32 + 2 * column}, ${33 + 2 * column}}}"
        lines.append(f"{_MMA} {parts}, {words}, {limbs}, {parts if column else '{0, 0, 0, 0}'};")
    for half in range(2):  # at most 4 * 32 * 255 * 255 * 257, which fits
        low = f"part{2 * half}"
        lines += [f"mad.lo.u32 {low}, part{2 * half + 1}, 256, {low};", f"cvt.u64.u32 total{half}, {low};"]
    return "\n".join([*lines, "mul.lo.s64 total0, total0, place0;", "mad.lo.s64 $0, total1, place1, total0;", "}"])


SUM_ASM = _sum_asm()
SUM_CONSTRAINTS = ",".join(["=l"] * 16 + ["r"] * 32)
