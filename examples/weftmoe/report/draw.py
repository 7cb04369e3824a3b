"""One picture of one or several runs: every curve of the log, runs of a variant in one colour."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from weftmoe.telemetry.flops import FLOPS_SOURCE
from weftmoe.telemetry.log import LoggedRun
from weftmoe.telemetry.record import StepRecord
from weftpub.errors import ConfigError

__all__ = ["PANELS", "Curve", "Panel", "draw_runs"]

_COLOURS = MappingProxyType({"baseline": "tab:grey", "bf16": "tab:blue", "fp8": "tab:orange"})
_MORE_COLOURS = ("tab:red", "tab:purple", "tab:brown", "tab:pink", "tab:olive", "tab:cyan")
_STYLES = ("-", "--", ":", "-.")
_COLUMNS = 4
_TURNS = len(_STYLES) - 1  # that have a line each


@dataclass(frozen=True)
class Curve:
    """One line of a panel: its label, and a record's value (None leaves a gap)."""

    label: str
    value: Callable[[StepRecord], float | None]


@dataclass(frozen=True)
class Panel:
    """One pair of axes."""

    title: str
    unit: str
    curves: tuple[Curve, ...]
    log: bool = False


def _statistic(name: str, when: str = "before") -> Callable[[StepRecord], float | None]:
    def value(record: StepRecord) -> float | None:
        found = record.before if when == "before" else record.after
        return None if found is None else found[name]

    return value


def _seconds(name: str) -> Callable[[StepRecord], float | None]:
    return lambda record: record.seconds.get(name)


def _idle_passes(record: StepRecord) -> float | None:
    """Scores before several updates, and the measurement after them; None in a step without either."""
    found = [record.seconds[name] for name in ("score", "measure") if name in record.seconds]
    return sum(found) if found else None


def _memory(name: str) -> Callable[[StepRecord], float | None]:
    return lambda record: record.memory[name] / 2**30 if name in record.memory else None


def _turn(turn: int) -> Callable[[StepRecord], float | None]:
    return lambda record: next((found.mean for found in record.prompt_lengths if found.turn == turn), None)


def _last_turn(record: StepRecord) -> float | None:
    """Of a conversation with more turns than there are lines."""
    last = max(record.prompt_lengths, key=lambda found: found.turn, default=None)
    return last.mean if last is not None and last.turn > _TURNS else None


PANELS: tuple[Panel, ...] = (
    Panel("Task reward", "mean over completions", (Curve("reward", lambda r: r.reward),)),
    Panel(
        "Tokens since the first step",
        "tokens",
        (
            Curve("prompt", lambda r: r.total.prompt),
            Curve("completion", lambda r: r.total.completion),
            Curve("trained", lambda r: r.total.trained),
        ),
    ),
    Panel(
        "Prompt length up to each turn",
        "tokens",
        (
            *(Curve(f"turn {turn}", _turn(turn)) for turn in range(1, _TURNS + 1)),
            Curve(f"the last turn, of more than {_TURNS}", _last_turn),
        ),
    ),
    Panel(
        "Completion length",
        "tokens",
        (Curve("mean", lambda r: r.completion_mean), Curve("longest", lambda r: float(r.completion_longest))),
    ),
    Panel(
        "Trainer against rollout, before and after the update",
        "mean |log-prob difference|, nats",
        (
            Curve("before", _statistic("difference_abs_mean")),
            Curve("after", _statistic("difference_abs_mean", "after")),
        ),
    ),
    Panel(
        "KL(rollout || trainer)",
        "nats",
        (Curve("before", _statistic("kl")), Curve("after", _statistic("kl", "after"))),
        log=True,
    ),
    Panel(
        "Tokens rejected and truncated by the correction",
        "tokens of a step",
        (Curve("rejected", _statistic("rejected_tokens")), Curve("truncated", _statistic("truncated_tokens"))),
    ),
    Panel(
        "Clipped tokens",
        "share of trained tokens",
        (Curve("low", _statistic("clip_low_fraction")), Curve("high", _statistic("clip_high_fraction"))),
    ),
    Panel(
        "Timers",
        "seconds of a step",
        (
            Curve("rollout", _seconds("rollout")),
            Curve("train", _seconds("train")),
            Curve("weight update", _seconds("publish")),
            Curve("passes that train nothing", _idle_passes),
        ),
    ),
    Panel("Estimated training speed", "FLOP/s, all ranks", (Curve("train phase", lambda r: r.flops_per_s),)),
    Panel(
        "GPU memory",
        "GiB",
        (
            Curve("in use on a GPU, all processes, most of all ranks", _memory("device_used")),
            Curve("trainer's allocator on rank 0, peak", _memory("peak")),
            Curve("trainer's allocator on rank 0, offloaded", _memory("offloaded")),
        ),
    ),
    Panel(
        "Bytes changed by a step",
        "% of published expert bytes",
        (Curve("changed", lambda r: None if r.changed_share is None else 100 * r.changed_share),),
    ),
)


