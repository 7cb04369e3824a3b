"""Who may write and who may serve one set of bytes, and what is left when either side dies in the middle."""

import fcntl
import os
import signal
import threading
from collections.abc import Generator
from pathlib import Path

import pytest
import torch
from memory_support import CATALOGUE, Partner
from store_support import EXPERTS, HIDDEN, INTERMEDIATE, LAYERS, fill, make_masters, make_store, published, same_bytes
from test_store_offload import BookkeepingAllocator

from weftpub.errors import ChecksumError, ConfigError, DeadlineError, StateError, TornError
from weftpub.masters import ExpertMatrix
from weftpub.memory import Catalogue, Committed, SharedAllocation, SharedAllocator, SharedState
from weftpub.memory import header as header_module
from weftpub.store import ExpertStore, StoreLayout, StoreState
from weftpub.store.shared import shared_canonical, shared_catalogue, verify_shared

W13 = "layers.1.w13"


@pytest.fixture
def memory(tmp_path: Path) -> Generator[SharedAllocation]:
    with SharedAllocation.join(tmp_path, "experts", "cpu", CATALOGUE) as joined:
        yield joined


@pytest.fixture
def partner() -> Generator[Partner]:
    started = Partner()
    yield started
    started.stop()


def shared_store(memory: SharedAllocation, **settings: object) -> ExpertStore:
    return make_store(allocator=SharedAllocator(memory), **settings)


def serve(store: ExpertStore, memory: SharedAllocation, generation: int, version: int) -> None:
    """A step and a publish of nothing else: write, commit, serve."""
    fill(store, generation, make_masters(store, generation))
    memory.commit(version)
    assert memory.start_serving() == version


# The bytes.


@pytest.mark.parametrize("wt", ["store", "rebuild"])
@pytest.mark.parametrize("form", ["fp8", "bf16"])
def test_a_store_in_shared_memory_holds_the_bytes_of_any_store(tmp_path: Path, wt: str, form: str) -> None:

    catalogue = shared_catalogue(StoreLayout(LAYERS, EXPERTS, HIDDEN, INTERMEDIATE, form))
    with SharedAllocation.join(tmp_path, "experts", "cpu", catalogue) as memory:
        store, other = shared_store(memory, wt=wt, format=form), make_store(wt=wt, format=form)
        assert fill(store, 0).checksums == fill(other, 0).checksums
        assert same_bytes(published(store), published(other))
        assert [item.name for item in shared_canonical(memory)] == [item.name for item in store.canonical()]
        for item, own in zip(shared_canonical(memory), store.canonical(), strict=True):
            assert (item.tensor.data_ptr(), item.tensor.shape, item.tensor.stride(), item.role) == (
                own.tensor.data_ptr(),
                own.tensor.shape,
                own.tensor.stride(),
                own.role,
            )
        store.check_wt()


@pytest.mark.parametrize("keep", [True, False])
def test_offload_leaves_shared_weights_where_they_are_and_frees_the_rest(memory: SharedAllocation, keep: bool) -> None:
    """An offload copied 4 GB of W to the host and back at every step, while the engine needed the very same bytes on
    the device. What both map is neither released nor copied; W^T goes, and is rebuilt."""
    others = BookkeepingAllocator()
    store = make_store(allocator=SharedAllocator(memory, others))
    fill(store, 0)
    before, address = published(store), store.layer(1).w13.data_ptr()
    store.offload(keep=keep)
    assert {name for name, used in others.used.items() if used} == {"change.scratch"}
    assert not any(host for layer in store._memory._host or () for host in layer)
    assert torch.equal(
        memory.tensor(W13).view(torch.uint8)[0, :128], before["model.layers.1.mlp.experts.4.gate_proj.weight"]
    )
    store.reload()
    assert store.layer(1).w13.data_ptr() == address
    assert same_bytes(published(store), before)
    store.check_wt()
    fill(store, 1)


