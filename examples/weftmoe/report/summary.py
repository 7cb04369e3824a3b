"""A run in one row: where it began, where it ended, and whether its bytes were checked."""

import math
from collections.abc import Callable, Mapping, Sequence

from pydantic import BaseModel, ConfigDict
from rich.table import Table

from weftmoe.telemetry.log import LoggedRun
from weftmoe.telemetry.record import StepRecord

__all__ = ["RunSummary", "summarize_run", "summary_table"]

_WINDOW = 10


class RunSummary(BaseModel):
    """One run's row.

    Attributes:
        first_reward, last_reward: mean over the first and last `window` steps.
        kl_1, kl_2: estimates of KL(rollout || trainer) at steps 1 and 2, in nats; None without such a step.
        kl_1_error, kl_2_error: their standard errors.
        difference_first, difference_last: mean |trainer - rollout| log-prob over the windows.
        versions_in_order: whether every step published the version after the one that it sampled from.
        bytes_checked: steps whose publish was checked.
        fixed_tokens: how many different results the re-scored fixed tokens had; None where they were not scored.
        peak_memory: of the trainer's allocator on rank 0, bytes; 0 without a GPU.
        device_memory: the most in use on any rank's GPU, by all processes there; 0 where it was not read.
        seconds: medians per phase.
    """

    model_config = ConfigDict(extra="forbid")

    name: str
    directory: str
    variant: str
    seed: int
    steps: int
    starts: int
    rollout: str
    notes: tuple[str, ...]
    window: int
    first_reward: float | None
    last_reward: float | None
    kl_1: float | None
    kl_2: float | None
    kl_1_error: float | None
    kl_2_error: float | None
    difference_first: float | None
    difference_last: float | None
    rejected_tokens: int
    versions_in_order: bool
    bytes_checked: int
    fixed_tokens: int | None
    trained_tokens: int
    flops_per_s: float | None
    peak_memory: int | None
    device_memory: int | None = None
    seconds: dict[str, float]
    versions: dict[str, str]


def summarize_run(run: LoggedRun) -> RunSummary:
    """Make the row."""
    steps, first = run.steps, run.headers[0]
    window = max(1, min(_WINDOW, len(steps) // 2)) if steps else 0
    by_step = {record.step: record for record in steps}
    fixed = {record.fixed_logp_sha256 for record in steps} - {None}
    return RunSummary(
        name=run.name,
        directory=str(run.directory),
        variant=first.variant,
        seed=first.seed,
        steps=len(steps),
        starts=len(run.headers),
        rollout=first.rollout,
        notes=tuple(dict.fromkeys(note for header in run.headers for note in header.notes)),
        window=window,
        first_reward=_mean([record.reward for record in steps[:window]]),
        last_reward=_mean([record.reward for record in steps[len(steps) - window :]]),
        kl_1=_statistic(by_step, 1, "kl"),
        kl_2=_statistic(by_step, 2, "kl"),
        kl_1_error=_statistic(by_step, 1, "kl_error"),
        kl_2_error=_statistic(by_step, 2, "kl_error"),
        difference_first=_mean([record.before["difference_abs_mean"] for record in steps[:window]]),
        difference_last=_mean([record.before["difference_abs_mean"] for record in steps[len(steps) - window :]]),
        rejected_tokens=sum(int(record.before["rejected_tokens"]) for record in steps),
        versions_in_order=all(record.published_version == record.served_version + 1 for record in steps),
        bytes_checked=sum(record.byte_check.matched is True for record in steps),
        fixed_tokens=len(fixed) if fixed else None,
        trained_tokens=steps[-1].total.trained if steps else 0,
        flops_per_s=_median([record.flops_per_s for record in steps]),
        peak_memory=max((record.memory.get("peak", 0) for record in steps), default=None),
        device_memory=max((record.memory.get("device_used", 0) for record in steps), default=None),
        seconds=_medians(steps),
        versions=first.versions,
    )


def summary_table(rows: Sequence[RunSummary]) -> Table:
    """The rows for a terminal, turned: a line per number that a run has, a column per run."""
    table = Table(title="Runs")
    table.add_column("", no_wrap=True)
    for row in rows:
        table.add_column(row.name, justify="right", overflow="fold")
    for heading, value in _LINES:
        cells = [value(row) for row in rows]
        if set(cells) != {"-"}:
            table.add_row(heading, *cells)
    return table


def _seconds(name: str) -> Callable[[RunSummary], str]:
    return lambda row: _number(row.seconds.get(name), ".2f")


_LINES: tuple[tuple[str, Callable[[RunSummary], str]], ...] = (
    ("steps", lambda row: str(row.steps)),
    ("starts", lambda row: str(row.starts)),
    ("reward, first steps", lambda row: _number(row.first_reward, ".3f")),
    ("reward, last steps", lambda row: _number(row.last_reward, ".3f")),
    ("|log-prob difference|, first", lambda row: _number(row.difference_first, ".4f")),
    ("|log-prob difference|, last", lambda row: _number(row.difference_last, ".4f")),
    ("KL of step 1", lambda row: _number(row.kl_1, ".2e")),
    ("KL of step 2", lambda row: _number(row.kl_2, ".2e")),
    ("rejected tokens", lambda row: str(row.rejected_tokens)),
    ("trained tokens", lambda row: str(row.trained_tokens)),
    ("steps whose bytes were checked", lambda row: str(row.bytes_checked)),
    ("versions in order", lambda row: "yes" if row.versions_in_order else "NO"),
    ("results of fixed tokens", lambda row: "-" if row.fixed_tokens is None else str(row.fixed_tokens)),
    ("s, rollout", _seconds("rollout")),
    ("s, train", _seconds("train")),
    ("s, scores before updates", _seconds("score")),
    ("s, measurement after updates", _seconds("measure")),
    ("s, weight update", _seconds("publish")),
    ("s, step", _seconds("total")),
    ("training FLOP/s", lambda row: _number(row.flops_per_s, ".2e")),
    ("trainer's allocator, peak GiB", lambda row: _gib(row.peak_memory)),
    ("GPU in use, most GiB", lambda row: _gib(row.device_memory)),
)


def _gib(nbytes: int | None) -> str:
    return f"{nbytes / 2**30:.2f}" if nbytes else "-"


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _statistic(by_step: Mapping[int, StepRecord], step: int, name: str) -> float | None:
    """Of the weights before the update; None without such a step, or in a log from before it was measured."""
    return by_step[step].before.get(name) if step in by_step else None


def _mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None


def _median(values: Sequence[float]) -> float | None:
    return sorted(values)[len(values) // 2] if values else None


def _medians(steps: Sequence[StepRecord]) -> dict[str, float]:
    names = sorted({name for record in steps for name in record.seconds})
    found: dict[str, float] = {}
    for name in names:
        values = sorted(record.seconds[name] for record in steps if name in record.seconds)
        found[name] = values[len(values) // 2]
    return found
