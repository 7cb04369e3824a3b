"""The optimizer settings of Megatron-core for each variant and update rule, and the learning rate of a step."""

from collections.abc import Iterable
from typing import Any

import torch

from weftmoe.schema import Optimizer, Settings

__all__ = ["learning_rate", "optimizer_copies", "optimizer_fields", "set_groups", "uses_flat_buffers"]

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def uses_flat_buffers(settings: Settings) -> bool:
    """Whether Megatron's DistributedOptimizer is used: AdamW needs it, Muon needs whole matrices."""
    return settings.optimizer.name == "adamw"


def optimizer_copies(settings: Settings) -> int:
    """Instances of Megatron's DistributedOptimizer. One deals all that it updates out over data-parallel ranks, over
    replicas of an expert, too; FP8 experts are written whole, so each of their replicas has an instance.
    """
    if settings.variant != "fp8" or not uses_flat_buffers(settings):
        return 1
    return settings.cluster.world // (settings.train.expert * settings.train.expert_tensor)


def optimizer_fields(settings: Settings) -> dict[str, Any]:
    """Arguments of Megatron's OptimizerConfig."""
    chosen, flat = settings.optimizer, uses_flat_buffers(settings)
    fields: dict[str, Any] = {
        "optimizer": "adam" if flat else "muon",
        "lr": chosen.lr,
        "min_lr": 0.0,
        "weight_decay": chosen.weight_decay,
        "clip_grad": chosen.clip_grad,
        "adam_beta1": chosen.adam_beta1,
        "adam_beta2": chosen.adam_beta2,
        "adam_eps": chosen.adam_eps,
        "bf16": True,
        "params_dtype": torch.bfloat16,
        "use_distributed_optimizer": flat,
    }
    if not flat:
        return fields | {
            "muon_momentum": chosen.muon_momentum,
            "muon_nesterov": chosen.muon_nesterov,
            "muon_scale_mode": chosen.muon_scale_mode,
            "muon_num_ns_steps": chosen.muon_num_ns_steps,
        }
    # Megatron's HybridDeviceOptimizer knows only parameters on a GPU; without one there is nothing to offload.
    if settings.variant != "baseline" or (chosen.cpu_offload and settings.cluster.gpus):
        fields |= {
            "use_precision_aware_optimizer": True,
            "optimizer_cpu_offload": True,
            "optimizer_offload_fraction": 1.0,
            "exp_avg_dtype": _DTYPES[chosen.exp_avg_dtype],
            "exp_avg_sq_dtype": _DTYPES[chosen.exp_avg_sq_dtype],
        }
    return fields


def learning_rate(optimizer: Optimizer, step: int) -> float:
    """Of a step, counted from 1: rises linearly over the warm-up steps, then stays."""
    if step < optimizer.warmup_steps:
        return optimizer.lr * step / optimizer.warmup_steps
    return optimizer.lr


def set_groups(groups: Iterable[dict[str, Any]], *, lr: float, weight_decay: float) -> None:
    """Give parameter groups the rate and the decay of the next update, each times the group's own factor.

    Megatron builds every group with the whole decay and only notes the factor (0 for vectors and biases, such as the
    weights of norms); applying it is left to its scheduler, which this loop does not use.
    """
    for group in groups:
        group["lr"] = lr * group.get("lr_mult", 1.0)
        group["weight_decay"] = weight_decay * group.get("wd_mult", 1.0)
