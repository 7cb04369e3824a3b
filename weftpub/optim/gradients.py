"""Gradients before a step: they fit the masters, they are finite, and how large they are.

All of it happens before the first byte changes, and names what is wrong.
"""

import math
from collections.abc import Iterable, Mapping, Sequence

import torch

from weftpub.errors import ConfigError, NonFiniteGradientError
from weftpub.masters import MasterSet, find_nonfinite, format_names
from weftpub_kernels.pair import has_storage

__all__ = ["check_gradients", "clip_grad_norm", "gradient_norms", "joint_norm"]

_FP32_MAX = torch.finfo(torch.float32).max
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def check_gradients(masters: MasterSet, grads: Mapping[str, torch.Tensor]) -> None:
    """Checks that there is one dense float gradient of the right shape for every master, and no other.

    Raises:
        ConfigError: missing or unknown names, a wrong shape, a dtype that is not FP32, BF16, FP16 or FP64, or memory
            that was released.
    """
    missing, unknown = set(masters) - set(grads), set(grads) - set(masters)
    if missing or unknown:
        raise ConfigError(
            f"gradients do not match the masters: missing {format_names(missing)}, unknown {format_names(unknown)}; "
            "every master needs one in every step (an expert without tokens has a zero gradient)"
        )
    for name, master in masters.items():
        grad = grads[name]
        if not isinstance(grad, torch.Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError(f"gradient of {name!r} must be a tensor, got {type(grad).__name__}")
        if grad.layout is not torch.strided or grad.device.type not in ("cpu", "cuda"):
            raise ConfigError(f"gradient of {name!r} must be dense on a CPU or GPU, got {grad.layout} on {grad.device}")
        if tuple(grad.shape) != master.layout.shape:
            raise ConfigError(
                f"gradient of {name!r} has shape {list(grad.shape)}, its master {list(master.layout.shape)}"
            )
        if grad.dtype not in _DTYPES:
            raise ConfigError(
                f"gradient of {name!r} is {grad.dtype}; expected float32, bfloat16, float16 or float64 "
                "(dequantize an FP8 gradient with its scales first)"
            )
        if not has_storage(grad):
            raise ConfigError(
                f"gradient of {name!r} {list(grad.shape)} has no memory behind it, it was released; "
                "step before gradients are offloaded or freed"
            )


@torch.no_grad()
def gradient_norms(grads: Mapping[str, torch.Tensor], *, in_fp32: bool = False) -> dict[str, float]:
    """Name -> Euclidean norm, having read every element; the host waits once per device and dtype.

    A norm is zero only if every element is zero. It is accumulated in FP32 (FP64 for FP64 gradients, and where FP32
    overflows or underflows), in the order of the device's reduction: good for reports and clipping, not bit-exact.

    Args:
        in_fp32: the gradients will be converted to FP32: an FP64 element beyond its range counts as Inf.

    Raises:
        NonFiniteGradientError: a NaN or Inf, naming matrix, row and column.
    """
    norms = _norms(grads, 2.0)
    overflowed = [name for name, norm in norms.items() if not math.isfinite(norm)]
    _require_finite(grads, overflowed)
    if in_fp32:
        # No element beyond FP32's range can hide in a norm within it.
        wide = [name for name, norm in norms.items() if norm > _FP32_MAX and grads[name].dtype == torch.float64]
        _require_finite({name: grads[name].detach().float() for name in wide}, wide)
    # FP32 squares underflow below 1e-22 or so, and a gradient that is not zero must not be reported as zero.
    tiny = {name: grads[name] for name, norm in norms.items() if norm < 1e-16}
    vanished = [name for name, peak in _norms(tiny, math.inf).items() if peak > 0.0]
    for name in overflowed + vanished:
        norms[name] = float(torch.linalg.vector_norm(grads[name].detach().double()))
    return {name: norms[name] for name in grads}


@torch.no_grad()
def clip_grad_norm(grads: Mapping[str, torch.Tensor], max_norm: float) -> float:
    """Scales all gradients in place so that their joint norm is at most ``max_norm``; returns the norm before.

    The factor is that of ``torch.nn.utils.clip_grad_norm_`` and Megatron: ``min(1, max_norm / (norm + 1e-6))``, here
    computed in FP64. With several ranks, use the norm over all of them instead (Megatron does).

    Raises:
        ConfigError: ``max_norm`` is not a positive number.
        NonFiniteGradientError: a NaN or Inf; nothing was scaled.
    """
    if not (math.isfinite(max_norm) and max_norm > 0):
        raise ConfigError(f"clip_grad_norm(max_norm={max_norm}): must be a positive number")
    total = joint_norm(gradient_norms(grads).values())
    factor = max_norm / (total + 1e-6)
    if factor < 1.0:
        for grad in grads.values():
            grad.detach().mul_(factor)
    return total


def joint_norm(norms: Iterable[float]) -> float:
    """Norm of all matrices together, from the norm of each."""
    return math.hypot(*norms)


def _norms(grads: Mapping[str, torch.Tensor], order: float) -> dict[str, float]:
    groups: dict[tuple[torch.device, torch.dtype], list[str]] = {}
    for name, grad in grads.items():
        groups.setdefault((grad.device, grad.dtype), []).append(name)
    norms: dict[str, float] = {}
    for (_, dtype), names in groups.items():
        accumulate = torch.float64 if dtype is torch.float64 else torch.float32
        tensors = [grads[name].detach() for name in names]
        found = torch._foreach_norm(tensors, order, dtype=accumulate)  # pyright: ignore[reportPrivateImportUsage]
        norms.update(zip(names, torch.stack(list(found)).tolist(), strict=True))
    return norms


def _require_finite(grads: Mapping[str, torch.Tensor], suspects: Sequence[str]) -> None:
    """Tells NaN and Inf elements from a norm that merely overflowed."""
    found = {name: spot for name in suspects if (spot := find_nonfinite(grads[name])) is not None}
    if not found:
        return
    name, (row, column, value) = next(iter(found.items()))
    others = f" ({len(found) - 1} other gradients are not finite either)" if len(found) > 1 else ""
    raise NonFiniteGradientError(
        f"gradient of {name!r} is {value} at row {row}, column {column}{others}; nothing was changed. "
        "Skip this step (and lower the loss scale, if there is one), or find what made it"
    )
