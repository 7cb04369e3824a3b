"""Runs the demo as a user does, in a process of its own; helpers of the end-to-end tests."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from weftpub_demo.report import Report

__all__ = ["LIMIT_S", "Finished", "run_demo", "running_demo", "still_running"]

LIMIT_S = 600  # whole runs on a machine that is busy with other tests


@dataclass(frozen=True)
class Finished:
    """A demo that has ended: exit code, what it said, and the report it left."""

    code: int
    out: str
    err: str
    report: Report

    @property
    def last_line(self) -> str:
        return self.out.rstrip("\n").rsplit("\n", 1)[-1]


def run_demo(directory: Path, *options: str, prelude: str = "", device: str = "cpu") -> Finished:
    """Run `weftpub demo` with `options`, its output in `directory`.

    Args:
        device: as the demo's own option.
        prelude: Python code that runs in the demo's process first; how a test breaks what the demo stands on.
    """
    code = f"{prelude}\nfrom weftpub_demo.command import main\nmain()\n"
    command = [sys.executable, "-c", code, "--out", str(directory), "--device", device, "--limit", "400", *options]
    result = subprocess.run(
        command, cwd=directory, env=_environment(device), capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert (directory / "report.json").exists(), result.stdout + result.stderr
    report = Report.model_validate_json((directory / "report.json").read_text())
    return Finished(result.returncode, result.stdout, result.stderr, report)


@contextmanager
def running_demo(directory: Path) -> Iterator[subprocess.Popen[str]]:
    """A long demo under way, its output in `directory`; killed at the end if it still runs."""
    options = ["--out", str(directory), "--device", "cpu", "--limit", "400", "--steps", "400"]
    command = [sys.executable, "-m", "weftpub_demo", *options]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    demo = subprocess.Popen(command, cwd=directory, env=_environment("cpu"), text=True, **pipes)
    try:
        yield demo
    finally:
        demo.kill()
        demo.wait()


def still_running(directory: Path) -> list[str]:
    """Command lines of living receivers whose checkpoint lies in `directory`."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        line = process.info["cmdline"] or []
        if "weftpub_demo.receiver" in line and any(str(directory) in part for part in line):
            found.append(" ".join(line))
    return found


def _environment(device: str) -> dict[str, str]:
    # Hidden from the start: the code that a test runs first may already ask torch for GPUs.
    return {**os.environ, "OMP_NUM_THREADS": "1", **({"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {})}
