"""CUDA IPC on a real GPU: right bytes between processes, memory that is really given back, and refusals that name the
setting.
"""

import multiprocessing as mp
import os
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from weftpub.errors import TransportError
from weftpub.transport import CudaIpcReceive, CudaIpcSend, cuda_driver, export_obstacle
from weftpub.wire import CudaIpcOffer, gpu_uuid

pytestmark = pytest.mark.gpu


class Opener:
    """A process that opens offers and says what it sees."""

    def __init__(self, environment: dict[str, str] | None = None) -> None:
        context = mp.get_context("spawn")
        self.pipe, there = context.Pipe()
        saved = {key: os.environ.get(key) for key in environment or {}}
        os.environ.update(environment or {})
        try:
            self.process = context.Process(target=_open_offers, args=(there,), daemon=True)
            self.process.start()
        finally:
            for key, value in saved.items():
                if value is None:
                    del os.environ[key]
                else:
                    os.environ[key] = value

    def ask(self, *request: Any) -> Any:
        self.pipe.send(request)
        assert self.pipe.poll(120), "the other process does not answer"
        answer = self.pipe.recv()
        if isinstance(answer, Exception):
            raise answer
        return answer


@contextmanager
def opener(environment: dict[str, str] | None = None) -> Generator[Opener]:
    made = Opener(environment)
    try:
        yield made
    finally:
        made.pipe.send(("stop",))
        made.process.join(60)


def _open_offers(pipe: Any) -> None:
    transport = CudaIpcReceive()
    while True:
        action, *args = pipe.recv()
        try:
            if action == "stop":
                transport.close()
                return
            if action == "sum":
                offer, start, stop = args
                opened = transport.open(offer)
                total = int(opened[start:stop].long().sum())
                del opened
                transport.done(offer)
                pipe.send((total, len(transport._open)))
            elif action == "drop":
                transport.drop(tuple(args))
                pipe.send(len(transport._open))
            elif action == "gpus":
                pipe.send([gpu_uuid(i) for i in range(torch.cuda.device_count())])
        except TransportError as error:
            pipe.send(error)


@pytest.fixture(scope="module")
def other() -> Generator[Opener]:
    with opener() as made:
        yield made


@pytest.fixture
def sender() -> Generator[CudaIpcSend]:
    made = CudaIpcSend(torch.device("cuda", 0))
    yield made
    made.close()


def free_bytes() -> int:
    torch.cuda.synchronize()
    return torch.cuda.mem_get_info()[0]


def test_a_packed_buffer_is_seen_and_kept(other: Opener, sender: CudaIpcSend) -> None:
    buffer = sender.allocate(1 << 20)
    buffer.tensor.fill_(3)
    torch.cuda.synchronize()
    assert other.ask("sum", buffer.offer, 0, 1 << 20) == (3 << 20, 1)
    buffer.tensor[:10] = 5
    torch.cuda.synchronize()
    assert other.ask("sum", buffer.offer, 0, 10) == (50, 1)  # the same mapping, and new bytes
    assert other.ask("drop", buffer.offer.allocation) == 0


def test_memory_of_the_trainer_is_shown_where_it_is_and_closed_at_once(other: Opener, sender: CudaIpcSend) -> None:
    store = torch.arange(4096, dtype=torch.int32, device="cuda")[1024:]
    offer, offset = sender.export(store, keep=False)
    torch.cuda.synchronize()
    expected = int(store.view(torch.uint8).long().sum())
    assert other.ask("sum", offer, offset, offset + store.nbytes) == (expected, 0)


def test_fifty_buffers_leave_nothing_behind(other: Opener, sender: CudaIpcSend) -> None:
    """Handles leaked 4 to 5 GB a step."""

    def cycle() -> None:
        buffer = sender.allocate(256 << 20)
        assert other.ask("sum", buffer.offer, 0, 8)[1] == 1
        assert other.ask("drop", buffer.offer.allocation) == 0
        sender.free(buffer)

    cycle()
    before = free_bytes()
    for _ in range(50):
        cycle()
    assert abs(free_bytes() - before) < 32 << 20


def test_no_name_is_used_twice(sender: CudaIpcSend) -> None:
    names = set()
    for _ in range(10):
        buffer = sender.allocate(1 << 20)
        names.add(buffer.offer.allocation)
        sender.free(buffer)
    assert len(names) == 10


