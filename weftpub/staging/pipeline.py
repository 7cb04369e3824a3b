"""The staging pipeline: each master whole through one slot, loads, updates and stores overlapped.

For master i in a slot that held master j before::

    IN        wait until j is stored . load i . mark "loaded"
    COMPUTE   wait for "loaded" . update i . write i . mark "written"
    OUT       wait for "written" . store i . mark "stored"

The store waits for the writer, and the next load into the slot waits for the store: a slot is never overwritten while
the writer still reads it. All waits are between lanes; the host only enqueues, and waits once, at the end.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch

from weftpub.errors import ConfigError, StateError
from weftpub.masters import Master, MasterSet
from weftpub.staging.lanes import Lane, Lanes, open_lanes
from weftpub.staging.slots import Slot, SlotPool, SlotState

__all__ = ["StagedMaster", "StagingPipeline", "Work", "Writer"]


class Writer(Protocol):
    """Gets each complete updated master while it is in its slot.

    Called as ``writer(name, matrix)`` with ``matrix`` FP32 ``[M, N]`` on the pipeline's device. On CUDA it is called on
    the compute stream and must enqueue all its work on the current stream: the slot is reused once that stream has
    passed. It must not change the matrix, nor keep it.
    """

    def __call__(self, name: str, matrix: torch.Tensor, /) -> None: ...


class StagedMaster(NamedTuple):
    """A master in its slot.

    Attributes:
        name: the master's name.
        weight: FP32, on the pipeline's device, a view of the slot.
        state: state name -> FP32 view of the slot, of the weight's shape.
    """

    name: str
    weight: torch.Tensor
    state: dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Work:
    """What happens to one master on its way.

    Attributes:
        master: its block is loaded, and stored once it is updated and written.
        write: called with name and weight; see :class:`Writer`.
        update: called with the staged master and the FP32 gradient on the pipeline's device; changes weight and state.
            None only shows the weight to the writer: nothing is stored, the master's bytes are not touched.
        gradient: of the weight's shape, any float dtype and device (one that lies elsewhere travels with the load);
            set exactly when ``update`` is.
    """

    master: Master
    write: Writer
    update: Callable[[StagedMaster, torch.Tensor], None] | None = None
    gradient: torch.Tensor | None = None


class StagingPipeline:
    """Runs :class:`Work` through the slots of a pool.

    One run at a time, from one thread; a pipeline may serve several optimizers in turn.
    """

    def __init__(
        self,
        device: torch.device | str | None,
        pool: SlotPool,
        *,
        lanes: Lanes | None = None,
        drain_seconds: float = 600.0,
    ) -> None:
        """Joins a pool with the lanes of its device.

        Args:
            device: "cpu", a CUDA device, or None for the pool's.
            pool: the slots.
            lanes: the queues to use; None opens those of the device.
            drain_seconds: how long the device may take, once a run has enqueued everything.

        Raises:
            ConfigError: device, pool and lanes are not on one device.
        """
        self.pool = pool
        self._lanes = lanes if lanes is not None else open_lanes(pool.device if device is None else device)
        self.device = self._lanes.device
        if self.device != pool.device:
            raise ConfigError(f"the pipeline runs on {self.device}, its slots are on {pool.device}; use one device")
        self._marks = [_SlotMarks(self._lanes) for _ in pool.slots]
        self._latest: tuple[Slot, SlotState, str] | None = None
        self._drain_seconds = drain_seconds
        self._idle = True

    @classmethod
    def for_masters(
        cls, masters: MasterSet, device: torch.device | str | None = None, *, slots: int = 3
    ) -> "StagingPipeline":
        """A pipeline with a pool that fits a set of masters; None takes CUDA where there is one."""
        pool = SlotPool.for_masters(masters, device, slots)
        return cls(pool.device, pool)

    @property
    def progress(self) -> str:
        """The matrix and stage that the host enqueued last, for error messages."""
        if self._latest is None:
            return "before the first matrix"
        slot, state, name = self._latest
        return f"latest enqueued: matrix {name!r} {state.name} in slot {slot.index}"

    def require_fit(self, masters: MasterSet) -> None:
        """Checks before anything moves that this pipeline can stage a set.

        Raises:
            ConfigError: a matrix fits no slot (the message names the size to set), or masters of a CUDA pipeline are
                not in pinned memory.
        """
        for name, master in masters.items():
            self.pool.require_fit(name, master.layout)
        if self.device.type == "cuda" and not masters.is_pinned:
            raise ConfigError(
                "masters of a CUDA pipeline must lie in pinned memory (pageable copies are several times slower and do "
                "not overlap): build the MasterSet with pin=None or pin=True"
            )

    @torch.no_grad()
    def run(self, works: Iterable[Work]) -> None:
        """Loads, updates, writes and stores each master; returns when all of them are back in host memory.

        When anything fails, the lanes are drained and the slots freed before the error goes on: nothing is in flight
        any more, and masters before the failing one have changed.

        Raises:
            ConfigError: a matrix fits no slot; the masters before it are done.
            DeadlineError: the device did not finish in time; what it still does is unknown, so later runs are refused.
            StateError: the pipeline is running already, or never came to rest.
        """
        if not self._idle:
            raise StateError(
                "the pipeline is not idle: it was called from one of its own writers, or device work of a failed run "
                f"never finished ({self.progress}); in the latter case restart the process from the last checkpoint"
            )
        self._idle = False
        self._latest = None
        self._lanes.begin()
        try:
            for work in works:
                self._stage(work)
        finally:
            self._lanes.drain(self._drain_seconds)
            self.pool.abandon()
            self._idle = True

    def _stage(self, work: Work) -> None:
        master, lanes = work.master, self._lanes
        self.pool.require_fit(master.name, master.layout)
        slot = self.pool.turn()
        marks = self._marks[slot.index]
        if slot.state is SlotState.STORING:
            lanes.wait(Lane.IN, marks.stored)
            slot.move(SlotState.FREE)

        self._enter(slot, SlotState.LOADING, master.name)
        weight, state = slot.views(master.layout)
        flat = slot.flat[: master.layout.total]
        gradient = work.gradient
        inbox = None if gradient is None or gradient.device == self.device else slot.inbox(gradient)

        def load() -> None:
            self._copy(flat, master.block)
            if inbox is not None and gradient is not None:
                self._copy(inbox, gradient)

        lanes.enqueue(Lane.IN, load)
        lanes.record(Lane.IN, marks.loaded)

        self._enter(slot, SlotState.UPDATING, master.name)
        lanes.wait(Lane.COMPUTE, marks.loaded)
        update, arrived = work.update, gradient if inbox is None else inbox
        if update is not None and arrived is not None:
            staged = StagedMaster(master.name, weight, state)
            lanes.enqueue(Lane.COMPUTE, lambda: update(staged, _as_fp32(arrived)))

        self._enter(slot, SlotState.WRITING, master.name)
        lanes.enqueue(Lane.COMPUTE, lambda: work.write(master.name, weight))
        lanes.record(Lane.COMPUTE, marks.written)

        self._enter(slot, SlotState.STORING, master.name)
        lanes.wait(Lane.OUT, marks.written)
        if update is not None:
            lanes.enqueue(Lane.OUT, lambda: self._copy(master.block, flat))
        lanes.record(Lane.OUT, marks.stored)

    def _enter(self, slot: Slot, state: SlotState, name: str) -> None:
        slot.move(state)
        slot.holds = name
        self._latest = slot, state, name

    def _copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        # Without lanes of its own the host must not run ahead of a copy from a GPU gradient.
        target.copy_(source, non_blocking=self.device.type == "cuda")


class _SlotMarks:
    """The marks that order a slot's stages across the lanes."""

    def __init__(self, lanes: Lanes) -> None:
        self.loaded: Any = lanes.mark()
        self.written: Any = lanes.mark()
        self.stored: Any = lanes.mark()


def _as_fp32(gradient: torch.Tensor) -> torch.Tensor:
    """The gradient as contiguous FP32: itself where it is that already, never changed in place by us."""
    return gradient.to(torch.float32).contiguous()
