"""Builds the Megatron-core model of a run: TransformerEngine's layers on GPUs, the local spec elsewhere."""

import importlib
import importlib.util
import math
import os
from datetime import timedelta
from typing import Any

import torch

from weftmoe.loop.optimizer import optimizer_copies
from weftmoe.schema import Settings
from weftpub.errors import ConfigError
from weftpub_adapters.megatron import (
    Qwen3MoeFields,
    Qwen35MoeFields,
    base_settings,
    hybrid_settings,
    hybrid_spec,
    require_delta_net_kernels,
)
from weftpub_demo import cpu_megatron

__all__ = ["build_model", "config_fields", "initialize", "join_world", "longest_wait", "prepare_process"]

# A checkpoint of some hundred gigabytes is downloaded by rank 0, which the others wait for.
_DOWNLOAD_S = 4 * 3600.0


def prepare_process(settings: Settings) -> torch.device:
    """Before anything imports Megatron or uses cuDNN: choose the device, and let Megatron run without CUDA where there
    is none.

    Raises:
        ConfigError: the settings want a GPU and there is none, or TransformerEngine is there and cannot be loaded.
    """
    if settings.cluster.gpus == 0 or not torch.cuda.is_available():
        if settings.cluster.gpus:
            raise ConfigError(
                f"cluster.gpus={settings.cluster.gpus}, but torch finds no CUDA GPU; use the CPU smoke, or set "
                "cluster.gpus=0 and rollout.engine=sampler"
            )
        if not torch.cuda.is_available():
            cpu_megatron.install()
        return torch.device("cpu")
    if settings.train.deterministic:
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = False
    if torch.distributed.is_torchelastic_launched():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    _load_transformer_engine()
    return torch.device("cuda", torch.cuda.current_device())


def _load_transformer_engine() -> None:
    """Ahead of everything that uses cuDNN.

    Torch loads the parts of the cuDNN beside it as they are used. TransformerEngine's library asks the loader for all
    of them by name, and gets those that are loaded, and the others from where the system has them. On a machine with
    two cuDNNs it therefore has to be first: then all parts are the system's, for torch too. In the other order they
    are of both, and it cannot be loaded.
    """
    if importlib.util.find_spec("transformer_engine") is None:
        return
    try:
        importlib.import_module("transformer_engine")
    except OSError as error:
        raise ConfigError(
            f"TransformerEngine cannot be loaded: {error}. If that names cuDNN, this process has parts of two; "
            "`weftpub doctor` says where both are, and what to do"
        ) from error


def join_world(settings: Settings, device: torch.device) -> None:
    """The default process group; a process that no launcher started is a world of one. May be called again.

    Several ranks exchange plain data over gloo, so that NCCL's communicators hold no memory before training needs them.
    What rank 0 does alone may take longer than torch's half an hour; a rank that died is torchrun's to notice.
    """
    dist = torch.distributed
    if dist.is_initialized():
        return
    backend = "gloo" if device.type == "cpu" else "nccl" if settings.cluster.world == 1 else "cpu:gloo,cuda:nccl"
    if dist.is_torchelastic_launched():
        dist.init_process_group(backend, timeout=longest_wait(settings))
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


def longest_wait(settings: Settings) -> timedelta:
    """For rank 0's files, or for it to draw and judge all completions of a step, in as many rounds as it may take."""
    algorithm, reward = settings.algorithm, settings.reward
    rounds = 1 + (algorithm.max_resamples if algorithm.dynamic_sampling else 0)
    turns = math.ceil(algorithm.prompts * algorithm.completions / reward.workers)
    judging = turns * (3 * reward.timeout + 2)
    return timedelta(seconds=max(_DOWNLOAD_S, rounds * (settings.rollout.generate_timeout + judging)))


