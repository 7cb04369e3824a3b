"""Devices and host buffers. Registration with CUDA is tested against a stand-in here, and for real on a GPU."""

import gc

import pytest
import torch

import weftpub.device as device_module
from weftpub.device import default_device, pinned, resolve_device
from weftpub.errors import ConfigError

without_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="says what a machine without CUDA does")


class RecordingCudart:
    """Stands in for the CUDA runtime: remembers what was locked and unlocked."""

    def __init__(self, status: int = 0) -> None:
        self.status = status
        self.calls: list[tuple[str, int]] = []

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        self.calls.append(("register", address))
        return self.status

    def cudaHostUnregister(self, address: int) -> int:
        self.calls.append(("unregister", address))
        return 0


@pytest.fixture
def cudart(monkeypatch: pytest.MonkeyPatch) -> RecordingCudart:
    runtime = RecordingCudart()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(device_module, "_cudart", lambda: runtime)
    monkeypatch.setattr(device_module, "_REGISTER_FROM_BYTES", 4096)
    return runtime


def test_resolve_cpu() -> None:
    assert resolve_device("cpu") == torch.device("cpu")
    assert resolve_device("cpu:0") == torch.device("cpu")


@without_cuda
def test_without_cuda_the_default_is_the_cpu_and_cuda_is_refused() -> None:
    assert default_device() == resolve_device(None) == torch.device("cpu")
    with pytest.raises(ConfigError, match="sees no CUDA GPU; use device='cpu'"):
        resolve_device("cuda:0")


def test_other_devices_are_refused() -> None:
    with pytest.raises(ConfigError, match="not on 'meta'"):
        resolve_device("meta")


@pytest.mark.parametrize("shape", [7, (7,), (3, 5), ()])
def test_pageable_buffers_are_zeroed_and_shaped(shape: int | tuple[int, ...]) -> None:
    buffer = pinned(shape, torch.bfloat16, pin=False)
    assert buffer.shape == torch.Size((shape,) if isinstance(shape, int) else shape)
    assert buffer.dtype is torch.bfloat16
    assert not buffer.any()


@without_cuda
def test_pinning_needs_cuda() -> None:
    assert pinned(8).numel() == 8
    with pytest.raises(ConfigError, match="leave pin unset"):
        pinned(8, pin=True)


def test_a_large_buffer_is_locked_until_its_last_view_is_gone(cudart: RecordingCudart) -> None:
    buffer = pinned((64, 33))
    address = buffer.data_ptr()
    assert not buffer.any()
    assert buffer.shape == (64, 33)
    assert cudart.calls == [("register", address)]

    view = buffer[3:5]
    del buffer
    gc.collect()
    view.fill_(2.0)
    assert cudart.calls == [("register", address)], "still in use: it must stay locked"

    del view
    gc.collect()
    assert cudart.calls == [("register", address), ("unregister", address)]


def test_memory_that_cannot_be_locked_is_an_error_and_nothing_is_unlocked(cudart: RecordingCudart) -> None:
    cudart.status = 2
    with pytest.raises(ConfigError, match=r"could not page-lock .* memlock limit"):
        pinned(4096)
    gc.collect()
    assert [call for call, _ in cudart.calls] == ["register"]


@pytest.mark.gpu
@pytest.mark.parametrize("numel", [1000, (64 << 20) // 4 + 5])
def test_gpu_buffers_are_pinned_and_copy_both_ways(numel: int) -> None:
    buffer = pinned(numel)
    assert buffer.is_pinned()
    assert buffer[numel // 2 :].is_pinned()
    assert not buffer.any()
    values = torch.arange(numel, dtype=torch.float32, device="cuda")
    buffer.copy_(values, non_blocking=True)
    torch.cuda.synchronize()
    assert torch.equal(buffer, values.cpu())
    back = torch.empty_like(values)
    back.copy_(buffer, non_blocking=True)
    torch.cuda.synchronize()
    assert torch.equal(back, values)


@pytest.mark.gpu
def test_gpu_locked_memory_can_be_locked_again_after_it_was_given_back() -> None:
    """A mapping unmapped while still registered poisons its addresses: the next buffer there could not be locked."""
    for _ in range(8):
        buffer = pinned(64 << 20 >> 2)
        assert buffer.is_pinned()
        del buffer
        gc.collect()
