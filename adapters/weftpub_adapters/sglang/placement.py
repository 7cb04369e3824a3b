"""Which expert lies in which slot of an engine rank, at this moment.

A slot is one row of a layer's w13 and w2. Without load balancing slot i of expert-parallel rank r is expert
``r * slots + i``. With it SGLang keeps a map from physical to logical experts, which moves hot experts and may hold one
expert in several slots; the map changes while the engine serves, so whoever publishes reads it anew each time.
"""

from collections.abc import Mapping
from typing import Any

import torch

from weftpub.errors import ConfigError
from weftpub.plan.types import digest_of

__all__ = ["expert_slots", "placement_digest"]


def expert_slots(model: torch.nn.Module) -> dict[str, list[int]]:
    """Module name of each layer of routed experts to the expert that each of this rank's slots holds, in order.

    Reads SGLang's current runtime context.

    Raises:
        ConfigError: a shared expert is fused into the routed experts' tensors, or slots were added without a map that
            says what they hold.
    """
    from sglang.srt.eplb.expert_location import get_global_expert_location_metadata
    from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE

    metadata = get_global_expert_location_metadata()
    return {
        name: _slots(name, module, metadata) for name, module in model.named_modules() if isinstance(module, FusedMoE)
    }


def placement_digest(slots: Mapping[str, list[int]]) -> str:
    """Digest of one rank's slots: another digest means that a plan made before sends experts to the wrong places."""
    return digest_of({name: slots[name] for name in sorted(slots)})


def _slots(name: str, module: Any, metadata: Any) -> list[int]:
    if module.num_fused_shared_experts:
        raise ConfigError(
            f"{name}: {module.num_fused_shared_experts} shared experts are fused into the routed experts' tensors; "
            "start SGLang with --disable-shared-experts-fusion"
        )
    held = module.num_local_experts
    first = module.moe_ep_rank * held
    if metadata is None or not module.uses_expert_location or module.layer_id >= metadata.num_layers:
        return list(range(first, first + held))
    row = metadata.physical_to_logical_map_cpu[module.layer_id]
    if first + held > len(row):
        raise ConfigError(
            f"{name}: expert-parallel rank {module.moe_ep_rank} holds {held} slots from {first} on, but SGLang's map "
            f"knows {len(row)}"
        )
    return [int(expert) for expert in row[first : first + held].tolist()]
