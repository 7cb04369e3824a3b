"""From checked arguments to a kernel launch, cheaply.

All that depends on dtypes, shapes and strides is worked out once per layout and kept as a plan: argument checks, the
compiled kernel, its constant arguments, and the self-test of that variant on that device. A call then reads the
buffers' addresses and launches, a few microseconds on the host, and allocates nothing.
"""

import contextlib
import dataclasses
import functools
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from triton.runtime import driver

from .checks import check_arguments, check_monitor
from .errors import ShapeError
from .fragments import sum_weights
from .nonfinite import NonFiniteMonitor
from .pair import QuantizedPair, grid_of, span
from .recipe import BLOCK, Recipe
from .triton_quantize import COLUMNS_FIRST, NUM_WARPS, ROWS_FIRST, quantize_tiles
from .tuning import Tuning, choose

__all__ = [
    "Pointer",
    "Variant",
    "batch_stride",
    "batch_strides",
    "compile_kernel",
    "fixed_strides",
    "idle_monitor",
    "launch",
    "settle",
]

_MAX_PLANS = 4096
_MOST_FIXED = 32768  # longest row that is compiled in: the self-test needs hundreds of them
_MOST_LAYOUTS = 32  # compiled in per device, about a second each; a process that brings more has the others unfixed
_LOW = 1 << 40  # a tensor without storage has the address of its offset, which is below this


class Variant(NamedTuple):
    """What the kernel is compiled for; each variant is tested once per device before its first use."""

    dtype: torch.dtype
    operators: tuple[float | str, ...]
    even: bool
    sums: bool
    check: bool
    aligned: bool
    tuning: Tuning
    strides: tuple[int, int, int]  # row strides of x, w and wt that are compiled in, or zeros


@dataclass(slots=True, frozen=True)
class _Plan:
    run: Callable[..., None]
    programs: tuple[int, int, int]  # blocks across, blocks down, matrices
    function: Any
    packed_metadata: Any
    constants: tuple[Any, ...]  # every argument after the addresses and the base
    spans: tuple[int, int, int, int, int]  # bytes that x, w, wt, scale and scale_t reach over
    weights: torch.Tensor | None
    matrices: tuple[int, int, int]  # how many, M, N


_plans: dict[tuple[Any, ...], _Plan | None] = {}
_tested: set[tuple[int, Variant]] = set()
_fixed: dict[int, set[tuple[int, int, int]]] = {}  # row strides that are compiled in, per device
_lock = threading.RLock()
_local = threading.local()


@contextlib.contextmanager
def idle_monitor(device: torch.device) -> Iterator[NonFiniteMonitor]:
    """A clean monitor for one call that waits for its result, kept per thread and device."""
    kept: dict[torch.device, NonFiniteMonitor] = _local.__dict__.setdefault("monitors", {})
    monitor = kept.pop(device, None) or NonFiniteMonitor(device)
    yield monitor
    monitor.forget()
    kept[device] = monitor  # one that raised is dropped: its record is set


def launch(
    x: torch.Tensor,
    out: QuantizedPair,
    recipe: Recipe,
    monitor: NonFiniteMonitor | None,
    name: str | Sequence[str] | None,
    tuning: Tuning | None = None,
) -> None:
    """Quantize CUDA matrices ``x`` into ``out`` on the current stream; errors are those of entry.quantize_into.

    Without ``tuning`` it is chosen for the grid, and its variant tested before the first use. The self-test and the
    tuner name one, which runs untested: both compare its bytes themselves.
    """
    px, pw, pt, ps, pst = (
        x.data_ptr(), out.w.data_ptr(), out.wt.data_ptr(), out.scale.data_ptr(), out.scale_t.data_ptr(),
    )  # fmt: skip
    index = x.get_device()
    aligned = (px | pw | pt) & 15 == 0
    key = (recipe, index, x.dtype, x.shape, x.stride(), out.layout, monitor is None, aligned, tuning)
    if key not in _plans:
        _prepare(key, x, out, recipe, monitor is not None, aligned, tuning)
    plan = _plans[key]
    if plan is None:
        _launch_slices(x, out, recipe, monitor, name, tuning)
        return
    nx, nw, nt, ns, nst = plan.spans
    end = px + nx
    if (
        (pw < end and px < pw + nw) or (pt < end and px < pt + nt) or (ps < end and px < ps + ns)
        or (pst < end and px < pst + nst) or min(px, pw, pt, ps, pst) < _LOW
    ):  # fmt: skip
        check_arguments(x, out, recipe)
    base = record = 0
    if monitor is not None:
        if monitor.index != index:
            check_monitor(x, monitor)
        record = monitor.record.data_ptr()
        base = monitor.add(*plan.matrices, name)
    sums = 0 if out.sums is None else out.sums.data_ptr()
    if torch.cuda.current_device() != index:
        with torch.cuda.device(index):
            _run(plan, index, px, pw, pt, ps, pst, sums, record, base)
    else:
        _run(plan, index, px, pw, pt, ps, pst, sums, record, base)


