"""A 64-bit checksum of bytes, made so that the quantizer can emit it while it writes them.

    h = sum_i byte_i * A^i  mod 2^64,    checksum = mix(h + bytes * G)

A is an odd 64-bit constant, G the golden ratio's, and ``mix`` an invertible scramble (MurmurHash3's finalizer): equal
checksums of equally many bytes mean equal h. Because A^(row * N + column) = A^(row * N) * A^column, each 128x128 tile
of a matrix has one partial sum, and the checksum of any block-aligned range of rows follows from the partials without
reading the bytes again.

What is detected for certain, whatever the data:

* One changed byte: h moves by d * A^i with 0 < \\|d\\| < 256; A^i is odd, so this is not 0 mod 2^64.
* Two different bytes swapped: h moves by d * A^i * (1 - A^n), n their distance. A = 5 mod 8, so A^n - 1 holds exactly
  2 + v factors of two, v being those of n, and d holds at most 7: together fewer than 64 for every n < 2^55.
* A change within four adjacent bytes, hence of one float32 scale: no d_0..d_3 with \\|d_k\\| < 256, not all zero, have
  d_0 + d_1 A + d_2 A^2 + d_3 A^3 = 0 mod 2^64 (the tests enumerate them).
* Zero bytes appended: h stays, but the byte count enters the mix injectively.

Any other change escapes with a chance of about 2^-64. This guards against faults, not against an adversary.

Checksums are signed 64-bit integers, as torch holds them: ``checksum(t) == int(checksum_many([t])[0])``.
"""

import ctypes
import functools
from collections.abc import Sequence

import numpy as np
import torch

from .errors import DtypeError, ShapeError
from .pair import grid_of, has_storage
from .recipe import BLOCK, TILE_PARTS

__all__ = [
    "LENGTH",
    "MIX",
    "MULTIPLIER",
    "SpanChecksums",
    "checksum",
    "checksum_many",
    "checksum_rows_from_sums",
    "checksum_spans",
    "finish",
    "power",
    "powers",
    "rows_from_sums",
    "signed",
    "tile_sums",
]

MULTIPLIER = 0xD1342543DE82EF95
"""A of the definition: a spectrally good multiplier mod 2^64 (Steele and Vigna, "Computationally easy, spectrally good
multipliers for congruential pseudorandom number generators", 2021), so that nearby bytes have no small relation
either."""

LENGTH = 0x9E3779B97F4A7C15
"""G of the definition."""
MIX = 0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53
"""The two factors of MurmurHash3's finalizer."""
_MASK = (1 << 64) - 1
# A tensor without storage has the address of its offset, which is below this. Memory that is mapped piece by piece
# (expandable segments, memory savers) begins as low as 2^33.6.
_LOW = 1 << 33
_UNMAPPED = 1 << 12  # a host's memory may begin anywhere above
_ROW = 1 << 16  # bytes per step of the torch reference
_STEP = 16  # rows of that many bytes held as int64 at a time: 8 MiB


def power(exponent: int) -> int:
    """A^exponent mod 2^64 as a signed 64-bit integer; negative exponents are inverses."""
    return signed(pow(MULTIPLIER, exponent, 1 << 64))


def powers(count: int, step: int = 1) -> torch.Tensor:
    """int64 [count]: A^(step * i), by doubling."""
    table = np.ones(max(count, 1), dtype=np.uint64)
    filled = 1
    while filled < count:
        more = min(filled, count - filled)
        table[filled : filled + more] = table[:more] * np.uint64(pow(MULTIPLIER, step * filled, 1 << 64))
        filled += more
    return torch.from_numpy(table[:count].view(np.int64))


def finish(sums: torch.Tensor, nbytes: torch.Tensor | int) -> torch.Tensor:
    """int64 h and byte counts (int64, of the same shape, or one for all) -> int64 checksums, on the device of
    ``sums``."""
    if sums.is_cuda:
        from .triton_checksum import launch_finish

        return launch_finish(sums, nbytes)
    length = signed(nbytes * LENGTH) if isinstance(nbytes, int) else nbytes * signed(LENGTH)
    h = sums + length
    h = (h ^ _shift(h, 33)) * signed(MIX[0])
    h = (h ^ _shift(h, 33)) * signed(MIX[1])
    return h ^ _shift(h, 33)


def checksum(tensor: torch.Tensor) -> int:
    """Checksum of the bytes of one contiguous tensor of any dtype, computed on its device. Raises ShapeError."""
    return int(checksum_many([tensor])[0])


