"""W^T from W: the exact transposes of byte matrices, and of their dequant scales.

For W that came alone: from the host at a reload, from a checkpoint, or because only one layer's W^T is kept. The
quantizer writes both at once (entry.py).
"""

import torch

from .errors import DtypeError, ShapeError
from .pair import grid_of, has_storage, overlaps, overlaps_itself

__all__ = ["check_transpose", "transpose"]

_BYTES = (torch.uint8, torch.float8_e4m3fn)


def transpose(
    w: torch.Tensor,
    wt: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    scale_t: torch.Tensor | None = None,
) -> torch.Tensor:
    """Write the transposes of ``w [..., M, N]`` (uint8 or float8_e4m3fn) to ``wt [..., N, M]``, and return it.

    ``wt`` has w's dtype and device, any strides, and no byte in common with w; without it a fresh tensor is made. With
    ``scale`` float32 ``[..., ceil(M/128), ceil(N/128)]``, its transpose goes to ``scale_t`` in the same launch. On a
    GPU this is enqueued on the current stream; the first call for a kind of layout compiles the kernel and tests it on
    the device.

    Raises DtypeError and ShapeError before anything is written, and KernelSelfTestError.
    """
    if wt is None:
        check_transpose(w, None, scale, scale_t)
        wt = torch.empty((*w.shape[:-2], w.shape[-1], w.shape[-2]), dtype=w.dtype, device=w.device)
    if w.device.type == "cuda":
        from .launch_transpose import launch

        launch(w, wt, scale, scale_t)
        return wt
    check_transpose(w, wt, scale, scale_t)
    wt.view(torch.uint8).copy_(w.view(torch.uint8).transpose(-1, -2))
    if scale is not None and scale_t is not None:
        scale_t.copy_(scale.transpose(-1, -2))
    return wt


def check_transpose(
    w: torch.Tensor, wt: torch.Tensor | None, scale: torch.Tensor | None, scale_t: torch.Tensor | None
) -> None:
    """Raise unless ``w`` can be turned into ``wt`` and ``scale`` into ``scale_t``: DtypeError, ShapeError."""
    if w.dtype not in _BYTES or (wt is not None and wt.dtype != w.dtype):
        found = f"{w.dtype}" if wt is None else f"{w.dtype} and {wt.dtype}"
        raise DtypeError(f"w and wt must both be uint8 or both float8_e4m3fn, found {found}")
    if w.ndim < 2 or w.numel() == 0:
        raise ShapeError(f"matrices [..., M, N] that are not empty are needed, found {list(w.shape)}")
    if w.device.type not in ("cpu", "cuda"):
        raise ShapeError(f"matrices on {w.device.type} cannot be turned; move them to a GPU or the CPU")
    if (scale is None) != (scale_t is None):
        raise ShapeError("scale and scale_t go together: give both, or neither")
    tensors = {"w": w, "wt": wt, "scale": scale, "scale_t": scale_t}
    present = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    lead, (m, n), (mb, nb) = w.shape[:-2], w.shape[-2:], grid_of(w.shape)
    shapes = {"w": w.shape, "wt": (*lead, n, m), "scale": (*lead, mb, nb), "scale_t": (*lead, nb, mb)}
    for name, tensor in present.items():
        if "scale" in name and tensor.dtype != torch.float32:
            raise DtypeError(f"{name} must be float32, found {tensor.dtype}")
        if tuple(tensor.shape) != tuple(shapes[name]):
            wanted, found = list(shapes[name]), list(tensor.shape)
            raise ShapeError(f"{name} must be {wanted} for w {list(w.shape)}, found {found}")
        if tensor.device != w.device or not has_storage(tensor):
            raise ShapeError(
                f"{name} on {tensor.device} must be on {w.device} with storage behind it; reload what is offloaded"
            )
    for name in {"wt", "scale_t"} & present.keys():
        if overlaps_itself(present[name]):
            raise ShapeError(f"{name} with strides {present[name].stride()} has elements at one address")
        for other, tensor in present.items():
            if other != name and overlaps(present[name], tensor):
                raise ShapeError(f"{name} shares memory with {other}; give it bytes of its own")
