"""GPUs are known by what they are, however CUDA_VISIBLE_DEVICES lists them in each process; MIG slices are refused."""

import platform
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from weftpub.errors import ConfigError
from weftpub.wire import gpu_uuid, local_identity
from weftpub.wire.identity import device_index, process_alive, process_identity

UUIDS = ("1f0d0a52-0000", "2b7c9d14-0000", "3a81e6f0-0000", "4c55b3aa-0000")


@pytest.fixture
def visible(monkeypatch: pytest.MonkeyPatch) -> Generator[Callable[..., None]]:
    """Let this process see GPUs of a host of four, as the driver does for a value of CUDA_VISIBLE_DEVICES."""

    def see(value: str | None, name: str = "NVIDIA H200") -> None:
        entries = [str(i) for i in range(4)] if value is None else [entry for entry in value.split(",") if entry]
        seen = [
            next(uuid for uuid in UUIDS if uuid.startswith(entry.removeprefix("GPU-")))
            if entry.startswith("GPU-")
            else UUIDS[int(entry)]
            for entry in entries
        ]
        monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(seen))
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(seen))
        monkeypatch.setattr(
            torch.cuda, "get_device_properties", lambda index: SimpleNamespace(name=name, uuid=seen[index])
        )
        gpu_uuid.cache_clear()

    yield see
    gpu_uuid.cache_clear()


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        pytest.param(None, (0, 1, 2, 3), id="unset"),
        pytest.param("2,3", (2, 3), id="list"),
        pytest.param("3,0,1", (3, 0, 1), id="reordered"),
        pytest.param("GPU-3a81e6f0-0000", (2,), id="uuid"),
        pytest.param("GPU-4c55,GPU-1f0d", (3, 0), id="uuid-prefixes-reordered"),
        pytest.param("", (), id="none"),
    ],
)
def test_gpus_are_known_by_uuid(visible: Callable[..., None], value: str | None, expected: tuple[int, ...]) -> None:
    """With CUDA_VISIBLE_DEVICES=4,5,6,7 a peer took the local index for the physical one and waited forever."""
    visible(value)
    assert local_identity().gpus == tuple(f"GPU-{UUIDS[i]}" for i in expected)
    for position, physical in enumerate(expected):
        assert device_index(f"GPU-{UUIDS[physical]}") == position
    for physical in set(range(4)) - set(expected):
        assert device_index(f"GPU-{UUIDS[physical]}") is None


def test_a_mig_slice_is_refused_by_name(visible: Callable[..., None]) -> None:
    visible("1", name="NVIDIA H200 MIG 1g.18gb")
    with pytest.raises(ConfigError, match=r"cuda:0 is a MIG slice \(NVIDIA H200 MIG 1g.18gb\); run .* on whole GPUs"):
        local_identity()
    assert process_identity().gpus == ()


def state_of(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def test_a_killed_process_exists_until_its_last_thread_is_gone() -> None:
    """A killed trainer's first thread was a zombie at once; another one was still closing the GPU, whose kernels wrote
    into the memory that the next trainer had begun to write."""
    script = (
        "import ctypes, threading, time\n"
        "threading.Thread(target=time.sleep, args=(600,)).start()\n"
        f"ctypes.CDLL(None).syscall({60 if platform.machine() == 'x86_64' else 93}, 0)\n"  # exit, of the first thread
    )
    process = subprocess.Popen([sys.executable, "-c", script])
    here = process_identity()

    def wait_for(what: Callable[[], bool]) -> None:
        until = time.monotonic() + 60
        while not what():
            assert time.monotonic() < until
            time.sleep(0.01)

    try:
        wait_for(lambda: state_of(process.pid)[0] == "Z")
        other = here.model_copy(update={"pid": process.pid, "started": int(state_of(process.pid)[19])})
        assert process_alive(other, here)
        process.send_signal(signal.SIGKILL)
        wait_for(lambda: not process_alive(other, here))
        assert state_of(process.pid)[0] == "Z"  # nobody has reaped it
    finally:
        process.kill()
        process.wait(30)
    assert not process_alive(other, here)