def test_what_the_memory_lacks_is_the_stores_own(tmp_path: Path) -> None:
    """Mixed: the engine holds one layer elsewhere, and another in a shape of its own."""
    shapes = {e.name: (e.shape, torch.float8_e4m3fn) for e in CATALOGUE.entries if e.name in (W13, "layers.3.w2")}
    shapes["layers.3.w2"] = ((1, 1, 1), torch.float8_e4m3fn)
    with SharedAllocation.join(tmp_path, "experts", "cpu", Catalogue.pack(shapes)) as memory:
        allocator = SharedAllocator(memory, BookkeepingAllocator())
        store = make_store(allocator=allocator)
        fill(store, 0)
        assert memory.offset_of(store.layer(1).w13) == 0
        assert memory.offset_of(store.layer(3).w2) is None
        assert (
            "the store needs torch.float8_e4m3fn [3, 256, 128], the shared memory holds"
            in allocator.reasons["layers.3.w2"]
        )
        before = published(store)
        store.offload(keep=False)
        store.reload()
        assert same_bytes(published(store), before)
        with pytest.raises(ConfigError, match=r"layers\.1\.w13: release of memory that an engine maps too"):
            allocator.release(W13, store.layer(1).w13)


# Who may do what.


def test_the_trainer_may_not_write_while_an_engine_serves(
    memory: SharedAllocation, tmp_path: Path, partner: Partner
) -> None:
    store = shared_store(memory)
    fill(store, 1)
    with pytest.raises(TornError, match="generation 1, which is not committed; no version was committed last"):
        memory.start_serving()
    memory.commit(7)
    partner("join", str(tmp_path), "experts")
    assert partner("do", "start_serving") == 7
    with pytest.raises(StateError, match=r"generation 2 cannot be written while host .*, pid \d+ serves"):
        store.begin(2)
    assert store.state is StoreState.SEALED
    assert same_bytes(published(store), published(store))
    partner("do", "stop_serving")
    fill(store, 2)
    with pytest.raises(
        AssertionError, match=r"TornError.*generation 2, which is not committed; version 7 was committed"
    ):
        partner("do", "start_serving")
    memory.commit(8)
    assert partner("do", "start_serving") == 8
    partner.kill()  # whoever is dead serves no more
    fill(store, 3)


def test_an_engine_may_not_serve_while_a_generation_is_written(
    memory: SharedAllocation, partner: Partner, tmp_path: Path
) -> None:
    partner("join", str(tmp_path), "experts")
    store = shared_store(memory)
    with pytest.raises(AssertionError, match=r"TornError.*nothing was ever written"):
        partner("do", "start_serving")
    with pytest.raises(StateError, match="version 0 cannot be committed: nothing was ever written"):
        memory.commit(0)
    serve(store, memory, 0, 0)
    memory.stop_serving()
    store.begin(1)
    with pytest.raises(AssertionError, match=r"TornError.*generation 1 is being written by host"):
        partner("do", "start_serving")
    with pytest.raises(AssertionError, match=r"StateError: .* writes generation 1 at this moment"):
        partner("do", "begin", 5)
    with pytest.raises(AssertionError, match=r"StateError: .*seal by a process that does not write it"):
        partner("do", "seal")
    store.cancel()
    assert partner("do", "start_serving") == 0


def test_a_trainer_that_dies_in_the_step_leaves_a_fenced_engine_until_all_is_written_again(
    memory: SharedAllocation, partner: Partner, tmp_path: Path
) -> None:
    """The optimizer wrote some of the experts and its process was killed. The engine's own state still said that it
    holds version 3, and it would have served a mixture. The word in the header is what decides."""
    partner("join", str(tmp_path), "experts")
    digests = partner("fill", 3, 3)
    memory.commit(3)
    assert memory.start_serving() == 3
    assert verify_shared(memory) == 3
    memory.stop_serving()
    partner("write_half", 4, 4)
    partner.kill()
    assert memory.standing().state is SharedState.WRITING
    with pytest.raises(
        TornError, match=r"its trainer \(host .*\) died while it wrote generation 4; publish a complete"
    ):
        memory.start_serving()
    with pytest.raises(TornError, match="died while it wrote generation 4"):
        verify_shared(memory)
    store = shared_store(memory)  # the trainer that comes back
    with pytest.raises(TornError, match="died while it wrote generation 4; load the last checkpoint"):
        store.begin(4)
    with store.writing(3, recover=True):
        for name, master in make_masters(store, 3).items():
            store.writer()(name, master)
    memory.commit(3)
    assert memory.start_serving() == 3
    assert store.sha256() == digests


