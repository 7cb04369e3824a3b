"""Transports are chosen by facts about both processes, and kept apart from other processes' device numbers."""

import os

import pytest
import torch

from weftpub.errors import TransportError
from weftpub.transport import InProcessReceive, InProcessSend, choose, find_candidates
from weftpub.wire import Identity, InProcessOffer, local_identity

HERE = Identity(host="h", boot="b", pid_space="s", pid=1, started=5, uid=7, gpus=("GPU-a", "GPU-b"))
PEER = HERE.model_copy(update={"pid": 2})
ALL = ("inprocess", "shared_memory", "cuda_ipc")
CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process calls GPU-a cuda:0 and GPU-b cuda:1."""
    monkeypatch.setattr(choose, "gpu_uuid", lambda index: HERE.gpus[index])


@pytest.mark.parametrize(
    ("change", "device", "kinds"),
    [
        pytest.param({"pid": 1}, CPU, ["inprocess", "shared_memory"], id="same-process"),
        pytest.param({"pid": 1}, CUDA, ["inprocess", "shared_memory"], id="same-process-cuda"),
        pytest.param({}, CPU, ["shared_memory"], id="two-processes"),
        pytest.param({}, CUDA, ["cuda_ipc", "shared_memory"], id="two-processes-cuda"),
        pytest.param({"pid": 1, "started": 6}, CPU, ["shared_memory"], id="reused-pid"),
        pytest.param({"pid": 1, "pid_space": "t"}, CPU, ["shared_memory"], id="two-containers"),
        pytest.param({"gpus": ("GPU-b",)}, CUDA, ["shared_memory"], id="gpu-hidden"),
        pytest.param({"gpus": ("GPU-b", "GPU-a")}, CUDA, ["cuda_ipc", "shared_memory"], id="gpus-reordered"),
    ],
)
def test_candidates(change: dict, device: torch.device, kinds: list[str]) -> None:
    assert find_candidates(HERE, PEER.model_copy(update=change), device, ALL, "auto").kinds == kinds


def test_a_gpu_is_known_by_its_uuid_not_by_its_number() -> None:
    """With CUDA_VISIBLE_DEVICES=4,5,6,7 a peer took the local index for the physical one and waited forever. Both
    processes here call their GPU cuda:0, and they are two GPUs."""
    found = find_candidates(HERE, PEER.model_copy(update={"gpus": ("GPU-c",)}), CUDA, ALL, "auto")
    assert found.kinds == ["shared_memory"]
    assert found.obstacles["cuda_ipc"] == "the engine cannot see GPU-a; it sees GPU-c"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"boot": "c", "host": "i"}, "two hosts, h and i"),
        ({"uid": 8}, "two users, 7 and 8"),
        ({"boot": ""}, "two hosts"),
    ],
)
def test_no_way_to_a_peer(change: dict, words: str) -> None:
    with pytest.raises(TransportError, match=words):
        find_candidates(HERE, PEER.model_copy(update=change), CPU, ALL, "auto")


def test_only_what_was_asked_for_and_what_the_peer_has() -> None:
    assert find_candidates(HERE, PEER, CUDA, ALL, "shared_memory").kinds == ["shared_memory"]
    assert find_candidates(HERE, PEER, CUDA, ("shared_memory",), "auto").kinds == ["shared_memory"]
    with pytest.raises(TransportError, match="on the CPU"):
        find_candidates(HERE, PEER, CPU, ALL, "cuda_ipc")


def test_in_process_offers_are_found_and_forgotten() -> None:
    sender, receiver = InProcessSend(CPU), InProcessReceive()
    buffer = sender.allocate(10)
    assert receiver.open(buffer.offer).data_ptr() == buffer.tensor.data_ptr()
    store = torch.arange(12, dtype=torch.int32)[2:].view(5, 2)
    offer, offset = sender.export(store, keep=False)
    shown = receiver.open(offer)[offset:]
    assert shown.view(torch.int32).tolist() == list(range(2, 12))
    del shown
    sender.end_publish()
    with pytest.raises(TransportError, match="no longer offered"):
        receiver.open(offer)
    assert receiver.open(buffer.offer).numel() == 10
    sender.free(buffer)
    with pytest.raises(TransportError, match="not of this process"):
        receiver.open(InProcessOffer(allocation="x", nbytes=1, keep=False, pid=os.getpid() + 1))


def test_an_export_does_not_keep_a_store_from_freeing_its_memory() -> None:
    sender = InProcessSend(CPU)
    store = torch.zeros(1000)
    sender.export(store, keep=False)
    sender.end_publish()
    store.untyped_storage().resize_(0)
    sender.close()


def test_this_process_describes_itself() -> None:
    here = local_identity()
    assert (here.pid, here.uid) == (os.getpid(), os.getuid())
    assert here.same_host(local_identity())
    assert f"pid {os.getpid()}" in str(here)
