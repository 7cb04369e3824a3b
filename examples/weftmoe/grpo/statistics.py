"""What a step's record says about its tokens: differences of log-probabilities, KL estimates, clipped and rejected
tokens.

All in float64 with one order of summation, whatever the packing and the number of ranks: every sequence is summed on
its own, from its first token to its last, and the sequences' sums are joined by `math.fsum`, which rounds once and
knows no order. Replaying an identical batch therefore gives bit-identical statistics.

With ``d = logp_trainer - logp_rollout`` of tokens that the rollout sampled, the mean of ``exp(d) - 1 - d`` estimates
``KL(rollout || trainer)`` without bias and never below zero (estimator k3 of joschu.net/blog/kl-approx.html), and the
mean of ``-d`` does so with more noise (k1).

What is drawn are prompts. Completions of one prompt begin with the same tokens in the same context, with the same
decision of the router: a thousand of them tell little more about those than one. Standard errors and covariances are
therefore those of a ratio estimator whose draws are prompts, each with the sums over all of its completions (W. G.
Cochran, Sampling Techniques, 3rd edition, formula 6.13, without the correction for a finite population).
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

import numpy as np
import torch

from weftpub.errors import ConfigError

__all__ = [
    "PromptSums",
    "SequenceSums",
    "StepStatistics",
    "kl_covariance",
    "prompt_sums",
    "sequence_sums",
    "summarize",
]


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
class PromptSums:
    """Sums over the trained tokens of all completions of one prompt, in all passes of a step.

    Attributes:
        kl: sum of exp(d) - 1 - d.
        tokens: trained tokens.
    """

    kl: float
    tokens: int


@dataclass(frozen=True)
class StepStatistics:
    """Over all trained tokens of a step; means are per token.

    Attributes:
        tokens, sequences: how many.
        difference_mean, difference_abs_mean, difference_std, difference_abs_max: of ``d = trainer - rollout``.
        kl: mean of exp(d) - 1 - d, an estimate of KL(rollout || trainer) in nats.
        kl_error: its standard error, prompts being what is drawn; 0 for fewer than two.
        kl_k1: mean of -d.
        loss: mean token loss, every token alike also where `algorithm.loss` is "sequence".
        clip_low_fraction, clip_high_fraction: shares of tokens whose ratio left the range on the side to which their
            advantage pushes, so that clipping cut their gradient off.
        truncated_fraction: share of tokens whose importance weight was capped.
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


def prompt_sums(sums: Iterable[SequenceSums], completions: int) -> tuple[PromptSums, ...]:
    """Join the sums of each prompt's completions, in the order of the batch.

    Args:
        sums: of all sequences of a step, in whatever order; one that was trained in several passes has several.
        completions: of each prompt; they stand one after the other in the batch.
    """
    prompts: dict[int, list[SequenceSums]] = {}
    for one in sums:
        prompts.setdefault(one.index // completions, []).append(one)
    return tuple(
        PromptSums(math.fsum(one.kl for one in prompts[number]), sum(one.tokens for one in prompts[number]))
        for number in sorted(prompts)
    )


def summarize(sums: Iterable[SequenceSums], completions: int) -> StepStatistics:
    """Join the sums of all sequences of a step, in whatever order they arrive; `completions` of each prompt stand one
    after the other in the batch.
    """
    ordered = sorted(sums, key=lambda one: one.index)
    prompts = prompt_sums(ordered, completions)
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
        kl_error=math.sqrt(kl_covariance(prompts, prompts) or 0.0),
        kl_k1=-difference,
        loss=mean("loss"),
        clip_low_fraction=count("clipped_low") / divisor,
        clip_high_fraction=count("clipped_high") / divisor,
        truncated_fraction=count("truncated") / divisor,
        truncated_tokens=count("truncated"),
        rejected_tokens=count("rejected"),
    )


def kl_covariance(first: Sequence[PromptSums], second: Sequence[PromptSums]) -> float | None:
    """Covariance of two steps' mean KL a token, both measured with the same prompts; of one step with itself, the
    variance of its mean. In nats squared.

    Args:
        first, second: by prompt, in one order.

    Returns:
        None for fewer than two prompts or no tokens, from which nothing can be estimated.

    Raises:
        ConfigError: the steps have other numbers of prompts.
    """
    if len(first) != len(second):
        raise ConfigError(
            f"{len(first)} prompts in one step and {len(second)} in the other: a covariance is of the same prompts"
        )
    here, there = _deviations(first), _deviations(second)
    if here is None or there is None:
        return None
    draws = len(first)
    return draws / (draws - 1) * math.fsum(a * b for a, b in zip(here, there, strict=True))


def _deviations(prompts: Sequence[PromptSums]) -> list[float] | None:
    """What each prompt adds to the mean over tokens: they sum to zero."""
    tokens = sum(one.tokens for one in prompts)
    if len(prompts) < 2 or not tokens:
        return None
    mean = math.fsum(one.kl for one in prompts) / tokens
    return [(one.kl - mean * one.tokens) / tokens for one in prompts]


def _host(values: torch.Tensor) -> np.ndarray:
    return values.detach().to("cpu", torch.float64).numpy()


def _sum(values: np.ndarray) -> float:
    # A running sum: numpy's own `sum` groups terms by the processor's vector width.
    return float(np.cumsum(values)[-1]) if len(values) else 0.0


def _count(mask: torch.Tensor | None) -> int:
    return 0 if mask is None else int(mask.sum())