def checksum_many(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """int64 [n] on the tensors' device: the checksum of the bytes of each of n contiguous tensors.

    On a GPU one launch reads them all, and nothing waits for it. Raises ShapeError when a tensor is not contiguous or
    its memory is released, or the tensors are on several devices.
    """
    if not tensors:
        return torch.empty(0, dtype=torch.int64)
    device = tensors[0].device
    if not all(t.is_contiguous() for t in tensors) or len({t.get_device() for t in tensors}) > 1:
        _refuse(tensors)
    addresses = np.array([t.data_ptr() for t in tensors], dtype=np.int64)
    if (addresses < _LOW).any():
        _refuse_released(tensors)
    counts = np.array([t.numel() * t.element_size() for t in tensors], dtype=np.int64)
    if device.type == "cuda":
        return SpanChecksums(device).compute(addresses, counts)
    sums = [_sum_of_bytes(t.reshape(-1).view(torch.uint8)) for t in tensors]
    return finish(torch.tensor(sums, dtype=torch.int64), torch.from_numpy(counts))


def checksum_spans(addresses: np.ndarray, counts: np.ndarray, device: torch.device) -> torch.Tensor:
    """int64 [n] on ``device``: the checksum of ``counts[i]`` bytes at each ``addresses[i]``, both int64 [n].

    For who has thousands of spans of a few tensors: no object for each. The caller vouches for the addresses: memory of
    ``device`` that stays while the work is under way. On a GPU one launch reads it all, on the current stream. Raises
    ShapeError.
    """
    return SpanChecksums(device).compute(addresses, counts)


class SpanChecksums:
    """`checksum_spans`, again and again: what was worked out and uploaded for the last call serves the next one as far
    as it is the same. Holds tables, none of the memory that is read.

    Args:
        device: a CPU or a GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._spans: tuple[np.ndarray, np.ndarray] | None = None
        self._tables: tuple[tuple[torch.Tensor, ...], int, torch.Tensor] | None = None

    def compute(self, addresses: np.ndarray, counts: np.ndarray) -> torch.Tensor:
        """int64 [n] on the device, as `checksum_spans`."""
        return finish(*self.sums(addresses, counts))

    def sums(self, addresses: np.ndarray, counts: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        """int64 [n] h and int64 [n] byte counts, both on the device: what `finish` makes checksums of."""
        same = self._spans is not None and all(map(np.array_equal, self._spans, (addresses, counts)))
        if not same:
            self._refuse(addresses, counts)
        if self._device.type == "cuda":
            return self._on_gpu(addresses.astype(np.int64, copy=False), counts.astype(np.int64, copy=False), same)
        sums = [_sum_of_bytes(_memory(a, n)) for a, n in zip(addresses.tolist(), counts.tolist(), strict=True)]
        return torch.tensor(sums, dtype=torch.int64), torch.from_numpy(counts.astype(np.int64))

    def _refuse(self, addresses: np.ndarray, counts: np.ndarray) -> None:
        low = _LOW if self._device.type == "cuda" else _UNMAPPED
        if len(addresses) != len(counts) or (counts < 0).any() or (addresses[counts > 0] < low).any():
            raise ShapeError(
                f"{len(addresses)} addresses with {len(counts)} byte counts: expected as many, addresses of memory and "
                "counts from 0; is a tensor offloaded?"
            )

    def _on_gpu(self, addresses: np.ndarray, counts: np.ndarray, same: bool) -> tuple[torch.Tensor, torch.Tensor]:
        from .triton_checksum import launch_sums, upload, work

        if self._tables is None or not same:
            *tables, programs = work(addresses, counts)
            uploaded = tuple(upload(table, self._device) for table in tables)
            self._tables = uploaded, programs, upload(counts, self._device)
            self._spans = addresses.copy(), counts.copy()
        tables, programs, lengths = self._tables
        return launch_sums(tables, programs, len(counts), self._device), lengths


def _memory(address: int, count: int) -> torch.Tensor:
    """uint8 [count] over host memory at an address, which the caller keeps alive."""
    if not count:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer((ctypes.c_uint8 * count).from_address(address), dtype=torch.uint8)


def _refuse(tensors: Sequence[torch.Tensor]) -> None:
    for i, tensor in enumerate(tensors):
        if not tensor.is_contiguous():
            found = f"tensor {i} {list(tensor.shape)} has strides {tensor.stride()}"
            raise ShapeError(f"{found}; pass a contiguous tensor, whose bytes have one order")
        if tensor.device != tensors[0].device:
            raise ShapeError(f"tensor {i} is on {tensor.device}, tensor 0 on {tensors[0].device}; call once per device")


def _refuse_released(tensors: Sequence[torch.Tensor]) -> None:
    for i, tensor in enumerate(tensors):
        if not has_storage(tensor):
            raise ShapeError(f"tensor {i} {list(tensor.shape)} has no storage behind it (it is offloaded); reload it")


def checksum_rows_from_sums(
    sums: torch.Tensor, shape: torch.Size | tuple[int, ...], start: int = 0, stop: int | None = None
) -> torch.Tensor:
    """int64 [...]: the checksum of rows ``start:stop`` of each matrix ``[..., M, N]`` of one-byte codes, from its
    tile sums.

    ``sums [..., MB, NB, 8]`` is QuantizedPair.sums and ``shape`` the shape of W; ``start`` and ``stop`` are multiples
    of 128, or the last row. Equals ``checksum(w[..., start:stop, :].contiguous())`` of each matrix. Raises ShapeError,
    DtypeError.
    """
    return finish(*rows_from_sums(sums, shape, start, stop))


def rows_from_sums(
    sums: torch.Tensor, shape: torch.Size | tuple[int, ...], start: int = 0, stop: int | None = None
) -> tuple[torch.Tensor, int]:
    """int64 [...] h of each matrix's rows, and how many bytes these are: what `finish` makes checksums of. Takes and
    raises what `checksum_rows_from_sums` does."""
    if sums.dtype != torch.int64 or len(shape) < 2:
        raise DtypeError(f"tile sums are int64, for W [..., M, N]; found {sums.dtype} for W {list(shape)}")
    rows, columns = shape[-2:]
    stop = rows if stop is None else stop
    wanted = (*shape[:-2], *grid_of(shape), TILE_PARTS)
    if tuple(sums.shape) != wanted:
        raise ShapeError(f"sums must be {list(wanted)} for W {list(shape)}, found {list(sums.shape)}")
    if start % BLOCK or not 0 <= start < stop <= rows or (stop % BLOCK and stop != rows):
        raise ShapeError(f"rows {start}:{stop} of {rows} are not a range of whole blocks of {BLOCK} rows")
    first, last = start // BLOCK, -(-stop // BLOCK)
    weights = _tile_weights(last - first, sums.shape[-2], columns, sums.device)
    return (sums[..., first:last, :, :].sum(-1) * weights).sum((-2, -1)), (stop - start) * columns


def tile_sums(codes: torch.Tensor) -> torch.Tensor:
    """int64 [MB, NB, 8]: sums of ``byte * A^(r * N + c)`` over each 128x128 tile of uint8 [M, N], r and c counted
    within the tile, apart for its upper and lower 64 rows and therein for each 32 columns."""
    columns, (mb, nb) = codes.shape[1], grid_of(codes.shape)
    half, quarter = BLOCK // 2, BLOCK // 4
    across = powers(BLOCK).to(codes.device).repeat(nb)[:columns]
    down = powers(BLOCK, columns).to(codes.device)
    result = torch.zeros(mb, nb, 2, 4, dtype=torch.int64, device=codes.device)
    for i in range(2 * mb):
        band = codes[i * half : (i + 1) * half].to(torch.int64) * across
        band = (band * down[i % 2 * half :][: band.shape[0], None]).sum(0)
        band = torch.nn.functional.pad(band, (0, nb * BLOCK - columns))
        result[i // 2, :, i % 2] = band.view(nb, 4, quarter).sum(2)
    return result.view(mb, nb, TILE_PARTS)


@functools.lru_cache(maxsize=256)
def _tile_weights(mb: int, nb: int, columns: int, device: torch.device) -> torch.Tensor:
    """int64 [mb, nb]: A^(128 * i * N + 128 * j), the place of each tile in the bytes of its matrix."""
    return (powers(mb, BLOCK * columns)[:, None] * powers(nb, BLOCK)).to(device)


@functools.lru_cache(maxsize=1)
def _row_powers() -> torch.Tensor:
    return powers(_ROW)


def _sum_of_bytes(data: torch.Tensor) -> int:
    """h of uint8 [n] on a CPU, in steps that hold a few MiB."""
    total, whole = 0, data.numel() // _ROW * _ROW
    for start in range(0, whole, _ROW * _STEP):
        part = data[start : min(start + _ROW * _STEP, whole)].view(-1, _ROW)
        for i, h in enumerate((part.to(torch.int64) * _row_powers()).sum(1).tolist()):
            total += h * pow(MULTIPLIER, start + i * _ROW, 1 << 64)
    if whole < data.numel():
        tail = data[whole:].to(torch.int64)
        total += int((tail * _row_powers()[: tail.numel()]).sum()) * pow(MULTIPLIER, whole, 1 << 64)
    return signed(total)


def _shift(h: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical right shift of int64."""
    return (h >> bits) & ((1 << (64 - bits)) - 1)


def signed(value: int) -> int:
    """The signed 64-bit integer with the bits of ``value`` mod 2^64."""
    value &= _MASK
    return value - (1 << 64) if value >> 63 else value
