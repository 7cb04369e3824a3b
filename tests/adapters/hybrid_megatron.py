"""Megatron-core's own Qwen3.5-MoE on a CPU: its GatedDeltaNet, gated SelfAttention, MoELayer and SharedExpertMLP.

Megatron builds this model from TransformerEngine's layers only, and its gated delta net wants the kernels of
flash-linear-attention. Here the same modules are put together from local layers, with the kernels looked for at
forward only: names, shapes and packing of the parameters are Megatron's; nothing is computed.
"""

from collections.abc import Mapping
from typing import Any
from unittest import mock

import torch

__all__ = ["build_hybrid", "hybrid_config"]


def hybrid_config(config: Mapping[str, Any]) -> Any:
    """Megatron's TransformerConfig of a Qwen3.5-MoE `config.json`, as Bridge sets it."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    return TransformerConfig(
        num_layers=config["num_hidden_layers"],
        hidden_size=config["hidden_size"],
        ffn_hidden_size=config["moe_intermediate_size"],
        num_attention_heads=config["num_attention_heads"],
        num_query_groups=config["num_key_value_heads"],
        kv_channels=config["head_dim"],
        qk_layernorm=True,
        normalization="RMSNorm",
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        attention_output_gate=True,
        experimental_attention_variant="gated_delta_net",
        linear_attention_freq=config["full_attention_interval"],
        linear_conv_kernel_dim=config["linear_conv_kernel_dim"],
        linear_key_head_dim=config["linear_key_head_dim"],
        linear_value_head_dim=config["linear_value_head_dim"],
        linear_num_key_heads=config["linear_num_key_heads"],
        linear_num_value_heads=config["linear_num_value_heads"],
        num_moe_experts=config["num_experts"],
        moe_ffn_hidden_size=config["moe_intermediate_size"],
        moe_router_topk=config["num_experts_per_tok"],
        moe_router_load_balancing_type="none",
        moe_shared_expert_intermediate_size=config["shared_expert_intermediate_size"],
        moe_shared_expert_gate=True,
        moe_token_dispatcher_type="alltoall",
        mtp_num_layers=config.get("mtp_num_hidden_layers"),
        moe_grouped_gemm=False,
        bf16=True,
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
        use_cpu_initialization=True,
        perform_initialization=False,
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        persist_layer_norm=False,
        deterministic_mode=True,  # the delta rule in plain torch
    )


def build_hybrid(config: Mapping[str, Any]) -> Any:
    """Megatron's Float16Module around the GPTModel, parameters uninitialised."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.ssm.gated_delta_net import common
    from megatron.core.transformer.module import Float16Module
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    settings = hybrid_config(config)
    interval = config["full_attention_interval"]
    layers = [_layer_spec(config, full=(layer + 1) % interval == 0) for layer in range(settings.num_layers)]
    mtp = get_gpt_mtp_block_spec(settings, layers[-1], False) if settings.mtp_num_layers else None
    with mock.patch.object(common, "HAVE_FLA", True):
        model = GPTModel(
            settings,
            TransformerBlockSubmodules(layer_specs=layers, layer_norm=WrappedTorchNorm),
            vocab_size=config["vocab_size"],
            max_sequence_length=config["max_position_embeddings"],
            position_embedding_type="rope",
            mtp_block_spec=mtp,
            share_embeddings_and_output_weights=config["tie_word_embeddings"],
        )
    # Local norms know no zero-centred weight, so the flag comes after they are made: it says what the weights mean.
    settings.layernorm_zero_centered_gamma = True
    return Float16Module(settings, model)


def _layer_spec(config: Mapping[str, Any], *, full: bool) -> Any:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.ssm.gated_delta_net import GatedDeltaNet
    from megatron.core.ssm.gated_delta_net.common import GatedDeltaNetSubmodules
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    spec = get_gpt_layer_local_spec(
        num_experts=config["num_experts"], moe_grouped_gemm=False, qk_layernorm=True, normalization="RMSNorm"
    )
    if not full:
        submodules = GatedDeltaNetSubmodules(
            in_proj=ColumnParallelLinear, out_norm=WrappedTorchNorm, out_proj=RowParallelLinear
        )
        spec.submodules.self_attention = ModuleSpec(module=GatedDeltaNet, submodules=submodules)
    return spec
