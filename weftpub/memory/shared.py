"""A store's memory where an engine maps it too; what is not shared comes from another allocator."""

from collections.abc import Mapping, Sequence

import torch

from weftpub.errors import ConfigError
from weftpub.memory.allocation import SharedAllocation
from weftpub.memory.allocator import Allocator, TorchAllocator, Witness
from weftpub.plan import dtype_name

__all__ = ["SharedAllocator"]


class SharedAllocator:
    """Gives the tensors of a shared allocation's catalogue, and everything else from `others`.

    Shared memory is never released: an engine serves from it while the trainer is away.

    Args:
        memory: the allocation.
        others: for W^T, scratch and whatever the catalogue lacks; torch's allocator by default.
        witness: told of every change of the store; by default `memory`, whose header then keeps engines and trainers
            apart. None only for a store that nobody serves from.
    """

    def __init__(self, memory: SharedAllocation, others: Allocator | None = None) -> None:
        self.memory = memory
        self._others: Allocator = TorchAllocator() if others is None else others
        self._reasons: dict[str, str] = {}

    @property
    def reasons(self) -> Mapping[str, str]:
        """Tensors that are not shared although the catalogue knows their names, with the reason."""
        return self._reasons

    def allocate(self, name: str, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """See `Allocator.allocate`; ConfigError if the store lives on another device than the shared memory."""
        if device != self.memory.device:
            raise ConfigError(f"{name}: wanted on {device}, the shared memory is on {self.memory.device}")
        entry = self.memory.catalogue.by_name.get(name)
        if entry is not None:
            if (entry.shape, entry.dtype) == (tuple(shape), dtype_name(dtype)):
                return self.memory.tensor(name)
            self._reasons[name] = (
                f"the store needs {dtype} {list(shape)}, the shared memory holds {entry.dtype} {list(entry.shape)}"
            )
        return self._others.allocate(name, shape, dtype, device)

    def shares(self, name: str) -> bool:
        """See `Allocator.shares`."""
        return name in self.memory.catalogue.by_name and name not in self._reasons

    def witness(self) -> Witness | None:
        """See `Allocator.witness`."""
        return self.memory

    def release(self, name: str, tensor: torch.Tensor) -> None:
        """See `Allocator.release`."""
        self._refuse_shared(name, "release")
        self._others.release(name, tensor)

    def restore(self, name: str, tensor: torch.Tensor) -> None:
        """See `Allocator.restore`."""
        self._refuse_shared(name, "restore")
        self._others.restore(name, tensor)

    def trim(self) -> None:
        """See `Allocator.trim`."""
        self._others.trim()

    def _refuse_shared(self, name: str, action: str) -> None:
        if self.shares(name):
            raise ConfigError(f"{name}: {action} of memory that an engine maps too; it stays in place")
