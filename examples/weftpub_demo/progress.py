"""Live progress on stderr: a growing table on a terminal, one line an event elsewhere. stdout stays free."""

import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from rich.console import Console, Group
from rich.live import Live
from rich.spinner import Spinner
from rich.text import Text

from weftpub_demo.report import StepRecord, table

__all__ = ["Progress"]


class Progress:
    """Shows what the demo is doing. A context manager; `phase` and `step` may be called inside it.

    Args:
        title: of the table.
        steps: that are to come.
        interrupted: whether the user wants an end; then `phase` and `step` raise KeyboardInterrupt. Packages that are
            just being imported may have caught the one that the signal raised.
        console: where to show it; stderr if not given.
    """

    def __init__(
        self,
        title: str,
        steps: int,
        console: Console | None = None,
        *,
        interrupted: Callable[[], bool] = lambda: False,
    ) -> None:
        self._interrupted = interrupted
        self._console = Console(stderr=True, highlight=False) if console is None else console
        self._title = title
        self._total = steps
        self._records: list[StepRecord] = []
        self._phase = "starting"
        self._started = time.monotonic()
        self._live: Live | None = None
        if self._console.is_terminal:
            self._live = Live(get_renderable=self._render, console=self._console, refresh_per_second=8, transient=True)

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        else:
            self._line(self._title)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def phase(self, text: str) -> None:
        """Say what is going on now."""
        self._go_on()
        self._phase = text
        if self._live is None:
            self._line(text)

    def step(self, record: StepRecord) -> None:
        """Add one finished step."""
        self._go_on()
        self._records.append(record)
        if self._live is None:
            self._line(
                f"step {record.step}/{self._total}: loss {record.loss:.4f}, {record.changed:.1%} of expert bytes "
                f"changed, published in {record.publish_ms:.1f} ms, version {record.version} committed"
            )

    def _go_on(self) -> None:
        if self._interrupted():
            raise KeyboardInterrupt

    def _line(self, text: str) -> None:
        self._console.print(f"[{time.monotonic() - self._started:6.1f} s] {text}", markup=False, soft_wrap=True)

    def _render(self) -> Group:
        elapsed = time.monotonic() - self._started
        status = Spinner("dots", Text(f"{self._phase}  ({len(self._records)}/{self._total} steps, {elapsed:.0f} s)"))
        return Group(table(self._records, self._title), status) if self._records else Group(status)
