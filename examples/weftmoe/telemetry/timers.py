"""Wall time by phase of a step."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["Timers"]


class Timers:
    """Seconds per phase; a phase that runs twice in a step is summed.

    Args:
        synchronize: called before the clock is read, so that a device's queued work counts where it was asked for.
        ended: called after each phase that did not raise.
    """

    def __init__(
        self, synchronize: Callable[[], None] = lambda: None, ended: Callable[[], None] = lambda: None
    ) -> None:
        self._synchronize, self._ended = synchronize, ended
        self._spent: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time the block, also one that raises."""
        self._synchronize()
        began = time.perf_counter()
        try:
            yield
        finally:
            self._synchronize()
            self._spent[name] = self._spent.get(name, 0.0) + time.perf_counter() - began
        self._ended()

    def add(self, name: str, seconds: float) -> None:
        """Count time that something else measured."""
        self._spent[name] = self._spent.get(name, 0.0) + seconds

    def take(self) -> dict[str, float]:
        """The seconds so far, and a clean start."""
        spent, self._spent = self._spent, {}
        return spent
