"""Device memory made piece by piece with the driver's virtual memory calls: created, exported as a file descriptor,
mapped, protected.

A physical allocation (a handle), the addresses that are reserved for it and the mapping between both are three things
with three lives. The driver counts who holds the physical memory (handles, descriptors and mappings of all processes)
and frees it when the last one is gone, also when a process is killed.
"""

import ctypes
import secrets
from enum import IntEnum

from weftpub.errors import TransportError
from weftpub.memory.driver import check, current, device_attribute

__all__ = [
    "Access",
    "create",
    "export_fd",
    "granularity",
    "import_fd",
    "map_handle",
    "protect",
    "unmap",
    "vmm_obstacle",
]

_PINNED = 1  # CU_MEM_ALLOCATION_TYPE_PINNED
_ON_DEVICE = 1  # CU_MEM_LOCATION_TYPE_DEVICE
_POSIX_FD = 1  # CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
_RECOMMENDED = 1  # CU_MEM_ALLOC_GRANULARITY_RECOMMENDED
_HAS_VMM = 102  # CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
_HIGH = 1 << 45  # addresses are asked for from here on
_APART = 1 << 38
_HAS_POSIX_FD = 103  # CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED


class Access(IntEnum):
    """What a process may do with its mapping; the values are the driver's `CUmemAccess_flags`."""

    NONE = 0
    READ = 1
    WRITE = 3


class Location(ctypes.Structure):
    """`CUmemLocation`."""

    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class AllocationProperties(ctypes.Structure):
    """`CUmemAllocationProp`; the fields after `win32` are the compression, RDMA and usage flags, all zero here."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", Location),
        ("win32", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )


class AccessDescription(ctypes.Structure):
    """`CUmemAccessDesc`."""

    _fields_ = (("location", Location), ("flags", ctypes.c_int))


def properties(index: int) -> AllocationProperties:
    """Memory on device `index` that can be exported as a file descriptor."""
    return AllocationProperties(_PINNED, _POSIX_FD, Location(_ON_DEVICE, index), None)


def vmm_obstacle(index: int) -> str | None:
    """Why device `index` cannot share memory by file descriptor, None if it says that it can."""
    try:
        if not device_attribute(index, _HAS_VMM):
            return f"cuda:{index} has no virtual memory management (cuMemCreate); its driver or vGPU profile lacks it"
        if not device_attribute(index, _HAS_POSIX_FD):
            return f"cuda:{index} cannot export memory as a file descriptor; its driver or container forbids it"
    except TransportError as error:
        return str(error)
    return None


def granularity(index: int) -> int:
    """Bytes that sizes on device `index` are multiples of."""
    size, wanted = ctypes.c_size_t(), properties(index)
    with current(index) as driver:
        check(
            driver.cuMemGetAllocationGranularity(ctypes.byref(size), ctypes.byref(wanted), _RECOMMENDED),
            "cuMemGetAllocationGranularity",
        )
    return size.value


def create(index: int, nbytes: int) -> int:
    """Handle of `nbytes` (a multiple of `granularity`) of new physical memory."""
    handle, wanted = ctypes.c_uint64(), properties(index)
    with current(index) as driver:
        check(
            driver.cuMemCreate(
                ctypes.byref(handle), ctypes.c_size_t(nbytes), ctypes.byref(wanted), ctypes.c_ulonglong(0)
            ),
            f"cuMemCreate of {nbytes} bytes",
        )
    return handle.value


def export_fd(index: int, handle: int) -> int:
    """A file descriptor for a handle from `create`; it holds the memory as a handle does, until it is closed."""
    descriptor = ctypes.c_int(-1)
    with current(index) as driver:
        check(
            driver.cuMemExportToShareableHandle(
                ctypes.byref(descriptor), ctypes.c_uint64(handle), ctypes.c_int(_POSIX_FD), ctypes.c_ulonglong(0)
            ),
            "cuMemExportToShareableHandle",
        )
    return descriptor.value


def import_fd(index: int, descriptor: int) -> int:
    """Handle of the memory that a descriptor from `export_fd` of another process stands for."""
    handle = ctypes.c_uint64()
    with current(index) as driver:
        check(
            driver.cuMemImportFromShareableHandle(
                ctypes.byref(handle), ctypes.c_void_p(descriptor), ctypes.c_int(_POSIX_FD)
            ),
            "cuMemImportFromShareableHandle",
        )
    return handle.value


def map_handle(index: int, handle: int, nbytes: int, access: Access) -> int:
    """Reserve addresses, map a handle there and let go of the handle: from then on the mapping holds the memory.

    High addresses are asked for, which is a hint: the kernels' launches take low ones for released tensors, and look
    twice.

    Returns:
        the address, which stays the same until `unmap`, whatever `protect` does.
    """
    address = ctypes.c_uint64()
    wish = ctypes.c_uint64(_HIGH + secrets.randbelow(32) * _APART)
    with current(index) as driver:
        size, none = ctypes.c_size_t(nbytes), ctypes.c_ulonglong(0)
        try:
            check(
                driver.cuMemAddressReserve(ctypes.byref(address), size, ctypes.c_size_t(0), wish, none),
                f"cuMemAddressReserve of {nbytes} bytes",
            )
            try:
                check(driver.cuMemMap(address, size, ctypes.c_size_t(0), ctypes.c_uint64(handle), none), "cuMemMap")
            except TransportError:
                driver.cuMemAddressFree(address, size)
                raise
        finally:
            check(driver.cuMemRelease(ctypes.c_uint64(handle)), "cuMemRelease")
    try:
        protect(index, address.value, nbytes, access)
    except TransportError:
        unmap(index, address.value, nbytes)
        raise
    return address.value


def protect(index: int, address: int, nbytes: int, access: Access) -> None:
    """Change what this process may do with a mapping. The caller has waited for the device.

    A kernel that does more than allowed fails with an illegal memory access, after which this process' context is of no
    use any more.
    """
    wanted = AccessDescription(Location(_ON_DEVICE, index), int(access))
    with current(index) as driver:
        check(
            driver.cuMemSetAccess(
                ctypes.c_uint64(address), ctypes.c_size_t(nbytes), ctypes.byref(wanted), ctypes.c_size_t(1)
            ),
            f"cuMemSetAccess to {access.name}",
        )


def unmap(index: int, address: int, nbytes: int) -> None:
    """Undo `map_handle`. The caller has waited for the device."""
    with current(index) as driver:
        check(driver.cuMemUnmap(ctypes.c_uint64(address), ctypes.c_size_t(nbytes)), "cuMemUnmap")
        check(driver.cuMemAddressFree(ctypes.c_uint64(address), ctypes.c_size_t(nbytes)), "cuMemAddressFree")
