"""Task rewards: a rule for each kind of question, and worker processes that may hang or die without harm."""

from weftmoe.reward.exact import exact_reward
from weftmoe.reward.pool import RewardPool, Verdict
from weftmoe.reward.rules import Rewarder, RewardJob

__all__ = ["RewardJob", "RewardPool", "Rewarder", "Verdict", "exact_reward"]
