"""The JSON-lines log of a run: `steps.jsonl` in its directory.

Lines are headers (`kind` "run") and step records (`kind` "step"), each written whole and flushed. A resumed run
appends: its header comes next, and its records replace those of the same steps before it.
"""

import errno
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from pydantic import ValidationError

from weftmoe.telemetry.record import RunHeader, StepRecord
from weftpub.errors import ConfigError

__all__ = ["LOG_NAME", "LoggedRun", "RunLog", "read_log", "told_apart"]

LOG_NAME = "steps.jsonl"


class RunLog:
    """Appends records. Use it as a context manager."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._path = directory / LOG_NAME
        torn = self._path.is_file() and self._path.stat().st_size > 0 and not _ends_a_line(self._path)
        # Without a buffer: what a full disk has not taken would be tried, and fail, again at every later call.
        self._file = self._path.open("ab", buffering=0)
        if torn:  # a killed run's half line; it gets a line of its own, which readers pass over
            self._append(b"\n")

    def write(self, record: RunHeader | StepRecord) -> None:
        """Append one line and hand it to the operating system; OSError names the file."""
        self._append(record.model_dump_json().encode() + b"\n")

    def close(self) -> None:
        """Write everything to disk."""
        with self._file:
            try:
                os.fsync(self._file.fileno())
            except OSError as error:
                if error.errno != errno.EINVAL:  # a pipe, which has no disk
                    raise self._named(error) from None

    def _append(self, rest: bytes) -> None:
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            raise self._named(error) from None

    def _named(self, error: OSError) -> OSError:
        """With the file's name, which the operating system does not say."""
        return OSError(error.errno, error.strerror, str(self._path))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass(frozen=True)
class LoggedRun:
    """A log, read.

    Attributes:
        directory: the run's.
        headers: one per start.
        steps: the last record of each step, in order of steps.
        label: what tells it from other runs of its variant and seed; "" where there are none.
    """

    directory: Path
    headers: tuple[RunHeader, ...]
    steps: tuple[StepRecord, ...]
    label: str = ""

    @property
    def name(self) -> str:
        """The run in a legend: variant and seed, and the label where there is one."""
        first = self.headers[0]
        name = f"{first.variant} seed {first.seed}"
        return f"{name}, {self.label}" if self.label else name


def _ends_a_line(path: Path) -> bool:
    return path.read_bytes().endswith(b"\n")


def told_apart(runs: Sequence[LoggedRun]) -> list[LoggedRun]:
    """The runs in their order; those that share a name are labelled with their folder's, else with its path."""
    named: list[LoggedRun] = []
    for run in runs:
        twins = [one for one in runs if one.name == run.name]
        folders = {one.directory.absolute().name for one in twins}
        label = run.directory.absolute().name if len(folders) == len(twins) else str(run.directory)
        named.append(replace(run, label=label) if len(twins) > 1 else run)
    return named


def read_log(directory: Path) -> LoggedRun:
    """Read a run's log.

    Raises:
        ConfigError: there is none, it has no header, or a line is no record.
    """
    path = directory / LOG_NAME
    if not path.is_file():
        raise ConfigError(f"{directory} holds no {LOG_NAME}; give the directory that a run wrote to (its --out)")
    headers: list[RunHeader] = []
    steps: dict[int, StepRecord] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
        try:
            data = json.loads(line)
        except json.JSONDecodeError:
            continue  # the half line of a killed run
        try:
            if data["kind"] == "run":
                headers.append(RunHeader.model_validate(data))
            else:
                record = StepRecord.model_validate(data)
                steps[record.step] = record
        except (KeyError, TypeError, ValidationError) as error:
            raise ConfigError(f"{path}, line {number}: not a record of this version: {error}") from None
    if not headers:
        raise ConfigError(f"{path} has no header line; it is not the log of a run")
    return LoggedRun(directory, tuple(headers), tuple(steps[step] for step in sorted(steps)))
