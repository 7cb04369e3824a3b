"""The rollout phase: prompts drawn, completions sampled and judged, advantages given; the step's training data.

Only rank 0 runs it. Prompts, and seeds of completions, follow from the run's seed, the step, the round and the place in
it: a resumed run draws the same prompts as an unbroken one, and the same completions where the engine minds the seeds,
as the torch sampler always does, and SGLang with `train.deterministic`. Without that, SGLang draws others.
"""

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Container
from dataclasses import dataclass
from typing import Any

from weftmoe.data import PromptSampler
from weftmoe.grpo import DynamicSampling, GroupRewards, Sequence, group_advantages, select_groups
from weftmoe.loop.prompts import EncodedPrompt
from weftmoe.reward import Rewarder, RewardJob
from weftmoe.rollout import Request, Rollout, Sample, require_spans
from weftmoe.schema import Settings
from weftmoe.telemetry import Timers
from weftpub.errors import StateError

__all__ = ["Collected", "Collector"]


@dataclass(frozen=True)
class Collected:
    """What a step trains on, and what is to be said about how it came to be. Plain data: rank 0 hands it to the others.

    Attributes:
        sequences: of the groups that train.
        versions: that made their tokens.
        rewards: task reward of every judged completion, dropped groups included.
        prompt_tokens, completion_tokens, completions: over everything that was sampled.
        turns: per trained prompt its length after each turn.
        completion_lengths: of trained completions.
        cut: trained completions that reached the length limit.
        kept, dropped, rounds: of dynamic sampling.
        verdicts: outcome of judging to its number.
        epoch: of the data.
        exhausted: whether the data's last epoch ended before the step was full.
    """

    sequences: tuple[Sequence, ...]
    versions: frozenset[int]
    rewards: tuple[float, ...]
    prompt_tokens: int
    completion_tokens: int
    completions: int
    turns: tuple[tuple[int, ...], ...]
    completion_lengths: tuple[int, ...]
    cut: int
    kept: int
    dropped: int
    rounds: int
    verdicts: dict[str, int]
    epoch: int
    exhausted: bool


@dataclass(frozen=True)
class _Group:
    """One prompt's completions: `rewards` of the task alone, `judged` with the punishment of long ones."""

    encoded: EncodedPrompt
    samples: tuple[Sample, ...]
    rewards: tuple[float, ...]
    judged: GroupRewards

    @property
    def task(self) -> GroupRewards:
        """What dynamic sampling looks at: DAPO wants groups of which some are right and some wrong (eq. 11), and one
        that is wrong throughout would teach nothing but shortness.
        """
        return group_advantages(self.rewards)


