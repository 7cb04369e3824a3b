"""AWEX's converters, extended by what they lack: FP8 experts from a store, the layouts of a real engine, and hybrid
attention taken apart.

Names and splits stay AWEX's: a store matrix, or its scale, is given to AWEX's own conversion in place of the parameter,
and what comes back is a view of the store. Where AWEX fuses tensors for one engine's ranks (gated attention, gated
delta nets), the parts travel apart here, because a part, unlike a fusion, means the same for every number of ranks.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch

from weftpub.errors import PlanError
from weftpub_adapters.awex.seams import Base

__all__ = ["MATRICES", "SHAPES_ONLY", "EngineRules", "MatrixTensors", "engine_converter", "trainer_converter"]

# Key of the trainer's settings under which the converter finds its experts.
MATRICES = "weftpub_matrices"
# Set when only names, shapes and dtypes are wanted: parameters may be offloaded, their storage empty.
SHAPES_ONLY = "weftpub_shapes_only"
_SCALE = "_scale_inv"
# Multi-token prediction: Megatron's module of the trained layer, an engine's of the draft model, and what they hold
# beside a decoder layer.
_MTP_LAYER = re.compile(r"(?:language_model\.)?mtp\.layers\.(\d+)\.(?:(?:mtp_model_layer|transformer_layer)\.)?(.+)")
_MTP_TRAINER = {
    "eh_proj.weight": "mtp.fc.weight",
    "enorm.weight": "mtp.pre_fc_norm_embedding.weight",
    "hnorm.weight": "mtp.pre_fc_norm_hidden.weight",
    "final_layernorm.weight": "mtp.norm.weight",
}
_MTP_ENGINE = {
    "fc.weight": "mtp.fc.weight",
    "pre_fc_norm_embedding.weight": "mtp.pre_fc_norm_embedding.weight",
    "pre_fc_norm_hidden.weight": "mtp.pre_fc_norm_hidden.weight",
    "model.norm.weight": "mtp.norm.weight",
}
_DRAFT = "draft."
# Rows of a gated delta net's input projection, and channels of its convolution, top to bottom.
_GDN_IN = ("in_proj_q", "in_proj_k", "in_proj_v", "in_proj_z", "in_proj_b", "in_proj_a")
_GDN_CONV = ("conv1d_q", "conv1d_k", "conv1d_v")

type _Named = list[tuple[str, torch.Tensor]]


@dataclass(frozen=True)
class MatrixTensors:
    """One expert matrix as it is published: weight ``[M, N]`` and, in FP8, its scale."""

    weight: torch.Tensor
    scale: torch.Tensor | None


# (layer, local expert, "fc1" or "fc2") to the tensors to publish
MatrixSource = Callable[[int, int, str], MatrixTensors]


@dataclass(frozen=True)
class EngineRules:
    """What AWEX's engine converter must know beyond its own config; stands in for the engine's server arguments.

    Attributes:
        vocabulary: parameter name to {"start", "end", "shards", ...}, see the SGLang adapter's description.
        slots: module of routed experts to the expert in each of this rank's slots.
        up_first: w13 holds up rows over gate rows, as some runners of experts want them.
        kv_replicas: ranks that hold the same key/value head; 1 unless attention is split wider than there are heads.
    """

    tp_size: int
    ep_size: int
    dp_size: int
    enable_dp_attention: bool
    vocabulary: Mapping[str, Mapping[str, int]]
    slots: Mapping[str, list[int]] = field(default_factory=dict[str, list[int]])
    up_first: bool = False
    kv_replicas: int = 1
    enable_dp_lm_head: bool = False
    moe_dense_tp_size: int | None = None
    device_backend: str = "cuda"
    enable_debug_mode: bool = False


@cache
def trainer_converter(base: Base) -> type:
    """Megatron to Hugging Face names: AWEX's converter of the family, with experts from ``infer_conf[MATRICES]``."""
    awex = _registered(base, "mcore_converter")

    class FromStore(awex):
        """Yields (name, W) and (name + "_scale_inv", scale) for routed experts, AWEX's conversion for the rest."""

        def convert_param(self, name: str, parameter: torch.Tensor, vp_stage: int | None = None) -> _Named:
            if self.infer_conf.get(SHAPES_ONLY):
                parameter = torch.empty_like(parameter, device="meta")
            mtp = _MTP_LAYER.fullmatch(_plain(name))
            if mtp is not None:
                return self._convert_mtp(mtp[1], mtp[2], parameter, vp_stage)
            place = _expert_place(name)
            if place is None or self.infer_conf[MATRICES] is None:
                return super().convert_param(_te_name(name), parameter, vp_stage=vp_stage)
            tensors = self.infer_conf[MATRICES](*place)
            converted = list(super().convert_param(name, tensors.weight, vp_stage=vp_stage))
            if tensors.scale is not None:
                scales = super().convert_param(name, tensors.scale, vp_stage=vp_stage)
                converted += [(scale_name + _SCALE, scale) for scale_name, scale in scales]
            return converted

        def _convert_mtp(self, layer: str, rest: str, parameter: torch.Tensor, vp_stage: int | None) -> _Named:
            """A layer of multi-token prediction is a decoder layer, and four tensors more; AWEX leaves it out."""
            if rest in _MTP_TRAINER:
                return [(_MTP_TRAINER[rest], parameter)]
            converted = super().convert_param(_te_name(f"decoder.layers.0.{rest}"), parameter, vp_stage=vp_stage)
            return [(n.replace("model.layers.0.", f"mtp.layers.{layer}.", 1), part) for n, part in converted]

    return _taken_apart(FromStore) if base.hybrid else FromStore


