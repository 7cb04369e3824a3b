"""The tensor-core weights give the tile sum when the documented matrix fragments are played through by hand."""

import numpy as np
import pytest
import torch

from weftpub_kernels.checksum import tile_sums
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
    limbs = table[:128].view(np.uint8).reshape(8, 4, 4, 2, 4).astype(np.int64)
    places = table[128:].view(np.uint64).reshape(THREADS, 2)
    total = 0
    for warp in range(THREADS // 32):
        words = np.stack([words_of(codes, 32 * warp + lane) for lane in range(32)]).astype(np.int64)
        # result[row, group, n]: word 2 half + row of each column; threads of a group, columns and halves add up
        result = np.einsum("gtchrb,ntchb->rgn", words.reshape(8, 4, 4, 2, 2, 4), limbs)
        assert result.max() * 257 < 1 << 32
        for lane in range(32):
            group, member = divmod(lane, 4)
            for row in range(2):
                low, high = result[row, group, 2 * member : 2 * member + 2]
                total += int(low + 256 * high) * int(places[32 * warp + lane, row])
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
