"""Which expert lies in which slot of an engine rank, at this moment.

A slot is one row of a layer's w13 and w2. Without load balancing slot i of expert-parallel rank r is expert
``r * slots + i``. With it SGLang keeps a map from physical to logical experts, which moves hot experts and may hold one
expert in several slots; the map changes while the engine serves, so whoever publishes reads it anew each time.
"""

from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch

from weftpub.errors import ConfigError, PlanError
from weftpub.plan.types import digest_of
from weftpub_adapters.sglang.parallel import ParallelSizes

__all__ = ["current_placement", "expert_slots", "place_experts", "placement_digest", "require_placement"]


def expert_slots(model: torch.nn.Module) -> dict[str, list[int]]:
    """Module name of each layer of routed experts to the expert that each of this rank's slots holds, in order.

    Reads SGLang's current runtime context.

    Raises:
        ConfigError: a shared expert is fused into the routed experts' tensors, or slots were added without a map that
            says what they hold.
    """
    from sglang.srt.eplb.expert_location import get_global_expert_location_metadata
    from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
    from sglang.srt.runtime_context import get_exec

    metadata, redundant = get_global_expert_location_metadata(), get_exec().moe.ep_num_redundant_experts
    return {
        name: _slots(name, module, metadata, redundant)
        for name, module in model.named_modules()
        if isinstance(module, FusedMoE)
    }


def placement_digest(slots: Mapping[str, list[int]]) -> str:
    """Digest of one rank's slots: another digest means that a plan made before sends experts to the wrong places."""
    return digest_of({name: slots[name] for name in sorted(slots)})


# Model to the map that its digest was computed from, and the digest: asked for several times in every publish.
_DIGESTS: WeakKeyDictionary[torch.nn.Module, tuple[torch.Tensor | None, str]] = WeakKeyDictionary()


def current_placement(model: torch.nn.Module) -> str:
    """Digest of where this rank's experts are now; computed anew only when SGLang's map has other content.

    Reads SGLang's current runtime context.
    """
    from sglang.srt.eplb.expert_location import get_global_expert_location_metadata

    metadata = get_global_expert_location_metadata()
    rows = None if metadata is None else metadata.physical_to_logical_map_cpu
    known = _DIGESTS.get(model)
    if known is not None and (known[0] is rows is None or _equal(known[0], rows)):
        return known[1]
    digest = placement_digest(expert_slots(model))
    _DIGESTS[model] = (None if rows is None else rows.clone(), digest)
    return digest


def _equal(known: torch.Tensor | None, rows: torch.Tensor | None) -> bool:
    return known is not None and rows is not None and torch.equal(known, rows)


def require_placement(model: torch.nn.Module, described: str | None, engine: str) -> None:
    """PlanError if experts were moved since the rank was described with the digest `described`; None if it never was.

    Reads SGLang's current runtime context.
    """
    if described is None:
        return
    now = current_placement(model)
    if now != described:
        raise PlanError(
            f"{engine}: experts were moved since this rank was described (placement {now[:12]}, described "
            f"{described[:12]}), so the plan would write them into the wrong slots; describe the engine and plan again"
        )


def place_experts(
    model: torch.nn.Module, physical_to_logical: Sequence[Sequence[int]] | None, parallel: ParallelSizes
) -> None:
    """Set the map of SGLang's current runtime context, which must be one that this process made for itself.

    Args:
        physical_to_logical: for each layer of the model the expert of every slot of all ranks; None deals the experts
            in their order, again from the first.

    Raises:
        ConfigError: rows are of another number or length, or leave an expert out.
    """
    from sglang.srt.eplb import expert_location
    from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE

    layers = [module for module in model.modules() if isinstance(module, FusedMoE) and module.uses_expert_location]
    experts = model.config.get_text_config().num_experts
    slots = layers[0].num_local_experts * parallel.moe_ep_size
    if physical_to_logical is None:
        physical_to_logical = [[slot % experts for slot in range(slots)]] * len(layers)
    for row in physical_to_logical:
        if len(row) != slots or set(row) != set(range(experts)) or len(physical_to_logical) != len(layers):
            raise ConfigError(
                f"expected {len(layers)} rows of {slots} slots that name every expert from 0 to {experts - 1}, found "
                f"{len(physical_to_logical)} rows, one of them {list(row)}"
            )
    rows = torch.tensor([list(row) for row in physical_to_logical], device="cpu")
    rank = {"ep_size": parallel.moe_ep_size, "moe_ep_rank": parallel.moe_ep_rank}
    inverse = expert_location._compute_logical_to_all_physical_map(
        physical_to_logical_map=rows, num_logical_experts=experts, **rank
    )
    expert_location.set_global_expert_location_metadata(
        expert_location.ExpertLocationMetadata._init_raw(
            physical_to_logical_map=rows, logical_to_all_physical_map=inverse, **rank
        ),
        allow_overwrite=True,
    )


def _slots(name: str, module: Any, metadata: Any, redundant: int) -> list[int]:
    if module.num_fused_shared_experts:
        raise ConfigError(
            f"{name}: {module.num_fused_shared_experts} shared experts are fused into the routed experts' tensors; "
            "start SGLang with --disable-shared-experts-fusion"
        )
    held = module.num_local_experts
    first = module.moe_ep_rank * held
    if metadata is None or not module.uses_expert_location or module.layer_id >= metadata.num_layers:
        if redundant:
            raise ConfigError(
                f"{name}: SGLang added {redundant} slots for redundant experts, and no map says what they hold; draft "
                "models are published to without ep_num_redundant_experts only"
            )
        return list(range(first, first + held))
    row = metadata.physical_to_logical_map_cpu[module.layer_id]
    if first + held > len(row):
        raise ConfigError(
            f"{name}: expert-parallel rank {module.moe_ep_rank} holds {held} slots from {first} on, but SGLang's map "
            f"knows {len(row)}"
        )
    return [int(expert) for expert in row[first : first + held].tolist()]
