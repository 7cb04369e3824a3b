"""A run that is told to end: SIGUSR1 says that its job will be over soon. What was computed is saved.

    in the rollout    it goes on while the step can still be trained and saved in the time that is left; else it is cut
                      short. The trainer holds the step before, which is saved: a resumed run begins this one anew,
                      with the same prompts (and the same completions, if `train.deterministic` is set)
    in the training   the step is finished, saved and published
    between steps     as in the rollout of the next one, which is not begun if there is no time for it

Rank 0 decides about a rollout, which it alone runs, and the others hear of it where they wait for its completions.
About the end of a step all ranks decide together, so none waits in a collective for one that has left.
"""

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import Any, Self

__all__ = ["NOTICE", "CutShort", "Pace", "StopNotice", "run_until"]

NOTICE = signal.SIGUSR1
_LOOK_S = 0.2
_MARGIN = 1.25  # no step takes exactly as long as the last one
_UNSEEN_SAVE = 0.25  # of the grace, before a first checkpoint was written
_ROLLOUT = ("rollout", "reward")


class StopNotice:
    """Whether the run was told to end, and how much time it has left. Use it as a context manager, in the main thread.

    The signal may be blocked and pending already: it counts from the moment that this is entered.

    Args:
        grace: seconds from the signal until the run must be over.
    """

    def __init__(self, grace: float) -> None:
        self.grace = grace
        self._until: float | None = None
        self._restore = contextlib.ExitStack()

    @property
    def given(self) -> bool:
        """Whether the run was told to end."""
        return self._until is not None

    @property
    def left(self) -> float:
        """Seconds that are left; infinite as long as nobody said anything."""
        return float("inf") if self._until is None else self._until - time.monotonic()

    def __enter__(self) -> Self:
        before = signal.signal(NOTICE, self._hear)
        mask = signal.pthread_sigmask(signal.SIG_UNBLOCK, {NOTICE})
        # It may be said again, every second, until the process has ended: that must not end it in another way.
        self._restore.callback(lambda: signal.signal(NOTICE, signal.SIG_IGN if self.given else before))
        self._restore.callback(signal.pthread_sigmask, signal.SIG_SETMASK, mask)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._restore.close()

    def _hear(self, number: int, frame: FrameType | None) -> None:
        if self._until is None:
            self._until = time.monotonic() + self.grace


@dataclass
class Pace:
    """How long the parts of a step take, as the last one showed.

    Attributes:
        rollout: seconds of sampling and judging.
        rest: seconds of everything after them but saving; None before a first step.
        save: seconds of the last checkpoint; None before one was written.
    """

    rollout: float = 0.0
    rest: float | None = None
    save: float | None = None

    def learn(self, seconds: Mapping[str, float]) -> None:
        """Take over a step's timers."""
        self.save = seconds.get("save", self.save)
        self.rollout = sum(seconds.get(name, 0.0) for name in _ROLLOUT)
        self.rest = seconds["total"] - self.rollout - seconds.get("save", 0.0)

    def enough(self, notice: StopNotice, elapsed: float) -> bool:
        """Whether a rollout that has been under way for `elapsed` seconds may go on: what is left of it, and training
        and saving, fit into the time that is left.
        """
        if not notice.given:
            return True
        if self.rest is None:  # nothing is known, and nothing would be lost
            return False
        save = _UNSEEN_SAVE * notice.grace if self.save is None else self.save
        return max(0.0, self.rollout - elapsed) + _MARGIN * (self.rest + save) <= notice.left


@dataclass(frozen=True)
class CutShort:
    """In a rollout's place: it was not waited for. Plain data, which rank 0 hands to the others."""


def run_until[T](work: Callable[[], T], enough: Callable[[float], bool]) -> T | CutShort:
    """Do some work, as long as there is time for it.

    Args:
        work: runs in a thread of its own. If it is cut short it goes on there, until what it waits for has ended, and
            nobody asks for its result.
        enough: by the seconds since it began, whether to wait on; asked before the beginning, and then several times a
            second.

    Raises:
        What `work` raises.
    """
    if not enough(0.0):
        return CutShort()
    began, future = time.monotonic(), Future[Any]()
    threading.Thread(target=_into, args=(future, work), name="rollout", daemon=True).start()
    while not wait([future], _LOOK_S).done:
        if not enough(time.monotonic() - began):
            return CutShort()
    result: T = future.result()
    return result


def _into(future: "Future[Any]", work: Callable[[], Any]) -> None:
    try:
        future.set_result(work())
    except BaseException as error:  # whatever it is, it belongs to whoever waits
        future.set_exception(error)
