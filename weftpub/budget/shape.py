"""A model's parameters, counted from its Hugging Face config alone: what there is, and how each side splits it.

Counts are those of transformers' Qwen3MoeForCausalLM and Qwen3_5MoeForConditionalGeneration (tests compare them with
the modules built on the meta device). Multi-token-prediction layers are neither trained nor served, and not counted.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

from weftpub.canonical import family_of
from weftpub.errors import ConfigError

__all__ = ["Group", "LinearAttention", "ModelShape", "known_models", "load_shape"]

# Trainer: experts over expert parallel ranks, Megatron's tensor parallel shards, or a copy on every rank.
TrainSplit = Literal["expert", "tensor", "copy", "absent"]
# Engine: experts over EP x MoE-TP, shards of one attention group, shards of all ranks of the engine, or a copy.
ServeSplit = Literal["expert", "attention", "world", "copy"]


@dataclass(frozen=True)
class Group:
    """Parameters that are split and updated alike.

    Attributes:
        name: what they are.
        count: elements in the whole model.
        train: how the Megatron trainer splits them; "absent" is not trained here.
        serve: how SGLang splits them.
        matrices: whether Muon updates them; vectors, convolutions, embeddings and the head get AdamW.
        serve_most: most parts that the engine makes; further ranks hold copies (heads of keys and values).
    """

    name: str
    count: int
    train: TrainSplit
    serve: ServeSplit
    matrices: bool
    serve_most: int | None = None


@dataclass(frozen=True)
class LinearAttention:
    """Gated DeltaNet layers: count and sizes, named as in the Hugging Face config."""

    layers: int
    key_dim: int
    value_dim: int
    value_heads: int
    key_head_dim: int
    value_head_dim: int
    kernel: int

    def state_bytes(self) -> int:
        """State of one running request over all layers, unsplit: BF16 convolution window and FP32 recurrent state
        (SGLang's MambaPool)."""
        window = (2 * self.key_dim + self.value_dim) * (self.kernel - 1) * 2
        return self.layers * (window + self.value_heads * self.key_head_dim * self.value_head_dim * 4)


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a model, named as in its Hugging Face config; `groups` holds the parameter counts."""

    architecture: str
    layers: int
    hidden: int
    intermediate: int
    experts: int
    top_k: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    gated_attention: bool
    linear: LinearAttention | None
    groups: tuple[Group, ...]

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "ModelShape":
        """Read a config.json's content.

        Raises:
            ConfigError: an architecture or layer layout that is not supported, or a missing field.
        """
        architecture = (config.get("architectures") or ["(none)"])[0]
        family_of(architecture)
        text: Mapping[str, Any] = config.get("text_config", config)
        try:
            return _read(architecture, text, config.get("vision_config"))
        except KeyError as error:
            raise ConfigError(f"the config of {architecture} has no field {error}; it is needed to count") from None

    @property
    def parameters(self) -> int:
        """Elements of all groups, vision tower included."""
        return sum(group.count for group in self.groups)

    @property
    def full_layers(self) -> int:
        """Layers with softmax attention: the ones with a KV cache."""
        return self.layers - (self.linear.layers if self.linear else 0)

    @property
    def qkv_rows(self) -> int:
        """Rows of one full attention layer's fused projection, output gate included."""
        return (self.heads * (2 if self.gated_attention else 1) + 2 * self.kv_heads) * self.head_dim

    @property
    def expert_matrix(self) -> int:
        """Elements of the larger of an expert's two matrices, fc1."""
        return 2 * self.intermediate * self.hidden

    def largest_matrix(self, tensor: int) -> int:
        """Elements of the largest matrix that must be whole in a staging slot: an expert's fc1, or what Muon updates of
        attention on one tensor parallel rank."""
        rows = [self.qkv_rows, self.heads * self.head_dim]
        if self.linear:
            rows += [2 * self.linear.key_dim + 2 * self.linear.value_dim + 2 * self.linear.value_heads]
        return max(self.expert_matrix, max(rows) * self.hidden // tensor)

    def kv_bytes_per_token(self, attention_tensor: int) -> int:
        """KV cache of one token on one GPU, BF16, over all full attention layers."""
        heads = max(1, self.kv_heads // attention_tensor)
        return self.full_layers * 2 * heads * self.head_dim * 2


def known_models() -> tuple[str, ...]:
    """Names whose configs are shipped."""
    return tuple(_table())


def load_shape(model: str) -> ModelShape:
    """Shape of a Hugging Face directory, or of a shipped name with or without organisation and ``-Base``.

    Raises:
        ConfigError: neither; lists the shipped names.
    """
    path = Path(model)
    if path.is_dir() or path.suffix == ".json":
        source = path / "config.json" if path.is_dir() else path
        if not source.is_file():
            raise ConfigError(
                f"model {model!r}: there is no file {source}; give a Hugging Face checkpoint directory, or one of "
                f"{', '.join(known_models())}"
            )
        try:
            return ModelShape.from_config(json.loads(source.read_text(encoding="utf-8")))
        except (OSError, json.JSONDecodeError) as error:
            raise ConfigError(f"{source}: cannot be read as a Hugging Face config: {error}") from error
    name = model.rpartition("/")[2].lower().removesuffix("-base")
    entry = _table().get(name)
    if entry is None:
        raise ConfigError(
            f"model {model!r} is neither a directory with a config.json nor one of {', '.join(known_models())}"
        )
    return ModelShape.from_config(entry["config"])


def _table() -> dict[str, Any]:
    return json.loads(files("weftpub.budget").joinpath("models.json").read_text(encoding="utf-8"))


def _read(architecture: str, text: Mapping[str, Any], vision: Mapping[str, Any] | None) -> ModelShape:
    if text.get("mlp_only_layers") or text.get("decoder_sparse_step", 1) != 1:
        raise ConfigError("dense layers among the sparse ones are not supported (mlp_only_layers, decoder_sparse_step)")
    next_generation = architecture != "Qwen3MoeForCausalLM"
    layers, hidden = int(text["num_hidden_layers"]), int(text["hidden_size"])
    heads, kv_heads = int(text["num_attention_heads"]), int(text["num_key_value_heads"])
    head_dim = int(text.get("head_dim") or hidden // heads)
    linear = _linear(text, layers) if next_generation else None
    # transformers 5 writes Qwen3-MoE's count under the second name, older releases under the first.
    experts = int(text["num_local_experts"] if "num_local_experts" in text else text["num_experts"])
    shape = ModelShape(
        architecture,
        layers,
        hidden,
        int(text["moe_intermediate_size"]),
        experts,
        int(text["num_experts_per_tok"]),
        heads,
        kv_heads,
        head_dim,
        int(text["vocab_size"]),
        next_generation,
        linear,
        (),
    )
    groups = _text_groups(shape, int(text.get("shared_expert_intermediate_size") or 0), text)
    if vision is not None and next_generation:
        groups.append(Group("vision tower", _vision(vision), "absent", "copy", False))
    return replace(shape, groups=tuple(group for group in groups if group.count))


def _linear(text: Mapping[str, Any], layers: int) -> LinearAttention | None:
    kinds = text.get("layer_types")
    interval = int(text.get("full_attention_interval", 4))
    full = kinds.count("full_attention") if kinds else layers // interval
    if full == layers:
        return None
    keys, values = int(text["linear_num_key_heads"]), int(text["linear_num_value_heads"])
    key_dim, value_dim = int(text["linear_key_head_dim"]), int(text["linear_value_head_dim"])
    kernel = int(text["linear_conv_kernel_dim"])
    return LinearAttention(layers - full, keys * key_dim, values * value_dim, values, key_dim, value_dim, kernel)


def _text_groups(s: ModelShape, shared: int, text: Mapping[str, Any]) -> list[Group]:
    out = s.heads * s.head_dim
    keys_values = s.full_layers * 2 * s.kv_heads * s.head_dim * s.hidden
    attention = s.full_layers * (s.qkv_rows + out) * s.hidden - keys_values
    vectors = s.full_layers * 2 * s.head_dim
    small = 0
    if s.linear:
        n = s.linear
        mixed = 2 * n.key_dim + n.value_dim
        attention += n.layers * (mixed + 2 * n.value_dim + 2 * n.value_heads) * s.hidden
        small = n.layers * (mixed * n.kernel + 2 * n.value_heads)
        vectors += n.layers * n.value_head_dim
    head = 0 if text.get("tie_word_embeddings") else s.vocab * s.hidden
    return [
        Group("routed experts", s.layers * s.experts * 3 * s.intermediate * s.hidden, "expert", "expert", True),
        Group("attention", attention, "tensor", "attention", True),
        Group("keys and values", keys_values, "tensor", "attention", True, s.kv_heads),
        Group("shared experts", s.layers * 3 * shared * s.hidden, "tensor", "world", True),
        Group("routers", s.layers * (s.experts + bool(shared)) * s.hidden, "copy", "copy", True),
        Group("embedding", s.vocab * s.hidden, "tensor", "attention", False),
        Group("head", head, "tensor", "world", False),
        Group("convolutions and decays", small, "tensor", "attention", False),
        Group("norms", s.layers * 2 * s.hidden + s.hidden + vectors, "copy", "copy", False),
    ]


# Sizes that a vision config may leave out: transformers' defaults for Qwen3.5-MoE.
_VISION_DEFAULTS = {
    "depth": 27,
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "in_channels": 3,
    "patch_size": 16,
    "temporal_patch_size": 2,
    "spatial_merge_size": 2,
    "num_position_embeddings": 2304,
    "out_hidden_size": 3584,
}


def _vision(config: Mapping[str, Any]) -> int:
    v = {name: int(config.get(name, default)) for name, default in _VISION_DEFAULTS.items()}
    hidden, inner = v["hidden_size"], v["intermediate_size"]
    patch = v["in_channels"] * v["temporal_patch_size"] * v["patch_size"] ** 2
    block = 4 * hidden + (hidden + 1) * 3 * hidden + (hidden + 1) * hidden + (hidden + 1) * inner + (inner + 1) * hidden
    merged = hidden * v["spatial_merge_size"] ** 2
    merger = 2 * hidden + (merged + 1) * merged + (merged + 1) * v["out_hidden_size"]
    return patch * hidden + hidden + v["num_position_embeddings"] * hidden + v["depth"] * block + merger
