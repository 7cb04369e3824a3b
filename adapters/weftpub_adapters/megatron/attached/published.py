"""What an attachment publishes: the store of the fp8 variant, the parameters' own views for bf16, and their
description."""

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from weftpub.canonical import FAMILIES, CanonicalTensor, family_of
from weftpub.errors import ConfigError
from weftpub.memory import Allocator
from weftpub.store import ExpertStore, StoreLayout
from weftpub.store.shared import shared_allocator
from weftpub_adapters.megatron.attached.prepare import Prepared
from weftpub_adapters.megatron.attached.selection import ExpertLayer, ExpertParameter

__all__ = ["PublishedTensor", "bf16_canonical", "expert_items", "make_store"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PublishedTensor:
    """One published expert tensor: canonical name, dtype, shape and role, without its bytes."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    role: str


def bf16_canonical(layers: tuple[ExpertLayer, ...]) -> Iterator[CanonicalTensor]:
    """Canonical views of BF16 expert parameters: gate, up and down of every expert."""
    family = FAMILIES["Qwen3MoeForCausalLM"]
    for item in expert_items(layers):
        weight = item.parameter.detach()
        for part in family.parts[item.matrix.projection]:
            rows = family.rows(item.matrix, part, weight.shape[0])
            yield CanonicalTensor(family.name(item.matrix, part, "weight"), weight[rows], "weight")


def expert_items(layers: tuple[ExpertLayer, ...]) -> Iterator[ExpertParameter]:
    """Every expert matrix of this rank, layer by layer."""
    for layer in layers:
        yield from layer.parameters


def make_store(prepared: Prepared) -> ExpertStore:
    """An empty FP8 store for a prepared model's experts; ConfigError if their shapes differ or cannot be cut into
    blocks."""
    shapes: Mapping[str, torch.Size] = {
        item.matrix.projection: item.parameter.shape for item in expert_items(prepared.layers)
    }
    hidden, intermediate = shapes["fc2"]
    for item in expert_items(prepared.layers):
        if item.parameter.shape != shapes[item.matrix.projection]:
            raise ConfigError(
                f"{item.matrix.name} is {list(item.parameter.shape)}, others are "
                f"{list(shapes[item.matrix.projection])}; experts must be alike"
            )
    device = next(iter(expert_items(prepared.layers))).parameter.device
    layers, experts = tuple(layer.layer for layer in prepared.layers), prepared.layers[0].experts
    family = family_of(prepared.settings.architecture)
    layout = StoreLayout(layers, tuple(experts), hidden, intermediate, family=family)
    return ExpertStore(
        layers,
        experts,
        hidden,
        intermediate,
        preset=prepared.settings.preset,
        device=device,
        allocator=_allocator(prepared, layout, device),
        family=family,
        measure_change=prepared.settings.measure_change,
        lease_timeout=prepared.settings.lease_timeout,
        name="attached experts",
    )


def _allocator(prepared: Prepared, layout: StoreLayout, device: torch.device) -> Allocator | None:
    """Memory that a colocated engine maps too, if that was asked for and can be had; None for torch's."""
    settings = prepared.settings
    if settings.shared_folder is None:
        return None
    allocator, obstacle = shared_allocator(layout, device, settings.shared_folder, protected=settings.shared_protected)
    if obstacle:
        logger.warning("weftpub: experts are not shared with the engine, publishes copy them: %s", obstacle)
    return allocator