def test_a_torn_step_says_why(memory: SharedAllocation) -> None:
    store = shared_store(memory)
    serve(store, memory, 0, 0)
    memory.stop_serving()
    masters = make_masters(store, 1)
    next(iter(masters.values()))[3, 5] = float("nan")
    with pytest.raises(Exception, match="row 3, column 5"):
        fill(store, 1, masters)
    assert memory.standing().state is SharedState.TORN
    with pytest.raises(TornError, match=r"generation 1 failed: .*row 3, column 5"):
        memory.start_serving()


def test_an_engine_that_comes_back_serves_the_committed_version_without_a_byte_moved(
    memory: SharedAllocation, partner: Partner, tmp_path: Path
) -> None:
    store = shared_store(memory)
    serve(store, memory, 5, 2)
    partner("join", str(tmp_path), "experts")
    partner("do", "start_serving")
    partner.kill()
    again = Partner()
    try:
        again("join", str(tmp_path), "experts", False)
        assert again("verify") == 2
        assert again("do", "start_serving") == 2
        again("do", "stop_serving")
        again("write", W13, 700, int(memory.tensor(W13).view(torch.uint8).reshape(-1)[700]) ^ 1)
        with pytest.raises(AssertionError, match=r"ChecksumError.*generation 5 was sealed with digest"):
            again("verify")
    finally:
        again.stop()
    with pytest.raises(ChecksumError, match="somebody wrote to it"):
        verify_shared(memory)


# Debug mode.


@pytest.mark.parametrize(("when", "does"), [("serving", "write"), ("sealed", "write"), ("paused", "read")])
def test_the_protected_mapping_catches(tmp_path: Path, partner: Partner, when: str, does: str) -> None:
    partner("join", str(tmp_path), "experts", True, True)
    partner("fill", 0, 0)
    partner("do", "commit", 0)
    if when != "sealed":
        partner("do", "start_serving")
        assert len(partner("read", W13, 0, 4)) == 4
    if when == "paused":
        partner("do", "stop_serving")
        assert partner("verify") == 0  # checksums before a commit are admitted
        partner("do", "stop_serving")
        partner("do", "start_serving")
        partner("do", "stop_serving")
    command = ("write", W13, 0, 1) if does == "write" else ("read", W13, 0, 1)
    assert partner.dies_of(*command) == -signal.SIGSEGV


def test_the_protected_mapping_lets_a_step_write(tmp_path: Path) -> None:
    with SharedAllocation.join(tmp_path, "experts", "cpu", CATALOGUE, protected=True) as memory:
        store = shared_store(memory)
        for generation in range(3):
            fill(store, generation)
        store.offload()
        store.reload()
        store.check_wt()
        assert store.matrix(ExpertMatrix(1, 4, "fc1")).w.shape == (256, 256)


def test_other_bytes_of_the_committed_generation_are_not_served(memory: SharedAllocation) -> None:
    """A trainer died at generation 7, which was committed, and its successor started at a checkpoint of generation 4.
    Three steps later, none of them published, generation 7 was sealed again, and an engine that went on would have
    served bytes that nobody had verified, as the version of the first 7."""
    serve(shared_store(memory), memory, 7, 3)
    memory.stop_serving()
    first = memory.standing()
    again = shared_store(memory)
    for generation in (4, 5, 6, 7):
        fill(again, generation)
    assert memory.standing().generation == first.generation == 7
    assert memory.standing().digest != first.digest
    with pytest.raises(
        TornError, match="holds other bytes of generation 7 than those that were committed as version 3"
    ):
        memory.start_serving()
    memory.commit(4)
    assert memory.start_serving() == 4
    memory.stop_serving()
    # The same bytes are the same version.
    once_more = shared_store(memory)
    once_more.load(7, {item.name: item.tensor.clone() for item in again.canonical()})
    assert memory.start_serving() == 4
    memory.stop_serving()


