"""Where a store's memory comes from, and where it goes while an engine needs the device.

The store never calls ``torch.empty``: it asks an allocator, so that the same store can live in plain torch memory, in
host shared memory or in one physical allocation that an engine maps too. Releasing keeps the ``Tensor`` objects and
every view of them: only the bytes behind their common storage go, and come back, possibly at another address and with
undefined content.
"""

import math
import mmap
from collections.abc import Sequence
from typing import Protocol, runtime_checkable
from weakref import WeakValueDictionary

import torch

from weftpub.errors import ConfigError, StateError

__all__ = ["Allocator", "TorchAllocator", "Witness"]


class Witness(Protocol):
    """Told of every change that a store makes to memory which other processes map, before its first byte and after its
    last. `begin` may refuse by raising: then nothing is written.
    """

    def begin(self, generation: int, *, recover: bool = False) -> None:
        """The bytes are about to change; `recover`: all of them, whatever was there."""
        ...

    def seal(self, digest: str = "") -> None:
        """The bytes are the generation's, with this hex sha256 over their checksums."""
        ...

    def cancel(self) -> None:
        """Nothing was written after all."""
        ...

    def tear(self, reason: str) -> None:
        """The bytes are of no generation."""
        ...


@runtime_checkable
class Allocator(Protocol):
    """Gives, takes back and gives again the memory of named tensors. Content is undefined after `allocate` and after
    `restore`.
    """

    def allocate(self, name: str, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return a contiguous tensor that owns its whole storage, from the storage's first element."""
        ...

    def release(self, name: str, tensor: torch.Tensor) -> None:
        """Free the bytes behind `tensor`; the object and its views stay, and must not be read until `restore`."""
        ...

    def restore(self, name: str, tensor: torch.Tensor) -> None:
        """Put bytes behind `tensor` and all its views again; the address may differ."""
        ...

    def trim(self) -> None:
        """Hand released memory back to the device, so that another process can have it."""
        ...

    def shares(self, name: str) -> bool:
        """Whether another process maps the memory of `name` too. It then stays in place through every offload: it is
        neither released nor restored nor copied.
        """
        ...

    def witness(self) -> Witness | None:
        """Who must be told before shared memory changes; None if none is shared."""
        ...


class TorchAllocator:
    """CUDA memory from torch's caching allocator, host memory from anonymous pages.

    A CUDA storage is resized to zero and back. Host pages are handed back to the system instead, and read as zeros
    until they are written again: torch refuses to resize memory that ``numpy()`` has once seen, and a stale reader
    would fault.

    Args:
        poison: fill new and restored memory with 0xFF, which is NaN in float8_e4m3fn, bfloat16 and float32: whatever
            reads bytes that nobody wrote then shows. Costs one write of the memory.
    """

    def __init__(self, *, poison: bool = False) -> None:
        self._poison = poison
        self._pages: WeakValueDictionary[int, mmap.mmap] = WeakValueDictionary()  # by address; tensors keep them alive
        self._released: set[int] = set()

    def allocate(self, name: str, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes == 0:
            raise ConfigError(f"{name}: shape {list(shape)} has no elements")
        tensor = self._host(nbytes) if device.type == "cpu" else torch.empty(nbytes, dtype=torch.uint8, device=device)
        tensor = tensor.view(dtype).view(tuple(shape))
        self._fill(tensor)
        return tensor

    def release(self, name: str, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage.nbytes() == 0 or storage.data_ptr() in self._released:
            raise StateError(f"{name}: its memory was released before; restore it first")
        pages = self._pages.get(storage.data_ptr())
        if pages is None:
            storage.resize_(0)
        else:
            pages.madvise(mmap.MADV_DONTNEED)
            self._released.add(storage.data_ptr())

    def restore(self, name: str, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage.nbytes() == 0:
            storage.resize_(math.prod(tensor.shape) * tensor.element_size())
        elif storage.data_ptr() in self._released:
            self._released.remove(storage.data_ptr())
        else:
            raise StateError(f"{name}: its memory was never released, nothing to restore")
        self._fill(tensor)

    def trim(self) -> None:
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            torch.cuda.empty_cache()

    def shares(self, name: str) -> bool:
        """No: all memory is this process' own."""
        return False

    def witness(self) -> Witness | None:
        """Nobody."""
        return None

    def _host(self, nbytes: int) -> torch.Tensor:
        pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        tensor = torch.frombuffer(pages, dtype=torch.uint8, count=nbytes)
        self._pages[tensor.data_ptr()] = pages
        self._released.discard(tensor.data_ptr())
        return tensor

    def _fill(self, tensor: torch.Tensor) -> None:
        if self._poison:
            tensor.view(torch.uint8).fill_(0xFF)
