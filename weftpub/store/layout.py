"""What a store holds and under which names: shapes and views, no memory and no state.

Per layer the buffers have SGLang's own layout, so that a store's memory can be an engine's memory::

    w13 [E, 2I, H]   gate rows over up rows      w13_scale [E, 2I/128, H/128]     fc1 of expert e is w13[e]
    w2  [E, H, I]                                w2_scale  [E, H/128, I/128]      fc2 of expert e is w2[e]

and their exact transposes for the trainer's dgrad: ``w13_t [E, H, 2I]``, ``w2_t [E, I, H]`` and the transposed scales.
E counts the experts held here; scale sizes are rounded up.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Any, Literal

import torch

from weftpub.canonical import FAMILIES, ModelFamily, Projection, Role
from weftpub.errors import ConfigError
from weftpub.masters import ExpertMatrix

__all__ = ["BLOCK", "BUFFERS", "CanonicalEntry", "Format", "LayerStore", "MatrixView", "StoreLayout", "Wt"]

Format = Literal["fp8", "bf16"]
Wt = Literal["store", "rebuild"]

BLOCK = 128
# Buffer of each projection; "_scale", "_t" and "_scale_t" are added for what belongs to it.
BUFFERS: Mapping[Projection, str] = MappingProxyType({"fc1": "w13", "fc2": "w2"})


@dataclass(frozen=True)
class MatrixView:
    """One matrix of the store; every field is a view of a layer's buffer.

    Attributes:
        w: ``[M, N]`` float8_e4m3fn or bfloat16, what forward reads.
        wt: ``[N, M]``, w's exact transpose, what dgrad reads. In BF16 the same memory as w, strided.
        scale: float32 ``[ceil(M/128), ceil(N/128)]``, value = code * scale; None in BF16.
        scale_t: float32, scale's exact transpose; None in BF16.
    """

    w: torch.Tensor
    wt: torch.Tensor
    scale: torch.Tensor | None
    scale_t: torch.Tensor | None

    def transpose_difference(self) -> str | None:
        """Where wt or scale_t is not the exact transpose of w or scale, bit for bit; None if nowhere."""
        for what, source, transposed in (("W^T", self.w, self.wt), ("scale^T", self.scale, self.scale_t)):
            if source is None or transposed is None:
                continue
            wrong = torch.nonzero(_bits(source) != _bits(transposed).t())
            if len(wrong):
                row, column = wrong[0].tolist()
                return f"{what} differs from its source in {len(wrong)} elements, first at row {row}, column {column}"
        return None


@dataclass(frozen=True)
class LayerStore:
    """The buffers of one layer, shapes as in this module's docstring; scales are None in BF16."""

    layer: int
    w13: torch.Tensor
    w2: torch.Tensor
    w13_t: torch.Tensor
    w2_t: torch.Tensor
    w13_scale: torch.Tensor | None
    w2_scale: torch.Tensor | None
    w13_scale_t: torch.Tensor | None
    w2_scale_t: torch.Tensor | None


@dataclass(frozen=True)
class CanonicalEntry:
    """One canonical tensor of a store, before its first byte exists."""

    name: str
    role: Role
    dtype: torch.dtype
    shape: tuple[int, int]
    matrix: ExpertMatrix
    part: str