def test_a_step_waits_for_an_engine_that_puts_its_weights_there(
    memory: SharedAllocation, partner: Partner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Engine and trainer started at once; the engine had made the memory and was copying its weights there when the
    trainer began its first step, and the trainer ended with an error."""
    monkeypatch.setattr(header_module, "_FILL_S", 60.0)  # a busy machine may take that long
    partner("join", str(tmp_path), "experts")
    partner("do", "begin", 0)
    partner.send("do", "seal")  # on its way while this waits
    memory._header.begin(1, seconds=60.0)
    partner.take("seal")
    memory.seal()
    with pytest.raises(StateError, match="somebody has written to it already; it is sealed"):
        memory.begin(0, first=True)
    assert memory.standing().generation == 1


# The header itself.


def test_a_death_in_the_middle_of_a_header_change_leaves_the_one_before(memory: SharedAllocation) -> None:
    store = shared_store(memory)
    serve(store, memory, 0, 0)
    target = memory._header._map
    number, _ = memory._header._newest()
    start = header_module._COPIES + (number + 1) % 2 * header_module._COPY_BYTES
    before = memory.standing()
    target[start + 16 : start + 48] = b"x" * 32  # half of the next change, and a head that has no right checksum yet
    header_module._COPY.pack_into(target, start, number + 1, 32, 0)
    assert memory.standing() == before
    memory.stop_serving()
    assert memory.standing().serving == ()
    fill(store, 1)


def test_what_was_read_before_is_read_again_after_every_change(memory: SharedAllocation) -> None:
    other = header_module.Header(os.dup(memory._header.descriptor), "the same header")
    parsed: list[int] = []
    parse = other._parse
    other._parse = lambda: parsed.append(1) or parse()  # type: ignore[method-assign]
    for generation in range(4):
        memory.begin(generation)
        assert (other.read().state, other.read().writing) == (SharedState.WRITING, generation)
        memory.seal()
        assert (other.read().state, other.read().generation) == (SharedState.SEALED, generation)
        other.commit(generation)
        assert memory.standing().committed == Committed(version=generation, generation=generation)
    assert len(parsed) == 8  # two changes of the other side each time, its own besides
    other.close()


def test_changes_of_two_threads_come_one_after_the_other(memory: SharedAllocation) -> None:
    """A file's lock belongs to the process. Two of its threads changed the header at once: one change was lost, and the
    one that had been lost was what this process read from then on."""
    header = memory._header
    other = threading.Thread(target=header.tear, args=("the engine's thread says so",))

    def change(now: header_module.Standing) -> header_module.Standing:
        other.start()
        other.join(0.3)  # it waits for this change to end
        return now.model_copy(update={"generation": 7})

    header._change(change, 10.0)
    other.join(20)
    found = header_module.Header(os.dup(header.descriptor), "the same header")
    assert header.read() == found.read()
    assert (header.read().state, header.read().reason) == (SharedState.TORN, "the engine's thread says so")
    found.close()


def test_a_header_that_is_locked_for_good_is_an_error_in_time(memory: SharedAllocation) -> None:
    other = os.open(f"/proc/self/fd/{memory._header.descriptor}", os.O_RDWR)
    fcntl.flock(other, fcntl.LOCK_EX)
    with pytest.raises(DeadlineError, match=r"its header was locked for 0.05 s"):
        memory._header.begin(1, seconds=0.05)
    os.close(other)
    memory._header.begin(1, seconds=0.05)
