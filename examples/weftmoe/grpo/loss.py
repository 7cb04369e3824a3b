"""The policy loss of a token, with DAPO's decoupled clipping, summed over tokens (DAPO, arXiv 2503.14476, eq. 8).

    ratio = exp(logp - old_logp)
    loss  = -w * min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A)

Token-level: a step divides the sum over all its trained tokens, on all ranks, by their number, so every token counts
the same in a long completion as in a short one. `w` is the importance weight of `correction`.
"""

from dataclasses import dataclass

import torch

from weftpub.errors import ConfigError

__all__ = ["LossSettings", "TokenLoss", "token_loss"]


@dataclass(frozen=True)
class LossSettings:
    """Clipping range of the probability ratio; `clip_high` above `clip_low` is DAPO's clip-higher."""

    clip_low: float = 0.2
    clip_high: float = 0.28

    def __post_init__(self) -> None:
        if not 0 < self.clip_low < 1 or not self.clip_high > 0:
            raise ConfigError(
                f"clip_low is {self.clip_low} and clip_high {self.clip_high}; expected 0 < clip_low < 1 and "
                "clip_high > 0"
            )


@dataclass(frozen=True)
class TokenLoss:
    """Loss of some tokens; tensors are of their shape.

    Attributes:
        values: float32, differentiable; the sum over tokens is what a step minimizes.
        clipped_low, clipped_high: bool, where clipping cut the gradient off: the ratio left the range on the side to
            which the advantage pushes.
    """

    values: torch.Tensor
    clipped_low: torch.Tensor
    clipped_high: torch.Tensor


def token_loss(
    logp: torch.Tensor, old_logp: torch.Tensor, advantages: torch.Tensor, weights: torch.Tensor, settings: LossSettings
) -> TokenLoss:
    """Losses of sampled tokens.

    Args:
        logp: log-probabilities by the weights being trained, with gradient.
        old_logp: by the weights before the step's first update; a constant.
        advantages: of each token's completion.
        weights: importance weights; constants.
    """
    shapes = {tuple(tensor.shape) for tensor in (logp, old_logp, advantages, weights)}
    if len(shapes) != 1:
        raise ConfigError(f"log-probs, advantages and weights must have one shape, found {sorted(shapes)}")
    advantages, weights = advantages.float(), weights.detach().float()
    ratio = (logp.float() - old_logp.detach().float()).exp()
    clipped = ratio.clamp(1 - settings.clip_low, 1 + settings.clip_high)
    values = -weights * torch.minimum(ratio * advantages, clipped * advantages)
    with torch.no_grad():
        low = (ratio < 1 - settings.clip_low) & (advantages < 0)
        high = (ratio > 1 + settings.clip_high) & (advantages > 0)
    return TokenLoss(values, low, high)
