"""Shared memory between processes: owner-only, named for one publish, and gone after it, crashes included."""

import errno
import multiprocessing as mp
import os
import signal
import stat
from pathlib import Path
from typing import Any

import pytest
import torch

from weftpub.errors import TransportError
from weftpub.transport import SharedMemoryReceive, SharedMemorySend, sweep_abandoned
from weftpub.wire import SharedMemoryOffer


@pytest.fixture
def sender(tmp_path: Path) -> SharedMemorySend:
    return SharedMemorySend("run", 3, pin=False, folder=tmp_path)


@pytest.fixture
def receiver(tmp_path: Path) -> SharedMemoryReceive:
    return SharedMemoryReceive(pin=False, folder=tmp_path)


def test_bytes_arrive(sender: SharedMemorySend, receiver: SharedMemoryReceive) -> None:
    buffer = sender.allocate(5000)
    buffer.tensor.copy_(torch.arange(5000) % 251)
    seen = receiver.open(buffer.offer)
    assert torch.equal(seen, buffer.tensor)
    assert seen.data_ptr() != buffer.tensor.data_ptr()
    buffer.tensor[7] = 99
    assert receiver.open(buffer.offer)[7] == 99


def test_files_are_owner_only_and_say_whose_they_are(sender: SharedMemorySend, tmp_path: Path) -> None:
    offer = sender.allocate(100).offer
    path = tmp_path / offer.allocation
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert path.name.startswith(f"weftpub-{os.getuid()}-run-v3-")


def test_the_name_goes_first_and_the_memory_with_the_last_mapping(
    sender: SharedMemorySend, receiver: SharedMemoryReceive, tmp_path: Path
) -> None:
    buffer = sender.allocate(100)
    seen = receiver.open(buffer.offer)
    sender.everyone_opened(buffer)
    assert list(tmp_path.iterdir()) == []
    buffer.tensor.fill_(7)
    assert seen.eq(7).all()
    sender.close()
    assert seen.eq(7).all()


def test_names_go_with_the_publish(sender: SharedMemorySend, receiver: SharedMemoryReceive, tmp_path: Path) -> None:
    """A receiver that ends early leaves the name to the others; the sender removes it."""
    offer = sender.allocate(100).offer
    receiver.open(offer)
    receiver.end_publish()
    assert [path.name for path in tmp_path.iterdir()] == [offer.allocation]
    SharedMemoryReceive(pin=False, folder=tmp_path).open(offer)
    sender.end_publish()
    assert list(tmp_path.iterdir()) == []


def test_a_freed_buffer_is_gone(sender: SharedMemorySend, tmp_path: Path) -> None:
    first, second = sender.allocate(100), sender.allocate(100)
    sender.free(first)
    sender.free(first)
    assert [path.name for path in tmp_path.iterdir()] == [second.offer.allocation]


def test_mappings_do_not_stay(sender: SharedMemorySend, receiver: SharedMemoryReceive) -> None:
    """Handles leaked gigabytes a step. Names in this process's memory map are counted."""
    before = mappings()
    for _ in range(50):
        buffer = sender.allocate(1 << 16)
        receiver.open(buffer.offer)
        del buffer
        receiver.end_publish()
        sender.end_publish()
    assert mappings() == before
    assert len(os.listdir("/proc/self/fd")) < 100


def mappings() -> int:
    return Path("/proc/self/maps").read_text().count("weftpub-")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"nbytes": 99}, "has 100 bytes; expected user"),
        ({"name": "weftpub-0-none", "allocation": "weftpub-0-none"}, "cannot be opened"),
    ],
)
def test_an_offer_that_does_not_fit_is_refused(
    sender: SharedMemorySend, receiver: SharedMemoryReceive, change: dict, words: str
) -> None:
    offer = sender.allocate(100).offer
    with pytest.raises(TransportError, match=words):
        receiver.open(offer.model_copy(update=change))


def test_a_link_is_not_followed(receiver: SharedMemoryReceive, tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"x" * 100)
    (tmp_path / "weftpub-0-link").symlink_to(tmp_path / "secret")
    with pytest.raises(TransportError, match="cannot be opened"):
        receiver.open(SharedMemoryOffer(allocation="weftpub-0-link", nbytes=100, keep=True, name="weftpub-0-link"))


def test_a_full_folder_is_an_error_and_leaves_nothing(
    sender: SharedMemorySend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(TransportError, match=r"do not fit into .*shm-size"):
        sender.allocate(100)
    assert list(tmp_path.iterdir()) == []


def test_other_memory_is_not_exported(sender: SharedMemorySend) -> None:
    with pytest.raises(TransportError, match="packed instead"):
        sender.export(torch.zeros(4), keep=False)


def _create_and_wait(folder: str, pipe: Any) -> None:
    side = SharedMemorySend("run", 1, pin=False, folder=Path(folder))
    pipe.send([side.allocate(1000).offer.allocation for _ in range(2)])
    pipe.recv()


@pytest.mark.slow
def test_files_of_a_killed_trainer_go_and_those_of_a_living_one_stay(
    sender: SharedMemorySend, receiver: SharedMemoryReceive, tmp_path: Path
) -> None:
    """A receiver that had one open removes it, the next sender the others."""
    context = mp.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_create_and_wait, args=(str(tmp_path), there), daemon=True)
    process.start()
    assert here.poll(60)
    (opened, other), mine = here.recv(), sender.allocate(100).offer.allocation
    for name in (opened, mine):
        receiver.open(SharedMemoryOffer(allocation=name, nbytes=1000 if name == opened else 100, keep=True, name=name))
    assert sweep_abandoned(tmp_path) == []
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join(30)
    receiver.end_publish()
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([other, mine])
    assert sweep_abandoned(tmp_path) == [other]
    assert [path.name for path in tmp_path.iterdir()] == [mine]
