"""The names under which experts travel: one table row per model family, and the functions that build and read those
names.

Two name spaces, both Hugging Face style, one expert and one projection a tensor:

* canonical names, which publisher, plan and engine use; they are AWEX's,
  ``model.layers.L.mlp.experts.E.{gate,up,down}_proj.weight`` for every family, with ``.weight_scale_inv`` for the
  dequant scale (value = code x scale). Where a checkpoint fuses tensors that engines split each by itself (the input
  projection and the convolution of a gated delta net), the parts travel under names of their own;
* checkpoint names, which stand in a safetensors directory; multimodal families keep their language model one level
  deeper.

The trainer's matrices are fc1 ``[2I, H]``, gate rows over up rows, and fc2 ``[H, I]``. A canonical tensor is therefore
a whole row range of one matrix, and its scale the row range of the scale: a view, never a copy.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Literal

import torch

from weftpub.errors import ConfigError
from weftpub.masters import ExpertMatrix

__all__ = ["FAMILIES", "CanonicalTensor", "ExpertName", "ModelFamily", "Projection", "Role", "family_of"]

Role = Literal["weight", "scale", "other"]
Projection = Literal["fc1", "fc2"]

# What Megatron calls fc1 and fc2, in row order, by the names of Hugging Face.
_GATED_MLP: Mapping[Projection, tuple[str, ...]] = MappingProxyType(
    {"fc1": ("gate_proj", "up_proj"), "fc2": ("down_proj",)}
)
_STACKED_MLP: Mapping[Projection, str] = MappingProxyType({"fc1": "gate_up_proj", "fc2": "down_proj"})


@dataclass(frozen=True)
class CanonicalTensor:
    """One tensor under the name it travels by.

    Attributes:
        name: canonical name.
        tensor: weight float8_e4m3fn or bfloat16 ``[rows, columns]``; scale float32 ``[rows/128, columns/128]``, rounded
            up; others as they are.
        role: what it is to the checks: an FP8 weight without its scale, or a scale without its weight, is an error.
    """

    name: str
    tensor: torch.Tensor
    role: Role


@dataclass(frozen=True)
class ExpertName:
    """What a canonical expert name says: the matrix, which of its row ranges, and weight or scale."""

    matrix: ExpertMatrix
    part: str
    role: Literal["weight", "scale"]


@dataclass(frozen=True)
class ModelFamily:
    """How one architecture names its routed experts. A new family is one row of `FAMILIES`.

    Attributes:
        architecture: ``architectures[0]`` of the Hugging Face config.
        checkpoint_prefixes: (canonical prefix, checkpoint prefix) pairs; the first that matches a name translates it.
        layers: canonical prefix of the decoder layers.
        experts: module path of the routed experts inside a layer. Anything else, shared experts included, has role
            "other" and stays BF16.
        parts: per projection, the Hugging Face names of its row ranges, top to bottom.
        stacked: per projection, the name of the one 3-D tensor ``[experts, rows, columns]`` that BF16 checkpoints of
            some releases hold instead.
        joined: name of a checkpoint's tensor inside a layer to the canonical parts that it consists of, top to bottom.
    """

    architecture: str
    checkpoint_prefixes: tuple[tuple[str, str], ...] = (("model.", "model."),)
    layers: str = "model.layers."
    experts: str = "mlp.experts"
    parts: Mapping[Projection, tuple[str, ...]] = field(default_factory=lambda: _GATED_MLP)
    stacked: Mapping[Projection, str] = field(default_factory=lambda: _STACKED_MLP)
    weight: str = "weight"
    scale: str = "weight_scale_inv"
    joined: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: MappingProxyType({}))

    def experts_module(self, layer: int) -> str:
        """Canonical module path of a layer's routed experts, without a trailing dot."""
        return f"{self.layers}{layer}.{self.experts}"

    def name(self, matrix: ExpertMatrix, part: str, role: Literal["weight", "scale"]) -> str:
        """Canonical name of one row range of `matrix`, or of its scale."""
        if part not in self.parts[matrix.projection]:
            raise ConfigError(
                f"{matrix.name}: has no part {part!r}; {self.architecture} splits {matrix.projection} into "
                f"{self.parts[matrix.projection]}"
            )
        suffix = self.weight if role == "weight" else self.scale
        return f"{self.experts_module(matrix.layer)}.{matrix.expert}.{part}.{suffix}"

    def rows(self, matrix: ExpertMatrix, part: str, total: int) -> slice:
        """Rows of `part` in a matrix, or in a scale, that has `total` rows: fc1 is gate over up, in equal halves."""
        parts = self.parts[matrix.projection]
        each = total // len(parts)
        start = parts.index(part) * each
        return slice(start, start + each)

    def parse(self, name: str) -> ExpertName | None:
        """Read a canonical name; None if it names no routed expert.

        Raises:
            ConfigError: the name lies inside a routed expert and is neither weight nor scale of a known projection,
                such as ``weight_scale``: passing it on as "other" would drop it silently later.
        """
        match = self._pattern.match(name)
        if match is None:
            return None
        layer, expert, part, suffix = int(match["layer"]), int(match["expert"]), match["part"], match["suffix"]
        projection: Projection | None = next((p for p, parts in self.parts.items() if part in parts), None)
        if projection is None or suffix not in (self.weight, self.scale):
            known = [part for parts in self.parts.values() for part in parts]
            raise ConfigError(
                f"{name}: not a tensor of a routed expert of {self.architecture}; expected one of {known} with suffix "
                f"{self.weight!r} or {self.scale!r}, found {part}.{suffix}; rename it, or add a row to "
                "weftpub.canonical.FAMILIES"
            )
        return ExpertName(ExpertMatrix(layer, expert, projection), part, "weight" if suffix == self.weight else "scale")

    def role(self, name: str) -> Role:
        """Role of any canonical name; raises as `parse` does."""
        parsed = self.parse(name)
        return "other" if parsed is None else parsed.role

    def is_expert(self, checkpoint_name: str) -> bool:
        """Whether a checkpoint name is of routed experts, one by one or stacked; raises as `parse` does."""
        name = self.from_checkpoint(checkpoint_name)
        module, _, last = name.rpartition(".")
        stacked = last in self.stacked.values() and module.endswith("." + self.experts)
        return stacked or self.parse(name) is not None

    def to_checkpoint(self, name: str) -> str:
        """Checkpoint name of a canonical name. Names outside the translated prefixes (``lm_head.weight``) are the same
        in both.
        """
        return _translate(name, self.checkpoint_prefixes)

    def from_checkpoint(self, name: str) -> str:
        """Canonical name of a checkpoint name; the inverse of `to_checkpoint`."""
        return _translate(name, tuple((there, here) for here, there in self.checkpoint_prefixes))

    def join(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Canonical tensors outside the routed experts under the names, and in the shapes, of a checkpoint.

        Raises:
            ConfigError: a tensor that a checkpoint fuses lacks one of its parts.
        """
        waiting = dict(tensors)
        made: dict[str, torch.Tensor] = {}
        for name in tensors:
            if name not in waiting:
                continue
            for whole, parts in self.joined.items():
                prefix = name.removesuffix(parts[0])
                if prefix == name or not prefix.endswith("."):
                    continue
                missing = [part for part in parts if prefix + part not in waiting]
                if missing:
                    raise ConfigError(f"{prefix}{whole}: its parts {missing} are missing; give all of {list(parts)}")
                rows = [waiting.pop(prefix + part) for part in parts]
                made[self.to_checkpoint(prefix + whole)] = torch.cat(rows)
        loose = sorted(name for name in waiting for parts in self.joined.values() if name.endswith(parts))
        if loose:
            raise ConfigError(f"{loose[0]}: part of a fused tensor whose other parts are missing ({len(loose)} in all)")
        return {self.to_checkpoint(name): tensor for name, tensor in waiting.items()} | made

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        layers, experts = re.escape(self.layers), re.escape(self.experts)
        return re.compile(rf"{layers}(?P<layer>\d+)\.{experts}\.(?P<expert>\d+)\.(?P<part>[^.]+)\.(?P<suffix>.+)")


def _translate(name: str, prefixes: tuple[tuple[str, str], ...]) -> str:
    for source, target in prefixes:
        if name.startswith(source):
            return target + name[len(source) :]
    return name


# Qwen3.5's vision tower is a sibling of the language model in the checkpoint, and keeps its name.
_MULTIMODAL = (("model.visual.", "model.visual."), ("model.", "model.language_model."))

# A gated delta net's projection and convolution: each part is split over ranks by itself.
_GATED_DELTA_NET: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        f"linear_attn.{whole}.weight": tuple(f"linear_attn.{part}_{letter}.weight" for letter in "qkv")
        for whole, part in (("in_proj_qkv", "in_proj"), ("conv1d", "conv1d"))
    }
)

FAMILIES: Mapping[str, ModelFamily] = MappingProxyType(
    {
        family.architecture: family
        for family in (
            ModelFamily("Qwen3MoeForCausalLM"),
            ModelFamily("Qwen3_5MoeForCausalLM", joined=_GATED_DELTA_NET),
            ModelFamily("Qwen3_5MoeForConditionalGeneration", checkpoint_prefixes=_MULTIMODAL, joined=_GATED_DELTA_NET),
        )
    }
)


def family_of(architecture: str) -> ModelFamily:
    """The table row of a Hugging Face architecture name; ConfigError lists the known ones."""
    try:
        return FAMILIES[architecture]
    except KeyError:
        raise ConfigError(
            f"no canonical names for architecture {architecture!r}; known: {', '.join(FAMILIES)}"
        ) from None