def _run(plan: _Plan, index: int, *addresses_and_base: int) -> None:
    """What Triton's own launch does once its cache has found the kernel (hooks of its profilers aside)."""
    plan.run(
        *plan.programs, driver.active.get_current_stream(index), plan.function, plan.packed_metadata, None, None, None,
        *addresses_and_base, *plan.constants,
    )  # fmt: skip


def _prepare(
    key: tuple[Any, ...],
    x: torch.Tensor,
    out: QuantizedPair,
    recipe: Recipe,
    check: bool,
    aligned: bool,
    tuning: Tuning | None,
) -> None:
    """Check everything that the key stands for, test and compile its kernel, and keep the plan."""
    check_arguments(x, out, recipe)
    with _lock, torch.cuda.device(x.device):
        even = x.shape[-2] % BLOCK == 0 and x.shape[-1] % BLOCK == 0
        processors = torch.cuda.get_device_properties(x.device).multi_processor_count
        chosen = tuning or choose(math.prod(x.shape[:-2]) * math.prod(grid_of(x.shape)), processors)
        known = _fixed.setdefault(x.get_device(), set()) if tuning is None else None
        chosen, strides = settle(x, out, chosen, known)
        variant = Variant(x.dtype, recipe.operators, even, out.sums is not None, check, aligned, chosen, strides)
        if tuning is None and (x.get_device(), variant) not in _tested:
            from .selftest import check_variant

            check_variant(variant, recipe, x.device)
            _tested.add((x.get_device(), variant))
        if len(_plans) >= _MAX_PLANS:
            _plans.clear()
        _plans[key] = _plan(x, out, variant)


def _plan(x: torch.Tensor, out: QuantizedPair, variant: Variant) -> _Plan | None:
    """The plan of one launch over all matrices, or None when the leading dimensions do not run along one stride."""
    strides = batch_strides(x, out)
    if strides is None:
        return None
    count, (rows, columns), (mb, columns_of_blocks) = math.prod(x.shape[:-2]), x.shape[-2:], grid_of(x.shape)
    if count >= 1 << 16 or mb >= 1 << 16:
        found = f"{list(x.shape)} has {count} matrices of {mb} rows of blocks"
        raise ShapeError(f"{found}, one launch takes 65535 of each; split it")
    weights = _weights(columns, x.device) if variant.sums else None
    compiled, constants = compile_kernel(x, out, strides, variant, weights)
    return _Plan(
        compiled.run,
        (columns_of_blocks, mb, count),
        compiled.function,
        compiled.packed_metadata,
        constants,
        (span(x), span(out.w), span(out.wt), span(out.scale), span(out.scale_t)),
        weights,
        (count, rows, columns),
    )


def fixed_strides(x: torch.Tensor, out: QuantizedPair, tuning: Tuning) -> tuple[int, int, int]:
    """The row strides that ``tuning`` has compiled in: those of ordinary matrices of whole blocks, else zeros."""
    strides = (x.stride(-2), out.w.stride(-2), out.wt.stride(-2))
    least = (384, 384, 256)  # the self-test's matrix must fit them
    whole = x.shape[-2] % BLOCK == 0 and x.shape[-1] % BLOCK == 0
    rows = x.stride(-1) == out.w.stride(-1) == out.wt.stride(-1) == 1
    ordinary = all(low <= step <= _MOST_FIXED and step % 16 == 0 for low, step in zip(least, strides, strict=True))
    return strides if tuning.fixed and whole and rows and ordinary else (0, 0, 0)


