"""The public entry: check the arguments, then hand over to the Triton kernel on a GPU or to the torch reference on a
CPU.

Everything is checked before the first byte is written. What a check has passed is remembered per layout on a GPU
(launch.py), so that a training loop pays for it once.
"""

from collections.abc import Sequence

import torch

from .checks import check_arguments, check_input, check_monitor
from .errors import DtypeError, ShapeError
from .nonfinite import NonFiniteMonitor
from .pair import QuantizedPair, grid_of, has_storage
from .recipe import BLOCK, Recipe, get_recipe
from .reference import quantize_reference

__all__ = ["dequantize", "quantize_into", "quantize_pair"]


def quantize_pair(x: torch.Tensor, preset: str | Recipe = "te_fp32", out: QuantizedPair | None = None) -> QuantizedPair:
    """Quantize matrices ``x [..., M, N]`` to W, W^T and dequant scales, and wait until they are known to be finite.

    ``x`` is float32 on any device, contiguous or strided (bfloat16 for presets named ``*_bf16``). ``out`` takes the
    bytes in place, and is returned; without it fresh buffers are made. ``value = code * dequant scale`` (recipe.py
    gives the formulas and their sources).

    Raises UnknownPresetError, DtypeError, ShapeError and, on a CPU, ApproximateOnCpuError and NonFiniteError before
    anything is written. On a GPU the same pass finds NaN and Inf and writes: NonFiniteError then means that ``out``
    holds void bytes.
    """
    recipe = get_recipe(preset)
    if out is None:
        check_input(x, recipe)
        out = QuantizedPair.empty(x.shape, x.device)
    if x.device.type == "cuda":
        from .launch import idle_monitor, launch

        with idle_monitor(x.device) as monitor:
            launch(x, out, recipe, monitor, None)
            monitor.raise_if_set()
        return out
    check_arguments(x, out, recipe)
    monitor = NonFiniteMonitor(x.device)
    monitor.note_host(monitor.note(x.shape), x)
    monitor.raise_if_set()
    quantize_reference(x, out, recipe)
    return out


def quantize_into(
    x: torch.Tensor,
    out: QuantizedPair,
    preset: str | Recipe = "te_fp32",
    nonfinite: NonFiniteMonitor | None = None,
    name: str | Sequence[str] | None = None,
) -> None:
    """Quantize ``x [..., M, N]`` into ``out`` on the current stream without waiting: for training loops.

    ``nonfinite`` notes the first NaN or Inf, under ``name`` (one, or one per matrix), and nothing is raised about it
    until its ``raise_if_set``; without a monitor nobody looks. The first call for a layout compiles, and tests the
    kernel on the device.

    Raises as quantize_pair does for everything but NonFiniteError, and KernelSelfTestError.
    """
    recipe = get_recipe(preset)
    if x.device.type == "cuda":
        from .launch import launch

        launch(x, out, recipe, nonfinite, name)
        return
    check_arguments(x, out, recipe)
    if nonfinite is not None:
        check_monitor(x, nonfinite)
        nonfinite.note_host(nonfinite.note(x.shape, name), x)
    quantize_reference(x, out, recipe)


def dequantize(w: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """``code * dequant scale`` of ``w [..., M, N]`` and ``scale [..., ceil(M/128), ceil(N/128)]``, in a fresh tensor
    of ``dtype``.

    The product is made in float32 and rounded once to ``dtype``. Works for W^T with scale_t as well. Raises
    DtypeError, ShapeError.
    """
    if not (isinstance(w, torch.Tensor) and isinstance(scale, torch.Tensor)):  # pyright: ignore[reportUnnecessaryIsInstance]
        found = f"{type(w).__name__} and {type(scale).__name__}"
        raise DtypeError(f"codes and their dequant scales are needed, found {found}; codes alone mean nothing")
    if w.dtype != torch.float8_e4m3fn or scale.dtype != torch.float32:
        raise DtypeError(f"codes must be float8_e4m3fn and scales float32, found {w.dtype} and {scale.dtype}")
    if w.ndim < 2 or tuple(scale.shape) != (*w.shape[:-2], *grid_of(w.shape)):
        wanted = [*w.shape[:-2], *grid_of(w.shape)] if w.ndim >= 2 else "[..., MB, NB]"
        raise ShapeError(f"scale must be {wanted} for codes {list(w.shape)}, found {list(scale.shape)}")
    for name, tensor in (("codes", w), ("scales", scale)):
        if tensor.device != w.device or not has_storage(tensor):
            raise ShapeError(
                f"{name} {list(tensor.shape)} on {tensor.device} must be on {w.device} with storage behind them; "
                "reload what is offloaded, and keep codes and scales on one device"
            )
    rows, columns = w.shape[-2:]
    wide = scale.repeat_interleave(BLOCK, -1)[..., :columns]
    value = w.to(torch.float32)
    for i in range(scale.shape[-2]):
        value[..., i * BLOCK : min((i + 1) * BLOCK, rows), :] *= wide[..., i : i + 1, :]
    return value.to(dtype)
