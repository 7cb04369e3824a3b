"""What a run leaves behind: report.json (one pydantic schema), the table on the terminal, and report.png."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field
from rich.table import Table

__all__ = ["Check", "Report", "StepRecord", "draw", "table", "write_report"]


class _Plain(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class StepRecord(_Plain):
    """One trained and published step."""

    step: int = Field(ge=1)
    loss: float = Field(description="mean cross entropy per byte, in nats, before the step's update")
    changed: float = Field(ge=0, le=1, description="share of the served expert bytes (W and scales) the step changed")
    publish_ms: float = Field(ge=0)
    version: int = Field(ge=1)
    sha256: str = Field(min_length=64, max_length=64, description="over every published tensor's name and sha256")
    train_ms: float = Field(ge=0, description="forward and backward")
    update_ms: float = Field(ge=0, description="optimizer step, quantization into the store included")
    phases_ms: dict[str, float] = Field(description="publish time by phase")
    bytes: int = Field(ge=0, description="bytes moved to the receivers")
    transport: str = Field(description="what carried them: cuda_ipc, shared_memory, or files")


class Check(_Plain):
    """One kind of check and how often it held."""

    name: str
    meaning: str
    passed: int = Field(ge=0)


class Report(_Plain):
    """A whole run. `ok` is true only if every step was published, verified and committed on every receiver."""

    ok: bool
    result: str = Field(description="the last line that the demo printed")
    error: str | None = None
    run_id: str
    started: str = Field(description="UTC, ISO 8601")
    seconds: float = Field(ge=0)
    settings: dict[str, Any]
    model: dict[str, Any]
    versions: dict[str, str]
    checks: tuple[Check, ...]
    committed_version: int = Field(ge=0, description="what every receiver serves; 0 before the first publish")
    steps: tuple[StepRecord, ...]


def write_report(report: Report, directory: Path) -> Path:
    """Write report.json into `directory` and return its path."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "report.json"
    path.write_text(report.model_dump_json(indent=2) + "\n", encoding="utf-8")
    return path


def table(steps: Sequence[StepRecord], title: str) -> Table:
    """The steps as a table for the terminal."""
    result = Table(title=title, title_justify="left")
    for heading in ("step", "loss", "changed", "publish ms", "version"):
        result.add_column(heading, justify="right")
    for record in steps:
        result.add_row(
            str(record.step),
            f"{record.loss:.4f}",
            f"{record.changed:.1%}",
            f"{record.publish_ms:.1f}",
            str(record.version),
        )
    return result


def draw(report: Report, path: Path) -> Path:
    """Draw loss, changed share and publish time by phase over the steps into a PNG and return its path."""
    # Agg canvas by hand: pyplot would look for a display and keep global state.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator, PercentFormatter

    figure = Figure(figsize=(12, 3.8), layout="constrained")
    FigureCanvasAgg(figure)
    loss, changed, publish = figure.subplots(1, 3)
    steps = [record.step for record in report.steps]
    loss.plot(steps, [record.loss for record in report.steps], marker="o", color="#1f4e79")
    loss.set(title="loss (nats per byte)", xlabel="step")
    changed.bar(steps, [record.changed for record in report.steps], color="#6a8caf")
    changed.set(title="expert bytes changed by the step", xlabel="step", ylim=(0, 1))
    changed.yaxis.set_major_formatter(PercentFormatter(1.0))
    base = [0.0] * len(steps)
    for phase in dict.fromkeys(phase for record in report.steps for phase in record.phases_ms):
        heights = [record.phases_ms.get(phase, 0.0) for record in report.steps]
        publish.bar(steps, heights, bottom=base, label=phase)
        base = [low + height for low, height in zip(base, heights, strict=True)]
    publish.set(title="publish time by phase (ms)", xlabel="step")
    if base:
        publish.legend(fontsize="small")
    for axis in (loss, changed, publish):
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        axis.grid(axis="y", alpha=0.3)
    settings = report.settings
    figure.suptitle(f"weftpub demo: {settings['variant']}, {settings['optimizer']}, {report.result}", fontsize="medium")
    figure.savefig(path, dpi=110)
    return path