def _taken_apart(trainer: Any) -> type:
    """A trainer's converter whose hybrid attention comes in parts."""

    class Apart(trainer):
        """Query with gate, key and value by name; every part of a gated delta net by name."""

        def _convert_attention_param(self, name: str, parameter: torch.Tensor, layer_number: str) -> _Named:
            from awex.models.qwen3_5 import _Qwen3_5Layout as Layout

            kind = name.removeprefix("self_attention.")
            local = _local_sizes(self.hf_config, max(1, int(self.rank_info.attn_tp_size)))
            match kind:
                case "linear_qkv.weight":
                    packed = Layout.pack_output_gated_qkv(parameter, local, 1)
                    names = [f"self_attn.{part}.weight" for part in ("q_proj", "k_proj", "v_proj")]
                    rows = local.head_dim * local.num_key_value_heads
                    return list(zip(names, packed.split((packed.shape[0] - 2 * rows, rows, rows)), strict=True))
                case "in_proj.weight":
                    parts = Layout.split_gdn_input(parameter, local, 1)
                    return [(f"linear_attn.{n}.weight", part) for n, part in zip(_GDN_IN, parts, strict=True)]
                case "conv1d.weight":
                    parts = parameter.split(_gdn_rows(local)[:3])
                    return [(f"linear_attn.{n}.weight", part) for n, part in zip(_GDN_CONV, parts, strict=True)]
                case "A_log":  # engines keep it in FP32; BF16 holds a subset of its values
                    return [("linear_attn.A_log", parameter.float())]
                case "out_norm.weight" if not self.tf_config.layernorm_zero_centered_gamma:
                    raise PlanError(
                        f"{name}: AWEX adds one to it; set layernorm_zero_centered_gamma=True, as Bridge does"
                    )
                case _:
                    return super()._convert_attention_param(name, parameter, layer_number)

    return Apart


