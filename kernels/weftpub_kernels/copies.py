"""Many copies between addresses as one: what a publish does with thousands of pieces of a few tensors.

A row of the table is one piece: ``rows`` rows of ``width`` bytes, with a pitch from row to row on either side. It says
nothing of dtypes: bytes are bytes.
"""

import ctypes

import numpy as np
import torch

from .errors import ShapeError

__all__ = ["COLUMNS", "SpanCopies", "copy_spans"]

COLUMNS = ("source", "target", "width", "rows", "source_pitch", "target_pitch")
# A tensor without storage has the address of its offset. On a GPU that is below all memory, which begins as low as
# 2^33.6 where it is mapped piece by piece (expandable segments, memory savers); a host's may begin anywhere above the
# pages that systems keep unmapped.
_LOW = {"cuda": 1 << 33, "cpu": 1 << 12}


def copy_spans(table: np.ndarray, device: torch.device) -> None:
    """Copy every piece of ``table``, int64 [n, 6] with the columns of `COLUMNS`: addresses, and bytes.

    The caller vouches for the addresses: memory of ``device``, or reachable from it, that stays while the work is under
    way; targets overlap neither sources nor each other. On a GPU at most three launches, on the current stream. Raises
    ShapeError.
    """
    SpanCopies(device).copy(table)


class SpanCopies:
    """`copy_spans`, again and again: what was worked out and uploaded for the last table serves the next one if it is
    the same. Holds tables, none of the memory that is copied.

    Args:
        device: a CPU or a GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._table: np.ndarray | None = None
        self._launches: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor, int, int]] = []

    def copy(self, table: np.ndarray) -> None:
        """Copy every piece, as `copy_spans`."""
        if table.ndim != 2 or table.shape[1] != len(COLUMNS):
            raise ShapeError(f"a table of copies is [n, {len(COLUMNS)}], found {list(table.shape)}")
        if (table < 0).any() or (table[(table[:, 2:4] > 0).all(1), :2] < _LOW[self._device.type]).any():
            raise ShapeError("a table of copies holds addresses of memory and sizes from 0; is a tensor offloaded?")
        if self._device.type == "cuda":
            self._on_gpu(table)
            return
        for row in table.tolist():
            _copy_rows(*row)

    def _on_gpu(self, table: np.ndarray) -> None:
        from .triton_checksum import upload
        from .triton_copy import launch, work

        with torch.cuda.device(self._device):
            if self._table is None or not np.array_equal(self._table, table):
                self._launches = []
                for word, part in by_word(table).items():
                    owner, first, programs = work(part, word)
                    uploaded = [upload(array, self._device) for array in (part, owner, first)]
                    self._launches.append((uploaded[0], uploaded[1], uploaded[2], programs, word))
                self._table = table.copy()
            for tables in self._launches:
                launch(*tables)


def by_word(table: np.ndarray) -> dict[int, np.ndarray]:
    """The pieces that can be copied in words of 16, 4 or 1 bytes; empty ones are left out. The last bytes of a single
    row that is nearly whole words become a piece of their own."""
    table = table[(table[:, 2] > 0) & (table[:, 3] > 0)]
    ragged = (
        (((table[:, 0] | table[:, 1]) & 15) == 0) & (table[:, 3] == 1) & (table[:, 2] > 16) & (table[:, 2] & 15 > 0)
    )
    if ragged.any():
        tails = table[ragged]
        whole = tails[:, 2] & ~15
        table = table.copy()
        table[ragged, 2] = whole
        tails[:, 2] -= whole
        tails[:, :2] += whole[:, None]
        table = np.concatenate([table, tails])
    single = table[:, 3] == 1
    bits = table[:, 0] | table[:, 1] | table[:, 2] | np.where(single, 0, table[:, 4] | table[:, 5])
    words = np.where(bits & 15 == 0, 16, np.where(bits & 3 == 0, 4, 1))
    return {word: np.ascontiguousarray(table[words == word]) for word in (16, 4, 1) if (words == word).any()}


def _copy_rows(source: int, target: int, width: int, rows: int, source_pitch: int, target_pitch: int) -> None:
    if not width or not rows:
        return
    if rows == 1 or width == source_pitch == target_pitch:
        ctypes.memmove(target, source, width * rows)
        return
    origin, place = (
        np.lib.stride_tricks.as_strided(
            np.frombuffer((ctypes.c_uint8 * (pitch * (rows - 1) + width)).from_address(address), dtype=np.uint8),
            (rows, width),
            (pitch, 1),
        )
        for address, pitch in ((source, source_pitch), (target, target_pitch))
    )
    np.copyto(place, origin)
