"""`weftpub report`: run directories in; a picture, a table, or JSON out."""

import json
from pathlib import Path
from typing import Annotated

import typer

__all__ = ["report"]


def report(
    runs: Annotated[list[Path], typer.Argument(help="Directories of runs (their --out), one or several.")],
    out: Annotated[
        Path | None, typer.Option(help="Picture to write; report.png in the first directory if not given.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summaries as JSON instead of the table.")] = False,
) -> None:
    """Draw what runs logged: rewards, tokens, log-prob differences, timers, memory; and sum each one up in a row."""
    # Logs, tables and pictures load pydantic, rich and matplotlib; --help must not wait for them.
    from rich.console import Console

    from weftmoe.report.draw import draw_runs
    from weftmoe.report.summary import summarize_run, summary_table
    from weftmoe.telemetry.log import read_log, told_apart

    read = told_apart([read_log(directory) for directory in runs])
    picture = runs[0] / "report.png" if out is None else out
    draw_runs(read, picture)
    rows = [summarize_run(run) for run in read]
    if as_json:
        print(json.dumps({"picture": str(picture), "runs": [row.model_dump(mode="json") for row in rows]}, indent=2))
        return
    console = Console(highlight=False, soft_wrap=True)
    console.print(summary_table(rows))
    for row in rows:
        console.print(f"{row.name}: {row.rollout}; {row.directory}", markup=False)
    for note in dict.fromkeys(note for row in rows for note in row.notes):
        whose = [row.name for row in rows if note in row.notes]
        of = "" if len(whose) == len(rows) else f" ({', '.join(whose)})"
        console.print(f"note{of}: {note}", markup=False)
    console.print(f"picture: {picture}", markup=False)
