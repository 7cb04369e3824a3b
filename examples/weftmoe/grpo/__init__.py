"""Group-relative policy optimization: advantages, off-policy correction, loss, packing and statistics.

Pure functions of tensors and numbers; they know neither Megatron nor an engine, and need no GPU.
"""

from weftmoe.grpo.advantages import GroupRewards, group_advantages
from weftmoe.grpo.correction import Correction, CorrectionSettings, correct
from weftmoe.grpo.loss import LossSettings, TokenLoss, token_loss
from weftmoe.grpo.objective import batch_loss, token_weights
from weftmoe.grpo.packing import Layout, Microbatch, Sequence, deal, microbatches
from weftmoe.grpo.selection import DynamicSampling, Selection, select_groups
from weftmoe.grpo.statistics import (
    PromptSums,
    SequenceSums,
    StepStatistics,
    kl_covariance,
    prompt_sums,
    sequence_sums,
    summarize,
)

__all__ = [
    "Correction",
    "CorrectionSettings",
    "DynamicSampling",
    "GroupRewards",
    "Layout",
    "LossSettings",
    "Microbatch",
    "PromptSums",
    "Selection",
    "Sequence",
    "SequenceSums",
    "StepStatistics",
    "TokenLoss",
    "batch_loss",
    "correct",
    "deal",
    "group_advantages",
    "kl_covariance",
    "microbatches",
    "prompt_sums",
    "select_groups",
    "sequence_sums",
    "summarize",
    "token_loss",
    "token_weights",
]
