"""What must hold before a byte is written: dtypes, shapes, devices, and that no buffer shares memory with the input."""

import torch

from .errors import DtypeError, ShapeError
from .nonfinite import NonFiniteMonitor
from .pair import QuantizedPair, has_storage, overlaps
from .recipe import Recipe
from .reference import require_cpu_exact

__all__ = ["check_arguments", "check_input", "check_monitor"]


def check_input(x: torch.Tensor, recipe: Recipe) -> None:
    """Raise unless ``x`` is a matrix, or a batch of them, that the recipe takes: DtypeError, ShapeError,
    ApproximateOnCpuError."""
    if not isinstance(x, torch.Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise DtypeError(f"a torch.Tensor is needed, found {type(x).__name__}; pass the FP32 master itself")
    if x.layout is not torch.strided:
        raise ShapeError(f"a dense matrix is needed, found layout {x.layout}; call to_dense() first")
    if x.dtype != recipe.input_dtype:
        bf16 = recipe.input_dtype == torch.bfloat16
        hint = "convert the matrix" if bf16 else "pass the FP32 master, since rounding it first changes the bytes"
        raise DtypeError(f"preset {recipe.name!r} takes {recipe.input_dtype}, found {x.dtype}; {hint}")
    if x.ndim < 2 or x.numel() == 0:
        raise ShapeError(f"matrices [..., M, N] that are not empty are needed, found {list(x.shape)}")
    recipe.check_shape(*x.shape[-2:])
    if not has_storage(x):
        raise ShapeError(f"x {list(x.shape)} has no storage behind it (it is offloaded); reload it before quantizing")
    if x.device.type == "cpu":
        require_cpu_exact(recipe)
    elif x.device.type != "cuda":
        raise ShapeError(f"matrices on {x.device.type} cannot be quantized; move them to a GPU or the CPU")


def check_arguments(x: torch.Tensor, out: QuantizedPair, recipe: Recipe) -> None:
    """Raise unless ``x`` may be quantized into ``out``: DtypeError, ShapeError, ApproximateOnCpuError."""
    check_input(x, recipe)
    if out.w.shape != x.shape:
        found, wanted = list(out.w.shape), list(x.shape)
        raise ShapeError(
            f"out holds matrices {found}, x is {wanted}; make out with QuantizedPair.empty(x.shape, x.device)"
        )
    if out.w.device != x.device:
        raise ShapeError(f"out is on {out.w.device}, x on {x.device}; both must be on one device")
    for name, tensor in out.present().items():
        if tensor.untyped_storage().nbytes() == 0:
            raise ShapeError(f"out.{name} has no storage (it is offloaded); reload it before writing")
        if overlaps(tensor, x):
            raise ShapeError(f"out.{name} shares memory with x; give it bytes of its own")


def check_monitor(x: torch.Tensor, monitor: NonFiniteMonitor) -> None:
    """Raise ShapeError unless the monitor lives where ``x`` does."""
    if monitor.device != x.device:
        raise ShapeError(f"the monitor is on {monitor.device}, x on {x.device}; make one per device")
