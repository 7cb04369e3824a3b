"""What a quantizer writes: W, W^T and their dequant scales, as fresh tensors or as views of bigger buffers.

Shapes for a matrix (or a batch of matrices) ``[..., M, N]`` with MB = ceil(M/128), NB = ceil(N/128):
``w [..., M, N]`` and ``wt [..., N, M]`` in float8_e4m3fn, ``scale [..., MB, NB]`` and ``scale_t [..., NB, MB]`` in
float32, and, where the checksum is wanted, ``sums [..., MB, NB, 8]`` in int64: the checksum sums of each tile of W, in
eight parts (see checksum.py).
"""

import itertools
import math
from dataclasses import dataclass, field
from typing import Self

import numpy as np
import torch

from .errors import DtypeError, ShapeError
from .recipe import BLOCK, TILE_PARTS

__all__ = ["QuantizedPair", "grid_of", "has_storage", "overlaps", "overlaps_itself", "span"]

_TYPES = {
    "w": torch.float8_e4m3fn,
    "wt": torch.float8_e4m3fn,
    "scale": torch.float32,
    "scale_t": torch.float32,
    "sums": torch.int64,
}
_layouts: dict[tuple[object, ...], int] = {}
_numbers = itertools.count()  # drawn, not counted from _layouts: two threads must never give two layouts one number


