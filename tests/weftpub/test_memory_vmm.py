"""The driver's structures as they are laid out here, against cuda-python's; and errors in the driver's own words."""

import ctypes
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from weftpub.errors import TransportError
from weftpub.memory import sharing_obstacle, vmm
from weftpub.memory.driver import check
from weftpub.memory.vmm import Access, AccessDescription, AllocationProperties, Location, properties
from weftpub_kernels import ShapeError, SpanChecksums, SpanCopies

bindings = pytest.importorskip("cuda.bindings.driver", reason="cuda-python is not installed")


def test_allocation_properties_have_the_drivers_layout() -> None:
    theirs = bindings.CUmemAllocationProp()
    theirs.type = bindings.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    theirs.requestedHandleTypes = bindings.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    theirs.location.type = bindings.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    theirs.location.id = 3
    ours = properties(3)
    assert ctypes.sizeof(AllocationProperties) == 32
    assert ctypes.string_at(theirs.getPtr(), 32) == bytes(ours)


def test_access_descriptions_have_the_drivers_layout_and_values() -> None:
    theirs = bindings.CUmemAccessDesc()
    theirs.location.type = bindings.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    theirs.location.id = 2
    theirs.flags = bindings.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READ
    ours = AccessDescription(Location(1, 2), int(Access.READ))
    assert ctypes.string_at(theirs.getPtr(), ctypes.sizeof(ours)) == bytes(ours)
    flags = bindings.CUmemAccess_flags
    assert [int(a) for a in Access] == [
        int(flags.CU_MEM_ACCESS_FLAGS_PROT_NONE),
        int(flags.CU_MEM_ACCESS_FLAGS_PROT_READ),
        int(flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE),
    ]


def test_attributes_and_options_have_the_drivers_numbers() -> None:
    attribute = bindings.CUdevice_attribute
    assert int(attribute.CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED) == vmm._HAS_VMM
    assert int(attribute.CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED) == vmm._HAS_POSIX_FD
    assert int(bindings.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED) == vmm._RECOMMENDED


def test_a_refusal_names_the_call_and_the_drivers_words() -> None:
    def words(status: int, target: Any) -> int:
        target._obj.value = b"operation not supported"
        return 0

    with pytest.raises(TransportError, match=r"cuMemCreate of 5 bytes failed: operation not supported \(CUDA"):
        check(801, "cuMemCreate of 5 bytes", SimpleNamespace(cuGetErrorString=words))
    check(0, "cuMemCreate")


@pytest.mark.parametrize(("attribute", "says"), [(vmm._HAS_VMM, "cuMemCreate"), (vmm._HAS_POSIX_FD, "file descriptor")])
def test_a_driver_that_lacks_it_is_named_before_anything_is_made(
    monkeypatch: pytest.MonkeyPatch, attribute: int, says: str
) -> None:
    monkeypatch.setattr(vmm, "device_attribute", lambda index, which: int(which != attribute))
    assert says in (vmm.vmm_obstacle(0) or "")
    monkeypatch.setattr(vmm, "device_attribute", lambda index, which: 1)
    assert vmm.vmm_obstacle(0) is None


def test_a_system_without_memory_files_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr("os.memfd_create", refuse)
    assert "memfd_create failed: Operation not permitted" in (sharing_obstacle(torch.device("cpu")) or "")


def test_low_addresses_of_piecewise_mapped_memory_are_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver maps memory of expandable segments and memory savers from 0x302000000 on. A check that took every
    address below 2^40 for a released tensor refused all publishes to an engine with a memory saver."""
    seen: list[int] = []
    for kind in (SpanChecksums, SpanCopies):
        monkeypatch.setattr(kind, "_on_gpu", lambda self, table, *_: seen.append(int(table.reshape(-1)[0])))
    gpu, low, released = torch.device("cuda", 0), 0x302000000, 1 << 32
    SpanChecksums(gpu).sums(np.array([low]), np.array([16]))
    SpanCopies(gpu).copy(np.array([[low, low + 4096, 16, 1, 16, 16]]))
    assert seen == [low, low]
    with pytest.raises(ShapeError, match="is a tensor offloaded"):
        SpanChecksums(gpu).compute(np.array([released]), np.array([16]))
    with pytest.raises(ShapeError, match="is a tensor offloaded"):
        SpanCopies(gpu).copy(np.array([[released, low, 16, 1, 16, 16]]))
