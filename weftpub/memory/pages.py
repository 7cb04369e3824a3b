"""Memory that several processes map: on a GPU through the driver, on the host through a memory file.

Both kinds are made, opened from a file descriptor and protected alike, so everything above them (the hand-over, the
header, the protocol) is one code, and a CPU tests it. There is no name that could be left behind: the kernel or the
driver frees the memory when the last descriptor and mapping are gone, however their processes ended.
"""

import ctypes
import fcntl
import mmap
import os
import sys
import weakref
from functools import cache
from typing import Any, Protocol

import torch

from weftpub.errors import TransportError
from weftpub.memory import vmm
from weftpub.memory.vmm import Access

__all__ = ["DevicePages", "HostPages", "Pages", "make_pages", "memory_file", "open_pages"]

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW  # a file that shrinks under a mapping kills whoever reads it


class Pages(Protocol):
    """One mapped allocation.

    Attributes:
        descriptor: stands for the memory; can be handed to another process any number of times.
        nbytes: of the whole mapping.
        address: where it is mapped in this process; never changes.
    """

    descriptor: int
    nbytes: int
    address: int

    def tensor(self, offset: int, nbytes: int) -> torch.Tensor:
        """uint8 ``[nbytes]`` over the mapping from byte `offset` on; it keeps the mapping alive."""
        ...

    def protect(self, access: Access) -> None:
        """Change what this process may do. What was enqueued on the GPU has finished before."""
        ...

    def close(self) -> None:
        """Close the descriptor. The mapping goes with the last tensor over it."""
        ...


class HostPages:
    """A memory file (memfd), mapped shared.

    Args:
        descriptor: of the file; owned from here on.
        nbytes: its size, in whole pages.
    """

    def __init__(self, descriptor: int, nbytes: int) -> None:
        self.descriptor = descriptor
        self.nbytes = nbytes
        self._map = mmap.mmap(descriptor, nbytes, flags=mmap.MAP_SHARED)
        self.address = torch.frombuffer(self._map, dtype=torch.uint8).data_ptr()

    def tensor(self, offset: int, nbytes: int) -> torch.Tensor:
        """See `Pages.tensor`."""
        return torch.frombuffer(self._map, dtype=torch.uint8, count=nbytes, offset=offset)

    def protect(self, access: Access) -> None:
        """See `Pages.protect`; breaking it is a segmentation fault."""
        wanted = {Access.NONE: 0, Access.READ: mmap.PROT_READ, Access.WRITE: mmap.PROT_READ | mmap.PROT_WRITE}[access]
        if _libc().mprotect(ctypes.c_void_p(self.address), ctypes.c_size_t(self.nbytes), ctypes.c_int(wanted)) != 0:
            raise TransportError(
                f"mprotect of {self.nbytes} bytes to {access.name} failed: {os.strerror(ctypes.get_errno())}"
            )

    def close(self) -> None:
        """See `Pages.close`."""
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


class DevicePages:
    """GPU memory from the driver's virtual memory calls.

    Args:
        index: the device.
        descriptor: of the memory; owned from here on.
        handle: the memory's handle; given up to the mapping.
        nbytes: its size.
    """

    def __init__(self, index: int, descriptor: int, handle: int, nbytes: int) -> None:
        self.descriptor = descriptor
        self.nbytes = nbytes
        self._index = index
        self._mapping = _Mapping(index, vmm.map_handle(index, handle, nbytes, Access.WRITE), nbytes)
        self.address = self._mapping.address

    def tensor(self, offset: int, nbytes: int) -> torch.Tensor:
        """See `Pages.tensor`."""
        shown = _Shown(self._mapping, offset, nbytes)
        return torch.as_tensor(shown, device=torch.device("cuda", self._index))

    def protect(self, access: Access) -> None:
        """See `Pages.protect`; breaking it is an illegal memory access, and ends this process' use of the GPU."""
        torch.cuda.synchronize(self._index)
        vmm.protect(self._index, self.address, self.nbytes, access)

    def close(self) -> None:
        """See `Pages.close`."""
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


class _Mapping:
    """A mapping that is undone when nobody refers to it any more."""

    def __init__(self, index: int, address: int, nbytes: int) -> None:
        self.address = address
        finish = weakref.finalize(self, _unmap, index, address, nbytes)
        finish.atexit = False  # the process' end unmaps everything, and tensors may still be around then


class _Shown:
    """Part of a mapping as PyTorch takes memory from others; the tensor keeps this object, and it the mapping."""

    def __init__(self, mapping: _Mapping, offset: int, nbytes: int) -> None:
        self._mapping = mapping
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (mapping.address + offset, False),
            "strides": None,
            "version": 3,
        }


def _unmap(index: int, address: int, nbytes: int) -> None:
    if not sys.is_finalizing():
        torch.cuda.synchronize(index)  # a kernel may still be reading for a tensor that is gone
        vmm.unmap(index, address, nbytes)


def make_pages(device: torch.device, nbytes: int) -> Pages:
    """New memory of at least `nbytes` on `device`, content undefined.

    Raises:
        TransportError: the system or the driver refuses; names the call.
    """
    if device.type == "cpu":
        size = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        return HostPages(memory_file("weftpub-experts", size), size)
    index = device.index
    size = -(-nbytes // (unit := vmm.granularity(index))) * unit
    handle = vmm.create(index, size)
    descriptor = vmm.export_fd(index, handle)
    os.set_inheritable(descriptor, False)
    return DevicePages(index, descriptor, handle, size)


def open_pages(device: torch.device, descriptor: int, nbytes: int) -> Pages:
    """Memory that another process made, from its descriptor, which is owned from here on.

    Raises:
        TransportError: the descriptor is not such memory, or the driver refuses it.
    """
    try:
        if device.type == "cpu":
            require_memory_file(descriptor, nbytes)
            return HostPages(descriptor, nbytes)
        return DevicePages(device.index, descriptor, vmm.import_fd(device.index, descriptor), nbytes)
    except TransportError:
        os.close(descriptor)
        raise


def memory_file(name: str, nbytes: int) -> int:
    """Descriptor of a new memory file of zeros that cannot change its size any more; TransportError if refused."""
    try:
        descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError as error:
        raise TransportError(
            f"memfd_create failed: {error.strerror}; the container's system call filter may forbid it"
        ) from error
    try:
        os.ftruncate(descriptor, nbytes)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
    except OSError as error:
        os.close(descriptor)
        raise TransportError(f"a memory file of {nbytes} bytes cannot be made: {error.strerror}") from error
    return descriptor


def require_memory_file(descriptor: int, nbytes: int) -> None:
    """TransportError unless `descriptor` is a memory file of `nbytes` that nobody can shrink."""
    try:
        seals, size = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS), os.fstat(descriptor).st_size
    except OSError as error:
        raise TransportError(f"what was handed over is no memory file: {error.strerror}") from error
    if seals & _SEALS != _SEALS or size != nbytes:
        raise TransportError(
            f"what was handed over is a memory file of {size} bytes with seals {seals:#x}, expected {nbytes} bytes "
            "that cannot shrink; both sides must run the same release"
        )


@cache
def _libc() -> Any:
    return ctypes.CDLL(None, use_errno=True)