def test_the_exporting_process_cannot_open_its_own_handle(sender: CudaIpcSend) -> None:
    with pytest.raises(TransportError, match="cuIpcOpenMemHandle failed"):
        CudaIpcReceive().open(sender.allocate(1 << 20).offer)


def test_offers_that_do_not_fit(other: Opener, sender: CudaIpcSend) -> None:
    offer = sender.allocate(1 << 20).offer
    assert isinstance(offer, CudaIpcOffer)
    with pytest.raises(TransportError, match=r"GPU-none, which this process cannot see; it sees: GPU-"):
        other.ask("sum", offer.model_copy(update={"gpu": "GPU-none"}), 0, 1)
    with pytest.raises(TransportError, match=r"bytes, \d+ were offered"):
        other.ask("sum", offer.model_copy(update={"nbytes": 1 << 40, "allocation": "large"}), 0, 1)
    assert other.ask("sum", offer, 0, 0)[1] == 1
    other.ask("drop", offer.allocation)


def test_host_memory_is_not_exported(sender: CudaIpcSend) -> None:
    with pytest.raises(TransportError, match="packed instead"):
        sender.export(torch.zeros(4), keep=False)
    released = torch.zeros(1000, device="cuda")
    released.untyped_storage().resize_(0)
    with pytest.raises(TransportError, match="no CUDA memory"):
        sender.export(released, keep=False)


def test_a_driver_error_has_words() -> None:
    with pytest.raises(TransportError, match=r"cuMemFree failed: .* \(CUDA error \d+\)"):
        cuda_driver.free(0, 12345)


def _expandable(pipe: Any) -> None:
    tensor = torch.zeros(1 << 20, dtype=torch.uint8, device="cuda")
    sender = CudaIpcSend(torch.device("cuda", 0))
    try:
        sender.export(tensor, keep=False)
        pipe.send(("exported", export_obstacle(tensor), None))
    except TransportError as error:
        buffer = sender.allocate(1 << 20)
        buffer.tensor.fill_(2)
        torch.cuda.synchronize()
        pipe.send((str(error), export_obstacle(tensor), buffer.offer))
    pipe.recv()


def test_expandable_segments_are_named_before_the_first_step(other: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    """With expandable segments a peer's first export failed in the middle of a step. The obstacle is known beforehand
    and names the setting; packed buffers do not come from that allocator and work."""
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    context = mp.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_expandable, args=(there,), daemon=True)
    process.start()
    assert here.poll(120)
    error, obstacle, offer = here.recv()
    assert "set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False" in error
    assert obstacle is not None
    assert "expandable_segments:False" in obstacle
    assert other.ask("sum", offer, 0, 1 << 20)[0] == 2 << 20
    other.ask("drop", offer.allocation)
    here.send("stop")
    process.join(60)


def test_a_process_that_hides_the_gpu_says_so(sender: CudaIpcSend) -> None:
    with opener({"CUDA_VISIBLE_DEVICES": ""}) as blind, pytest.raises(TransportError, match="it sees: none"):
        blind.ask("sum", sender.allocate(1 << 20).offer, 0, 1)


@pytest.mark.parametrize("visible", ["index", "uuid"])
def test_devices_are_found_by_uuid(sender: CudaIpcSend, visible: str) -> None:
    """CUDA_VISIBLE_DEVICES as a UUID: numbers mean nothing to another process."""
    value = gpu_uuid(0) if visible == "uuid" else "0"
    buffer = sender.allocate(1 << 20)
    buffer.tensor.fill_(1)
    torch.cuda.synchronize()
    with opener({"CUDA_VISIBLE_DEVICES": value}) as child:
        assert child.ask("gpus") == [gpu_uuid(0)]
        assert child.ask("sum", buffer.offer, 0, 100) == (100, 1)


@pytest.mark.multigpu
def test_devices_in_another_order() -> None:
    """CUDA_VISIBLE_DEVICES=1,0 in the engine: its cuda:0 is the trainer's cuda:1."""
    sender = CudaIpcSend(torch.device("cuda", 1))
    buffer = sender.allocate(1 << 20)
    buffer.tensor.fill_(1)
    torch.cuda.synchronize(1)
    with opener({"CUDA_VISIBLE_DEVICES": "1,0"}) as child:
        assert child.ask("gpus") == [gpu_uuid(1), gpu_uuid(0)]
        assert child.ask("sum", buffer.offer, 0, 100) == (100, 1)
    sender.close()
