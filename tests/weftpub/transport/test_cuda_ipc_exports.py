"""Which allocation an exported buffer is named after, publish by publish, with a driver that is played: a name stands
for one allocation for ever, and is looked up again at every publish."""

from types import SimpleNamespace

import pytest
import torch

from weftpub.errors import TransportError
from weftpub.transport import CudaIpcSend, cuda_ipc


class PlayedDriver:
    """Allocations by start address: (size, number)."""

    def __init__(self) -> None:
        self.allocations: dict[int, tuple[int, int]] = {}
        self.asked = 0
        self.number = 0

    def allocate_at(self, start: int, size: int = 4096) -> None:
        self.number += 1
        self.allocations[start] = size, self.number

    def _find(self, address: int) -> int | None:
        return next((s for s, (size, _) in self.allocations.items() if s <= address < s + size), None)

    def buffer_id(self, _: int, address: int) -> int:
        self.asked += 1
        start = self._find(address)
        assert start is not None
        return self.allocations[start][1]

    def buffer_ids(self, _: int, addresses: dict[int, object]) -> list[int | None]:
        starts = [self._find(address) for address in addresses]
        return [None if start is None else self.allocations[start][1] for start in starts]

    def region_of(self, _: int, address: int) -> tuple[int, int]:
        start = self._find(address)
        assert start is not None
        return start, self.allocations[start][0]

    def ipc_capable(self, _: int, address: int) -> bool:
        return address < 1 << 44

    def export_handle(self, _: int, address: int) -> bytes:
        return self.buffer_id(0, address).to_bytes(64, "little")


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> PlayedDriver:
    made = PlayedDriver()
    monkeypatch.setattr(cuda_ipc, "cuda_driver", made)
    monkeypatch.setattr(cuda_ipc, "gpu_uuid", lambda _: "GPU-a")
    monkeypatch.setattr(cuda_ipc, "resolve_device", lambda _: torch.device("cuda", 0))
    return made


def tensor_at(address: int, numel: int = 8) -> torch.Tensor:
    storage = SimpleNamespace(nbytes=lambda: numel)
    found: object = SimpleNamespace(
        device=torch.device("cuda", 0),
        is_cuda=True,
        numel=lambda: numel,
        get_device=lambda: 0,
        data_ptr=lambda: address,
        untyped_storage=lambda: storage,
    )
    return found  # type: ignore[return-value]


def test_tensors_of_one_allocation_share_an_offer(driver: PlayedDriver) -> None:
    driver.allocate_at(1 << 41)
    sender = CudaIpcSend(torch.device("cuda", 0))
    first, offset = sender.export(tensor_at(1 << 41), keep=True)
    second, further = sender.export(tensor_at((1 << 41) + 512), keep=True)
    assert first.allocation == second.allocation
    assert (offset, further, first.nbytes) == (0, 512, 4096)


def test_a_known_buffer_is_not_asked_about_again(driver: PlayedDriver) -> None:
    driver.allocate_at(1 << 41)
    sender = CudaIpcSend(torch.device("cuda", 0))
    offer, _ = sender.export(tensor_at(1 << 41), keep=True)
    sender.end_publish()
    driver.asked = 0
    assert sender.export(tensor_at(1 << 41), keep=True)[0] is offer
    assert driver.asked == 0


def test_other_memory_at_the_same_address_has_another_name(driver: PlayedDriver) -> None:
    """The trainer's allocator gave a block back to the driver and got another one at the same address; a receiver that
    had the first one mapped would have read it for ever."""
    sender = CudaIpcSend(torch.device("cuda", 0))
    names = []
    for _ in range(3):
        driver.allocate_at(1 << 41)
        names.append(sender.export(tensor_at(1 << 41), keep=True)[0].allocation)
        sender.end_publish()
    driver.allocations.clear()
    driver.allocate_at(1 << 42)
    names.append(sender.export(tensor_at(1 << 42), keep=True)[0].allocation)
    assert len(set(names)) == 4


def test_what_is_not_shown_any_more_is_forgotten(driver: PlayedDriver) -> None:
    sender = CudaIpcSend(torch.device("cuda", 0))
    for step in range(50):
        driver.allocations.clear()
        driver.allocate_at((1 << 41) + 8192 * step)
        sender.export(tensor_at((1 << 41) + 8192 * step), keep=True)
        sender.end_publish()
    assert len(sender._exports) == len(sender._handles) == 1


def test_whether_it_may_be_kept_is_part_of_the_offer(driver: PlayedDriver) -> None:
    driver.allocate_at(1 << 41)
    sender = CudaIpcSend(torch.device("cuda", 0))
    kept, _ = sender.export(tensor_at(1 << 41), keep=True)
    once, _ = sender.export(tensor_at(1 << 41), keep=False)
    assert (kept.keep, once.keep) == (True, False)
    assert kept.allocation == once.allocation


def test_memory_that_cannot_be_exported_names_the_setting(driver: PlayedDriver) -> None:
    driver.allocate_at(1 << 45)
    with pytest.raises(TransportError, match="expandable_segments:False"):
        CudaIpcSend(torch.device("cuda", 0)).export(tensor_at(1 << 45), keep=True)