@cache
def engine_converter(base: Base) -> type:
    """SGLang to Hugging Face names: AWEX's converter of the family, for padded vocabularies, replicated heads and moved
    experts too.
    """
    awex = _registered(base, "sglang_converter")

    class ToViews(awex):
        """Returns views of the engine's parameters only."""

        def convert_param(self, name: str, parameter: torch.Tensor) -> _Named:
            if not name.startswith(_DRAFT):
                return self._convert_one(name, name, parameter)
            inner = name.removeprefix(_DRAFT)
            if inner in _MTP_ENGINE:
                return [(_MTP_ENGINE[inner], parameter)]
            converted = self._convert_one(name, inner, parameter)
            return [(found.replace("model.layers.", "mtp.layers.", 1), view) for found, view in converted]

        def _convert_one(self, parameter_name: str, name: str, parameter: torch.Tensor) -> _Named:
            """`name` is the parameter's in its own model, target or draft; AWEX knows targets."""
            shard = self.infer_engine_config.vocabulary.get(parameter_name)
            if shard is not None:
                rows = shard["end"] - shard["start"]
                # padding only: the vocabulary ends on an earlier rank
                return super().convert_param(name, parameter.narrow(0, 0, rows)) if rows else []
            slots = self.infer_engine_config.slots.get(parameter_name.rpartition(".")[0])
            if slots is None:
                return super().convert_param(name, parameter)
            if len(slots) != parameter.shape[0]:
                raise PlanError(
                    f"{name} holds {parameter.shape[0]} experts, but the engine describes {len(slots)}; shared experts "
                    "that are fused into routed ones are not supported, start SGLang with "
                    "--disable-shared-experts-fusion"
                )
            first, ep_size = self.ep_rank * len(slots), self.ep_size
            # Without expert parallelism AWEX takes experts beyond the model's for shared ones; here they are replicas.
            self.ep_size = max(2, ep_size) if len(slots) > self.model_config.num_experts else ep_size
            try:
                converted = super().convert_param(name, parameter)
            finally:
                self.ep_size = ep_size
            return [(_moved(found, first, slots), view) for found, view in converted]

        def _split_gate_up(self, name: str, parameter: torch.Tensor) -> _Named:
            (gate, upper), (up, lower) = super()._split_gate_up(name, parameter)
            if self.infer_engine_config.up_first and "w13_weight" in name:
                upper, lower = lower, upper
            return [(gate, upper), (up, lower)]

        def _convert_attention_param(self, name: str, parameter: torch.Tensor, layer_number: str) -> _Named:
            if "qkv_proj" not in name or self.infer_engine_config.kv_replicas == 1:
                return super()._convert_attention_param(name, parameter, layer_number)
            return _split_heads(name, parameter, self.model_config.head_dim)

    return _split_apart(ToViews) if base.hybrid else ToViews


