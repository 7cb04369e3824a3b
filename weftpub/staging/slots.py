"""Slots: device buffers that hold one whole master each, and the states a slot passes through.

::

    FREE -> LOADING -> UPDATING -> WRITING -> STORING -> FREE

LOADING   the block comes in from host memory
UPDATING  the optimizer changes weight and state in the slot
WRITING   the writer reads the complete updated weight
STORING   the block goes back to host memory

A state says what the slot's latest enqueued work is; on CUDA that work runs later, in the order that events impose. A
slot leaves STORING for FREE when the work that comes next has been made to wait for the store. Every other move is a
StateError, whatever the device.
"""

import enum

import torch

from weftpub.device import resolve_device
from weftpub.errors import ConfigError, StateError
from weftpub.masters import BlockLayout, MasterSet

__all__ = ["Slot", "SlotPool", "SlotState"]


class SlotState(enum.Enum):
    """What a slot's latest enqueued work is."""

    FREE = "free"
    LOADING = "loading"
    UPDATING = "updating"
    WRITING = "writing"
    STORING = "storing"

    @property
    def successor(self) -> "SlotState":
        """The one state that may follow."""
        return _SUCCESSOR[self]


_ORDER = (SlotState.FREE, SlotState.LOADING, SlotState.UPDATING, SlotState.WRITING, SlotState.STORING)
_SUCCESSOR = {state: _ORDER[(i + 1) % len(_ORDER)] for i, state in enumerate(_ORDER)}


class Slot:
    """One device buffer and its state.

    Attributes:
        index: position in its pool.
        flat: FP32 ``[tensors_per_slot * stride]`` on the pool's device, laid out as a master's block.
        state: moved by :meth:`move` alone.
        holds: name of the master in it, or None.
    """

    def __init__(self, index: int, flat: torch.Tensor, numel: int) -> None:
        self.index = index
        self.flat = flat
        self._numel = numel
        self.holds: str | None = None
        self._state = SlotState.FREE
        self._views: dict[BlockLayout, tuple[torch.Tensor, dict[str, torch.Tensor]]] = {}
        self._inbox: torch.Tensor | None = None

    @property
    def state(self) -> SlotState:
        return self._state

    def move(self, to: SlotState) -> None:
        """Passes to the next state; StateError, changing nothing, for any other."""
        if to is not self._state.successor:
            held = "" if self.holds is None else f" (holding {self.holds!r})"
            raise StateError(
                f"slot {self.index}{held} is {self._state.name} and cannot become {to.name}: "
                f"only {self._state.successor.name} may follow"
            )
        self._state = to
        if to is SlotState.FREE:
            self.holds = None

    def abandon(self) -> None:
        """Frees the slot from any state, its content lost; only for a run that failed and whose lanes have drained."""
        self._state = SlotState.FREE
        self.holds = None

    def views(self, layout: BlockLayout) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Weight and states of a master in this slot; kept, since making views costs as much as a kernel launch."""
        found = self._views.get(layout)
        if found is None:
            found = self._views[layout] = layout.split(self.flat)
        return found

    def inbox(self, gradient: torch.Tensor) -> torch.Tensor:
        """Room on the slot's device for a gradient that comes from elsewhere, of its shape.

        Made at full size when the first such gradient comes: growing later would free memory that lanes still use.
        """
        if self._inbox is None:
            self._inbox = torch.empty(self._numel, dtype=torch.float32, device=self.flat.device)
        dtype = gradient.dtype if gradient.dtype.itemsize <= 4 else torch.float32
        return self._inbox.view(dtype)[: gradient.numel()].view(gradient.shape)


class SlotPool:
    """Equal slots on one device, used in turn.

    Three slots let a load, an update with its write, and a store run at the same time; a fourth only absorbs jitter.
    Device memory: ``count * tensors_per_slot * numel * 4`` bytes.
    """

    def __init__(
        self, device: torch.device | str | None, count: int = 3, *, numel: int, tensors_per_slot: int = 2
    ) -> None:
        """Allocates the slots.

        Args:
            device: "cpu" or a CUDA device; None takes CUDA where there is one.
            count: number of slots.
            numel: elements of the largest matrix that a slot takes.
            tensors_per_slot: the weight and its state tensors: 2 for Muon, 3 for AdamW.

        Raises:
            ConfigError: a size below one, or a device that does not exist.
        """
        for setting, value in (("count", count), ("numel", numel), ("tensors_per_slot", tensors_per_slot)):
            if value < 1:
                raise ConfigError(f"SlotPool({setting}={value}): must be at least 1")
        self.device = resolve_device(device)
        self.numel = numel
        self.tensors_per_slot = tensors_per_slot
        size = tensors_per_slot * BlockLayout((numel,), ()).stride
        self.slots = tuple(
            Slot(i, torch.zeros(size, dtype=torch.float32, device=self.device), numel) for i in range(count)
        )
        if self.device.type == "cuda":
            # The zero fill runs on whatever stream is current here; a first load on another one must not overtake it.
            torch.cuda.current_stream(self.device).synchronize()
        self._next = 0

    @classmethod
    def for_masters(cls, masters: MasterSet, device: torch.device | str | None = None, count: int = 3) -> "SlotPool":
        """A pool whose slots fit the largest master of a set with all its states."""
        numel = max(master.layout.numel for master in masters.values())
        return cls(device, count, numel=numel, tensors_per_slot=1 + len(masters.states))

    def require_fit(self, name: str, layout: BlockLayout) -> None:
        """Raises ConfigError, naming the setting and the size to set, for a master that no slot takes whole."""
        if layout.numel > self.numel:
            block = len(self.slots) * self.tensors_per_slot * layout.numel
            raise ConfigError(
                f"matrix {name!r} {list(layout.shape)} has {layout.numel} elements ({_mib(layout.numel)} in FP32), but "
                f"a slot takes {self.numel} ({_mib(self.numel)}), and a matrix is never split: set "
                f"SlotPool(numel={layout.numel}), {_mib(block)} of device memory for {len(self.slots)} slots"
            )
        if layout.tensors > self.tensors_per_slot:
            block = len(self.slots) * layout.tensors * self.numel
            raise ConfigError(
                f"master {name!r} has {layout.tensors} tensors (weight, {', '.join(layout.states)}), but a slot takes "
                f"{self.tensors_per_slot}: set SlotPool(tensors_per_slot={layout.tensors}), {_mib(block)} of device "
                f"memory for {len(self.slots)} slots"
            )

    def turn(self) -> Slot:
        """The slot whose turn it is: FREE, or STORING the matrix that it held last."""
        slot = self.slots[self._next]
        self._next = (self._next + 1) % len(self.slots)
        return slot

    def abandon(self) -> None:
        """:meth:`Slot.abandon` for every slot."""
        for slot in self.slots:
            slot.abandon()


def _mib(elements: int) -> str:
    return f"{elements * 4 / 2**20:.1f} MiB"
