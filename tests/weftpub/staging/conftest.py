"""Lanes that put staged work off and run it in any order that the marks allow: races without a GPU."""

from collections import deque
from collections.abc import Callable, Collection
from typing import Any

import pytest
import torch

from weftpub.errors import DeadlineError
from weftpub.staging import Lane


class SimulatedMark:
    """As a CUDA event: waiting refers to the latest record before the wait."""

    def __init__(self) -> None:
        self.recorded = 0
        self.passed = 0


class SimulatedLanes:
    """Three queues on the CPU that run only while draining, one operation of one lane at a time.

    Args:
        pick: chooses among the lanes whose next operation may run.
        deaf: lanes that ignore every wait, to plant a race.
    """

    device = torch.device("cpu")

    def __init__(self, pick: Callable[[list[Lane]], Lane], deaf: Collection[Lane] = ()) -> None:
        self._pick = pick
        self._deaf = deaf
        self._queues: dict[Lane, deque[tuple[str, Any, Any]]] = {lane: deque() for lane in Lane}

    def begin(self) -> None:
        pass

    def enqueue(self, lane: Lane, work: Callable[[], None]) -> None:
        self._queues[lane].append(("work", work, None))

    def mark(self) -> SimulatedMark:
        return SimulatedMark()

    def record(self, lane: Lane, mark: SimulatedMark) -> None:
        mark.recorded += 1
        self._queues[lane].append(("record", mark, mark.recorded))

    def wait(self, lane: Lane, mark: SimulatedMark) -> None:
        if lane not in self._deaf:
            self._queues[lane].append(("wait", mark, mark.recorded))

    def drain(self, seconds: float) -> None:
        while any(self._queues.values()):
            ready = [lane for lane in Lane if self._may_run(lane)]
            if not ready:
                for queue in self._queues.values():
                    queue.clear()
                raise DeadlineError("the lanes wait for each other")
            kind, subject, generation = self._queues[self._pick(ready)].popleft()
            if kind == "work":
                subject()
            elif kind == "record":
                subject.passed = generation

    def _may_run(self, lane: Lane) -> bool:
        if not self._queues[lane]:
            return False
        kind, subject, generation = self._queues[lane][0]
        return kind != "wait" or subject.passed >= generation


@pytest.fixture(scope="session")
def simulated_lanes() -> type[SimulatedLanes]:
    return SimulatedLanes
