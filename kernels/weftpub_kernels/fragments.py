"""The checksum sum of a tile on the tensor cores: the PTX and the weights that go with it.

Summing ``byte * A^place`` over 16384 bytes by 64-bit multiplies costs the quantizer 14% of its bandwidth. The tensor
cores do it for nothing: with the weights cut into eight byte limbs, the sum is a product of byte matrices, exact in
int32. Each warp multiplies the packed codes that its threads hold anyway (16 rows of 4 columns each, in ROWS_FIRST
order) by

    B[k, n] = limb n of A^(N * row + 4 * lane in group)      k = row of the word, n = 0..7

with ``mma.m16n8k32``, whose fragments are laid out like this (PTX ISA, "Matrix fragments for mma.m16n8k32"): thread 4
g + t holds row g of the left matrix, bytes 4t..4t+3 of its first and of its second half; column g of the right
matrix, rows likewise; and columns 2t, 2t+1 of rows g and g + 8 of the result. So one product adds up the four threads
of a group, and two accumulate 16 rows. What is left are two limbs for each of four columns per thread: these are
joined by A, A^2 and A^3, and one 64-bit weight per thread places the group, the limbs and the warp.
"""

import numpy as np
import torch

from .checksum import power

__all__ = ["LOAD_ASM", "LOAD_CONSTRAINTS", "SUM_ASM", "SUM_CONSTRAINTS", "THREADS", "sum_weights"]

THREADS = 256
_LIMB_WORDS = 32 * 4
_MMA = "mma.sync.aligned.m16n8k32.row.col.s32.u8.u8.s32"


def sum_weights(columns: int) -> torch.Tensor:
    """int64 [64 + 256] for tiles of a matrix with that many columns: right fragments of 32 lanes, then a weight per
    thread."""
    limbs = np.empty((32, 4, 4), dtype=np.uint8)
    for lane, word, byte in np.ndindex(limbs.shape):
        group, member = divmod(lane, 4)
        limbs[lane, word, byte] = power(columns * (4 * word + byte) + 4 * member) >> 8 * group & 255
    places = np.empty(THREADS, dtype=np.uint64)
    for thread in range(THREADS):
        warp, lane = divmod(thread, 32)
        group, member = divmod(lane, 4)
        row, column = 16 * (group // 2) + 64 * (warp // 4), 16 * (group % 2) + 32 * (warp % 4)
        places[thread] = (power(columns * row + column) << 16 * member) % (1 << 64)
    return torch.from_numpy(np.concatenate([limbs.reshape(-1).view(np.int64), places.view(np.int64)]))


LOAD_ASM = f"""
{{
.reg .b32 thread, lane;
.reg .b64 at;
mov.u32 thread, %tid.x;
and.b32 lane, thread, 31;
mad.wide.u32 at, lane, 16, $16;
ld.global.v4.b32 {{$0, $1, $2, $3}}, [at];
mad.wide.u32 at, thread, 8, $16;
ld.global.v2.b32 {{$4, $5}}, [at + {4 * _LIMB_WORDS}];
}}
"""
"""$0..$3: a thread's limbs, $4 and $5: the halves of its place; $16: the address of the weights. Ten more outputs are
unused."""

LOAD_CONSTRAINTS = ",".join(["=r"] * 16 + ["l"] * 16)


def _sum_asm() -> str:
    """$0: this thread's part of the sum; $16..$31: its words, four rows each, four words per column; $32..$37:
    LOAD_ASM's."""
    limbs = ("{$32, $33}", "{$34, $35}")
    lines = ["{", ".reg .b32 part<8>;", ".reg .b64 place, column<4>;", "mov.b64 place, {$36, $37};"]
    for half in range(2):
        first, second = 16 + 8 * half, 20 + 8 * half
        parts = "{" + ", ".join(f"part{4 * half + i}" for i in range(4)) + "}"
        for pair, start in enumerate(("{0, 0, 0, 0}", parts)):
            words = f"{{${first + 2 * pair}, ${second + 2 * pair}, ${first + 2 * pair + 1}, ${second + 2 * pair + 1}}}"
            lines.append(f"{_MMA} {parts}, {words}, {limbs[pair]}, {start};")
    for column in range(4):
        lines += [
            f"mad.lo.u32 part{2 * column}, part{2 * column + 1}, 256, part{2 * column};",
            f"cvt.u64.u32 column{column}, part{2 * column};",
        ]
    lines += [f"mad.lo.s64 column0, column{column}, {power(column)}, column0;" for column in range(1, 4)]
    return "\n".join([*lines, "mul.lo.s64 $0, column0, place;", "}"])


SUM_ASM = _sum_asm()
SUM_CONSTRAINTS = ",".join(["=l"] * 16 + ["r"] * 32)
