"""How Hugging Face's Qwen3-MoE tensors become Megatron-core's: one table row a kind of parameter.

Names are those of the local layer spec with SequentialMLP experts. `{L}` is the layer, `{E}` the global expert,
`{e}` the expert's number on its own rank. Joining never changes a value: rows are only moved.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from weftpub.errors import ConfigError
from weftpub.masters import ExpertMatrix
from weftpub_adapters.megatron.fields import Qwen3MoeFields

__all__ = ["ParameterSource", "expert_of", "parameter_sources", "plain_name"]

Join = Callable[[Sequence[torch.Tensor], Qwen3MoeFields], torch.Tensor]


def _same(parts: Sequence[torch.Tensor], fields: Qwen3MoeFields) -> torch.Tensor:
    return parts[0]


def _stack_rows(parts: Sequence[torch.Tensor], fields: Qwen3MoeFields) -> torch.Tensor:
    """fc1 ``[2I, H]``: gate rows over up rows."""
    return torch.cat(tuple(parts))


def _interleave_heads(parts: Sequence[torch.Tensor], fields: Qwen3MoeFields) -> torch.Tensor:
    """linear_qkv: for every key/value head its query heads, then the key head, then the value head."""
    groups = [part.view(fields.kv_heads, -1, part.shape[-1]) for part in parts]
    return torch.cat(groups, dim=1).reshape(-1, parts[0].shape[-1])


# (Megatron name, Hugging Face names, how to join them). Rows with {L} repeat for every layer, rows with {e} for
# every local expert.
_TABLE: tuple[tuple[str, tuple[str, ...], Join], ...] = (
    ("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), _same),
    ("decoder.layers.{L}.input_layernorm.weight", ("model.layers.{L}.input_layernorm.weight",), _same),
    (
        "decoder.layers.{L}.self_attention.linear_qkv.weight",
        (
            "model.layers.{L}.self_attn.q_proj.weight",
            "model.layers.{L}.self_attn.k_proj.weight",
            "model.layers.{L}.self_attn.v_proj.weight",
        ),
        _interleave_heads,
    ),
    ("decoder.layers.{L}.self_attention.q_layernorm.weight", ("model.layers.{L}.self_attn.q_norm.weight",), _same),
    ("decoder.layers.{L}.self_attention.k_layernorm.weight", ("model.layers.{L}.self_attn.k_norm.weight",), _same),
    ("decoder.layers.{L}.self_attention.linear_proj.weight", ("model.layers.{L}.self_attn.o_proj.weight",), _same),
    ("decoder.layers.{L}.pre_mlp_layernorm.weight", ("model.layers.{L}.post_attention_layernorm.weight",), _same),
    ("decoder.layers.{L}.mlp.router.weight", ("model.layers.{L}.mlp.gate.weight",), _same),
    (
        "decoder.layers.{L}.mlp.experts.local_experts.{e}.linear_fc1.weight",
        ("model.layers.{L}.mlp.experts.{E}.gate_proj.weight", "model.layers.{L}.mlp.experts.{E}.up_proj.weight"),
        _stack_rows,
    ),
    (
        "decoder.layers.{L}.mlp.experts.local_experts.{e}.linear_fc2.weight",
        ("model.layers.{L}.mlp.experts.{E}.down_proj.weight",),
        _same,
    ),
    ("decoder.final_layernorm.weight", ("model.norm.weight",), _same),
    ("output_layer.weight", ("lm_head.weight",), _same),
)


@dataclass(frozen=True)
class ParameterSource:
    """Where one Megatron parameter comes from.

    Attributes:
        name: Megatron's name, without wrapper prefixes.
        tensors: the Hugging Face tensors, each consumed by exactly one parameter.
        expert: the matrix's name in the store, None outside the routed experts.
        owner: expert-parallel rank that holds the parameter; None if every rank does.
    """

    name: str
    tensors: tuple[str, ...]
    expert: ExpertMatrix | None
    owner: int | None
    join: Join

    def build(self, parts: Sequence[torch.Tensor], fields: Qwen3MoeFields) -> torch.Tensor:
        """Join the tensors, in the order of `tensors`, into the parameter's layout."""
        return self.join(parts, fields)


def parameter_sources(fields: Qwen3MoeFields, expert_parallel: int = 1) -> Iterator[ParameterSource]:
    """Every parameter of every expert-parallel rank. Experts are dealt in consecutive blocks: rank r holds E/ep from
    r * E/ep.
    """
    per_rank = fields.experts // expert_parallel
    for name, tensors, join in _TABLE:
        if fields.tied and name == "output_layer.weight":
            continue
        for layer in range(fields.layers) if "{L}" in name else (None,):
            if "{e}" not in name:
                yield ParameterSource(_fill(name, layer), tuple(_fill(t, layer) for t in tensors), None, None, join)
                continue
            projection = "fc1" if "linear_fc1" in name else "fc2"
            for expert in range(fields.experts):
                assert layer is not None, f"{name}: experts live inside layers"
                yield ParameterSource(
                    _fill(name, layer, expert, expert % per_rank),
                    tuple(_fill(t, layer, expert) for t in tensors),
                    ExpertMatrix(layer, expert, projection),
                    expert // per_rank,
                    join,
                )


def plain_name(name: str) -> str:
    """A parameter's name without the prefixes of Float16Module and DistributedDataParallel."""
    while name.startswith("module."):
        name = name.removeprefix("module.")
    return name


def expert_of(name: str, first_expert: int) -> ExpertMatrix | None:
    """The expert matrix that a Megatron parameter name means; None for everything that is no routed expert.

    Args:
        name: parameter name, with or without wrapper prefixes.
        first_expert: global id of the rank's first expert.

    Raises:
        ConfigError: the name lies inside the routed experts and is not a weight of fc1 or fc2.
    """
    parts = plain_name(name).split(".")
    if "experts" not in parts:
        return None
    match parts:
        case [
            "decoder",
            "layers",
            layer,
            "mlp",
            "experts",
            "local_experts",
            expert,
            ("linear_fc1" | "linear_fc2") as linear,
            "weight",
        ]:
            return ExpertMatrix(int(layer), first_expert + int(expert), "fc1" if linear == "linear_fc1" else "fc2")
    raise ConfigError(
        f"{name}: not a weight of a SequentialMLP expert; set moe_grouped_gemm=False and add_bias_linear=False"
    )


def _fill(pattern: str, layer: int | None, expert: int | None = None, local: int | None = None) -> str:
    return pattern.replace("{L}", str(layer)).replace("{E}", str(expert)).replace("{e}", str(local))
