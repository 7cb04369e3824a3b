"""The tensor-core weights give the tile sum when the documented matrix fragments are played through by hand."""

import numpy as np
import pytest
import torch

from weftpub_kernels.checksum import power, tile_sums
from weftpub_kernels.fragments import THREADS, sum_weights

MASK = (1 << 64) - 1


def words_of(codes: np.ndarray, thread: int) -> np.ndarray:
    """The 16 words of a thread, [column, word of four rows, row]: 16 rows x 4 columns of the tile (kernel layout
    ROWS_FIRST)."""
    warp, lane = divmod(thread, 32)
    row = 16 * (lane >> 3) + 64 * (warp >> 2)
    column = 4 * (lane & 7) + 32 * (warp & 3)
    return codes[row : row + 16, column : column + 4].T.reshape(4, 4, 4)


def sum_by_fragments(codes: np.ndarray, columns: int) -> int:
    """What the asm of fragments.py computes, thread by thread, from the PTX description of mma.m16n8k32."""
    table = sum_weights(columns).numpy()
    limbs = table[:64].view(np.uint8).reshape(32, 4, 4).astype(np.int64)
    places = table[64:].view(np.uint64)
    total = 0
    for warp in range(THREADS // 32):
        words = np.stack([words_of(codes, 32 * warp + lane) for lane in range(32)]).astype(np.int64)
        # result[column][group, n]: the four threads of a group add up, and so do the two products of two words each
        result = np.einsum("gtcwb,ntwb->cgn", words.reshape(8, 4, 4, 4, 4), limbs.reshape(8, 4, 4, 4))
        for lane in range(32):
            group, member = divmod(lane, 4)
            part = sum(
                int(result[c, group, 2 * member] + 256 * result[c, group, 2 * member + 1]) * power(c) for c in range(4)
            )
            assert result.max() * 257 < 1 << 31
            total += part * int(places[32 * warp + lane])
    return total & MASK


@pytest.mark.parametrize("columns", [128, 300, 3072, 1 << 20])
def test_fragments_give_the_tile_sum(columns: int) -> None:
    codes = np.random.default_rng(columns).integers(0, 256, (128, 128), dtype=np.uint8)
    rows = np.zeros((128, columns), dtype=np.uint8)
    rows[:, :128] = codes
    expected = int(tile_sums(torch.from_numpy(rows))[0, 0].sum()) & MASK
    assert sum_by_fragments(codes, columns) == expected


def test_fragments_hold_the_largest_sums() -> None:
    codes = np.full((128, 128), 255, dtype=np.uint8)
    assert sum_by_fragments(codes, 128) == int(tile_sums(torch.from_numpy(codes)).sum()) & MASK
