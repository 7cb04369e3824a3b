"""The GPU kernels of checksum.py: h of the bytes of many tensors in one launch, near the speed of reading them; and
checksums of many h in another.

A table of (address, bytes) and the tensor of each 64 KiB chunk say what each program does. A program reads aligned
16-byte words, also where a tensor starts or ends between them: those words lie in the same allocation, and their
foreign bytes are masked. Each thread folds its words from last to first, acc = acc * A^(bytes per step) + word. What
remains are one weight per thread, the chunk's place from two tables, and one atomic add per chunk, exact in any order
since it is modular.
"""

import functools
from collections.abc import Sequence

import numpy as np
import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .checksum import LENGTH, MIX, MULTIPLIER, power, powers, signed
from .errors import ShapeError

__all__ = [
    "WARPS",
    "finish_sums",
    "launch_finish",
    "launch_sums",
    "places",
    "sum_chunks",
    "sums_on_device",
    "upload",
    "work",
]

WARPS = 4
_ROWS = 512  # 16-byte words of one step: four per thread, so that four loads are under way
_STEP = gl.constexpr(16 * _ROWS)
_CHUNK = gl.constexpr(1 << 16)
_SIDE = gl.constexpr(1024)  # chunk = high * _SIDE + low, for the two tables of places
_LAYOUT = gl.constexpr(gl.BlockedLayout([1, 4], [32, 1], [WARPS, 1], [1, 0]))
_FLAT = gl.constexpr(gl.SliceLayout(1, _LAYOUT.value))

_A = [pow(MULTIPLIER, k, 1 << 64) for k in range(16)]
_LOW = gl.constexpr(tuple(a & 0xFFFFFFFF for a in _A))
_HIGH = gl.constexpr(tuple(a >> 32 for a in _A))
_FOLD = gl.constexpr(power(16 * _ROWS))
_EACH = gl.constexpr(32 * WARPS)  # checksums of one program
_LINE = gl.constexpr(gl.BlockedLayout([1], [32], [WARPS], [0]))
_LENGTH = gl.constexpr(signed(LENGTH))
_FIRST_MIX, _SECOND_MIX = (gl.constexpr(signed(factor)) for factor in MIX)


