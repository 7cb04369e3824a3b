"""report.json's schema, the table and the picture."""

import json
from pathlib import Path

import pytest
from pydantic import ValidationError
from rich.console import Console

from weftpub_demo.report import Check, Report, StepRecord, draw, table, write_report

STEP = StepRecord(
    step=1,
    loss=5.5,
    changed=0.25,
    publish_ms=12.0,
    version=1,
    sha256="0" * 64,
    train_ms=100.0,
    update_ms=50.0,
    phases_ms={"send": 8.0, "verify": 4.0},
    bytes=1024,
    transport="shared_memory",
)


def report(**change: object) -> Report:
    fields: dict = {
        "ok": True,
        "result": "DEMO OK version=2 checks=5",
        "run_id": "r",
        "started": "2026-01-01T00:00:00Z",
        "seconds": 1.0,
        "settings": {"variant": "fp8", "optimizer": "muon"},
        "model": {},
        "versions": {},
        "checks": (Check(name="sha256", meaning="m", passed=5),),
        "committed_version": 2,
        "steps": (STEP, STEP.model_copy(update={"step": 2, "version": 2, "phases_ms": {"send": 3.0, "commit": 1.0}})),
    }
    return Report(**(fields | change))


def test_the_file_holds_what_the_report_says(tmp_path: Path) -> None:
    path = write_report(report(), tmp_path / "new" / "directory")
    assert path.name == "report.json"
    assert Report.model_validate_json(path.read_text()) == report()
    first = json.loads(path.read_text())["steps"][0]
    assert {"step", "loss", "changed", "publish_ms", "version", "sha256"} <= set(first)


@pytest.mark.parametrize(
    "change", [{"changed": 1.5}, {"changed": -0.1}, {"sha256": "abc"}, {"version": 0}, {"step": 0}, {"surprise": 1}]
)
def test_a_step_that_makes_no_sense_is_refused(change: dict) -> None:
    with pytest.raises(ValidationError):
        StepRecord(**(STEP.model_dump() | change))


def test_the_table_shows_every_step() -> None:
    console = Console(width=100, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(table(report().steps, "fp8, muon"))
    shown = console.export_text()
    assert [word for word in ("step", "loss", "changed", "publish ms", "version") if word not in shown] == []
    assert "5.5000" in shown
    assert "25.0%" in shown


@pytest.mark.parametrize("steps", [report().steps, ()])
def test_the_picture_is_a_png(tmp_path: Path, steps: tuple[StepRecord, ...]) -> None:
    path = draw(report(steps=steps), tmp_path / "report.png")
    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
