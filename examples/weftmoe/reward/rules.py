"""The one call by which a step judges its completions, by either rule."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Self

from weftmoe.reward.exact import exact_reward
from weftmoe.reward.pool import RewardPool, Verdict

__all__ = ["RewardJob", "Rewarder"]

Rule = Literal["exact", "math"]


@dataclass(frozen=True)
class RewardJob:
    """One completion to judge."""

    completion: str
    ground_truth: str
    rule: Rule


class Rewarder:
    """Judges completions. Worker processes start when the first mathematical answer comes.

    Args:
        workers, seconds: of the pool.
    """

    def __init__(self, *, workers: int = 8, seconds: float = 10.0) -> None:
        self._workers, self._seconds = workers, seconds
        self._pool: RewardPool | None = None

    def judge(self, jobs: Sequence[RewardJob]) -> tuple[list[float], dict[str, int]]:
        """Rewards in the order of the jobs, and how many jobs had which outcome ("judged", "timeout", ...)."""
        verdicts: list[Verdict | None] = [
            Verdict(exact_reward(job.completion, job.ground_truth), "judged") if job.rule == "exact" else None
            for job in jobs
        ]
        waiting = [index for index, verdict in enumerate(verdicts) if verdict is None]
        if waiting:
            if self._pool is None:
                self._pool = RewardPool(self._workers, seconds=self._seconds)
            judged = self._pool.judge([(jobs[index].completion, jobs[index].ground_truth) for index in waiting])
            for index, verdict in zip(waiting, judged, strict=True):
                verdicts[index] = verdict
        done = [verdict for verdict in verdicts if verdict is not None]
        return [verdict.reward for verdict in done], dict(Counter(verdict.outcome for verdict in done))

    def close(self) -> None:
        """End the worker processes."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
