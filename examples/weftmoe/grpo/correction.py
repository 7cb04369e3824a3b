"""Truncated importance sampling: the engine that sampled and the trainer that learns give one token two probabilities.

Weight of a token: ``w = min(p_trainer / p_rollout, cap)`` (arXiv 2508.02521 describes the problem; the truncation is
that of IMPALA, arXiv 1802.01561). The weight is a constant of the loss: no gradient flows through it. Tokens whose
ratio lies outside ``[reject_below, reject_above]`` are rejected, that is trained with weight zero, and counted.
"""

import math
from dataclasses import dataclass

import torch

from weftpub.errors import ConfigError

__all__ = ["Correction", "CorrectionSettings", "correct"]


@dataclass(frozen=True)
class CorrectionSettings:
    """How far trainer and rollout may differ.

    Attributes:
        enabled: False gives every token weight one, and no token counts as truncated or rejected.
        cap: largest weight.
        reject_below, reject_above: ratios outside are rejected; the defaults reject nothing.
    """

    enabled: bool = True
    cap: float = 2.0
    reject_below: float = 0.0
    reject_above: float = math.inf

    def __post_init__(self) -> None:
        if not self.cap > 0 or not 0 <= self.reject_below < self.reject_above:
            raise ConfigError(
                f"importance sampling: cap {self.cap} must be above 0 and reject_below {self.reject_below} from 0 and "
                f"below reject_above {self.reject_above}"
            )


@dataclass(frozen=True)
class Correction:
    """Weights of some tokens; all tensors are of the shape of the log-probabilities.

    Attributes:
        weights: float32, no gradient.
        truncated, rejected: bool, which tokens hit the cap, and which do not train.
    """

    weights: torch.Tensor
    truncated: torch.Tensor
    rejected: torch.Tensor


@torch.no_grad()
def correct(trainer: torch.Tensor, rollout: torch.Tensor, settings: CorrectionSettings) -> Correction:
    """Weights from the log-probabilities of the sampled tokens.

    Args:
        trainer: by the trainer's weights of the same version, before the update; any float dtype.
        rollout: as the engine reported them; same shape.
    """
    if trainer.shape != rollout.shape:
        raise ConfigError(f"trainer log-probs {list(trainer.shape)} and rollout log-probs {list(rollout.shape)} differ")
    ratio = (trainer.float() - rollout.float()).exp()
    ones = torch.ones_like(ratio)
    if not settings.enabled:
        none = torch.zeros_like(ratio, dtype=torch.bool)
        return Correction(ones, none, none)
    rejected = (ratio < settings.reject_below) | (ratio > settings.reject_above) | ~ratio.isfinite()
    truncated = (ratio > settings.cap) & ~rejected
    weights = torch.where(rejected, torch.zeros_like(ratio), ratio.clamp(max=settings.cap))
    return Correction(weights, truncated, rejected)