class Collector:
    """Samples a step's data.

    Args:
        settings: the run's.
        sampler: order of prompts.
        encoded: prompts by index of the data set.
        tokenizer: turns completions into text for the judge.
        rewarder: the judge.
    """

    def __init__(
        self,
        settings: Settings,
        sampler: PromptSampler,
        encoded: dict[str, EncodedPrompt],
        tokenizer: Any,
        rewarder: Rewarder,
    ) -> None:
        self._settings = settings
        self._sampler = sampler
        self._encoded = encoded
        self._tokenizer = tokenizer
        self._rewarder = rewarder

    def collect(
        self,
        step: int,
        rollout: Rollout,
        timers: Timers,
        advance: Callable[[int], None] = lambda count: None,
        *,
        published: Container[int],
    ) -> Collected | None:
        """Sample until the step has its groups; None if the data has ended, and what was left trains nothing.

        Args:
            step: from 1; part of every seed.
            rollout: serving.
            timers: phases "rollout" and "reward" are timed.
            advance: called with finished completions.
            published: versions that this run has published so far.

        Raises:
            StateError: dynamic sampling found no group whose rewards differ, it is not known which published version
                made a token, or a log-probability is NaN.
        """
        algorithm, epoch = self._settings.algorithm, self._sampler.epoch
        dynamic = DynamicSampling(algorithm.dynamic_sampling, algorithm.max_resamples + 1)
        groups: list[_Group] = []
        verdicts: Counter[str] = Counter()
        exhausted, rounds = False, 0
        while True:
            rounds += 1
            drawn = self._sampler.next(algorithm.prompts)
            exhausted = len(drawn) < algorithm.prompts
            if not drawn and not groups:
                return None
            if drawn:
                found, outcomes = self._round(step, rounds, [self._encoded[p.index] for p in drawn], rollout, timers)
                _require_sound(found, published)
                advance(sum(len(group.samples) for group in found))
                groups += found
                verdicts.update(outcomes)
            chosen = select_groups([group.task for group in groups], algorithm.prompts, dynamic, rounds)
            if chosen.complete or exhausted:
                break
        if not chosen.kept:
            if exhausted:
                return None
            raise StateError(
                f"step {step}: none of the {len(groups)} groups of {rounds} rounds has rewards that differ; there is "
                "nothing to train on; look at the answers, raise algorithm.max_resamples, or set "
                "algorithm.dynamic_sampling=false"
            )
        kept = [groups[index] for index in chosen.kept]
        return self._collected(groups, kept, len(chosen.dropped), rounds, dict(verdicts), epoch, exhausted)

    def _round(
        self, step: int, round: int, prompts: list[EncodedPrompt], rollout: Rollout, timers: Timers
    ) -> tuple[list[_Group], dict[str, int]]:
        settings = self._settings
        each, total = settings.algorithm.completions, settings.length.total
        drawn = 0 if settings.rollout.sampling.repeat else step
        requests = [
            Request(one.tokens, total - len(one.tokens), _seed(settings.seed, drawn, round, place, number))
            for place, one in enumerate(prompts)
            for number in range(each)
        ]
        with timers.phase("rollout"):
            samples = rollout.generate(requests)
        with timers.phase("reward"):
            texts = [self._tokenizer.decode(s.tokens, skip_special_tokens=True) for s in samples]
            jobs = [
                RewardJob(texts[place * each + number], one.prompt.ground_truth, settings.reward.verifier)
                for place, one in enumerate(prompts)
                for number in range(each)
            ]
            judged, outcomes = self._rewarder.judge(jobs)
        right, wrong = settings.reward.correct, settings.reward.wrong
        rewards = [wrong + (right - wrong) * value for value in judged]
        groups = []
        for place, one in enumerate(prompts):
            part = slice(place * each, (place + 1) * each)
            shaped = [
                reward - _overlong(len(sample.tokens), request.limit, settings.algorithm.overlong_tokens)
                for reward, sample, request in zip(rewards[part], samples[part], requests[part], strict=True)
            ]
            advantages = group_advantages(shaped, normalize_std=settings.algorithm.advantage == "std")
            groups.append(_Group(one, tuple(samples[part]), tuple(rewards[part]), advantages))
        return groups, outcomes

    def _collected(
        self,
        groups: list[_Group],
        kept: list[_Group],
        dropped: int,
        rounds: int,
        verdicts: dict[str, int],
        epoch: int,
        exhausted: bool,
    ) -> Collected:
        sequences: list[Sequence] = []
        for group in kept:
            for sample, advantage in zip(group.samples, group.judged.advantages, strict=True):
                if len(sample.tokens) != len(sample.logprobs) or not sample.tokens:
                    raise StateError(
                        f"prompt {group.encoded.prompt.index}: the engine gave {len(sample.tokens)} tokens and "
                        f"{len(sample.logprobs)} log-probs; ask it for log-probs of every output token"
                    )
                tokens = (*group.encoded.tokens, *sample.tokens)
                made = Sequence(len(sequences), tokens, len(group.encoded.tokens), sample.logprobs, advantage)
                sequences.append(made)
        trained = [sample for group in kept for sample in group.samples]
        sampled = [(group.encoded, sample) for group in groups for sample in group.samples]
        return Collected(
            sequences=tuple(sequences),
            versions=frozenset(version for sample in trained for version in sample.versions),
            rewards=tuple(reward for group in groups for reward in group.rewards),
            prompt_tokens=sum(len(encoded.tokens) for encoded, _ in sampled),
            completion_tokens=sum(len(sample.tokens) for _, sample in sampled),
            completions=len(sampled),
            turns=tuple(group.encoded.turns for group in kept),
            completion_lengths=tuple(len(sample.tokens) for sample in trained),
            cut=sum(sample.finish == "length" for sample in trained),
            kept=len(kept),
            dropped=dropped,
            rounds=rounds,
            verdicts=verdicts,
            epoch=epoch,
            exhausted=exhausted,
        )


def _require_sound(groups: list[_Group], published: Container[int]) -> None:
    """StateError for a completion, kept or not, of which it is not known which published versions made it, or that an
    engine drew from NaN: the correction would reject its tokens one by one, and the run go on without training.
    """
    for group in groups:
        for number, sample in enumerate(group.samples, 1):
            where = f"prompt {group.encoded.prompt.index}, completion {number} of {len(group.samples)}"
            require_spans(sample, where, published)
            lost = next((place for place, value in enumerate(sample.logprobs) if math.isnan(value)), None)
            if lost is not None:
                raise StateError(
                    f"{where}: the engine gave NaN as the log-prob of token {lost}; its weights or its cache hold NaN, "
                    "whatever the publish has proven of its bytes"
                )


def _overlong(length: int, limit: int, window: int) -> float:
    """DAPO's soft overlong punishment (arXiv 2503.14476, eq. 13): from 0 to 1 over the last `window` tokens."""
    if window == 0:
        return 0.0
    return min(1.0, max(0.0, (length - (limit - window)) / window))


def _seed(*parts: int) -> int:
    """A seed of 63 bits that different parts do not share."""
    digest = hashlib.sha256("/".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
