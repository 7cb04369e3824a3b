"""A progress bar per phase on a terminal; elsewhere a line per stage of the start and per finished step. On standard
error.
"""

import sys
import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from weftmoe.telemetry.record import StepRecord

__all__ = ["PhaseProgress"]


class PhaseProgress:
    """Shows where a run is. Use it as a context manager.

    Args:
        title: of the run.
        steps: in all, those of earlier starts included.
        enabled: False shows nothing, on ranks other than the first.
    """

    def __init__(self, title: str, steps: int | None, *, enabled: bool = True) -> None:
        self._console = Console(stderr=True, highlight=False, soft_wrap=True)
        self._live = enabled and sys.stderr.isatty()
        self._enabled = enabled
        self._began = time.monotonic()
        self._bars = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=self._console,
            transient=True,
            disable=not self._live,
        )
        self._steps = self._bars.add_task(title, total=steps)
        self._phase = self._bars.add_task("starting", total=None)

    def phase(self, name: str, total: int | None = None) -> None:
        """A phase begins; its bar counts to `total` if that is known."""
        self._bars.reset(self._phase, description=name, total=total)

    def stage(self, name: str) -> None:
        """A phase of the start, which takes seconds: where there are no bars, a line with the time since the start."""
        self.phase(name)
        if not self._live:
            self.note(f"{time.monotonic() - self._began:6.1f} s  {name}")

    def advance(self, count: int = 1) -> None:
        """The phase came forward."""
        self._bars.advance(self._phase, count)

    def note(self, text: str) -> None:
        """Show a line that stays."""
        if self._enabled:
            self._console.print(text, markup=False)

    def step(self, record: StepRecord) -> None:
        """A step is done."""
        self._bars.update(self._steps, completed=record.step)
        spent = record.seconds
        self.note(
            f"step {record.step:4d}  reward {record.reward:.3f}  kl {record.before['kl']:.2e}  "
            f"grad {record.grad_norm:.3g}  tokens {record.counters.trained}  published v{record.published_version}  "
            f"rollout {spent.get('rollout', 0.0):.1f} s  train {spent.get('train', 0.0):.1f} s  "
            f"publish {spent.get('publish', 0.0):.1f} s  total {spent.get('total', 0.0):.1f} s"
        )

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bars.stop()
