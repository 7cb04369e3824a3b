"""The few calls of the CUDA driver that sharing memory between processes needs, through ctypes.

PyTorch can share tensors between processes, but its handles are Python objects whose layout differs between releases,
and it decides by itself when a mapping is closed. Trainer and engine may run different torch builds, and a mapping must
be closed before the sender frees the memory, so the driver is
called directly: a handle is 64 bytes, opening and closing are explicit.

Every function works in the primary context of the device, which is the one that PyTorch uses.
"""

import ctypes
from collections.abc import Iterable

import torch

from weftpub.memory.driver import check as _check
from weftpub.memory.driver import current as _current

__all__ = [
    "Region",
    "allocate",
    "buffer_id",
    "buffer_ids",
    "close_handle",
    "export_handle",
    "free",
    "ipc_capable",
    "open_handle",
    "reached_from",
    "region_of",
    "tensor_at",
]

_BUFFER_ID = 7  # CU_POINTER_ATTRIBUTE_BUFFER_ID: unique among all allocations of a process's life
_LEGACY_IPC_CAPABLE = 10  # CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE
_LAZY_ENABLE_PEER_ACCESS = 1
_BLOCK = 2 << 20

type Region = tuple[int, int]  # address and bytes of a whole allocation


class _IpcHandle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_char * 64),)


def allocate(index: int, nbytes: int) -> int:
    """Address of at least `nbytes` of new memory on device `index`, an allocation of its own that any process can be
    shown. Rounded up to 2 MiB: smaller allocations share a block, and a handle shows the whole block."""
    pointer = ctypes.c_uint64()
    with _current(index) as driver:
        _check(
            driver.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(-(-nbytes // _BLOCK) * _BLOCK)),
            f"cuMemAlloc of {nbytes} bytes",
        )
    return pointer.value


def free(index: int, address: int) -> None:
    """Free memory from `allocate`; waits for the device."""
    with _current(index) as driver:
        _check(driver.cuMemFree_v2(ctypes.c_uint64(address)), "cuMemFree")


def region_of(index: int, address: int) -> Region:
    """Start and size of the allocation that `address` lies in."""
    start, size = ctypes.c_uint64(), ctypes.c_size_t()
    with _current(index) as driver:
        _check(
            driver.cuMemGetAddressRange_v2(ctypes.byref(start), ctypes.byref(size), ctypes.c_uint64(address)),
            "cuMemGetAddressRange",
        )
    return start.value, size.value


def buffer_id(index: int, address: int) -> int:
    """Number of the allocation, which no later one of this process will have, even at the same address."""
    value = ctypes.c_uint64()
    with _current(index) as driver:
        _check(
            driver.cuPointerGetAttribute(ctypes.byref(value), _BUFFER_ID, ctypes.c_uint64(address)),
            "cuPointerGetAttribute",
        )
    return value.value


def buffer_ids(index: int, addresses: Iterable[int]) -> list[int | None]:
    """`buffer_id` of many addresses; None for one at which there is no memory any more."""
    value = ctypes.c_uint64()
    place = ctypes.byref(value)
    with _current(index) as driver:
        get = driver.cuPointerGetAttribute
        return [value.value if get(place, _BUFFER_ID, ctypes.c_uint64(a)) == 0 else None for a in addresses]


def ipc_capable(index: int, address: int) -> bool:
    """Whether the memory at `address` can be exported by handle.

    Memory that was mapped piece by piece (expandable segments) cannot.
    """
    value = ctypes.c_int()
    with _current(index) as driver:
        _check(
            driver.cuPointerGetAttribute(ctypes.byref(value), _LEGACY_IPC_CAPABLE, ctypes.c_uint64(address)),
            "cuPointerGetAttribute",
        )
    return bool(value.value)


def export_handle(index: int, address: int) -> bytes:
    """The 64-byte handle of the allocation that `address` lies in."""
    handle = _IpcHandle()
    with _current(index) as driver:
        _check(driver.cuIpcGetMemHandle(ctypes.byref(handle), ctypes.c_uint64(address)), "cuIpcGetMemHandle")
    return bytes(handle)


def open_handle(index: int, handle: bytes) -> int:
    """Map another process's allocation into this one, for device `index`, which may be another than the memory is on if
    it can access it; the address here.

    Not possible in the process that exported it.
    """
    pointer = ctypes.c_uint64()
    with _current(index) as driver:
        _check(
            driver.cuIpcOpenMemHandle_v2(
                ctypes.byref(pointer), _IpcHandle.from_buffer_copy(handle), ctypes.c_uint(_LAZY_ENABLE_PEER_ACCESS)
            ),
            "cuIpcOpenMemHandle",
        )
    return pointer.value


def close_handle(index: int, address: int) -> None:
    """Unmap what `open_handle` mapped; the caller has waited for every copy out of it."""
    with _current(index) as driver:
        _check(driver.cuIpcCloseMemHandle(ctypes.c_uint64(address)), "cuIpcCloseMemHandle")


class _Raw:
    """Memory as PyTorch takes it from others: an address with a size, owned by whoever made it."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }


def tensor_at(index: int, address: int, nbytes: int) -> torch.Tensor:
    """A uint8 [nbytes] tensor over device memory that the tensor does not own."""
    return torch.as_tensor(_Raw(address, nbytes), device=torch.device("cuda", index))


def reached_from(device: torch.device, address: int, nbytes: int) -> torch.Tensor:
    """A uint8 [nbytes] tensor of `device` over memory that it reaches and that the tensor does not own: another GPU's,
    mapped for this one. `tensor_at` would ask the driver where the memory is.
    """
    storage = torch._C._construct_storage_from_data_pointer(address, device, nbytes)
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage, 0, (nbytes,), (1,))
