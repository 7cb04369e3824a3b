"""Staging buffers: never more than the budget, none reused before its reader let go, and never a wait without end."""

from typing import Any

import pytest
import torch

from weftpub.errors import TransportError
from weftpub.publisher.staging import BUFFERS, Staged, StagingPool
from weftpub.transport import InProcessSend


class Reader:
    """Stands for a link to a receiver."""

    def __init__(self, label: str) -> None:
        self.label = label


class Bench:
    """A pool over in-process transports that counts buffers."""

    def __init__(self) -> None:
        self.sends: dict[str, InProcessSend] = {}
        self.dropped: list[str] = []
        self.pool = StagingPool(self.transport)  # type: ignore[arg-type]
        self.one: Any = Reader("one")
        self.two: Any = Reader("two")

    def transport(self, kind: str) -> InProcessSend:
        return self.sends.setdefault(kind, InProcessSend(torch.device("cpu")))

    def prepare(self, **sizes: int) -> None:
        self.pool.prepare(sizes, lambda staged: self.dropped.append(staged.kind))  # type: ignore[arg-type]

    def take(self, kind: str, reader: Any = None) -> Staged | None:
        return self.pool.take(kind, reader or self.one)  # type: ignore[arg-type]


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_a_buffer_is_not_reused_before_its_reader_let_go(bench: Bench) -> None:
    """The send buffer was written again while a slow reader still copied out of it."""
    bench.prepare(inprocess=100)
    taken = [bench.take("inprocess") for _ in range(BUFFERS)]
    assert None not in taken
    assert bench.take("inprocess") is None
    first = taken[0]
    assert first is not None
    bench.pool.release(first, {bench.one})
    assert bench.take("inprocess", bench.two) is first
    assert bench.pool.nbytes == 100 * BUFFERS


def test_buffers_that_do_not_fit_are_dropped_before_the_transfer(bench: Bench) -> None:
    bench.prepare(inprocess=100)
    for staged in [bench.take("inprocess") for _ in range(BUFFERS)]:
        assert staged is not None
        bench.pool.release(staged, {bench.one})
    bench.prepare(inprocess=50)
    assert bench.dropped == []
    bench.prepare(inprocess=200)
    assert bench.dropped == ["inprocess"] * BUFFERS
    assert bench.pool.nbytes == 0
    taken = bench.take("inprocess")
    assert taken is not None
    assert taken.buffer.tensor.numel() == 200


def test_two_transports_share_the_budget(bench: Bench) -> None:
    """Buffers left from one transport would leave none for the other, and the transfer would never end."""
    bench.prepare(inprocess=100)
    for staged in [bench.take("inprocess") for _ in range(BUFFERS)]:
        assert staged is not None
        bench.pool.release(staged, {bench.one})
    bench.prepare(inprocess=100, shared_memory=100)
    assert bench.dropped == ["inprocess"]
    assert bench.take("shared_memory") is not None
    assert bench.take("inprocess") is not None
    assert bench.take("shared_memory") is None
    assert bench.pool.nbytes <= 100 * BUFFERS


def test_three_transports_are_refused(bench: Bench) -> None:
    with pytest.raises(TransportError, match="3 transports in one publish"):
        bench.prepare(inprocess=1, shared_memory=1, cuda_ipc=1)


def test_buffers_of_a_receiver_that_failed(bench: Bench) -> None:
    bench.prepare(inprocess=100)
    for _ in range(BUFFERS):
        bench.take("inprocess", bench.two)
    with pytest.raises(TransportError, match="still with receivers that failed: two"):
        bench.pool.require_progress()
    bench.prepare(inprocess=100)
    assert bench.take("inprocess") is None
    bench.pool.reclaim(lambda reader: reader is bench.two)
    bench.pool.require_progress()
    assert bench.take("inprocess") is not None


def test_a_name_goes_when_all_its_users_have_opened_the_buffer(bench: Bench) -> None:
    opened: list[Any] = []
    bench.transport("inprocess").everyone_opened = opened.append  # type: ignore[method-assign]
    bench.prepare(inprocess=100)
    users = {bench.one, bench.two}
    for reader in users:
        staged = bench.take("inprocess", reader)
        assert staged is not None
        assert opened == []
        bench.pool.release(staged, users)
    assert opened == [staged.buffer]
