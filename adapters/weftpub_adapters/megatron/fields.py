"""The fields of a Hugging Face `config.json` that the trainer needs, read and checked once: Qwen3-MoE, and Qwen3.5-MoE
as a text model of its own or as the language model of a multimodal one.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from weftpub.errors import ConfigError

__all__ = ["ARCHITECTURE", "HYBRID_ARCHITECTURES", "Qwen3MoeFields", "Qwen35MoeFields", "read_config", "read_fields"]

ARCHITECTURE = "Qwen3MoeForCausalLM"
HYBRID_ARCHITECTURES = ("Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration")


@dataclass(frozen=True)
class Qwen3MoeFields:
    """Sizes and numeric settings of one Qwen3-MoE model.

    Attributes:
        layers, hidden, vocab, positions: decoder layers, hidden width, rows of the embedding, longest sequence.
        heads, kv_heads, head_dim: attention heads, key/value heads, width of one head.
        experts, top_k, intermediate: routed experts, experts a token visits, width I of one expert.
        norm_topk: whether the chosen experts' probabilities are rescaled to sum to one.
        rope_theta, norm_eps: base of the rotary embedding, epsilon of RMSNorm.
        tied: whether the output layer is the embedding.
    """

    layers: int
    hidden: int
    vocab: int
    positions: int
    heads: int
    kv_heads: int
    head_dim: int
    experts: int
    top_k: int
    intermediate: int
    norm_topk: bool
    rope_theta: float
    norm_eps: float
    tied: bool

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> "Qwen3MoeFields":
        """Read the fields of a `config.json`.

        Raises:
            ConfigError: a field is missing, or the model uses something that this adapter does not compute: another
                architecture, dense layers among the sparse ones, attention biases, a sliding window, scaled rotary
                embeddings, an already quantized checkpoint.
        """
        _refuse_unsupported(config)
        rope = config.get("rope_parameters") or {}
        hidden, heads = _need(config, "hidden_size"), _need(config, "num_attention_heads")
        fields = cls(
            layers=_need(config, "num_hidden_layers"),
            hidden=hidden,
            vocab=_need(config, "vocab_size"),
            positions=_need(config, "max_position_embeddings"),
            heads=heads,
            kv_heads=_need(config, "num_key_value_heads"),
            head_dim=config.get("head_dim") or hidden // heads,
            experts=_need(config, "num_experts", "num_local_experts"),
            top_k=_need(config, "num_experts_per_tok"),
            intermediate=_need(config, "moe_intermediate_size"),
            norm_topk=bool(config.get("norm_topk_prob", False)),
            rope_theta=float(rope["rope_theta"] if "rope_theta" in rope else _need(config, "rope_theta")),
            norm_eps=float(_need(config, "rms_norm_eps")),
            tied=bool(config.get("tie_word_embeddings", False)),
        )
        if fields.heads % fields.kv_heads:
            raise ConfigError(
                f"num_attention_heads {fields.heads} is not a multiple of num_key_value_heads {fields.kv_heads}; "
                "every key/value head serves equally many query heads"
            )
        if not 0 < fields.top_k <= fields.experts:
            raise ConfigError(f"num_experts_per_tok is {fields.top_k}, expected 1 to num_experts {fields.experts}")
        return fields


@dataclass(frozen=True)
class Qwen35MoeFields(Qwen3MoeFields):
    """Sizes and numeric settings of one Qwen3.5-MoE language model: gated delta nets and gated attention take turns,
    and a shared expert stands beside the routed ones.

    Attributes:
        multimodal: whether the language model is a part of a multimodal one, whose checkpoint has a vision tower.
        full: for each layer whether it has attention; the others have a gated delta net.
        rotary_percent: share of a head's elements that are rotated. Of text alone all sections of the multimodal
            rotary embedding count the same positions, so it is the ordinary one.
        shared: width of the shared expert.
        key_heads, key_dim, value_heads, value_dim: of a gated delta net, heads and their widths.
        kernel: elements of its convolution.
    """

    multimodal: bool
    full: tuple[bool, ...]
    rotary_percent: float
    shared: int
    key_heads: int
    key_dim: int
    value_heads: int
    value_dim: int
    kernel: int

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> "Qwen35MoeFields":
        """Read the fields of a `config.json`; those of a multimodal model lie in its `text_config`. Layers of
        multi-token prediction are left out.

        Raises:
            ConfigError: as `Qwen3MoeFields.from_hf`; attention without its gate; kinds of layers that are not known.
        """
        architecture = (config.get("architectures") or [None])[0]
        if architecture not in HYBRID_ARCHITECTURES:
            raise ConfigError(
                f"architectures[0] is {architecture!r}; expected one of {', '.join(HYBRID_ARCHITECTURES)}"
            )
        text = {**config, **(config.get("text_config") or {})}
        tied = config.get("tie_word_embeddings", text.get("tie_word_embeddings", False))
        # The choice of experts is always followed by rescaling in this family.
        plain = {**text, "architectures": [ARCHITECTURE], "norm_topk_prob": True, "tie_word_embeddings": bool(tied)}
        if not text.get("attn_output_gate", True):
            raise ConfigError("attn_output_gate=False is not supported; expected True")
        common = Qwen3MoeFields.from_hf(plain)
        rope = text.get("rope_parameters") or {}
        percent = rope.get("partial_rotary_factor", text.get("partial_rotary_factor", 0.25))
        return cls(
            **asdict(common),
            multimodal="text_config" in config,
            full=_full_layers(text, common.layers),
            rotary_percent=float(percent),
            shared=_need(text, "shared_expert_intermediate_size"),
            key_heads=_need(text, "linear_num_key_heads"),
            key_dim=_need(text, "linear_key_head_dim"),
            value_heads=_need(text, "linear_num_value_heads"),
            value_dim=_need(text, "linear_value_head_dim"),
            kernel=_need(text, "linear_conv_kernel_dim"),
        )


def read_fields(config: Mapping[str, Any]) -> Qwen3MoeFields:
    """The fields of a `config.json` of any architecture that is trained here.

    Raises:
        ConfigError: another architecture, or what `from_hf` of the family refuses.
    """
    architecture = (config.get("architectures") or [None])[0]
    if architecture in HYBRID_ARCHITECTURES:
        return Qwen35MoeFields.from_hf(config)
    if architecture != ARCHITECTURE:
        known = ", ".join((ARCHITECTURE, *HYBRID_ARCHITECTURES))
        raise ConfigError(f"architectures[0] is {architecture!r}; trained are {known}")
    return Qwen3MoeFields.from_hf(config)


def read_config(directory: str | Path) -> dict[str, Any]:
    """The parsed `config.json` of a checkpoint directory; ConfigError if it is missing or no JSON object."""
    path = Path(directory) / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(
            f"{path} not found; give a Hugging Face checkpoint directory with config.json and *.safetensors"
        ) from None
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{path} holds a {type(config).__name__}, expected a JSON object")
    return config


def _need(config: Mapping[str, Any], *names: str) -> Any:
    for name in names:
        if config.get(name) is not None:
            return config[name]
    raise ConfigError(f"config.json has no {' or '.join(names)}; expected the config of a {ARCHITECTURE}")


def _full_layers(text: Mapping[str, Any], layers: int) -> tuple[bool, ...]:
    kinds = text.get("layer_types")
    if not kinds:
        interval = int(text.get("full_attention_interval", 4))
        return tuple((layer + 1) % interval == 0 for layer in range(layers))
    unknown = sorted(set(kinds) - {"full_attention", "linear_attention"})
    if unknown or len(kinds) != layers:
        raise ConfigError(
            f"layer_types names {len(kinds)} layers{f', of unknown kinds {unknown}' if unknown else ''}; expected "
            f"{layers} of full_attention or linear_attention"
        )
    return tuple(kind == "full_attention" for kind in kinds)


def _refuse_unsupported(config: Mapping[str, Any]) -> None:
    architectures = config.get("architectures") or [None]
    if architectures[0] != ARCHITECTURE:
        raise ConfigError(f"architectures[0] is {architectures[0]!r}; this loader knows {ARCHITECTURE!r}")
    if config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1:
        raise ConfigError(
            f"mlp_only_layers={config.get('mlp_only_layers')}, "
            f"decoder_sparse_step={config.get('decoder_sparse_step')}: dense layers are "
            "not supported; every layer must be a mixture of experts ([] and 1)"
        )
    for name, only in (("attention_bias", False), ("use_sliding_window", False), ("hidden_act", "silu")):
        if config.get(name, only) != only:
            raise ConfigError(f"{name}={config[name]!r} is not supported; expected {only!r}")
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    rope_type = rope.get("rope_type") or rope.get("type") or "default"
    if rope_type != "default":
        raise ConfigError(f"rope type {rope_type!r} is not supported; expected 'default'")
    if config.get("quantization_config"):
        raise ConfigError(
            "the checkpoint is already quantized (quantization_config); FP32 masters need the BF16 or FP32 "
            "checkpoint that it was made from"
        )
