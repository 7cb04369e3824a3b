"""Devices and host memory: which device staged work runs on, and host buffers that a GPU can copy at full speed.

A copy engine reads page-locked (pinned) memory at the speed of the bus and pageable memory at a fraction of it, and
only pinned copies overlap. So on a machine with CUDA every buffer of :func:`pinned` is page-locked; elsewhere pageable.

Large buffers are mapped and registered here instead of coming from PyTorch's caching host allocator, which rounds each
request up to a power of two (an arena of 65 GiB would take 128). Nothing binds the pages to a NUMA node: they land on
the node of the thread that asks for them, so start the process on the GPU's node (``numactl --cpunodebind --membind``).
"""

import contextlib
import math
import mmap
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from weftpub.errors import ConfigError

__all__ = ["default_device", "pinned", "resolve_device"]

# Below this size the caching host allocator is as good: its rounding wastes little, and it reuses blocks.
_REGISTER_FROM_BYTES = 64 << 20


def default_device() -> torch.device:
    """The current CUDA device where there is one, else the CPU."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def resolve_device(device: torch.device | str | int | None = None) -> torch.device:
    """A device with its index, checked to exist.

    Args:
        device: anything that ``torch.device`` takes; None means :func:`default_device`.

    Raises:
        ConfigError: neither CPU nor CUDA, or a CUDA device that this process does not see.
    """
    if device is None:
        return default_device()
    try:
        wanted = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ConfigError(f"device {device!r} is none that torch knows; use 'cpu', 'cuda' or 'cuda:<index>'") from error
    if wanted.type == "cpu":
        return torch.device("cpu")
    if wanted.type != "cuda":
        raise ConfigError(f"device {str(wanted)!r}: staged work runs on 'cpu' or 'cuda', not on {wanted.type!r}")
    if not torch.cuda.is_available():
        raise ConfigError(f"device {str(wanted)!r}: this process sees no CUDA GPU; use device='cpu'")
    index = wanted.index if ":" in str(wanted) else torch.cuda.current_device()
    if index >= torch.cuda.device_count():
        raise ConfigError(f"device {str(wanted)!r}: this process sees {torch.cuda.device_count()} CUDA GPU(s)")
    return torch.device("cuda", index)


def pinned(shape: int | Sequence[int], dtype: torch.dtype = torch.float32, *, pin: bool | None = None) -> torch.Tensor:
    """A zero-filled host tensor: page-locked on a machine with CUDA, pageable elsewhere.

    The memory goes back (and is unlocked) when the last tensor that views it is gone.

    Args:
        shape: elements, or the sizes of the dimensions.
        dtype: any dtype.
        pin: override the choice; None pins where CUDA is available.

    Raises:
        ConfigError: ``pin=True`` without CUDA, or the system refuses to lock that much memory.
    """
    sizes = (shape,) if isinstance(shape, int) else tuple(shape)
    wanted = torch.cuda.is_available() if pin is None else pin
    if not wanted:
        return torch.zeros(sizes, dtype=dtype)
    if not torch.cuda.is_available():
        raise ConfigError("pin=True needs a CUDA GPU, and this process sees none; leave pin unset")
    count = math.prod(sizes)
    nbytes = count * dtype.itemsize
    if nbytes < _REGISTER_FROM_BYTES:
        return torch.zeros(sizes, dtype=dtype, pin_memory=True)
    return torch.frombuffer(_RegisteredMemory(nbytes), dtype=dtype, count=count).view(sizes)


class _RegisteredMemory(mmap.mmap):
    """Anonymous zero pages, page-locked for CUDA from creation until the last tensor over them is gone.

    ``torch.frombuffer`` keeps this object alive for as long as the storage lives, and Python runs ``__del__`` before
    the pages are unmapped, which is the order that CUDA asks for.
    """

    _address: int
    _owner: int

    def __new__(cls, nbytes: int) -> "_RegisteredMemory":
        memory = super().__new__(cls, -1, nbytes)
        memory._owner = -1
        if hasattr(mmap, "MADV_HUGEPAGE"):
            # Fewer, larger pages make locking several times faster; a kernel without them says so and nothing is lost.
            with contextlib.suppress(OSError):
                memory.madvise(mmap.MADV_HUGEPAGE)
        memory._address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
        status = int(_cudart().cudaHostRegister(memory._address, nbytes, 0))
        if status != 0:
            raise ConfigError(
                f"CUDA could not page-lock {nbytes / 2**30:.2f} GiB of host memory (cudaHostRegister gave {status}): "
                "free host memory, raise the container's memory or memlock limit, or hold fewer masters on this rank"
            )
        memory._owner = os.getpid()
        return memory

    def __del__(self, _exiting: Callable[[], bool] = sys.is_finalizing, _pid: Callable[[], int] = os.getpid) -> None:
        # A forked child inherits the pages but not the registration. At exit driver and module globals may be gone
        # already (hence the functions as defaults), and the process' end unlocks the pages.
        if not _exiting() and self._owner == _pid():
            _cudart().cudaHostUnregister(self._address)


def _cudart() -> Any:
    return torch.cuda.cudart()
