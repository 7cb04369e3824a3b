"""Memory of another GPU: for which one it is mapped, and who copies out of it. The driver is stood in for, except in
the tests for two GPUs.
"""

import ctypes
import multiprocessing as mp
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from weftpub.memory import vmm
from weftpub.transport import CudaIpcReceive, CudaIpcSend, cuda_driver, cuda_ipc
from weftpub.wire import CudaIpcOffer, gpu_uuid
from weftpub_kernels import copy_spans

HOME, AWAY = 1, 0


class Driver:
    """Notes for which GPU memory is mapped and unmapped, and where torch is told that it is."""

    def __init__(self) -> None:
        self.opened: list[int] = []
        self.closed: list[int] = []
        self.shown: list[tuple[str, Any]] = []

    def open_handle(self, index: int, handle: bytes) -> int:
        self.opened.append(index)
        return 4096

    def close_handle(self, index: int, address: int) -> None:
        self.closed.append(index)

    def region_of(self, index: int, address: int) -> tuple[int, int]:
        return address, 1 << 20

    def tensor_at(self, index: int, address: int, nbytes: int) -> torch.Tensor:
        self.shown.append(("where it is", index))
        return torch.zeros(nbytes, dtype=torch.uint8)

    def reached_from(self, device: torch.device, address: int, nbytes: int) -> torch.Tensor:
        self.shown.append(("reached from", device.index))
        return torch.zeros(nbytes, dtype=torch.uint8)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    made = Driver()
    for name in ("open_handle", "close_handle", "region_of", "tensor_at", "reached_from"):
        monkeypatch.setattr(cuda_ipc.cuda_driver, name, getattr(made, name))
    monkeypatch.setattr(cuda_ipc, "device_index", lambda uuid: {"GPU-a": AWAY, "GPU-b": HOME}[uuid])
    monkeypatch.setattr(cuda_ipc, "resolve_device", torch.device)
    monkeypatch.setattr(cuda_ipc, "wait_for_devices", lambda devices: None)
    return made


def offer(gpu: str) -> CudaIpcOffer:
    return CudaIpcOffer(allocation=f"of {gpu}", nbytes=16, keep=False, gpu=gpu, handle=bytes(64))


@pytest.mark.parametrize(
    ("gpu", "linked", "mapped_for", "shown"),
    [
        pytest.param("GPU-b", False, HOME, ("where it is", HOME), id="own"),
        pytest.param("GPU-a", True, HOME, ("reached from", HOME), id="another"),
        pytest.param("GPU-a", False, AWAY, ("where it is", AWAY), id="another-without-a-link"),
    ],
)
def test_memory_is_mapped_for_the_gpu_that_copies(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, gpu: str, linked: bool, mapped_for: int, shown: tuple[str, int]
) -> None:
    """An engine's memory saver maps parameters for their own GPU only. A trainer's buffer on another GPU was mapped for
    that one, which then had to write into memory that it cannot reach."""
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda here, there: linked and here != there)
    transport = CudaIpcReceive(torch.device("cuda", HOME))
    transport.open(offer(gpu))
    assert (driver.opened, driver.shown) == ([mapped_for], [shown])
    transport.done(offer(gpu))
    assert driver.closed == [mapped_for]


def test_without_a_home_memory_is_mapped_where_it_is(driver: Driver) -> None:
    CudaIpcReceive().open(offer("GPU-a"))
    assert (driver.opened, driver.shown) == ([AWAY], [("where it is", AWAY)])


def test_torch_is_told_which_device_reaches_an_address() -> None:
    memory = (ctypes.c_uint8 * 16)(*range(16))
    found = cuda_driver.reached_from(torch.device("cpu"), ctypes.addressof(memory), 16)
    assert (found.dtype, found.tolist(), found.data_ptr()) == (torch.uint8, list(range(16)), ctypes.addressof(memory))
    memory[3] = 99
    assert int(found[3]) == 99


# On two GPUs.


def _send(pipe: Any) -> None:
    sender = CudaIpcSend(torch.device("cuda", AWAY))
    buffer = sender.allocate(1 << 22)
    buffer.tensor.copy_(torch.arange(1 << 22, device="cuda:0") % 251)
    torch.cuda.synchronize(AWAY)
    pipe.send(buffer.offer)
    pipe.recv()
    sender.close()


@pytest.fixture
def offered() -> Iterator[CudaIpcOffer]:
    """A buffer on the first GPU, of another process."""
    context = mp.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_send, args=(there,), daemon=True)
    process.start()
    assert here.poll(120)
    yield here.recv()
    here.send("stop")
    process.join(60)


@pytest.mark.gpu
@pytest.mark.multigpu
def test_a_kernel_of_one_gpu_reads_what_is_on_another(offered: CudaIpcOffer) -> None:
    """Whole and ragged pieces, into pages that are mapped for their own GPU only, as a memory saver maps them."""
    assert offered.gpu == gpu_uuid(AWAY)
    nbytes = 1 << 22
    address = vmm.map_handle(HOME, vmm.create(HOME, nbytes), nbytes, vmm.Access.WRITE)
    transport = CudaIpcReceive(torch.device("cuda", HOME))
    source = transport.open(offered)
    assert source.device == torch.device("cuda", HOME)
    target = cuda_driver.tensor_at(HOME, address, nbytes)
    pieces = [(0, 1 << 20), (1 << 20, 12345), ((1 << 20) + 12345, 7), (1 << 21, 1 << 21)]
    rows = [(source.data_ptr() + at, target.data_ptr() + at, size, 1, size, size) for at, size in pieces]
    copy_spans(np.array(rows, dtype=np.int64), torch.device("cuda", HOME))
    torch.cuda.synchronize(HOME)
    expected = torch.arange(1 << 22) % 251
    for at, size in pieces:
        assert torch.equal(target[at : at + size].cpu().long(), expected[at : at + size])
    assert int(source[:100].long().sum()) == int(expected[:100].sum())
    transport.close()
    del target
    vmm.unmap(HOME, address, nbytes)
