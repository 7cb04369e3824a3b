"""The classes of shapes and memory layouts that the kernel is proven on: whole and ragged blocks, batches, strides,
odd addresses."""

import math
from dataclasses import dataclass
from typing import Literal

import torch

from ..pair import QuantizedPair
from ..recipe import BLOCK, TILE_PARTS, Recipe
from ..selftest import awkward_matrix

__all__ = ["SHAPE_CLASSES", "ShapeClass", "classes_for"]

Layout = Literal["contiguous", "rows", "slices", "odd", "transposed", "nested"]


@dataclass(frozen=True)
class ShapeClass:
    """One shape and layout. ``rows``: padded rows; ``slices``: each matrix inside a bigger one, as in a layer's buffer;
    ``odd``: addresses off alignment; ``transposed``: columns strided; ``nested``: batch dimensions of no common
    step."""

    name: str
    shape: tuple[int, ...]
    layout: Layout = "contiguous"

    def input(self, dtype: torch.dtype, device: torch.device | str) -> torch.Tensor:
        """Awkward but finite matrices of this shape, laid out accordingly."""
        rows, columns = self.shape[-2:]
        count = math.prod(self.shape[:-2])
        values = torch.stack([awkward_matrix(rows, columns, dtype, seed=7 + k) for k in range(count)])
        x = self._empty(self.shape, dtype, device)
        x.copy_(values.view(self.shape))
        return x

    def output(self, device: torch.device | str) -> QuantizedPair:
        """Buffers of this layout, poisoned."""
        plain = QuantizedPair.empty(self.shape, "cpu", sums=True)
        buffers = {}
        for name, like in plain.present().items():
            if name == "sums":
                tensor = _side_by_side(self._empty(tuple(like.shape[:-1]), like.dtype, device), TILE_PARTS)
            else:
                tensor = self._empty(tuple(like.shape), like.dtype, device)
            tensor.view(torch.uint8 if like.element_size() == 1 else tensor.dtype).fill_(
                0xEE if like.element_size() == 1 else -7
            )
            buffers[name] = tensor
        return QuantizedPair(**buffers)

    def _empty(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str) -> torch.Tensor:
        *lead, rows, columns = shape
        make = lambda *size: torch.empty(size, dtype=dtype, device=device)  # noqa: E731
        if self.layout == "rows":
            return make(*lead, rows, columns + 16)[..., :columns]
        if self.layout == "slices":
            return make(*lead, 2 * rows, columns)[..., rows:, :]
        if self.layout == "odd":
            return make(math.prod(shape) + 1)[1:].view(shape)
        if self.layout == "transposed":
            return make(*lead, columns, rows).transpose(-1, -2)
        if self.layout == "nested":
            return make(lead[1], lead[0], rows, columns).transpose(0, 1)
        return make(*shape)


def _side_by_side(like: torch.Tensor, count: int) -> torch.Tensor:
    """Uninitialised ``[..., count]``: that many neighbours for each element of ``like``, in its layout."""
    elements = like.untyped_storage().nbytes() // like.element_size()
    memory = torch.empty(count * elements, dtype=like.dtype, device=like.device)
    strides = (*(count * step for step in like.stride()), 1)
    return memory.as_strided((*like.shape, count), strides, count * like.storage_offset())


SHAPE_CLASSES = (
    ShapeClass("one block", (128, 128)),
    ShapeClass("whole blocks", (256, 384)),
    ShapeClass("wide", (128, 2048)),
    ShapeClass("tall", (2048, 128)),
    ShapeClass("one element", (1, 1)),
    ShapeClass("one row", (1, 300)),
    ShapeClass("one column", (300, 1)),
    ShapeClass("around a block", (127, 129)),
    ShapeClass("ragged, rows of 16", (200, 304)),
    ShapeClass("ragged, odd rows", (333, 257)),
    ShapeClass("batch", (5, 256, 384)),
    ShapeClass("ragged batch", (3, 200, 300)),
    ShapeClass("two batch dimensions", (2, 3, 128, 256)),
    ShapeClass("padded rows", (384, 256), "rows"),
    ShapeClass("padded rows, ragged batch", (2, 200, 304), "rows"),
    ShapeClass("slices of a layer", (4, 256, 384), "slices"),
    ShapeClass("odd addresses", (256, 256), "odd"),
    ShapeClass("odd addresses, ragged", (2, 130, 250), "odd"),
    ShapeClass("strided columns", (256, 384), "transposed"),
    ShapeClass("strided columns, ragged batch", (2, 200, 129), "transposed"),
    ShapeClass("batch without a common step", (2, 3, 128, 256), "nested"),
)

_FOR_ALL = ("whole blocks", "ragged, odd rows", "ragged batch")


def classes_for(recipe: Recipe) -> tuple[ShapeClass, ...]:
    """The classes to prove a preset on: all for the default, three for the others, whose addressing is the same code.

    Classes that the preset refuses are left out.
    """
    chosen = (c for c in SHAPE_CLASSES if recipe.name == "te_fp32" or c.name in _FOR_ALL)
    return tuple(c for c in chosen if not (recipe.refuses_ragged and (c.shape[-2] % BLOCK or c.shape[-1] % BLOCK)))
