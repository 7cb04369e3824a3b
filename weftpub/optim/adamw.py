"""Staged AdamW: the arithmetic of ``torch.optim.AdamW(foreach=False)``, operator by operator.

Per parameter, t counting from 1::

    W <- W * (1 - lr * weight_decay)
    m <- lerp(m, g, 1 - beta1)
    v <- beta2 * v + (1 - beta2) * g * g
    W <- W - lr / (1 - beta1^t) * m / (sqrt(v) / sqrt(1 - beta2^t) + eps)

Results agree bit for bit with PyTorch's single-tensor AdamW on the same device. Its foreach and fused variants group
the same formula differently on a GPU, and differ from it (and from this) in last bits.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch

from weftpub.errors import ConfigError
from weftpub.optim.base import Hyperparameters, MasterStep, StagedOptimizer, require_number
from weftpub.staging import StagedMaster

__all__ = ["AdamWHyperparameters", "StagedAdamW", "adamw_update_"]


@dataclass(frozen=True, kw_only=True)
class AdamWHyperparameters(Hyperparameters):
    """Defaults of ``torch.optim.AdamW``.

    Attributes:
        lr: learning rate.
        beta1: decay of the first moment.
        beta2: decay of the second moment.
        eps: added to the root of the bias-corrected second moment; above 0.
        weight_decay: decoupled decay coefficient.
    """

    lr: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8

    def __post_init__(self) -> None:
        super().__post_init__()
        require_number("beta1", self.beta1, below=1.0)
        require_number("beta2", self.beta2, below=1.0)
        if require_number("eps", self.eps) == 0.0:
            raise ConfigError("eps must be above 0: an element whose gradient was always zero would become 0 / 0 = NaN")


class StagedAdamW(StagedOptimizer[AdamWHyperparameters]):
    """AdamW on FP32 masters in host memory: matrices, 1-D and scalar parameters."""

    KIND: ClassVar[str] = "adamw"
    STATES: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq")

    def run_one(self, staged: StagedMaster, gradient: torch.Tensor, settings: MasterStep) -> None:
        adamw_update_(
            staged.weight,
            staged.state["exp_avg"],
            staged.state["exp_avg_sq"],
            gradient,
            self.hyperparameters,
            lr=settings.lr,
            weight_decay=settings.weight_decay,
            step=settings.step,
        )


def adamw_update_(
    weight: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    gradient: torch.Tensor,
    hyperparameters: AdamWHyperparameters,
    *,
    lr: float,
    weight_decay: float,
    step: int,
) -> None:
    """One AdamW update in place of ``weight``, ``exp_avg`` and ``exp_avg_sq``; all FP32, of one shape, on one device.

    ``lr`` and ``weight_decay`` are those of this parameter and step; ``step`` counts from 1.
    """
    h = hyperparameters
    if weight_decay != 0.0:
        weight.mul_(1 - lr * weight_decay)
    exp_avg.lerp_(gradient, 1 - h.beta1)
    exp_avg_sq.mul_(h.beta2).addcmul_(gradient, gradient, value=1 - h.beta2)
    step_size = lr / (1 - h.beta1**step)
    root = (1 - h.beta2**step) ** 0.5
    denominator = (exp_avg_sq.sqrt() / root).add_(h.eps)
    weight.addcdiv_(exp_avg, denominator, value=-step_size)