@dataclass(frozen=True)
class StoreLayout:
    """Which matrices a store holds, in which format.

    Attributes:
        layers: layer indices, in the order of the buffers.
        experts: global ids of the experts held here, in the order of the buffers' first dimension; the same in every
            layer.
        hidden: H.
        intermediate: I, of one projection (fc1 has 2I rows).
        format: "fp8" or "bf16".
        family: how the tensors are named.

    Raises:
        ConfigError: an empty or repeated id, a size below 1, or (FP8) an I that is not a multiple of 128.
    """

    layers: tuple[int, ...]
    experts: tuple[int, ...]
    hidden: int
    intermediate: int
    format: Format = "fp8"
    family: ModelFamily = field(default_factory=lambda: FAMILIES["Qwen3MoeForCausalLM"])

    def __post_init__(self) -> None:
        for what, ids in (("layers", self.layers), ("experts", self.experts)):
            if not ids or len(set(ids)) != len(ids) or any(type(i) is not int or i < 0 for i in ids):
                raise ConfigError(f"{what}: expected distinct indices from 0, found {list(ids)}")
        if any(type(size) is not int or size < 1 for size in (self.hidden, self.intermediate)):
            raise ConfigError(
                f"hidden and intermediate are whole numbers from 1, found {self.hidden!r} and {self.intermediate!r}"
            )
        if self.format not in ("fp8", "bf16"):
            raise ConfigError(f"format: expected 'fp8' or 'bf16', found {self.format!r}")
        if self.format == "fp8" and self.intermediate % BLOCK:
            # A block would lie across gate and up, and engines refuse the shape.
            below, above = self.intermediate // BLOCK * BLOCK, -(-self.intermediate // BLOCK) * BLOCK
            sizes = f"{below} or {above}" if below else f"{above}"
            raise ConfigError(
                f"intermediate {self.intermediate} is not a multiple of {BLOCK}: a block would hold rows of both gate "
                f"and up; use {sizes}, or format='bf16'"
            )

    @property
    def weight_dtype(self) -> torch.dtype:
        return torch.float8_e4m3fn if self.format == "fp8" else torch.bfloat16

    @cached_property
    def matrices(self) -> tuple[ExpertMatrix, ...]:
        """Every matrix held, layer by layer, expert by expert, fc1 before fc2."""
        return tuple(ExpertMatrix(layer, e, p) for layer in self.layers for e in self.experts for p in BUFFERS)

    def shape(self, projection: Projection) -> tuple[int, int]:
        """``[M, N]`` of one matrix."""
        if projection == "fc1":
            return 2 * self.intermediate, self.hidden
        return self.hidden, self.intermediate

    def buffer_shapes(self) -> dict[str, tuple[tuple[int, int, int], torch.dtype]]:
        """Shape and dtype of what one layer publishes: the weight buffers and, in FP8, their scales."""
        shapes: dict[str, tuple[tuple[int, int, int], torch.dtype]] = {}
        for projection, name in BUFFERS.items():
            rows, columns = self.shape(projection)
            shapes[name] = ((len(self.experts), rows, columns), self.weight_dtype)
            if self.format == "fp8":
                shapes[f"{name}_scale"] = ((len(self.experts), -(-rows // BLOCK), -(-columns // BLOCK)), torch.float32)
        return shapes

    def transposed_shapes(self) -> dict[str, tuple[tuple[int, int, int], torch.dtype]]:
        """Shape and dtype of one layer's transposed buffers; none in BF16, where W^T is a view of W."""
        if self.format == "bf16":
            return {}
        return {
            f"{n}_t": ((e, columns, rows), dtype) for n, ((e, rows, columns), dtype) in self.buffer_shapes().items()
        }

    def entries(self) -> Iterator[CanonicalEntry]:
        """Every canonical tensor, weight before its scale, in the order in which a store yields them."""
        for matrix in self.matrices:
            rows, columns = self.shape(matrix.projection)
            parts = self.family.parts[matrix.projection]
            each = rows // len(parts)
            for part in parts:
                name = self.family.name(matrix, part, "weight")
                yield CanonicalEntry(name, "weight", self.weight_dtype, (each, columns), matrix, part)
                if self.format == "fp8":
                    name = self.family.name(matrix, part, "scale")
                    shape = (-(-each // BLOCK), -(-columns // BLOCK))
                    yield CanonicalEntry(name, "scale", torch.float32, shape, matrix, part)

    def view(self, entry: CanonicalEntry, matrix: MatrixView) -> torch.Tensor:
        """The contiguous rows of `entry` in its matrix or scale."""
        whole = matrix.w if entry.role == "weight" else matrix.scale
        assert whole is not None, "a BF16 layout has no scale entries"
        return whole[self.family.rows(entry.matrix, entry.part, whole.shape[0])]

    def to_json(self) -> dict[str, Any]:
        """Plain data that identifies the layout."""
        return {
            "layers": list(self.layers),
            "experts": list(self.experts),
            "hidden": self.hidden,
            "intermediate": self.intermediate,
            "format": self.format,
            "architecture": self.family.architecture,
        }


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as integers: float8 and NaN patterns do not compare."""
    return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.element_size()])
