"""Dynamic sampling (DAPO, arXiv 2503.14476, section 3.2): groups whose completions are all right or all wrong carry no
gradient and are replaced by further prompts, up to a limit of rounds.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from weftmoe.grpo.advantages import GroupRewards
from weftpub.errors import ConfigError

__all__ = ["DynamicSampling", "Selection", "select_groups"]


@dataclass(frozen=True)
class DynamicSampling:
    """The option's settings.

    Attributes:
        enabled: False keeps every group, informative or not.
        max_rounds: rollouts of one step, the first included; after the last the step goes on with what there is.
    """

    enabled: bool = False
    max_rounds: int = 4

    def __post_init__(self) -> None:
        if self.max_rounds < 1:
            raise ConfigError(f"dynamic sampling: max_rounds is {self.max_rounds}; at least one rollout is needed")


@dataclass(frozen=True)
class Selection:
    """What became of the groups that were sampled so far.

    Attributes:
        kept: indices of the groups to train on, in the order in which they were sampled.
        dropped: indices of groups without information.
        complete: whether the wanted number is there; if not, another round is due.
    """

    kept: tuple[int, ...]
    dropped: tuple[int, ...]
    complete: bool


def select_groups(groups: Sequence[GroupRewards], wanted: int, settings: DynamicSampling, round: int) -> Selection:
    """Choose the groups of a step.

    Args:
        groups: all sampled so far, over all rounds.
        wanted: groups that a step trains on.
        settings: the option.
        round: rounds sampled so far, from 1.
    """
    if not settings.enabled:
        return Selection(tuple(range(len(groups))), (), True)
    kept = [index for index, group in enumerate(groups) if group.informative]
    dropped = tuple(index for index, group in enumerate(groups) if not group.informative)
    complete = len(kept) >= wanted or round >= settings.max_rounds
    return Selection(tuple(kept[:wanted]), dropped, complete)
