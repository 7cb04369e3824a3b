"""AWEX's converters, extended by what they lack: FP8 experts from a store, and the layouts of a real engine.

Names and splits stay AWEX's: a store matrix, or its scale, is given to AWEX's own conversion in place of the parameter,
and what comes back is a view of the store.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from weftpub.errors import PlanError

__all__ = ["MATRICES", "EngineRules", "MatrixTensors", "engine_converter", "trainer_converter"]

# Key of the trainer's settings under which the converter finds its experts.
MATRICES = "weftpub_matrices"
_SCALE = "_scale_inv"


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
        up_first: w13 holds up rows over gate rows, as some runners of experts want them.
        kv_replicas: ranks that hold the same key/value head; 1 unless attention is split wider than there are heads.
    """

    tp_size: int
    ep_size: int
    dp_size: int
    enable_dp_attention: bool
    vocabulary: Mapping[str, Mapping[str, int]]
    up_first: bool = False
    kv_replicas: int = 1
    enable_dp_lm_head: bool = False
    moe_dense_tp_size: int | None = None
    device_backend: str = "cuda"
    enable_debug_mode: bool = False


@cache
def trainer_converter() -> type:
    """Megatron to Hugging Face names: AWEX's converter for Qwen3-MoE, with experts from ``infer_conf[MATRICES]``."""
    base = _registered("mcore_converter")

    class FromStore(base):
        """Yields (name, W) and (name + "_scale_inv", scale) for routed experts, AWEX's conversion for the rest."""

        def convert_param(
            self, name: str, parameter: torch.Tensor, vp_stage: int | None = None
        ) -> list[tuple[str, torch.Tensor]]:
            place = _expert_place(name)
            if place is None:
                return super().convert_param(_te_name(name), parameter, vp_stage=vp_stage)
            tensors = self.infer_conf[MATRICES](*place)
            converted = list(super().convert_param(name, tensors.weight, vp_stage=vp_stage))
            if tensors.scale is not None:
                scales = super().convert_param(name, tensors.scale, vp_stage=vp_stage)
                converted += [(scale_name + _SCALE, scale) for scale_name, scale in scales]
            return converted

    return FromStore


@cache
def engine_converter() -> type:
    """SGLang to Hugging Face names: AWEX's converter for Qwen3-MoE, for padded vocabularies and replicated heads
    too.
    """
    base = _registered("sglang_converter")

    class ToViews(base):
        """Returns views of the engine's parameters only."""

        def convert_param(self, name: str, parameter: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
            shard = self.infer_engine_config.vocabulary.get(name)
            if shard is None:
                return super().convert_param(name, parameter)
            rows = shard["end"] - shard["start"]
            if rows == 0:
                return []  # padding only: the vocabulary ends on an earlier rank
            return super().convert_param(name, parameter.narrow(0, 0, rows))

        def _split_gate_up(self, name: str, parameter: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
            (gate, upper), (up, lower) = super()._split_gate_up(name, parameter)
            if self.infer_engine_config.up_first and "w13_weight" in name:
                upper, lower = lower, upper
            return [(gate, upper), (up, lower)]

        def _convert_attention_param(
            self, name: str, parameter: torch.Tensor, layer_number: str
        ) -> list[tuple[str, torch.Tensor]]:
            if "qkv_proj" not in name or self.infer_engine_config.kv_replicas == 1:
                return super()._convert_attention_param(name, parameter, layer_number)
            head = self.model_config.head_dim
            queries = self.total_num_heads // self.rank_info.attn_tp_size * head
            starts = {"q_proj": (0, queries), "k_proj": (queries, head), "v_proj": (queries + head, head)}
            return [(name.replace("qkv_proj", part), parameter.narrow(0, *rows)) for part, rows in starts.items()]

    return ToViews


def _registered(side: str) -> Any:
    """AWEX's own converter class for Qwen3-MoE."""
    from awex.models.registry import ModelRegistry

    from weftpub_adapters.awex.seams import BASE_ARCHITECTURE

    entry = ModelRegistry.models.get(BASE_ARCHITECTURE)
    if entry is None:
        raise PlanError(f"AWEX knows no {BASE_ARCHITECTURE}; its import of awex.models.qwen3_moe failed, see its log")
    found = entry[side]
    return found if isinstance(found, type) else found()


def _expert_place(name: str) -> tuple[int, int, str] | None:
    """(layer, local expert, projection) of a routed expert's weight, None for everything else."""
    parts = [part for part in name.split(".") if part != "module"]
    match parts:
        case ["decoder", "layers", layer, "mlp", "experts", "local_experts", expert, linear, "weight"]:
            return int(layer), int(expert), {"linear_fc1": "fc1", "linear_fc2": "fc2"}[linear]
        case ["decoder", "layers", layer, "mlp", "experts", ("linear_fc1" | "linear_fc2") as linear, weight]:
            return int(layer), int(weight.removeprefix("weight")), {"linear_fc1": "fc1", "linear_fc2": "fc2"}[linear]
    if ".mlp.experts." in name:
        raise PlanError(f"{name}: a routed expert's parameter that this adapter cannot publish")
    return None


def _te_name(name: str) -> str:
    """AWEX knows the norm before attention only where TransformerEngine's layers keep it."""
    return name.replace(".input_layernorm.weight", ".self_attention.linear_qkv.layer_norm_weight")