def settle(
    x: torch.Tensor, out: QuantizedPair, tuning: Tuning, known: set[tuple[int, int, int]] | None
) -> tuple[Tuning, tuple[int, int, int]]:
    """The tuning and the compiled-in strides of a launch. ``known`` are the layouts that have been compiled in, and
    takes in a new one while there are few; None sets no limit.

    A launch without such strides has a tuning without them too, or the self-test's own matrix would have them.
    """
    strides = fixed_strides(x, out, tuning)
    if known is not None and any(strides):
        if len(known) < _MOST_LAYOUTS:
            known.add(strides)
        strides = strides if strides in known else (0, 0, 0)
    return (tuning, strides) if any(strides) else (dataclasses.replace(tuning, fixed=False), strides)


def compile_kernel(
    x: torch.Tensor,
    out: QuantizedPair,
    strides: Sequence[int],
    variant: Variant,
    weights: torch.Tensor | None,
) -> tuple[Any, tuple[Any, ...]]:
    """The kernel for tensors of this layout, and its arguments after the buffers and the monitor's base.

    A limit of registers is for whole blocks and multiplied codes; the other kernels would spill. Stores come first
    where there are sums: in kernels without them ptxas then asks for the last values after work on the first ones.
    """
    tuning = variant.tuning
    wide = any(BLOCK * abs(a) + BLOCK * abs(b) >= 1 << 31 for a, b in (t.stride()[-2:] for t in (x, out.w, out.wt)))
    address = 0 if weights is None else weights.data_ptr()
    caches = (tuning.load_cache, tuning.load_evict, tuning.store_cache, tuning.turned_cache)
    multiplier_first = not {"divide", "amax_times_recip", "amax_over_448_full"} & {*variant.operators}
    stores_first = tuning.stores_first and variant.sums
    order = (tuning.apart, stores_first, stores_first and multiplier_first)
    switches = (variant.even, variant.check, variant.sums, wide, *variant.strides, *caches, *order)
    layouts = (COLUMNS_FIRST, ROWS_FIRST)
    constants = (address, *x.shape[-2:], 0, *strides, *variant.operators, *switches, *layouts)
    dtypes = (x.dtype, out.w.dtype, out.wt.dtype, torch.float32, torch.float32, torch.int64, torch.int64)
    buffers = [Pointer(dtype, variant.aligned) for dtype in dtypes]
    limited = tuning.registers is not None and variant.even and "divide" not in variant.operators
    options = {"maxnreg": tuning.registers} if limited else {}
    compiled = quantize_tiles.warmup(*buffers, 0, *constants, grid=(1,), num_warps=NUM_WARPS, **options)
    return compiled, constants


def batch_strides(x: torch.Tensor, out: QuantizedPair) -> list[int] | None:
    """Batch, row and column strides of x, w, wt, scale, scale_t and sums, or None where some batch has no one
    stride."""
    strides: list[int] = []
    for tensor in (x, out.w, out.wt, out.scale, out.scale_t, out.scale if out.sums is None else out.sums[..., 0]):
        step = batch_stride(tensor)
        if step is None:
            return None
        strides += [step, *tensor.stride()[-2:]]
    return strides


def _launch_slices(
    x: torch.Tensor,
    out: QuantizedPair,
    recipe: Recipe,
    monitor: NonFiniteMonitor | None,
    name: str | Sequence[str] | None,
    tuning: Tuning | None,
) -> None:
    """One launch per index of the first dimension."""
    each = math.prod(x.shape[1:-2])
    if isinstance(name, str):
        name = [f"{name}[{i}]" for i in range(math.prod(x.shape[:-2]))]
    for i in range(x.shape[0]):
        launch(x[i], out[i], recipe, monitor, None if name is None else name[i * each : (i + 1) * each], tuning)


def batch_stride(tensor: torch.Tensor) -> int | None:
    """Elements from one matrix to the next over all leading dimensions, 0 for one matrix, None when there is no one
    step."""
    step: int | None = None
    expected = 0
    for size, stride in zip(reversed(tensor.shape[:-2]), reversed(tensor.stride()[:-2]), strict=True):
        if size == 1:
            continue
        if step is not None and stride != expected:
            return None
        step = stride if step is None else step
        expected = stride * size
    return step or 0


@functools.lru_cache(maxsize=256)
def _weights(columns: int, device: torch.device) -> torch.Tensor:
    return sum_weights(columns).to(device)


class Pointer:
    """Stands for a buffer while compiling: its dtype, and whether its address may be taken as a multiple of 16."""

    def __init__(self, dtype: torch.dtype, aligned: bool) -> None:
        self.dtype = dtype
        self._address = 16 if aligned else 1

    def data_ptr(self) -> int:
        return self._address
