"""Builds the Megatron-core model of a Qwen3-MoE: local layer spec, SequentialMLP experts, tensor and pipeline
parallel size one.

Choice made: the local spec, which needs no TransformerEngine and runs on any device; cost: experts run one after the
other. Memory for the parameters is made, and left uninitialised: the loader fills every element.
"""

from collections.abc import Mapping
from typing import Any

import torch

from weftpub.errors import ConfigError
from weftpub_adapters.megatron.fields import Qwen3MoeFields
from weftpub_adapters.megatron.support import check_settings, require_supported

__all__ = ["base_settings", "build_model", "initialize_parallel", "transformer_config"]


def initialize_parallel(
    *, expert_parallel: int = 1, seed: int = 1234, store: torch.distributed.Store | None = None
) -> None:
    """Set up Megatron's process groups: expert parallel over the whole world, everything else of size one.

    A single process needs no launcher; with `torchrun`, or an initialised default group, the existing world is used.

    Args:
        expert_parallel: ranks that share the experts; the world must be exactly this large, because experts must not
            be replicated.
        seed: of Megatron's random state tracker.
        store: rendezvous of a single-process world; by default one in memory.

    Raises:
        ConfigError: the world size differs from `expert_parallel`.
    """
    require_supported()
    from megatron.core import parallel_state, tensor_parallel

    dist = torch.distributed
    if not dist.is_initialized():
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        if store is None and dist.is_torchelastic_launched():
            dist.init_process_group(backend)
        else:
            dist.init_process_group(backend, store=dist.HashStore() if store is None else store, rank=0, world_size=1)
    world = dist.get_world_size()
    if world != expert_parallel:
        raise ConfigError(
            f"expert_parallel={expert_parallel} in a world of {world}: replicated experts are not "
            f"supported; start {expert_parallel} rank(s) "
            f"or set expert_parallel={world}"
        )
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(
            1, 1, expert_model_parallel_size=expert_parallel, expert_tensor_parallel_size=1
        )
        tensor_parallel.model_parallel_cuda_manual_seed(seed)


def base_settings(fields: Qwen3MoeFields) -> dict[str, Any]:
    """TransformerConfig fields that the checkpoint fixes, and those that every trainer here shares: BF16, no dropout,
    no fusion, memory not initialised.
    """
    return {
        "num_layers": fields.layers,
        "hidden_size": fields.hidden,
        "ffn_hidden_size": fields.intermediate,
        "num_attention_heads": fields.heads,
        "num_query_groups": fields.kv_heads,
        "kv_channels": fields.head_dim,
        "qk_layernorm": True,
        "normalization": "RMSNorm",
        "layernorm_epsilon": fields.norm_eps,
        "add_bias_linear": False,
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "num_moe_experts": fields.experts,
        "moe_ffn_hidden_size": fields.intermediate,
        "moe_router_topk": fields.top_k,
        # Softmax before or after the choice of experts: the same numbers as rescaling, or not, in Hugging Face's model.
        "moe_router_pre_softmax": not fields.norm_topk,
        "moe_router_load_balancing_type": "none",
        "moe_router_dtype": "fp32",
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "bf16": True,
        "params_dtype": torch.bfloat16,
        "pipeline_dtype": torch.bfloat16,
        "perform_initialization": False,
        "gradient_accumulation_fusion": False,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "masked_softmax_fusion": False,
        "persist_layer_norm": False,
        "apply_rope_fusion": False,
    }


def transformer_config(fields: Qwen3MoeFields, overrides: Mapping[str, Any] | None = None) -> Any:
    """The TransformerConfig of the model, on the present expert-parallel group.

    Args:
        fields: sizes of the model.
        overrides: further TransformerConfig fields, such as recomputation or the token dispatcher; they win over the
            defaults here.

    Raises:
        ConfigError: an override is unknown to Megatron, or refused by name (`support.REFUSED_SETTINGS`).
    """
    from megatron.core import parallel_state
    from megatron.core.transformer.transformer_config import TransformerConfig

    expert_parallel = parallel_state.get_expert_model_parallel_world_size()
    if fields.experts % expert_parallel:
        raise ConfigError(
            f"{fields.experts} experts cannot be shared by {expert_parallel} ranks; expert_parallel must "
            "divide num_experts"
        )
    settings = base_settings(fields) | {
        "moe_token_dispatcher_type": "alltoall",
        "moe_grouped_gemm": False,
        "expert_model_parallel_size": expert_parallel,
        "expert_tensor_parallel_size": 1,
        "use_cpu_initialization": not torch.cuda.is_available(),
    }
    try:
        config = TransformerConfig(**{**settings, **(overrides or {})})
    except TypeError as error:
        raise ConfigError(f"TransformerConfig does not take these overrides: {error}") from error
    check_settings(config)
    return config


def build_model(fields: Qwen3MoeFields, overrides: Mapping[str, Any] | None = None) -> Any:
    """A Megatron `Float16Module` around the GPTModel, with uninitialised BF16 parameters on the present device.

    Args:
        fields, overrides: as for `transformer_config`; with ``bf16=False, params_dtype=torch.float32`` the bare FP32
            GPTModel.
    """
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.module import Float16Module

    config = transformer_config(fields, overrides)
    spec = get_gpt_layer_local_spec(
        num_experts=fields.experts, moe_grouped_gemm=False, qk_layernorm=True, normalization=config.normalization
    )
    model = GPTModel(
        config,
        spec,
        vocab_size=fields.vocab,
        max_sequence_length=fields.positions,
        position_embedding_type="rope",
        rotary_base=fields.rope_theta,
        share_embeddings_and_output_weights=fields.tied,
    )
    if torch.cuda.is_available():
        model.cuda(torch.cuda.current_device())  # the local norms are torch's own, and made on the CPU
    return Float16Module(config, model) if config.bf16 else model
