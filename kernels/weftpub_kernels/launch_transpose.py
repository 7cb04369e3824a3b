"""From checked arguments to a launch of the transposition, cheaply: see launch.py, which does the same for the
quantizer.

What is compiled depends on few things, each of them a switch of the kernel: no stride is compiled in. So a handful of
kernels serve all layouts, and each one that is used is one that was tested on the device.
"""

import itertools
import math
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from triton.runtime import driver

from .errors import ShapeError
from .launch import Pointer, batch_stride
from .pair import grid_of, span
from .recipe import BLOCK
from .transposes import check_transpose
from .triton_transpose import layouts, transpose_tiles
from .tuning import BYTEWISE, TURN, Turn

__all__ = ["Variant", "compile_kernel", "launch", "programs_of", "strides_of", "variant_of"]

_MAX_PLANS = 4096
_WORD = 16  # bytes
_LOW = 1 << 33  # a tensor without storage has the address of its offset, which is below all memory of a GPU


class Variant(NamedTuple):
    """What the kernel is compiled for; each variant is tested once per device before its first use."""

    even: bool
    read_words: bool
    write_words: bool
    scales: bool
    turn: Turn


@dataclass(slots=True, frozen=True)
class _Plan:
    run: Callable[..., None]
    programs: tuple[int, int, int]
    function: Any
    packed_metadata: Any
    constants: tuple[Any, ...]  # every argument after the addresses
    spans: tuple[int, ...]  # bytes that w, wt, scale and scale_t reach over


_UNKNOWN: Any = object()
_plans: dict[tuple[Any, ...], _Plan | None] = {}
_tested: set[tuple[int, Variant]] = set()
_lock = threading.RLock()


def launch(
    w: torch.Tensor,
    wt: torch.Tensor,
    scale: torch.Tensor | None,
    scale_t: torch.Tensor | None,
    turn: Turn | None = None,
) -> None:
    """Turn CUDA matrices ``w`` into ``wt`` on the current stream; errors are those of transposes.transpose.

    The self-test and the bench name a ``turn``, which runs untested: both compare its bytes themselves.
    """
    index, tensors = w.get_device(), (w, wt, scale, scale_t)
    addresses = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
    layout = tuple(None if t is None else (t.dtype, t.get_device(), t.shape, t.stride()) for t in tensors)
    key = (layout, addresses[0] % _WORD == 0, addresses[1] % _WORD == 0, turn)
    plan = _plans.get(key, _UNKNOWN)
    if plan is _UNKNOWN:
        plan = _plans[key] = _prepare(w, wt, scale, scale_t, turn)
    if plan is None:
        for i in range(w.shape[0]):
            launch(w[i], wt[i], scale if scale is None else scale[i], scale_t if scale_t is None else scale_t[i], turn)
        return
    if _suspicious(addresses, plan.spans):
        check_transpose(w, wt, scale, scale_t)
    if torch.cuda.current_device() != index:
        with torch.cuda.device(index):
            _run(plan, index, addresses)
    else:
        _run(plan, index, addresses)


def _suspicious(addresses: list[int], spans: tuple[int, ...]) -> bool:
    """Whether some tensor may have no storage, or share memory with another."""
    used = sorted((at, at + length) for at, length in zip(addresses, spans, strict=True) if length)
    return used[0][0] < _LOW or any(start < end for (_, end), (start, _) in itertools.pairwise(used))


def _run(plan: _Plan, index: int, addresses: list[int]) -> None:
    """What Triton's own launch does once its cache has found the kernel (hooks of its profilers aside)."""
    plan.run(
        *plan.programs, driver.active.get_current_stream(index), plan.function, plan.packed_metadata, None, None, None,
        *addresses, *plan.constants,
    )  # fmt: skip