def _split_apart(engine: Any) -> type:
    """An engine's converter that cuts the fused tensors of hybrid attention into parts."""

    class Apart(engine):
        """Views of query with gate, key, value, and of every part of a gated delta net."""

        def convert_param(self, name: str, parameter: torch.Tensor) -> _Named:
            return [part for pair in super().convert_param(name, parameter) for part in self._parts(*pair)]

        def _parts(self, name: str, parameter: torch.Tensor) -> _Named:
            module, _, fused = name.removesuffix(".weight").rpartition(".")
            attention = self.rank_info.attn_tp_size
            match fused:
                case "qkv_proj":
                    heads = max(1, self.model_config.num_key_value_heads // attention)
                    return _split_heads(name, parameter, heads * self.model_config.head_dim)
                case "in_proj_qkvz":
                    names, rows = _GDN_IN[:4], _gdn_rows(_local_sizes(self.model_config, attention))[:4]
                case "in_proj_ba":
                    names, rows = _GDN_IN[4:], _gdn_rows(_local_sizes(self.model_config, attention))[4:]
                case "conv1d":
                    names, rows = _GDN_CONV, _gdn_rows(_local_sizes(self.model_config, attention))[:3]
                case _:
                    return [(name, parameter)]
            if sum(rows) != parameter.shape[0]:
                raise PlanError(f"{name} has {parameter.shape[0]} rows, expected {sum(rows)} in the parts {list(rows)}")
            return [(f"{module}.{n}.weight", part) for n, part in zip(names, parameter.split(rows), strict=True)]

    return Apart


def _split_heads(name: str, parameter: torch.Tensor, key_rows: int) -> _Named:
    """Query, key and value rows of a fused projection; the last two have `key_rows` each."""
    queries = parameter.shape[0] - 2 * key_rows
    starts = {"q_proj": (0, queries), "k_proj": (queries, key_rows), "v_proj": (queries + key_rows, key_rows)}
    return [(name.replace("qkv_proj", part), parameter.narrow(0, *rows)) for part, rows in starts.items()]


def _local_sizes(hf: Any, ranks: int) -> SimpleNamespace:
    """The numbers of heads that one of `ranks` attention ranks holds, in the words of the config."""
    counts = ("num_attention_heads", "num_key_value_heads", "linear_num_key_heads", "linear_num_value_heads")
    whole = {name: int(getattr(hf, name)) for name in counts}
    uneven = {name: count for name, count in whole.items() if count % ranks and name != "num_key_value_heads"}
    if uneven:
        raise PlanError(f"{ranks} attention ranks cannot share {uneven} equally; choose a divisor")
    local = {name: max(1, count // ranks) for name, count in whole.items()}
    widths = {name: int(getattr(hf, name)) for name in ("head_dim", "linear_key_head_dim", "linear_value_head_dim")}
    return SimpleNamespace(**local, **widths)


def _gdn_rows(local: SimpleNamespace) -> tuple[int, ...]:
    """Rows of query, key, value, gate z, b and a of a gated delta net."""
    keys = local.linear_num_key_heads * local.linear_key_head_dim
    values = local.linear_num_value_heads * local.linear_value_head_dim
    return keys, keys, values, values, local.linear_num_value_heads, local.linear_num_value_heads


def _moved(name: str, first: int, slots: list[int]) -> str:
    """The canonical name that AWEX gave to a slot, with the expert that the slot holds now."""
    before, marker, after = name.partition(".experts.")
    number, _, rest = after.partition(".")
    if not marker or not number.isdigit() or not first <= int(number) < first + len(slots):
        raise PlanError(
            f"{name}: AWEX gives this name to one of the slots {first} to {first + len(slots) - 1}, expected their "
            "numbers; its converter does not number experts over all ranks"
        )
    return f"{before}{marker}{slots[int(number) - first]}.{rest}"


def _registered(base: Base, side: str) -> Any:
    """AWEX's own converter class of a family."""
    from awex.models.registry import ModelRegistry

    entry = ModelRegistry.models.get(base.architecture)
    if entry is None:
        raise PlanError(f"AWEX knows no {base.architecture}; its import of the model failed, see its log")
    found = entry[side]
    return found if isinstance(found, type) else found()


def _expert_place(name: str) -> tuple[int, int, str] | None:
    """(layer, local expert, projection) of a routed expert's weight, None for everything else."""
    parts = _plain(name).removeprefix("language_model.").split(".")
    match parts:
        case ["decoder", "layers", layer, "mlp", "experts", "local_experts", expert, linear, "weight"]:
            return int(layer), int(expert), {"linear_fc1": "fc1", "linear_fc2": "fc2"}[linear]
        case ["decoder", "layers", layer, "mlp", "experts", ("linear_fc1" | "linear_fc2") as linear, weight]:
            return int(layer), int(weight.removeprefix("weight")), {"linear_fc1": "fc1", "linear_fc2": "fc2"}[linear]
    if ".mlp.experts." in name:
        raise PlanError(f"{name}: a routed expert's parameter that this adapter cannot publish")
    return None


def _plain(name: str) -> str:
    """Without the prefixes of Megatron's wrappers."""
    return ".".join(part for part in name.split(".") if part != "module")


def _te_name(name: str) -> str:
    """AWEX knows the norm before attention only where TransformerEngine's layers keep it."""
    return name.replace(".input_layernorm.weight", ".self_attention.linear_qkv.layer_norm_weight")
