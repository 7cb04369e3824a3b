"""The model and the trainers of eight_gpus.py: tensor and expert parallel, full recomputation, and what is read out of
them rank by rank.

Weights depend on names and global expert numbers alone: tensor-parallel parts fit together, replicas are equal, and no
two experts are.
"""

import hashlib
from collections.abc import Iterator
from typing import Any

import megatron_adapter as one_gpu
import torch
from eight_gpus_config import hf_config
from eight_gpus_ranks import gather
from megatron_adapter import DEVICE, Trainer

from weftpub_adapters.megatron import Qwen3MoeFields, base_settings
from weftpub_adapters.megatron.attached import AttachSettings, attach, prepare
from weftpub_adapters.megatron.names import plain_name

__all__ = [
    "batch",
    "build",
    "expert_tensors",
    "make_model",
    "shards_of",
    "stock_shards",
    "unlike_replicas",
]


def make_model(settings: dict[str, Any], *, fill: bool = True) -> Any:
    """Megatron's `Float16Module`: TransformerEngine's layers on GPUs, the local ones elsewhere. Without `fill` nothing
    touches the parameters' memory.
    """
    if not one_gpu.have_te():
        _let_torch_norms_see_parts()
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_layer_local_spec,
        get_gpt_layer_with_transformer_engine_spec,
    )
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.module import Float16Module
    from megatron.core.transformer.transformer_config import TransformerConfig

    fields = Qwen3MoeFields.from_hf(hf_config(settings))
    grouped = one_gpu.have_te()
    config = TransformerConfig(
        **base_settings(fields),
        tensor_model_parallel_size=settings["tensor"],
        sequence_parallel=settings["tensor"] > 1,
        expert_model_parallel_size=torch.distributed.get_world_size(),
        expert_tensor_parallel_size=1,
        moe_token_dispatcher_type="alltoall",
        moe_grouped_gemm=grouped,
        use_cpu_initialization=DEVICE.type == "cpu",
        recompute_granularity="full",
        recompute_method="uniform",
        recompute_num_layers=1,
    )
    spec = (
        get_gpt_layer_with_transformer_engine_spec(num_experts=fields.experts, moe_grouped_gemm=True, qk_layernorm=True)
        if grouped
        else get_gpt_layer_local_spec(
            num_experts=fields.experts, moe_grouped_gemm=False, qk_layernorm=True, normalization="RMSNorm"
        )
    )
    model = GPTModel(
        config,
        spec,
        vocab_size=fields.vocab,
        max_sequence_length=fields.positions,
        position_embedding_type="rope",
        rotary_base=fields.rope_theta,
        share_embeddings_and_output_weights=False,
    )
    if DEVICE.type == "cuda":
        model.cuda(torch.cuda.current_device())
    model = Float16Module(config, model)
    if fill:
        _fill(model, fields.experts // torch.distributed.get_world_size())
    return model


def _let_torch_norms_see_parts() -> None:
    """Megatron keeps torch's norms from sequence parallelism, because nobody marks their weights: their gradients are
    sums over the tensor-parallel ranks. Experts with tensor parallelism need it, so here they are marked."""
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    def marked(cls: type, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> torch.nn.Module:
        norm = torch.nn.RMSNorm(hidden_size, eps=eps)
        norm.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        return norm

    WrappedTorchNorm.__new__ = marked  # type: ignore[method-assign,assignment]


def build(settings: dict[str, Any], optimizer: str, variant: str | None) -> Trainer:
    """A trainer: attached for a variant, Megatron's own for None."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    model = make_model(settings)
    if variant is not None:
        prepare(model, AttachSettings(variant=variant))  # type: ignore[arg-type]
    flat = optimizer == "adam"
    wrapper = DistributedDataParallelConfig(use_distributed_optimizer=flat, grad_reduce_in_fp32=True)
    ddp = DistributedDataParallel(model.config, wrapper, model)
    offload = {
        "use_precision_aware_optimizer": True,
        "optimizer_cpu_offload": True,
        "optimizer_offload_fraction": 1.0,
    }
    config = OptimizerConfig(
        optimizer=optimizer,
        lr=1e-3,
        min_lr=1e-4,
        weight_decay=0.01,
        bf16=True,
        params_dtype=torch.bfloat16,
        use_distributed_optimizer=flat,
        clip_grad=1.0,
        **(offload if flat and variant is not None else {}),
    )
    megatron = get_megatron_optimizer(config, [ddp])
    return Trainer(ddp, megatron, attach(ddp, megatron) if variant is not None else None)


def batch(settings: dict[str, Any], seed: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """One microbatch: `tokens` tokens for each rank, so a sequence as long as all ranks of a tensor-parallel group
    have together; another one for each data-parallel rank."""
    from megatron.core import parallel_state

    shape = settings["shape"]
    length = shape["tokens"] * settings["tensor"]
    generator = torch.Generator().manual_seed(1000 * seed + parallel_state.get_data_parallel_rank())
    tokens = torch.randint(0, shape["vocab"], (1, length + 1), generator=generator).to(DEVICE)
    return [(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())]


@torch.no_grad()
def _fill(model: Any, local_experts: int) -> None:
    """Norms near one, everything else small random numbers; the whole tensor is drawn, and this rank's part taken."""
    from megatron.core import parallel_state as state

    first = state.get_expert_model_parallel_rank() * local_experts
    rank, size = state.get_tensor_model_parallel_rank(), state.get_tensor_model_parallel_world_size()
    for name, parameter in model.named_parameters():
        split = bool(getattr(parameter, "tensor_model_parallel", False)) and ".experts." not in name
        dimension = int(parameter.partition_dim) if split else 0
        whole = list(parameter.shape)
        if split:
            whole[dimension] *= size
        digest = hashlib.sha256(_global_name(plain_name(name), first).encode()).digest()
        generator = torch.Generator(device=DEVICE).manual_seed(int.from_bytes(digest[:6], "little"))
        value = torch.randn(whole, generator=generator, device=DEVICE)
        value = 1.0 + 0.1 * value if parameter.ndim == 1 else 0.02 * value
        parameter.copy_(value.chunk(size, dimension)[rank] if split else value)


def _global_name(name: str, first: int) -> str:
    """An expert's parameter under its number among all ranks' experts."""
    parts = name.split(".")
    if "local_experts" in parts:
        at = parts.index("local_experts") + 1
        parts[at] = str(int(parts[at]) + first)
    elif "experts" in parts and parts[-1].startswith("weight"):
        parts[-1] = f"weight{int(parts[-1].removeprefix('weight')) + first}"
    return ".".join(parts)


# What is read out of trainers.


def shards_of(trainer: Trainer) -> dict[str, tuple[int, torch.Tensor]]:
    """Parameter name to this rank's part of its FP32 master: where it begins, and its numbers, flat. The distributed
    optimizer cuts parameters over data-parallel ranks, and a rank may have nothing of one."""
    own = {id(parameter): name for name, parameter in trainer.attachment.placeholders.items()}
    names = {own.get(id(p), plain_name(name)): plain_name(name) for name, p in trainer.ddp.named_parameters()}
    found: dict[str, tuple[int, torch.Tensor]] = {}
    for name, master in trainer.attachment.masters().items():
        key, _, part = name.partition("@")
        found[names[key]] = (int(part.partition(":")[0] or 0), master.reshape(-1))
    return found


def stock_shards(trainer: Trainer) -> dict[str, tuple[int, torch.Tensor]]:
    """The same of unattached Megatron."""
    names = {id(p): plain_name(name) for name, p in trainer.ddp.named_parameters()}
    found: dict[str, tuple[int, torch.Tensor]] = {}
    for part in trainer.optimizer.chained_optimizers:
        for model, main in _pairs(part):
            cut = hasattr(part, "model_float16_groups")
            begin = int(part._get_model_param_range_map(model)["param"].start) if cut else 0
            found[names[id(model)]] = (begin, main.detach().reshape(-1))
    return found


def _pairs(part: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Model parameters and their FP32 masters in one of Megatron's optimizers."""
    if getattr(part, "is_stub_optimizer", False):
        return
    flat = hasattr(part, "model_float16_groups")
    models = part.model_float16_groups if flat else part.float16_groups
    mains = part.shard_fp32_from_float16_groups if flat else part.fp32_from_float16_groups
    for model_group, main_group in zip(models, mains, strict=True):
        yield from zip(model_group, main_group, strict=True)


def expert_tensors(trainer: Trainer) -> dict[str, torch.Tensor]:
    """The registered expert parameters of an attached trainer, by the names of their masters."""
    return {name: parameter.detach() for name, parameter in trainer.attachment.placeholders.items()}


def unlike_replicas(trainer: Trainer) -> list[str]:
    """Parameters of which ranks that should hold the same bytes do not: dense ones over data-parallel ranks, whole ones
    over tensor-parallel ranks too. Collective."""
    from megatron.core import parallel_state as state

    mine: dict[str, tuple[bool, str]] = {}
    for name, parameter in trainer.ddp.named_parameters():
        if ".experts." in name:
            continue
        data = parameter.detach().clone().view(torch.uint8).cpu().numpy().tobytes()  # numpy pins a storage
        whole = not bool(getattr(parameter, "tensor_model_parallel", False))
        mine[plain_name(name)] = (whole, hashlib.sha256(data).hexdigest())
    place = state.get_tensor_model_parallel_rank()
    gathered = gather((place, mine))
    return sorted(
        {
            name
            for other_place, other in gathered
            for name, (whole, digest) in other.items()
            if (whole or other_place == place) and mine[name][1] != digest
        }
    )