def draw_runs(runs: Sequence[LoggedRun], path: Path) -> None:
    """Draw all panels of all runs into one image file; the file's suffix says which kind.

    Raises:
        ConfigError: there is no such kind, or the file cannot be written.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.backend_bases import FigureCanvasBase

    kinds = sorted(FigureCanvasBase.get_supported_filetypes())
    if path.suffix.removeprefix(".").lower() not in kinds:
        raise ConfigError(f"{path}: pictures are written as one of {', '.join(kinds)}; end the name in one of them")
    rows = -(-len(PANELS) // _COLUMNS)
    figure, axes = plt.subplots(rows, _COLUMNS, figsize=(5.2 * _COLUMNS, 3.6 * rows), squeeze=False)
    for panel, axis in zip(PANELS, axes.flat, strict=False):
        _panel(axis, panel, runs)
    for axis in list(axes.flat)[len(PANELS) :]:
        axis.set_axis_off()
    notes = dict.fromkeys(note for run in runs for header in run.headers for note in header.notes)
    text = "\n".join([f"Training FLOPs: {FLOPS_SOURCE}", *notes])
    figure.text(0.01, 0.005, text, fontsize=7, color="0.3", va="bottom")
    figure.tight_layout(rect=(0, 0.02 + 0.012 * len(notes), 1, 1))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=120)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}; name another file with --out") from None
    finally:
        plt.close(figure)


def _colour(run: LoggedRun, runs: Sequence[LoggedRun]) -> str:
    """The variant's, which its seeds share; further runs of a variant and seed have colours of their own."""
    kinds = list(dict.fromkeys((one.headers[0].variant, one.label) for one in runs))
    first = dict(reversed(kinds))  # variant -> the label of its first run
    more = [kind for kind in kinds if first[kind[0]] != kind[1]]
    variant = run.headers[0].variant
    if first[variant] == run.label:
        return _COLOURS.get(variant, "tab:green")
    return _MORE_COLOURS[more.index((variant, run.label)) % len(_MORE_COLOURS)]


def _panel(axis: Any, panel: Panel, runs: Sequence[LoggedRun]) -> None:
    labelled: set[str] = set()
    positive = False
    for run in runs:
        variant = run.headers[0].variant
        drawn = f"{variant}, {run.label}" if run.label else variant
        for curve, style in zip(panel.curves, _STYLES[: len(panel.curves)], strict=True):
            points = [(r.step, value) for r in run.steps if (value := curve.value(r)) is not None]
            if not points:
                continue
            label = f"{drawn}: {curve.label}" if len(panel.curves) > 1 else drawn
            axis.plot(
                *zip(*points, strict=True),
                style,
                color=_colour(run, runs),
                linewidth=0.9,
                alpha=0.8,
                label=None if label in labelled else label,
            )
            labelled.add(label)
            positive = positive or any(value > 0 for _, value in points)
    axis.set(title=panel.title, xlabel="step", ylabel=panel.unit)
    axis.title.set_fontsize(10)
    axis.xaxis.get_major_locator().set_params(integer=True)
    if panel.log and positive:
        axis.set_yscale("log")
    if labelled:
        axis.legend(fontsize=6)
    else:  # such as GPU memory where there is no GPU
        axis.text(0.5, 0.5, "not measured", transform=axis.transAxes, ha="center", va="center", color="0.5")
