"""Advantages of a group of completions of one prompt: how much better than its siblings each one is.

Formula (GRPO, arXiv 2402.03300, eq. 5): ``A_i = (r_i - mean(r)) / (std(r) + eps)``, with the population's standard
deviation over the group. A group whose rewards are all equal says nothing: its advantages are exactly zero.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from weftpub.errors import ConfigError

__all__ = ["GroupRewards", "group_advantages"]


@dataclass(frozen=True)
class GroupRewards:
    """One group after normalization.

    Attributes:
        mean, std: of the rewards; the population's standard deviation.
        advantages: one per completion, in the order of the rewards.
    """

    mean: float
    std: float
    advantages: tuple[float, ...]

    @property
    def informative(self) -> bool:
        """Whether the completions differ in reward at all."""
        return self.std > 0.0


def group_advantages(rewards: Sequence[float], *, normalize_std: bool = True, epsilon: float = 1e-6) -> GroupRewards:
    """Normalize the rewards of one group.

    Sums are `math.fsum`, which rounds once: the result does not depend on the order of the completions.

    Args:
        rewards: finite, one per completion.
        normalize_std: divide by the standard deviation; False leaves ``r - mean`` (Dr. GRPO, arXiv 2503.20783).
        epsilon: added to the standard deviation.

    Raises:
        ConfigError: the group is empty or a reward is not finite.
    """
    count = len(rewards)
    if count == 0:
        raise ConfigError("a group needs at least one completion; found none")
    wrong = [index for index, reward in enumerate(rewards) if not math.isfinite(reward)]
    if wrong:
        raise ConfigError(f"reward {wrong[0]} of the group is {rewards[wrong[0]]}; rewards must be finite numbers")
    if all(reward == rewards[0] for reward in rewards):
        # Not computed: mean and deviation of equal numbers may be off by an ulp, which epsilon would blow up.
        return GroupRewards(float(rewards[0]), 0.0, (0.0,) * count)
    mean = math.fsum(rewards) / count
    std = math.sqrt(math.fsum((reward - mean) ** 2 for reward in rewards) / count)
    scale = std + epsilon if normalize_std else 1.0
    return GroupRewards(mean, std, tuple((reward - mean) / scale for reward in rewards))