def _prepare(
    w: torch.Tensor,
    wt: torch.Tensor,
    scale: torch.Tensor | None,
    scale_t: torch.Tensor | None,
    turn: Turn | None,
) -> _Plan | None:
    """Check everything that a key stands for, test and compile its kernel, and plan its launch; None where the leading
    dimensions do not run along one stride."""
    check_transpose(w, wt, scale, scale_t)
    with _lock, torch.cuda.device(w.device):
        if len(_plans) >= _MAX_PLANS:
            _plans.clear()
        strides = strides_of(w, wt, scale, scale_t)
        if strides is None:
            return None
        variant = variant_of(w, wt, strides, scale is not None, turn or TURN)
        if turn is None and (w.get_device(), variant) not in _tested:
            from .selftest import check_turned

            check_turned(variant, w.device)
            _tested.add((w.get_device(), variant))
        return _plan(w, wt, scale, scale_t, strides, variant)


def _plan(
    w: torch.Tensor,
    wt: torch.Tensor,
    scale: torch.Tensor | None,
    scale_t: torch.Tensor | None,
    strides: tuple[int, ...],
    variant: Variant,
) -> _Plan:
    programs = programs_of(w, variant)
    compiled, switches = compile_kernel(variant)
    spans = tuple(0 if tensor is None else span(tensor) for tensor in (w, wt, scale, scale_t))
    constants = (*w.shape[-2:], *strides, *switches)
    return _Plan(compiled.run, programs, compiled.function, compiled.packed_metadata, constants, spans)


def programs_of(w: torch.Tensor, variant: Variant) -> tuple[int, int, int]:
    """The grid: blocks in the order of the variant, and matrices. ShapeError where a GPU takes no such grid."""
    count, (mb, nb) = math.prod(w.shape[:-2]), grid_of(w.shape)
    if max(mb, nb, count) >= 1 << 16:
        found = f"{list(w.shape)} has {count} matrices of {mb} x {nb} blocks"
        raise ShapeError(f"{found}, one launch takes 65535 of each; split it")
    return (mb, nb, count) if variant.turn.down_first else (nb, mb, count)


def strides_of(
    w: torch.Tensor, wt: torch.Tensor, scale: torch.Tensor | None, scale_t: torch.Tensor | None
) -> tuple[int, ...] | None:
    """Batch, row and column strides of all four (zeros for none), or None where some batch has no one stride."""
    strides: list[int] = []
    for tensor in (w, wt, scale, scale_t):
        step = 0 if tensor is None else batch_stride(tensor)
        if step is None:
            return None
        strides += [step, *((0, 0) if tensor is None else tensor.stride()[-2:])]
    return tuple(strides)


def variant_of(w: torch.Tensor, wt: torch.Tensor, strides: tuple[int, ...], scales: bool, turn: Turn) -> Variant:
    """The kernel for tensors of this layout. Tiles of threads as ``turn`` says are for words on both sides."""
    even = w.shape[-2] % BLOCK == 0 and w.shape[-1] % BLOCK == 0
    read, write = (_in_words(tensor, step) for tensor, step in ((w, strides[0]), (wt, strides[3])))
    return Variant(even, read, write, scales, turn if read and write else BYTEWISE)


def _in_words(tensor: torch.Tensor, batch: int) -> bool:
    """Whether each row is dense, and begins and ends at a multiple of 16 bytes."""
    row, column = tensor.stride()[-2:]
    return column == 1 and not any(number % _WORD for number in (tensor.data_ptr(), batch, row, tensor.shape[-1]))


def compile_kernel(variant: Variant) -> tuple[Any, tuple[Any, ...]]:
    """The kernel, and its arguments after the strides.

    Sizes that end masks at multiples of 16 are said to do so; a size is else any number, and a stride always is.
    """
    turn = variant.turn
    tile = layouts(turn.columns, turn.down)
    sizes = (_WORD if variant.write_words else 3, _WORD if variant.read_words else 3)
    switches = (
        variant.even, variant.read_words, variant.write_words, variant.scales, turn.cache, turn.down_first,
        tile.read, tile.turn, tile.write,
    )  # fmt: skip
    buffers = [Pointer(dtype, False) for dtype in (torch.uint8, torch.uint8, torch.float32, torch.float32)]
    compiled = transpose_tiles.warmup(*buffers, *sizes, *[3] * 12, *switches, grid=(1,), num_warps=tile.warps)
    return compiled, switches