@gluon.jit
def sum_chunks(table, owner, first_chunk, weights, low_places, high_places, undo, result):
    """Add one chunk's part of h to ``result`` of its tensor; ``owner`` gives the tensor, ``first_chunk`` where its
    chunks start."""
    program = gl.program_id(0)
    tensor = gl.load(owner + program)
    chunk = program - gl.load(first_chunk + tensor)
    address = gl.load(table + 2 * tensor)
    head = (address & 15).to(gl.int32)
    end = gl.load(table + 2 * tensor + 1) + head  # bytes from the aligned start to the end of the tensor
    start = chunk.to(gl.int64) * _CHUNK
    # Said, not inferred: without it every 16-byte word is read as four of 4.
    words = gl.multiple_of((address - head + start).to(gl.pointer_type(gl.int32)), 16)
    if (start >= head) & (start + _CHUNK <= end):
        acc = _fold(words, 0, 0, _CHUNK // _STEP, False)
    else:
        steps = (gl.minimum(end - start, _CHUNK) + _STEP - 1) // _STEP
        skip = gl.maximum(head - start, 0).to(gl.int32)
        stop = gl.minimum(end - start, _CHUNK).to(gl.int32)
        acc = _fold(words, skip, stop, steps.to(gl.int32), True)
    rows = gl.arange(0, 512, _FLAT)
    total = gl.sum(acc * gl.load(weights + rows), 0)
    place = gl.load(low_places + chunk % _SIDE) * gl.load(high_places + chunk // _SIDE) * gl.load(undo + head)
    gl.atomic_add(result + tensor, total * place, sem="relaxed")


@gluon.jit
def _fold(words, skip, stop, steps, MASKED: gl.constexpr):
    """int64 [512]: sum over steps t of word(t) * A^(t * bytes per step); bytes outside skip..stop count as 0 when
    MASKED."""
    rows = gl.arange(0, 512, _FLAT)
    at = rows[:, None] * 4 + gl.arange(0, 4, gl.SliceLayout(0, _LAYOUT))[None, :]
    acc = gl.full([512], 0, gl.int64, _FLAT)
    for i in range(steps):
        offset = (steps - 1 - i) * (_STEP // 4)
        if MASKED:
            byte = (at + offset) * 4
            keep = (byte + 4 > skip) & (byte < stop)
            value = gl.load(words + offset + at, mask=keep, other=0).to(gl.uint32, bitcast=True)
            value = value & _low_bytes(stop - byte) & (_low_bytes(skip - byte) ^ 0xFFFFFFFF)
        else:
            value = gl.load(words + offset + at).to(gl.uint32, bitcast=True)
        acc = acc * _FOLD + _sum_word(value)
    return acc


@gluon.jit
def _low_bytes(count):
    """uint32 whose lowest ``count`` bytes are ones, count cut to 0..4."""
    bits = gl.minimum(gl.maximum(count, 0), 4) * 8
    return ((gl.full_like(bits, 1, dtype=gl.int64) << bits.to(gl.int64)) - 1).to(gl.uint32)


@gluon.jit
def _sum_word(value):
    """int64 [512]: sum of the 16 bytes of each row of uint32 [512, 4], times A^0..A^15, as 32-bit products."""
    even, odd = gl.split(gl.reshape(value, [512, 2, 2]))
    w0, w2 = gl.split(even)
    w1, w3 = gl.split(odd)
    low = gl.full([512], 0, gl.uint64, _FLAT)
    high = gl.full([512], 0, gl.uint32, _FLAT)
    for c in gl.static_range(4):
        if c == 0:
            word = gl.convert_layout(w0, _FLAT)
        elif c == 1:
            word = gl.convert_layout(w1, _FLAT)
        elif c == 2:
            word = gl.convert_layout(w2, _FLAT)
        else:
            word = gl.convert_layout(w3, _FLAT)
        for k in gl.static_range(4):
            byte = (word >> (8 * k)) & 255
            low += byte.to(gl.uint64) * _LOW[4 * c + k]
            high += byte * _HIGH[4 * c + k]
    return (low + (high.to(gl.uint64) << 32)).to(gl.int64, bitcast=True)


@gluon.jit(do_not_specialize=["nbytes"])
def finish_sums(sums, counts, nbytes: gl.int64, result, n, COUNTS: gl.constexpr):
    """``result[i]``: the checksum of ``sums[i]``, of ``counts[i]`` bytes each if COUNTS, else of ``nbytes`` all."""
    i = gl.program_id(0) * _EACH + gl.arange(0, _EACH, _LINE)
    h = gl.load(sums + i, mask=i < n, other=0)
    if COUNTS:
        h += gl.load(counts + i, mask=i < n, other=0) * _LENGTH
    else:
        h += nbytes * _LENGTH
    h = _mixed(h) * _FIRST_MIX
    h = _mixed(h) * _SECOND_MIX
    gl.store(result + i, _mixed(h), mask=i < n)


@gluon.jit
def _mixed(h):
    """int64 xor itself shifted right by 33 bits."""
    return h ^ (h.to(gl.uint64, bitcast=True) >> 33).to(gl.int64, bitcast=True)


def launch_finish(sums: torch.Tensor, nbytes: torch.Tensor | int) -> torch.Tensor:
    """`checksum.finish` of int64 ``sums`` on a GPU; one launch, on the current stream."""
    sums, each = sums.contiguous(), isinstance(nbytes, torch.Tensor)
    counts = nbytes.expand(sums.shape).contiguous() if isinstance(nbytes, torch.Tensor) else sums
    result = torch.empty_like(sums)
    if n := sums.numel():
        with torch.cuda.device(sums.device):
            grid = (-(-n // _EACH.value),)
            finish_sums[grid](sums, counts, 0 if each else nbytes, result, n, COUNTS=each, num_warps=WARPS)
    return result


def sums_on_device(addresses: np.ndarray, counts: np.ndarray, device: torch.device) -> torch.Tensor:
    """int64 [n] on the GPU: h of ``counts[i]`` bytes at each ``addresses[i]``; one launch, on the current stream."""
    *tables, programs = work(addresses, counts)
    return launch_sums([upload(table, device) for table in tables], programs, len(counts), device)


def launch_sums(tables: Sequence[torch.Tensor], programs: int, count: int, device: torch.device) -> torch.Tensor:
    """int64 [count] on the GPU: h of each tensor of the uploaded ``tables`` of `work`; one launch, on the current
    stream."""
    with torch.cuda.device(device):
        result = torch.zeros(count, dtype=torch.int64, device=device)
        if programs:
            sum_chunks[(programs,)](*tables, *places(device), result, num_warps=WARPS)
    return result


def work(addresses: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
    """The kernel's table, the tensor of each chunk, the first chunk of each tensor, and how many programs that
    makes."""
    chunks = np.where(counts > 0, -(-((addresses & 15) + counts) // _CHUNK.value), 0)
    first = np.concatenate(([0], np.cumsum(chunks)))
    limit = _SIDE.value**2
    if chunks.max(initial=0) > limit or first[-1] >= 1 << 31:
        found = f"{int(counts.max())} bytes in one tensor, {int(counts.sum())} in all"
        raise ShapeError(f"{found}; one checksum takes {limit * _CHUNK.value}, one call {_CHUNK.value << 31}")
    owner = np.repeat(np.arange(len(counts), dtype=np.int32), chunks)
    return np.stack([addresses, counts], axis=1).reshape(-1), owner, first[:-1].astype(np.int32), int(first[-1])


def upload(values: np.ndarray, device: torch.device) -> torch.Tensor:
    """To the device through pinned memory, so that the host does not wait for the stream."""
    host = torch.empty(values.shape, dtype=torch.from_numpy(values[:0]).dtype, pin_memory=True)
    host.numpy()[:] = values
    return host.to(device, non_blocking=True)


@functools.lru_cache(maxsize=64)
def places(device: torch.device) -> tuple[torch.Tensor, ...]:
    """Weights of a step's words, A^(64 KiB * low), A^(64 MiB * high), and A^-head."""
    undo = torch.tensor([power(-head) for head in range(16)], dtype=torch.int64)
    tables = powers(_ROWS, 16), powers(_SIDE.value, _CHUNK.value), powers(_SIDE.value, _CHUNK.value * _SIDE.value), undo
    return tuple(table.to(device) for table in tables)
