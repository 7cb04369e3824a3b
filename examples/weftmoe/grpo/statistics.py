"""What a step's record says about its tokens: differences of log-probabilities, KL estimates, clipped and rejected
tokens.

All in float64 with one order of summation, whatever the packing and the number of ranks: every sequence is summed on
its own, from its first token to its last, and the sequences' sums are joined by `math.fsum`, which rounds once and
knows no order. Replaying an identical batch therefore gives bit-identical statistics.

With ``d = logp_trainer - logp_rollout`` of tokens that the rollout sampled, the mean of ``exp(d) - 1 - d`` estimates
``KL(rollout || trainer)`` without bias and never below zero (estimator k3 of joschu.net/blog/kl-approx.html), and the
mean of ``-d`` does so with more noise (k1).
"""

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass

import numpy as np
import torch

__all__ = ["SequenceSums", "StepStatistics", "sequence_sums", "summarize"]


@dataclass(frozen=True)
class SequenceSums:
    """Sums over one completion's tokens, float64; plain numbers, so ranks can exchange them.

    Attributes:
        index: of the sequence in the step's batch.
        tokens: trained tokens.
        difference, absolute, squared: sums of d, |d| and d * d, where ``d = trainer - rollout``.
        largest: greatest |d|.
        kl: sum of exp(d) - 1 - d.
        loss: sum of the token losses.
        clipped_low, clipped_high, truncated, rejected: numbers of tokens.
    """

    index: int
    tokens: int
    difference: float
    absolute: float
    squared: float
    largest: float
    kl: float
    loss: float = 0.0
    clipped_low: int = 0
    clipped_high: int = 0
    truncated: int = 0
    rejected: int = 0

    def plain(self) -> dict[str, float]:
        """As JSON-ready values."""
        return asdict(self)


@dataclass(frozen=True)
class StepStatistics:
    """Over all trained tokens of a step; means are per token.

    Attributes:
        tokens, sequences: how many.
        difference_mean, difference_abs_mean, difference_std, difference_abs_max: of ``d = trainer - rollout``.
        kl: mean of exp(d) - 1 - d, an estimate of KL(rollout || trainer) in nats.
        kl_error: its standard error, completions being what is drawn; 0 for fewer than two.
        kl_k1: mean of -d.
        loss: mean token loss.
        clip_low_fraction, clip_high_fraction, truncated_fraction: shares of tokens.
        truncated_tokens, rejected_tokens: numbers of tokens.
    """

    tokens: int
    sequences: int
    difference_mean: float
    difference_abs_mean: float
    difference_std: float
    difference_abs_max: float
    kl: float
    kl_error: float
    kl_k1: float
    loss: float
    clip_low_fraction: float
    clip_high_fraction: float
    truncated_fraction: float
    truncated_tokens: int
    rejected_tokens: int

    def plain(self) -> dict[str, float]:
        """As JSON-ready values."""
        return asdict(self)


def sequence_sums(
    index: int,
    trainer: torch.Tensor,
    rollout: torch.Tensor,
    *,
    loss: torch.Tensor | None = None,
    clipped_low: torch.Tensor | None = None,
    clipped_high: torch.Tensor | None = None,
    truncated: torch.Tensor | None = None,
    rejected: torch.Tensor | None = None,
) -> SequenceSums:
    """Sum one completion.

    Args:
        index: of the sequence.
        trainer, rollout: log-probabilities ``[tokens]`` of any float dtype and device.
        loss: token losses.
        clipped_low, clipped_high, truncated, rejected: bool masks.
    """
    d = _host(trainer) - _host(rollout)
    return SequenceSums(
        index=index,
        tokens=len(d),
        difference=_sum(d),
        absolute=_sum(np.abs(d)),
        squared=_sum(d * d),
        largest=float(np.abs(d).max(initial=0.0)),
        kl=_sum(np.expm1(d) - d),
        loss=0.0 if loss is None else _sum(_host(loss)),
        clipped_low=_count(clipped_low),
        clipped_high=_count(clipped_high),
        truncated=_count(truncated),
        rejected=_count(rejected),
    )


def summarize(sums: Iterable[SequenceSums]) -> StepStatistics:
    """Join the sums of all sequences of a step, in whatever order they arrive."""
    ordered = sorted(sums, key=lambda one: one.index)
    tokens = sum(one.tokens for one in ordered)
    divisor = max(tokens, 1)

    def mean(name: str) -> float:
        return math.fsum(getattr(one, name) for one in ordered) / divisor

    def count(name: str) -> int:
        return sum(getattr(one, name) for one in ordered)

    difference = mean("difference")
    return StepStatistics(
        tokens=tokens,
        sequences=len(ordered),
        difference_mean=difference,
        difference_abs_mean=mean("absolute"),
        difference_std=math.sqrt(max(0.0, mean("squared") - difference * difference)),
        difference_abs_max=max((one.largest for one in ordered), default=0.0),
        kl=mean("kl"),
        kl_error=_ratio_error([one.kl for one in ordered], [one.tokens for one in ordered]),
        kl_k1=-difference,
        loss=mean("loss"),
        clip_low_fraction=count("clipped_low") / divisor,
        clip_high_fraction=count("clipped_high") / divisor,
        truncated_fraction=count("truncated") / divisor,
        truncated_tokens=count("truncated"),
        rejected_tokens=count("rejected"),
    )


def _ratio_error(sums: list[float], counts: list[int]) -> float:
    """Standard error of ``sum(sums) / sum(counts)``, a ratio estimator whose draws are the pairs (W. G. Cochran,
    Sampling Techniques, 3rd edition, formula 6.13, without the correction for a finite population).
    """
    draws, total = len(sums), sum(counts)
    if draws < 2 or not total:
        return 0.0
    mean = math.fsum(sums) / total
    squares = math.fsum((s - mean * n) ** 2 for s, n in zip(sums, counts, strict=True))
    return math.sqrt(draws / (draws - 1) * squares) / total


def _host(values: torch.Tensor) -> np.ndarray:
    return values.detach().to("cpu", torch.float64).numpy()


def _sum(values: np.ndarray) -> float:
    # A running sum: numpy's own `sum` groups terms by the processor's vector width.
    return float(np.cumsum(values)[-1]) if len(values) else 0.0


def _count(mask: torch.Tensor | None) -> int:
    return 0 if mask is None else int(mask.sum())
