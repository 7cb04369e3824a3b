"""An engine rank as plain data: what the planner needs to know, read from the live model and from SGLang's own
runtime context.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch

from weftpub.errors import ConfigError
from weftpub.receive import EngineDescription, parameter_specs
from weftpub_adapters.sglang.build import ServedModel
from weftpub_adapters.sglang.derived import kept_parameters
from weftpub_adapters.sglang.draft import DRAFT
from weftpub_adapters.sglang.parallel import parallel_sizes
from weftpub_adapters.sglang.placement import expert_slots, placement_digest
from weftpub_adapters.sglang.support import require_supported

__all__ = [
    "describe_live",
    "describe_model",
    "device_identity",
    "linear_shards",
    "live_backends",
    "live_tensors",
    "plain_config",
    "vocabulary_shards",
    "w13_order",
]

_PADDING = "rows beyond the vocabulary are padding and stay zero"


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
    with served.active():
        return describe_live(
            served.model, hf_config=served.hf_config, engine=engine, rank=rank, backends=served.backends
        )


def describe_live(
    model: torch.nn.Module,
    *,
    hf_config: Mapping[str, Any],
    engine: str,
    rank: int | None = None,
    backends: Mapping[str, str] | None = None,
) -> EngineDescription:
    """Describe the rank whose runtime context is SGLang's current one: call it in a worker, on the model it serves.

    Args:
        model: the live model; with its draft, if it has one (`with_draft`).
        hf_config: its `config.json` as plain data, see `plain_config`.
        engine: name that all ranks of the engine share.
        rank: receiver rank in the plan, counted through all engines; by default the rank inside this engine.
        backends: runner and data mover of the routed experts; read from SGLang by default.

    Raises:
        ConfigError: the engine splits, fuses or stores its model in a way that cannot be published to.
    """
    parallel = parallel_sizes()
    exempt = kept_parameters(model)
    kept = list(exempt)
    vocabulary = vocabulary_shards(model)
    slots = expert_slots(model)
    exempt.update({name: _PADDING for name, shard in vocabulary.items() if shard["padding"]})
    return EngineDescription(
        engine=engine,
        rank=parallel.rank if rank is None else rank,
        world_size=parallel.world_size,
        device=device_identity(next(model.parameters()).device),
        parameters=parameter_specs(live_tensors(model)),
        exempt=exempt,
        placement=placement_digest(slots),
        settings={
            "system": "sglang",
            "version": require_supported(),
            "architecture": type(model).__name__,
            "format": _format(model),
            "parallel": asdict(parallel),
            "backends": dict(live_backends() if backends is None else backends),
            "w13_order": w13_order(model),
            "kept": kept,
            "vocabulary": vocabulary,
            "linears": linear_shards(model),
            "experts": slots,
            "hf_config": dict(hf_config),
        },
    )


def plain_config(config: Any) -> dict[str, Any]:
    """A transformers configuration object, as a worker holds it, as plain data: without the folder that it was read
    from, in which engines of one model differ.
    """
    plain: dict[str, Any] = json.loads(config.to_json_string(use_diff=False), object_hook=_without_folder)
    return plain


def _without_folder(values: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if key != "_name_or_path"}


def live_backends() -> dict[str, str]:
    """Runner and data mover of the routed experts in SGLang's current runtime context."""
    from sglang.srt.layers.moe.utils import get_moe_a2a_backend, get_moe_runner_backend

    return {"moe_runner": str(get_moe_runner_backend().value), "moe_a2a": str(get_moe_a2a_backend().value)}


def _format(model: torch.nn.Module) -> str:
    """ "fp8" or "bf16", whichever the routed experts are; ConfigError if layers differ or are something else."""
    experts = {name: p for name, p in model.named_parameters() if name.endswith(("w13_weight", "w2_weight"))}
    dtypes = {p.dtype for name, p in experts.items() if not name.startswith(f"{DRAFT}.")}
    known = {torch.float8_e4m3fn: "fp8", torch.bfloat16: "bf16"}
    if len(dtypes) != 1 or not dtypes <= known.keys():
        raise ConfigError(f"routed experts are {sorted(map(str, dtypes))}, expected float8_e4m3fn or bfloat16 alone")
    return known[dtypes.pop()]


def w13_order(model: torch.nn.Module) -> str:
    """Which rows come first in every layer's w13, "gate" or "up"; ConfigError if layers differ."""
    from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE

    methods = [module.quant_method for module in model.modules() if isinstance(module, FusedMoE)]
    orders = {"up" if getattr(method, "load_up_proj_weight_first", False) else "gate" for method in methods}
    if len(orders) != 1:
        raise ConfigError(f"layers of routed experts load their w13 rows in the orders {sorted(orders)}, expected one")
    return orders.pop()


def linear_shards(model: torch.nn.Module) -> dict[str, int]:
    """Module name of every linear that several ranks split, to their number."""
    from sglang.srt.distributed.utils import get_group_rank_size
    from sglang.srt.layers.linear import LinearBase

    sizes = {
        name: get_group_rank_size(module.tp_group)[1]
        for name, module in model.named_modules()
        if isinstance(module, LinearBase) and module.tp_group is not None
    }
    return {name: size for name, size in sizes.items() if size > 1}


def vocabulary_shards(model: torch.nn.Module) -> dict[str, Any]:
    """Where the rows of each vocabulary-parallel parameter come from.

    Returns:
        Parameter name to {"start", "end": rows of the whole vocabulary that this rank serves, as its first rows;
        "padding": rows after them that belong to no token; "shards": ranks that split the vocabulary; "shard": this
        rank among them; "size": the whole vocabulary}.
    """
    from sglang.srt.layers.vocab_parallel_embedding import VocabParallelEmbedding

    named = dict(model.named_parameters())  # what a draft shares with its target is there once
    shards: dict[str, Any] = {}
    for name, module in model.named_modules():
        if isinstance(module, VocabParallelEmbedding) and f"{name}.weight" in named:
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
