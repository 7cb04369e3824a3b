"""Lanes: the three queues that staged work runs on, and the marks that order them.

On CUDA a lane is a stream and a mark an event, and the host never waits inside a run. On a CPU work runs at once, in
the order of the calls, which is one of the orders that the marks allow; so the pipeline is one piece of code for both.
"""

import enum
import time
from collections.abc import Callable
from typing import Any, Protocol

import torch

from weftpub.device import resolve_device
from weftpub.errors import DeadlineError

__all__ = ["CudaLanes", "HostLanes", "Lane", "Lanes", "open_lanes"]

_POLL_SECONDS = 50e-6


class Lane(enum.Enum):
    """Which queue."""

    IN = "in"
    COMPUTE = "compute"
    OUT = "out"


class Lanes(Protocol):
    """Three queues that run side by side, each in the order of its calls."""

    @property
    def device(self) -> torch.device:
        """Where the work runs."""
        ...

    def begin(self) -> None:
        """Makes every lane wait for what the caller's current stream holds so far."""
        ...

    def enqueue(self, lane: Lane, work: Callable[[], None]) -> None:
        """Runs ``work``, whose device operations join the lane."""
        ...

    def mark(self) -> Any:
        """A new mark, not recorded yet; waiting for it then is no wait."""
        ...

    def record(self, lane: Lane, mark: Any) -> None:
        """Moves the mark behind all work of the lane so far."""
        ...

    def wait(self, lane: Lane, mark: Any) -> None:
        """Holds all later work of the lane until the mark's latest record has been passed."""
        ...

    def drain(self, seconds: float) -> None:
        """Holds the host until every lane is empty. Errors of enqueued device work surface here at the latest.

        Raises:
            DeadlineError: a lane is not empty after that many seconds.
        """
        ...


class HostLanes:
    """All lanes are the calling thread."""

    device = torch.device("cpu")

    def begin(self) -> None:
        """Nothing runs elsewhere."""

    def enqueue(self, lane: Lane, work: Callable[[], None]) -> None:
        work()

    def mark(self) -> None:
        return None

    def record(self, lane: Lane, mark: None) -> None:
        """Work is done when it is recorded."""

    def wait(self, lane: Lane, mark: None) -> None:
        """Work is done when it is waited for."""

    def drain(self, seconds: float) -> None:
        """Nothing is pending."""


class CudaLanes:
    """A CUDA stream per lane. The streams live as long as the lanes, and so do their allocator pools."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._streams = {lane: torch.cuda.Stream(device) for lane in Lane}

    def begin(self) -> None:
        current = torch.cuda.current_stream(self.device)
        for stream in self._streams.values():
            stream.wait_stream(current)

    def enqueue(self, lane: Lane, work: Callable[[], None]) -> None:
        with torch.cuda.stream(self._streams[lane]):
            work()

    def mark(self) -> torch.cuda.Event:
        return torch.cuda.Event()

    def record(self, lane: Lane, mark: torch.cuda.Event) -> None:
        mark.record(self._streams[lane])

    def wait(self, lane: Lane, mark: torch.cuda.Event) -> None:
        self._streams[lane].wait_event(mark)

    def drain(self, seconds: float) -> None:
        # Asking instead of synchronizing: a stream with a hung kernel would never give the host back.
        start = time.monotonic()
        for lane, stream in self._streams.items():
            while not stream.query():
                elapsed = time.monotonic() - start
                if elapsed > seconds:
                    raise DeadlineError(
                        f"{self.device}, lane {lane.value!r}: staged work has not finished {elapsed:.1f} s after the "
                        f"host enqueued the last of it (allowed {seconds:.1f} s); likely a kernel that hangs, perhaps "
                        "in a writer, or a GPU that another process keeps busy"
                    )
                time.sleep(_POLL_SECONDS)


def open_lanes(device: torch.device | str | None = None) -> Lanes:
    """The lanes of a device; None takes CUDA where there is one."""
    place = resolve_device(device)
    return CudaLanes(place) if place.type == "cuda" else HostLanes()
