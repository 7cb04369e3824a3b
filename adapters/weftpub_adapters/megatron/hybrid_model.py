"""Qwen3.5-MoE as Megatron-core's GPTModel: settings that the checkpoint fixes, and the layers of either spec.

With TransformerEngine the layers are Megatron's own block spec for its experimental attention variants, which exists
for TransformerEngine alone. Without it the same modules of Megatron (GatedDeltaNet, gated SelfAttention, MoELayer,
SharedExpertMLP) are put together from local linears; only the norms are this module's, because Megatron's local ones
know no zero-centred weight.
"""

from typing import Any

import torch

from weftpub_adapters.megatron.fields import Qwen35MoeFields
from weftpub_adapters.megatron.model import base_settings

__all__ = ["ZeroCentredRMSNorm", "hybrid_settings", "hybrid_spec"]


def hybrid_settings(fields: Qwen35MoeFields) -> dict[str, Any]:
    """TransformerConfig fields that the checkpoint fixes, with those of `base_settings`. No layers of multi-token
    prediction are built.
    """
    return base_settings(fields) | {
        "layernorm_zero_centered_gamma": True,
        "attention_output_gate": True,
        "experimental_attention_variant": "gated_delta_net",
        "linear_attention_freq": [int(not full) for full in fields.full],
        "linear_conv_kernel_dim": fields.kernel,
        "linear_key_head_dim": fields.key_dim,
        "linear_value_head_dim": fields.value_dim,
        "linear_num_key_heads": fields.key_heads,
        "linear_num_value_heads": fields.value_heads,
        "moe_shared_expert_intermediate_size": fields.shared,
        "moe_shared_expert_gate": True,
        "mtp_num_layers": None,
    }


def hybrid_spec(config: Any, fields: Qwen35MoeFields, *, grouped: bool) -> Any:
    """Megatron's block of layers.

    Args:
        config: a TransformerConfig of `hybrid_settings`.
        fields: of the checkpoint.
        grouped: TransformerEngine's layers with grouped experts; else local ones, one module an expert.
    """
    if grouped:
        from megatron.core.models.gpt.experimental_attention_variant_module_specs import (
            get_transformer_block_with_experimental_attention_variant_spec,
        )

        return get_transformer_block_with_experimental_attention_variant_spec(config)
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    layers = [_local_layer(fields, full=full) for full in fields.full]
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=ZeroCentredRMSNorm)


class ZeroCentredRMSNorm(torch.nn.Module):
    """RMSNorm times one plus its weight, computed in FP32: ``[..., hidden]`` of any float dtype, which the result has,
    too. Made as Megatron makes norms.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.zeros(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # its gradient is then a sum over the ranks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (normed * (1.0 + self.weight.float())).to(x.dtype)


def _local_layer(fields: Qwen35MoeFields, *, full: bool) -> Any:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.ssm.gated_delta_net import GatedDeltaNet
    from megatron.core.ssm.gated_delta_net.common import GatedDeltaNetSubmodules
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.spec_utils import ModuleSpec

    spec = get_gpt_layer_local_spec(
        num_experts=fields.experts, moe_grouped_gemm=False, qk_layernorm=True, normalization="RMSNorm"
    )
    spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = ZeroCentredRMSNorm
    if full:
        attention = spec.submodules.self_attention.submodules
        attention.q_layernorm = attention.k_layernorm = ZeroCentredRMSNorm
    else:
        submodules = GatedDeltaNetSubmodules(
            in_proj=ColumnParallelLinear, out_norm=ZeroCentredRMSNorm, out_proj=RowParallelLinear
        )
        spec.submodules.self_attention = ModuleSpec(module=GatedDeltaNet, submodules=submodules)
    return spec
