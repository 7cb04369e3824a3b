"""An engine rank as plain data: what the planner needs to know, read from the live model and from SGLang's own
runtime context.
"""

from dataclasses import asdict
from typing import Any

import torch

from weftpub.errors import ConfigError
from weftpub.receive import EngineDescription, parameter_specs
from weftpub_adapters.sglang.build import ServedModel
from weftpub_adapters.sglang.support import require_supported

__all__ = ["describe_model", "device_identity", "live_tensors", "vocabulary_shards", "w13_order"]

_RESTORED = "computed at start-up and kept by the engine through an offload"


def live_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers by name, as they are at this moment: the tensors that the engine computes with."""
    tensors: dict[str, torch.Tensor] = {name: parameter.data for name, parameter in model.named_parameters()}
    tensors.update(model.named_buffers())
    return tensors


def describe_model(served: ServedModel, *, engine: str, rank: int | None = None) -> EngineDescription:
    """Describe one rank of one engine.

    Args:
        served: the live model.
        engine: name that all ranks of the engine share.
        rank: receiver rank in the plan, counted through all engines; by default the rank inside this engine.
    """
    exempt = {name: _RESTORED for name, _ in served.model.named_buffers()}
    vocabulary = vocabulary_shards(served.model)
    exempt.update(
        {
            name: "rows beyond the vocabulary are padding and stay zero"
            for name, shard in vocabulary.items()
            if shard["padding"]
        }
    )
    return EngineDescription(
        engine=engine,
        rank=served.parallel.rank if rank is None else rank,
        world_size=served.parallel.world_size,
        device=device_identity(served.device),
        parameters=parameter_specs(live_tensors(served.model)),
        exempt=exempt,
        settings={
            "system": "sglang",
            "version": require_supported(),
            "architecture": type(served.model).__name__,
            "format": served.format,
            "parallel": asdict(served.parallel),
            "backends": dict(served.backends),
            "w13_order": w13_order(served.model),
            "buffers": [name for name, _ in served.model.named_buffers()],
            "vocabulary": vocabulary,
            "hf_config": dict(served.hf_config),
        },
    )


def w13_order(model: torch.nn.Module) -> str:
    """Which rows come first in every layer's w13, "gate" or "up"; ConfigError if layers differ."""
    from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE

    methods = [module.quant_method for module in model.modules() if isinstance(module, FusedMoE)]
    orders = {"up" if getattr(method, "load_up_proj_weight_first", False) else "gate" for method in methods}
    if len(orders) != 1:
        raise ConfigError(f"layers of routed experts load their w13 rows in the orders {sorted(orders)}, expected one")
    return orders.pop()


def vocabulary_shards(model: torch.nn.Module) -> dict[str, Any]:
    """Where the rows of each vocabulary-parallel parameter come from.

    Returns:
        Parameter name to {"start", "end": rows of the whole vocabulary that this rank serves, as its first rows;
        "padding": rows after them that belong to no token; "shards": ranks that split the vocabulary; "shard": this
        rank among them; "size": the whole vocabulary}.
    """
    from sglang.srt.layers.vocab_parallel_embedding import VocabParallelEmbedding

    shards: dict[str, Any] = {}
    for name, module in model.named_modules():
        if isinstance(module, VocabParallelEmbedding):
            indices = module.shard_indices
            shards[f"{name}.weight"] = {
                "start": indices.org_vocab_start_index,
                "end": indices.org_vocab_end_index,
                "padding": module.weight.shape[0] - indices.num_org_elements,
                "shards": module.tp_size,
                "shard": indices.padded_org_vocab_start_index // max(1, indices.num_org_elements_padded),
                "size": module.org_vocab_size,
            }
    return shards


def device_identity(device: torch.device) -> str:
    """ "cpu", or the GPU's UUID: an index means another GPU in another process."""
    if device.type != "cuda":
        return device.type
    return f"GPU-{torch.cuda.get_device_properties(device).uuid}"
