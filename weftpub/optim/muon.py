"""Staged Muon: momentum orthogonalized by Newton-Schulz, in the arithmetic of Megatron-core's ``TensorParallelMuon``.

Per matrix, with emerging-optimizers 0.3.0's operators in its order (decay, momentum, Nesterov, orthogonalize, add)::

    W <- W - lr * weight_decay * W                          ("decoupled"; the other methods below)
    m <- lerp(m, g, 1 - momentum)
    d <- lerp(g, m, momentum) if nesterov else m
    W <- W - lr * scale(shape) * extra_scale_factor * newton_schulz(d)

fc1 [gate; up] is one matrix, as in Megatron-core. Without tensor parallelism the results agree bit for bit with
``emerging_optimizers`` on the same device.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from weftpub.errors import ConfigError
from weftpub.masters import MasterSet, format_names
from weftpub.optim.base import Hyperparameters, MasterStep, StagedOptimizer, require_number
from weftpub.optim.newton_schulz import COEFFICIENTS, SCALE_MODES, MatmulPrecision, newton_schulz, scale_factor
from weftpub.staging import StagedMaster

__all__ = ["MuonHyperparameters", "StagedMuon", "WeightDecayMethod", "muon_update_"]

WeightDecayMethod = Literal["decoupled", "independent", "l2", "palm"]

_CHOICES: dict[str, tuple[str, ...]] = {
    "weight_decay_method": ("decoupled", "independent", "l2", "palm"),
    "fp32_matmul_prec": ("medium", "high", "highest"),
    "coefficient_type": tuple(COEFFICIENTS),
    "scale_mode": SCALE_MODES,
}


@dataclass(frozen=True, kw_only=True)
class MuonHyperparameters(Hyperparameters):
    """Names and defaults of emerging-optimizers' ``Muon``; ``nesterov`` is off there and in Megatron's config.

    Attributes:
        lr: learning rate.
        momentum: share of the old momentum that stays.
        weight_decay: decay coefficient.
        nesterov: orthogonalize ``lerp(g, m, momentum)`` instead of the momentum.
        weight_decay_method: "decoupled" W -= lr * wd * W; "independent" W -= wd * W; "palm" W -= lr^2 * wd * W;
            "l2" adds wd * W to the gradient.
        fp32_matmul_prec: "medium" runs Newton-Schulz in BF16, "high" and "highest" in FP32.
        coefficient_type: a key of :data:`weftpub.optim.newton_schulz.COEFFICIENTS`.
        num_ns_steps: Newton-Schulz iterations.
        scale_mode: see :func:`weftpub.optim.newton_schulz.scale_factor`.
        extra_scale_factor: multiplies the update further (0.2 matches AdamW's update size, arXiv:2502.16982).
    """

    lr: float = 3e-4
    momentum: float = 0.95
    nesterov: bool = False
    weight_decay_method: WeightDecayMethod = "decoupled"
    fp32_matmul_prec: MatmulPrecision = "medium"
    coefficient_type: str = "quintic"
    num_ns_steps: int = 5
    scale_mode: str = "spectral"
    extra_scale_factor: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        require_number("momentum", self.momentum, below=1.0)
        require_number("extra_scale_factor", self.extra_scale_factor)
        if self.num_ns_steps < 1:
            raise ConfigError(f"num_ns_steps must be at least 1, got {self.num_ns_steps}")
        for setting, choices in _CHOICES.items():
            if getattr(self, setting) not in choices:
                raise ConfigError(
                    f"{setting}={getattr(self, setting)!r} is unknown; choose one of {', '.join(choices)}"
                )


class StagedMuon(StagedOptimizer[MuonHyperparameters]):
    """Muon on FP32 masters in host memory. Takes matrices only: 1-D and scalar parameters go to a StagedAdamW."""

    KIND: ClassVar[str] = "muon"
    STATES: ClassVar[tuple[str, ...]] = ("momentum_buffer",)

    def check_masters(self, masters: MasterSet) -> None:
        super().check_masters(masters)
        vectors = [
            name for name, master in masters.items() if len(master.layout.shape) != 2 or 1 in master.layout.shape
        ]
        if vectors:
            raise ConfigError(
                f"Muon orthogonalizes matrices, and these are vectors or scalars: {format_names(vectors)}; "
                "give them to a StagedAdamW"
            )

    def run_one(self, staged: StagedMaster, gradient: torch.Tensor, settings: MasterStep) -> None:
        muon_update_(
            staged.weight,
            staged.state["momentum_buffer"],
            gradient,
            self.hyperparameters,
            lr=settings.lr,
            weight_decay=settings.weight_decay,
        )


def muon_update_(
    weight: torch.Tensor,
    momentum_buffer: torch.Tensor,
    gradient: torch.Tensor,
    hyperparameters: MuonHyperparameters,
    *,
    lr: float,
    weight_decay: float,
) -> None:
    """One Muon update in place of ``weight`` and ``momentum_buffer``; all FP32 ``[M, N]`` on one device.

    ``lr`` and ``weight_decay`` are those of this matrix and step, and go before those of ``hyperparameters``.
    """
    h = hyperparameters
    gradient = _decay_(weight, gradient, h.weight_decay_method, lr, weight_decay)
    momentum_buffer.lerp_(gradient, 1 - h.momentum)
    direction = gradient.lerp(momentum_buffer, h.momentum) if h.nesterov else momentum_buffer
    update = newton_schulz(
        direction, steps=h.num_ns_steps, coefficients=h.coefficient_type, precision=h.fp32_matmul_prec
    )
    update = update * scale_factor(weight.size(0), weight.size(1), h.scale_mode)
    if h.extra_scale_factor != 1.0:
        update = update * h.extra_scale_factor
    weight.add_(update, alpha=-lr)


def _decay_(
    weight: torch.Tensor, gradient: torch.Tensor, method: WeightDecayMethod, lr: float, weight_decay: float
) -> torch.Tensor:
    """Decays the weight in place, or returns a gradient that holds the decay ("l2")."""
    if weight_decay == 0.0:
        return gradient
    if method == "l2":
        return gradient.add(weight, alpha=weight_decay)
    factor = {"decoupled": -weight_decay * lr, "independent": -weight_decay, "palm": -(weight_decay * lr * lr)}[method]
    weight.add_(weight, alpha=factor)
    return gradient
