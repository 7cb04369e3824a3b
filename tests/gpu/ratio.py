"""Whether one mean is at most so many times another, when both are known with an error: shown, refuted, or neither.

The interval of a ratio is Fieller's (E. C. Fieller, Some problems in interval estimation, Journal of the Royal
Statistical Society B 16, 1954): all R for which the difference ``second - R * first`` lies within so many of its own
standard errors of zero. The difference is a mean over what was drawn, and much closer to a normal distribution than the
ratio, whose upper end is otherwise set too low where a few draws make up most of the denominator.
"""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

__all__ = ["ERRORS", "FLAT_BOUND", "KL_BOUND", "Pair", "Verdict", "kl_checks", "kl_kinds", "kl_pair", "thirds"]

type Verdict = Literal["ok", "FAIL", "not shown"]

ERRORS = 2.0  # 97.7% of a normal distribution lie below the upper end, and as many above the lower one
KL_BOUND = 1.2
FLAT_BOUND = 1.25
_LEAST = 2  # draws whose spread can be told


@dataclass(frozen=True)
class Pair:
    """Two means, of one unit.

    Attributes:
        first, second: of which the second is to be at most so many times the first; above zero.
        first_variance, second_variance, covariance: of their errors.
    """

    first: float
    second: float
    first_variance: float
    second_variance: float
    covariance: float = 0.0

    @property
    def ratio(self) -> float:
        return self.second / self.first

    @property
    def interval(self) -> tuple[float, float]:
        """From where to where the ratio may lie, by `ERRORS`; without an upper end (inf) if the first mean may be 0."""
        squared = ERRORS * ERRORS
        a = self.first**2 - squared * self.first_variance
        b = self.first * self.second - squared * self.covariance
        c = self.second**2 - squared * self.second_variance
        if a <= 0:
            return 0.0, math.inf
        root = math.sqrt(max(0.0, b * b - a * c))
        return max(0.0, (b - root) / a), (b + root) / a

    def verdict(self, bound: float) -> Verdict:
        """Whether the ratio is at most `bound`: "not shown" if it may be or not be."""
        low, high = self.interval
        return "ok" if high <= bound else "FAIL" if low > bound else "not shown"

    def plus(self, other: "Pair") -> "Pair":
        """The sums of two pairs whose errors have nothing to do with each other."""
        return Pair(
            self.first + other.first,
            self.second + other.second,
            self.first_variance + other.first_variance,
            self.second_variance + other.second_variance,
            self.covariance + other.covariance,
        )

    def __str__(self) -> str:
        low, high = self.interval
        return f"x {self.ratio:.3f} [{low:.3f}, {high:.3f}]"


def thirds(values: Sequence[float]) -> Pair | None:
    """The mean of the last third of a series over that of the first, values being what is drawn; None if a third has
    fewer than two of them.
    """
    count = len(values) // 3
    if count < _LEAST:
        return None
    first, last = values[:count], values[-count:]
    return Pair(
        statistics.fmean(first),
        statistics.fmean(last),
        statistics.variance(first) / count,
        statistics.variance(last) / count,
    )


def kl_kinds(rows: Iterable[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    """Variant and experts a token (fp8-two) to its runs, one a seed."""
    kinds: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        kinds.setdefault(row["run"].removeprefix("kl-").partition("-seed-")[0], []).append(row)
    return kinds


def kl_pair(rows: Sequence[Mapping[str, Any]]) -> Pair | None:
    """KL of steps 1 and 2, summed over runs of several seeds; None if a run has no error of both.

    Errors have prompts as draws, and both steps have the same ones (`weftmoe.grpo.kl_covariance`). A row without
    `kl_covariance` is of a run whose errors took completions for draws: they were too small.
    """
    pair = Pair(0.0, 0.0, 0.0, 0.0)
    for row in rows:
        if row.get("kl_covariance") is None or not row["kl_1"] or row["kl_2"] is None:
            return None
        errors = row["kl_1_error"] ** 2, row["kl_2_error"] ** 2
        pair = pair.plus(Pair(row["kl_1"], row["kl_2"], *errors, row["kl_covariance"]))
    return pair if rows else None


def kl_checks(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """The checks of the KL's bound: of each run, and of the seeds of a kind together where there are several."""
    what = f"KL of step 2 at most {KL_BOUND} x step 1"
    found: dict[str, dict[str, Any]] = {}
    for row in rows:
        name = row["run"].removeprefix("kl-")
        found[f"kl/{name}: {what}"] = _kl_check([row])
    for kind, ran in kl_kinds(rows).items():
        if len(ran) > 1:
            found[f"kl/{kind}: {what}, over all seeds"] = _kl_check(ran)
    return found


def _kl_check(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    if any(not row["kl_1"] or row["kl_2"] is None for row in rows):
        return {"verdict": "FAIL", "detail": f"{min(row['steps'] for row in rows)} steps"}
    first, second = (sum(row[step] for row in rows) / len(rows) for step in ("kl_1", "kl_2"))
    means = f"{first:.3e}, {second:.3e}, {sum(row['trained_tokens'] for row in rows)} tokens"
    seeds = f", {len(rows)} seeds" if len(rows) > 1 else ""
    pair = kl_pair(rows)
    if pair is None:
        return {"verdict": "not shown", "detail": f"x {second / first:.3f}, no error is known: {means}{seeds}"}
    prompts = f" of {sum(row['prompts'] for row in rows)} prompts"
    return {"verdict": pair.verdict(KL_BOUND), "detail": f"{pair}: {means}{prompts}{seeds}"}