def grid_of(shape: torch.Size | tuple[int, ...]) -> tuple[int, int]:
    """Blocks per column and per row, (ceil(M/128), ceil(N/128)), of the matrices ``[..., M, N]``."""
    return -(-shape[-2] // BLOCK), -(-shape[-1] // BLOCK)


def overlaps(a: torch.Tensor, b: torch.Tensor) -> bool:
    """True when some byte belongs to both tensors, or when that is too costly to decide. Addresses are only
    compared."""
    if a.device != b.device or a.numel() == 0 or b.numel() == 0:
        return False
    first, second = a.data_ptr(), b.data_ptr()
    if first + span(a) <= second or second + span(b) <= first:
        return False
    try:
        return np.shares_memory(_ghost(a), _ghost(b), max_work=100_000)
    except np.exceptions.TooHardError:
        return True


def span(tensor: torch.Tensor) -> int:
    """Bytes from the tensor's first element to the end of its last one."""
    steps = sum(step * (size - 1) for step, size in zip(tensor.stride(), tensor.shape, strict=True))
    return (steps + 1) * tensor.element_size()


def has_storage(tensor: torch.Tensor) -> bool:
    """Whether the tensor's storage reaches as far as its elements do: False for memory that was released or cut."""
    reach = tensor.storage_offset() * tensor.element_size() + span(tensor)
    return tensor.numel() == 0 or reach <= tensor.untyped_storage().nbytes()


def _ghost(tensor: torch.Tensor) -> np.ndarray:
    """A numpy array at the tensor's address, device memory included: it is never read, only its extent is asked for."""

    class Interface:
        __array_interface__ = {  # noqa: RUF012
            "version": 3,
            "shape": tuple(tensor.shape),
            "strides": tuple(step * tensor.element_size() for step in tensor.stride()),
            "typestr": f"|V{tensor.element_size()}",
            "data": (tensor.data_ptr(), False),
        }

    return np.asarray(Interface())


def overlaps_itself(tensor: torch.Tensor) -> bool:
    """True unless, ordered by stride, each dimension steps over everything below it: then no element is written
    twice."""
    extent = 1
    for step, size in sorted(
        (step, size) for step, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1
    ):
        if step < extent:
            return True
        extent = step * (size - 1) + extent
    return False


@dataclass(frozen=True, eq=False, slots=True)
class QuantizedPair:
    """The bytes of one generation of one matrix, or of a batch of them: ``value = code * dequant scale``.

    Making one checks it once: dtypes, shapes, one device, and that no two buffers share a byte (DtypeError,
    ShapeError).
    """

    w: torch.Tensor
    wt: torch.Tensor
    scale: torch.Tensor
    scale_t: torch.Tensor
    sums: torch.Tensor | None = None
    layout: int = field(init=False, repr=False)
    """Equal for pairs of one shape, one device and the same strides: what a launch depends on besides addresses."""

    def __post_init__(self) -> None:
        shape = tuple(self.w.shape)
        if len(shape) < 2 or math.prod(shape) == 0:
            raise ShapeError(f"w must be [..., M, N] and not empty, found {list(shape)}")
        lead, (m, n), (mb, nb) = shape[:-2], shape[-2:], grid_of(shape)
        expected = {
            "w": shape,
            "wt": (*lead, n, m),
            "scale": (*lead, mb, nb),
            "scale_t": (*lead, nb, mb),
            "sums": (*lead, mb, nb, TILE_PARTS),
        }
        present = self.present()
        for name, tensor in present.items():
            if tensor.dtype != _TYPES[name]:
                raise DtypeError(f"{name} must be {_TYPES[name]}, found {tensor.dtype}")
            if tuple(tensor.shape) != expected[name]:
                raise ShapeError(
                    f"{name} must be {list(expected[name])} for w {list(shape)}, found {list(tensor.shape)}"
                )
            if tensor.device != self.w.device:
                raise ShapeError(f"{name} must be on {self.w.device} like w, found {tensor.device}")
            if name == "sums" and tensor.stride(-1) != 1:
                raise ShapeError(
                    f"the {TILE_PARTS} sums of a tile must lie side by side, found strides {tensor.stride()}"
                )
            if overlaps_itself(tensor):
                raise ShapeError(
                    f"{name} with strides {tensor.stride()} has elements at one address; give it memory of its own"
                )
        strides = tuple(tensor if tensor is None else tensor.stride() for tensor in self._buffers())
        object.__setattr__(self, "layout", _layouts.setdefault((self.w.device, shape, strides), next(_numbers)))
        names = list(present)
        for i, first in enumerate(names):
            for second in names[i + 1 :]:
                if overlaps(present[first], present[second]):
                    raise ShapeError(f"{first} and {second} share memory; give each buffer bytes of its own")

    @classmethod
    def empty(cls, shape: torch.Size | tuple[int, ...], device: torch.device | str, sums: bool = False) -> Self:
        """Fresh, uninitialised buffers for matrices ``[..., M, N]``; with ``sums``, the checksum's tile sums too."""
        shape = tuple(shape)
        if len(shape) < 2 or math.prod(shape) == 0:
            raise ShapeError(f"a matrix [..., M, N] that is not empty is needed, found {list(shape)}")
        lead, (m, n), (mb, nb) = shape[:-2], shape[-2:], grid_of(shape)

        def new(tail: tuple[int, ...], name: str) -> torch.Tensor:
            return torch.empty((*lead, *tail), dtype=_TYPES[name], device=device)

        return cls(
            new((m, n), "w"),
            new((n, m), "wt"),
            new((mb, nb), "scale"),
            new((nb, mb), "scale_t"),
            new((mb, nb, TILE_PARTS), "sums") if sums else None,
        )

    def present(self) -> dict[str, torch.Tensor]:
        """The buffers by name, without ``sums`` where there is none."""
        return {name: tensor for name, tensor in zip(_TYPES, self._buffers(), strict=True) if tensor is not None}

    def _buffers(self) -> tuple[torch.Tensor | None, ...]:
        return self.w, self.wt, self.scale, self.scale_t, self.sums

    def __reduce__(self) -> tuple[type[Self], tuple[torch.Tensor | None, ...]]:
        # Made anew where it is read: `layout` is a number of this process, and means another layout in every other.
        return type(self), self._buffers()

    def __getitem__(self, index: int | slice) -> Self:
        """The pair of one matrix, or of some, of a batch (views)."""
        if self.w.ndim < 3:
            raise ShapeError(f"a single matrix {list(self.w.shape)} has no batch dimension to index")
        return type(self)(**{name: tensor[index] for name, tensor in self.present().items()})
