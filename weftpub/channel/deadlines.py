"""Deadlines: how long each phase may take, and the error that says who let it pass."""

import time
from dataclasses import dataclass

from weftpub.errors import ConfigError, DeadlineError

__all__ = ["Deadline", "Deadlines"]


@dataclass(frozen=True)
class Deadlines:
    """Seconds that each wait of a publish may take. Every wait has one.

    Attributes:
        hello: until a receiver answers at all.
        plan: until it has checked the plan, or described itself.
        pause: until it has stopped serving; requests in flight may have to drain.
        begin: until its views are bound.
        chunk: until one chunk is copied and released.
        verify: until it has post-processed and computed all checksums. It post-processes before it answers a last
            chunk that is shown where it is: that answer may take this much longer.
        commit: until it has committed.
        resume: until it serves.
        group: how long one sender rank waits for another.
    """

    hello: float = 30.0
    plan: float = 120.0
    pause: float = 120.0
    begin: float = 60.0
    chunk: float = 60.0
    verify: float = 120.0
    commit: float = 60.0
    resume: float = 120.0
    group: float = 300.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not 0 < value < 86_400:
                raise ConfigError(f"deadline {name}: expected seconds between 0 and a day, found {value}")

    @classmethod
    def all(cls, seconds: float) -> "Deadlines":
        """The same deadline for every phase; what tests want."""
        return cls(*(seconds,) * len(cls.__dataclass_fields__))


class Deadline:
    """One wait that has begun.

    Args:
        peer: who is waited for: host, device or GPU, rank.
        phase: what is waited for.
        allowed: seconds.
    """

    def __init__(self, peer: str, phase: str, allowed: float) -> None:
        self.peer = peer
        self.phase = phase
        self.allowed = allowed
        self._start = time.monotonic()

    @property
    def elapsed(self) -> float:
        """Seconds since the wait began."""
        return time.monotonic() - self._start

    @property
    def left(self) -> float:
        """Seconds left, never negative."""
        return max(0.0, self.allowed - self.elapsed)

    @property
    def passed(self) -> bool:
        """Whether the deadline has passed."""
        return self.elapsed >= self.allowed

    def restart(self) -> None:
        """Begin again: there was progress."""
        self._start = time.monotonic()

    def error(self, cause: str) -> DeadlineError:
        """The error for this wait, with its likely cause."""
        return DeadlineError(
            f"{self.peer}: no answer in phase {self.phase} after {self.elapsed:.1f} s of {self.allowed:g} s allowed; "
            f"{cause}"
        )