def initialize(settings: Settings, device: torch.device) -> None:
    """Megatron's process groups of this run's sizes.

    Raises:
        ConfigError: other ranks were started than the settings say.
    """
    from megatron.core import parallel_state, tensor_parallel

    dist, train = torch.distributed, settings.train
    join_world(settings, device)
    if dist.get_world_size() != settings.cluster.world:
        raise ConfigError(
            f"{dist.get_world_size()} ranks were started, cluster.nodes x cluster.gpus is {settings.cluster.world} "
            "(without GPUs, x cluster.cpu_ranks); start the run with run.sh, or make them agree"
        )
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(
            train.tensor,
            train.pipeline,
            context_parallel_size=train.context,
            expert_model_parallel_size=train.expert,
            expert_tensor_parallel_size=train.expert_tensor,
            num_distributed_optimizer_instances=optimizer_copies(settings),
        )
        tensor_parallel.model_parallel_cuda_manual_seed(settings.seed)


def build_model(settings: Settings, fields: Qwen3MoeFields, device: torch.device) -> Any:
    """Megatron's `Float16Module` around the GPTModel, BF16, memory not initialised.

    Raises:
        ConfigError: no kernels for a model's gated delta nets on this GPU.
    """
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.module import Float16Module
    from megatron.core.transformer.transformer_config import TransformerConfig

    if isinstance(fields, Qwen35MoeFields) and device.type == "cuda":
        require_delta_net_kernels(deterministic=settings.train.deterministic)
    config = TransformerConfig(**config_fields(settings, fields, device))
    model = GPTModel(
        config,
        _layers(config, fields, grouped=settings.train.experts == "grouped"),
        vocab_size=fields.vocab,
        max_sequence_length=fields.positions,
        position_embedding_type="rope",
        rotary_percent=fields.rotary_percent if isinstance(fields, Qwen35MoeFields) else 1.0,
        rotary_base=fields.rope_theta,
        share_embeddings_and_output_weights=fields.tied,
        parallel_output=True,
    )
    if device.type == "cuda":
        model.cuda(torch.cuda.current_device())
    return Float16Module(config, model) if config.bf16 else model


def _layers(config: Any, fields: Qwen3MoeFields, *, grouped: bool) -> Any:
    """Megatron's spec of a layer, or of all where they differ."""
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_layer_local_spec,
        get_gpt_layer_with_transformer_engine_spec,
    )

    if isinstance(fields, Qwen35MoeFields):
        return hybrid_spec(config, fields, grouped=grouped)
    if grouped:
        return get_gpt_layer_with_transformer_engine_spec(
            num_experts=fields.experts, moe_grouped_gemm=True, qk_layernorm=True
        )
    return get_gpt_layer_local_spec(
        num_experts=fields.experts, moe_grouped_gemm=False, qk_layernorm=True, normalization="RMSNorm"
    )


def config_fields(settings: Settings, fields: Qwen3MoeFields, device: torch.device) -> dict[str, Any]:
    """Arguments of Megatron's TransformerConfig: what the checkpoint fixes, and what the run chooses."""
    train = settings.train
    hybrid = isinstance(fields, Qwen35MoeFields)
    chosen: dict[str, Any] = (hybrid_settings(fields) if hybrid else base_settings(fields)) | {
        "tensor_model_parallel_size": train.tensor,
        "sequence_parallel": train.sequence_parallel,
        "expert_model_parallel_size": train.expert,
        "expert_tensor_parallel_size": train.expert_tensor,
        "moe_token_dispatcher_type": train.dispatcher,
        "moe_grouped_gemm": train.experts == "grouped",
        "use_cpu_initialization": device.type == "cpu",
        # Without a GPU gated delta nets are computed in plain torch, which is what this says.
        "deterministic_mode": train.deterministic if device.type == "cuda" else hybrid,
    }
    if train.experts == "grouped":
        # One kernel for all sequences of a pack, angles in FP32 as the engine has them; Megatron's own loops over them.
        chosen |= {"apply_rope_fusion": True, "attention_backend": _attention(train.attention)}
    if train.dispatcher == "flex":
        chosen["moe_flex_dispatcher_backend"] = train.flex_backend
    if train.recompute == "full":
        chosen |= {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    return chosen


def _attention(name: str) -> Any:
    from megatron.core.transformer.enums import AttnBackend

    return AttnBackend[name]
