"""One colocated step, in the order that keeps device memory with one side at a time:

rollout    the engine serves version k-1; the trainer's tags are offloaded
drain      the engine comes to rest, and releases its key/value cache and weights
train      the trainer reloads; updates; the staged step writes generation k
save       the trainer's state, if due: before the publish, so that a checkpoint never lags behind what is served
publish    gradients and slots are released; weights travel, are verified, committed as version k
continue   the trainer's weights are offloaded, the key/value cache comes back, the engine serves version k
"""

import hashlib
import math
import random
import struct
from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import dataclass

import torch

from weftmoe.grpo import PromptSums, Sequence, SequenceSums, StepStatistics, prompt_sums, summarize
from weftmoe.loop.collect import Collected
from weftmoe.loop.optimizer import learning_rate
from weftmoe.loop.ranks import Ranks
from weftmoe.loop.trainer import MegatronGrpo
from weftmoe.rollout import Published, Rollout
from weftmoe.schema import Settings
from weftmoe.telemetry import Timers

__all__ = ["FixedTokens", "Trained", "publish_version", "train_step"]


@dataclass(frozen=True)
class Trained:
    """What the train phase did, over all ranks.

    Attributes:
        before, after: statistics against the rollout by the weights before and after; `after` None if not measured.
        prompts: sums of `before` by prompt, in the order of the batch.
        grad_norm: of the last update.
        learning_rate: of the step.
        updates: optimizer updates.
    """

    before: StepStatistics
    after: StepStatistics | None
    prompts: tuple[PromptSums, ...]
    grad_norm: float
    learning_rate: float
    updates: int


def train_step(
    settings: Settings,
    trainer: MegatronGrpo,
    sequences: Many[Sequence],
    step: int,
    ranks: Ranks,
    timers: Timers,
    *,
    measure_after: bool,
    advance: Callable[[int], None] = lambda count: None,
) -> Trained:
    """All updates of a step. The trainer's memory is loaded; collective. Phase "train" is the updates alone; passes
    that train nothing are phases of their own, "score" before the updates and "measure" after them.

    With one update a step, the log-probabilities that clipping and correction start from are those of the training
    pass itself. With several, they are scored once before the first, so that all updates share them.
    """
    algorithm = settings.algorithm
    rate = learning_rate(settings.optimizer, step)
    parts = algorithm.epochs * algorithm.minibatches
    old = None
    if parts > 1:
        with timers.phase("score"):
            old = _all_scores(trainer.score(sequences), ranks)
    before: list[tuple[SequenceSums, ...]] = []
    norm = math.nan
    with timers.phase("train"):
        for epoch in range(algorithm.epochs):
            for minibatch in _minibatches(
                sequences, algorithm.minibatches, algorithm.completions, (settings.seed, step, epoch)
            ):
                update = trainer.update(minibatch, old, lr=rate)
                norm = update.grad_norm
                before.append(update.sums)
                advance(1)
    after = None
    if measure_after:
        with timers.phase("measure"):
            after = summarize(_over_ranks([trainer.compare(sequences)], ranks), algorithm.completions)
    sums = _over_ranks(before, ranks)
    prompts = prompt_sums(sums, algorithm.completions)
    return Trained(summarize(sums, algorithm.completions), after, prompts, norm, rate, len(before))


def publish_version(trainer: MegatronGrpo, rollout: Rollout, version: int, timers: Timers) -> Published:
    """From loaded weights of the trainer to an engine that serves them; collective."""
    trainer.offload("optimizer", "gradients")
    with timers.phase("publish"), trainer.sources() as sources:
        published = rollout.publish(version, sources.tensors, sources.checksums)
        del sources  # tensors that were made for it are freed before the weights leave
    with timers.phase("offload"):
        trainer.offload("weights")
    with timers.phase("resume"):
        rollout.resume()
        rollout.continue_()
    return published


class FixedTokens:
    """Scores the same tokens after every publish: with learning rate 0 the results must be the same bits.

    Args:
        sequences: (tokens, first), those from position `first` on are scored.
    """

    def __init__(self, sequences: Many[tuple[tuple[int, ...], int]]) -> None:
        self.sequences = tuple(sequences)

    @classmethod
    def of(cls, collected: Collected, count: int = 8) -> "FixedTokens":
        """Some completions of a step, those of its first."""
        chosen = collected.sequences[:: max(1, len(collected.sequences) // count)][:count]
        return cls([(s.tokens, s.prompt) for s in chosen])

    def digest(self, rollout: Rollout) -> str:
        """SHA-256 over the bits of all log-probabilities, as the engine gives them now."""
        scores = rollout.score(self.sequences)
        values = [value for sequence in scores for value in sequence]
        return hashlib.sha256(struct.pack(f"<{len(values)}d", *values)).hexdigest()


def _minibatches(sequences: Many[Sequence], parts: int, group: int, seed: tuple[int, ...]) -> list[list[Sequence]]:
    """Whole groups, shuffled if there are several parts; each part in batch order. Fewer groups than wanted, as dynamic
    sampling may leave, can make fewer parts.
    """
    if parts == 1:
        return [list(sequences)]
    groups = [list(sequences[first : first + group]) for first in range(0, len(sequences), group)]
    random.Random("/".join(map(str, seed))).shuffle(groups)
    size = -(-len(groups) // parts)
    cut = [groups[first : first + size] for first in range(0, len(groups), size)]
    return [sorted((s for one in part for s in one), key=lambda s: s.index) for part in cut]


def _all_scores(mine: dict[int, torch.Tensor], ranks: Ranks) -> dict[int, torch.Tensor]:
    """Every rank's scores: minibatches are dealt anew, so a rank may train what another one scored."""
    found: dict[int, torch.Tensor] = {}
    for part in ranks.gather(mine):
        found.update(part)
    return found


def _over_ranks(passes: Many[Many[SequenceSums]], ranks: Ranks) -> list[SequenceSums]:
    """The sums of all ranks and passes. Within a pass tensor-parallel ranks have the same sequences, which count
    once. A sequence that was trained in several passes counts in each, whichever ranks it was dealt to.
    """
    gathered: list[list[list[SequenceSums]]] = ranks.gather([list(sums) for sums in passes])
    found: dict[tuple[int, int], SequenceSums] = {}
    for rank in gathered:
        for number, sums in enumerate(rank):
            for one in sums:
                found.setdefault((number, one.index), one)
    return list(found.values())
