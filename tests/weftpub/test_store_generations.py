"""The generation protocol: who may write, what sealing asks for, and that nothing but one sealed generation can be
read.
"""

import threading
import time

import pytest
import torch
from store_support import fill, make_masters, make_store, published, same_bytes

from weftpub.errors import ConfigError, DeadlineError, GenerationError, StateError, TornError
from weftpub.masters import ExpertMatrix
from weftpub.store import StoreState
from weftpub_kernels import NonFiniteError

FIRST = ExpertMatrix(1, 4, "fc1")


def _reads(store):
    return (
        lambda: store.layer(1),
        lambda: store.matrix(FIRST),
        lambda: next(store.canonical()),
        store.sha256,
        store.verify,
        store.rebuild_wt,
        lambda: store.checksums,
    )


def test_empty_store_cannot_be_read() -> None:
    store = make_store()
    assert store.state is StoreState.EMPTY
    assert store.generation is None
    for read in _reads(store):
        with pytest.raises(GenerationError, match="empty"):
            read()


@pytest.mark.parametrize("generation", [-1, 2.5, True, 2**63, "1", None])
def test_generations_are_whole_numbers(generation: object) -> None:
    """A driver counted generations in floats. The book of parts is of integers, so no matrix of generation 2.5 was
    ever seen as written, and the seal tore the store."""
    store = make_store()
    with pytest.raises(ConfigError, match="whole numbers from 0"):
        store.begin(generation)  # pyright: ignore[reportArgumentType]
    assert store.state is StoreState.EMPTY
    fill(store, 0)
    saved = {item.name: item.tensor.clone() for item in store.canonical()}
    with pytest.raises(ConfigError, match="whole numbers from 0"):
        store.load(generation, saved)  # pyright: ignore[reportArgumentType]
    assert store.generation == 0
    store.verify()


def test_nothing_can_be_read_while_a_generation_is_written() -> None:
    store = make_store()
    fill(store, 0)
    store.begin(1)
    for read in _reads(store):
        with pytest.raises(GenerationError, match="generation 1 is being written"):
            read()


def test_seal_lists_what_is_missing_and_can_be_completed() -> None:
    store = make_store()
    masters = make_masters(store)
    left_out = ["layers.1.experts.5.fc2", "layers.3.experts.7.fc1"]
    store.begin(0)
    for name, master in masters.items():
        if name not in left_out:
            store.writer()(name, master)
    with pytest.raises(
        GenerationError, match=r"lacks 2 of 12 .*layers\.1\.experts\.5\.fc2.*layers\.3\.experts\.7\.fc1"
    ):
        store.seal()
    for name in left_out:
        store.writer()(name, masters[name])
    assert store.seal().matrices == 12
    assert store.generation == 0


def test_a_write_that_failed_is_missing_even_if_its_error_was_swallowed() -> None:
    """An exporter once logged a quantizer's error and went on, so that a stale tensor was served."""
    store = make_store()
    masters = make_masters(store)
    store.begin(0)
    write, failing = store._encoder.write, store._index[FIRST.name]

    def fail(index: int, *arguments: torch.Tensor) -> None:
        if index == failing:
            raise RuntimeError("launch failed")
        write(index, *arguments)

    store._encoder.write = fail
    with pytest.raises(RuntimeError, match="launch failed"):
        store.writer()(FIRST.name, masters[FIRST.name])
    for name, master in masters.items():
        if name != FIRST.name:
            store.writer()(name, master)
    with pytest.raises(GenerationError, match=r"lacks 1 of 12 matrices: 'layers\.1\.experts\.4\.fc1'"):
        store.seal()
    with pytest.raises(GenerationError, match="written already"):
        store.cancel()


def test_a_matrix_is_written_once() -> None:
    store = make_store()
    masters = make_masters(store)
    store.begin(0)
    store.writer()(FIRST.name, masters[FIRST.name])
    with pytest.raises(GenerationError, match=r"layers\.1\.experts\.4\.fc1.*twice"):
        store.writer()(FIRST.name, masters[FIRST.name])


@pytest.mark.parametrize("generation", [5, 4])
def test_generations_grow(generation: int) -> None:
    store = make_store()
    fill(store, 5)
    with pytest.raises(GenerationError, match="generation 5 is sealed"):
        store.begin(generation)


def test_writing_needs_a_begun_generation() -> None:
    store = make_store()
    masters = make_masters(store)
    with pytest.raises(StateError, match="call begin first"):
        store.writer()(FIRST.name, masters[FIRST.name])
    with pytest.raises(StateError, match="call begin first"):
        store.seal()
    store.begin(0)
    with pytest.raises(StateError, match="generation 0 is being written"):
        store.begin(1)


@pytest.mark.parametrize(
    ("name", "master", "message"),
    [
        ("layers.1.experts.6.fc1", torch.zeros(256, 256), "holds no matrix"),
        ("layers.0.experts.4.fc1", torch.zeros(256, 256), "holds no matrix"),
        (FIRST.name, torch.zeros(256, 256, dtype=torch.bfloat16), "bfloat16"),
        (FIRST.name, torch.zeros(256, 256, dtype=torch.float64), "float64"),
        (FIRST.name, torch.zeros(256, 128), r"\[256, 256\].*\[256, 128\]"),
        (FIRST.name, torch.zeros(65536), r"\[65536\]"),
        (FIRST.name, torch.zeros(0, 256), r"\[0, 256\]"),
        (FIRST.name, torch.zeros(256, 256, device="meta"), "meta"),
    ],
)
def test_what_does_not_fit_is_refused_before_a_byte_changes(name, master, message) -> None:
    store = make_store()
    fill(store, 0)
    before = published(store)
    store.begin(1)
    with pytest.raises(ConfigError, match=message):
        store.writer()(name, master)
    store.cancel()
    assert store.generation == 0
    assert same_bytes(published(store), before)


def test_skipped_step_leaves_the_sealed_generation() -> None:
    store = make_store()
    fill(store, 0)
    with pytest.raises(RuntimeError, match="gradient"), store.writing(1):
        raise RuntimeError("gradient is not finite, nothing was written")
    assert store.generation == 0
    store.verify()
    fill(store, 1)


def test_cancel_is_refused_once_bytes_are_mixed() -> None:
    store = make_store()
    masters = make_masters(store)
    fill(store, 0, masters)
    store.begin(1)
    store.writer()(FIRST.name, masters[FIRST.name])
    with pytest.raises(GenerationError, match="1 matrices of generation 1 are written"):
        store.cancel()


def test_failure_half_way_tears_store_and_masters() -> None:
    store = make_store()
    masters = make_masters(store)
    fill(store, 0, masters)
    reasons = []

    def fail_after_one() -> None:
        with store.writing(1, on_torn=reasons.append):
            store.writer()(FIRST.name, masters[FIRST.name])
            raise RuntimeError("bus error")

    with pytest.raises(RuntimeError, match="bus error"):
        fail_after_one()
    assert store.state is StoreState.TORN
    assert reasons == ["generation 1 failed half-way: bus error"]
    for read in _reads(store):
        with pytest.raises(TornError, match=r"bus error.*load_state"):
            read()
    with pytest.raises(TornError):
        store.begin(2)


@pytest.mark.parametrize("form", ["fp8", "bf16"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_nan_in_a_master_names_its_place_and_is_never_served(form: str, value: float) -> None:
    """A NaN in a master was ignored by amax and went out as a silent -448. It must be found in the pass that quantizes,
    and nothing of that generation may be readable.
    """
    store = make_store(format=form)
    masters = make_masters(store)
    fill(store, 0, masters)
    masters["layers.3.experts.5.fc2"][200, 77] = value
    torn = []
    with pytest.raises(NonFiniteError) as caught:
        fill(store, 1, masters, on_torn=torn.append)
    assert (caught.value.matrix, caught.value.row, caught.value.column) == ("layers.3.experts.5.fc2", 200, 77)
    assert str(caught.value.value) == str(value)
    assert store.state is StoreState.TORN
    assert len(torn) == 1
    with pytest.raises(TornError):
        next(store.canonical())


def test_overflow_of_bfloat16_counts_as_non_finite() -> None:
    store = make_store(format="bf16")
    masters = make_masters(store)
    masters[FIRST.name][3, 4] = torch.finfo(torch.float32).max
    with pytest.raises(NonFiniteError, match=r"layers\.1\.experts\.4\.fc1"):
        fill(store, 0, masters)


def test_load_opens_a_torn_store_at_an_older_generation() -> None:
    store = make_store()
    fill(store, 7)
    saved = {item.name: item.tensor.clone() for item in store.canonical()}
    fill(store, 8, make_masters(store, seed=1))
    store.mark_torn("on purpose")
    store.load(7, saved)
    assert store.generation == 7
    assert same_bytes(published(store), {name: tensor.view(torch.uint8) for name, tensor in saved.items()})
    store.check_wt()
    fill(store, 8)


def test_masters_made_whole_open_a_torn_store() -> None:
    store = make_store()
    masters = make_masters(store)
    fill(store, 5, masters)
    before = published(store)
    store.mark_torn("on purpose")
    with store.writing(3, recover=True) as step:
        for name, master in masters.items():
            store.writer()(name, master)
    assert step.report.generation == store.generation == 3
    assert step.report.changed_share == 1.0  # nothing known was there to compare with
    assert same_bytes(published(store), before)


def test_a_recovery_cannot_go_back_to_what_it_gave_up() -> None:
    store = make_store()
    fill(store, 5)
    store.begin(6, recover=True)
    with pytest.raises(StateError, match="recovery of generation 6 has given up"):
        store.cancel()
    store.mark_torn("on purpose")
    with pytest.raises(RuntimeError, match="no masters"), store.writing(6, recover=True):
        raise RuntimeError("no masters")
    assert store.state is StoreState.TORN


@pytest.mark.parametrize("wrong", ["missing", "unknown", "dtype", "shape"])
def test_load_refuses_what_does_not_fit_and_changes_nothing(wrong: str) -> None:
    store = make_store()
    fill(store, 0)
    before = published(store)
    saved = {item.name: item.tensor.clone() for item in store.canonical()}
    name = "model.layers.3.mlp.experts.5.down_proj.weight_scale_inv"
    if wrong == "missing":
        del saved[name]
    elif wrong == "unknown":
        saved["model.layers.3.mlp.experts.6.down_proj.weight"] = saved["model.layers.3.mlp.experts.5.down_proj.weight"]
    elif wrong == "dtype":
        saved[name] = saved[name].to(torch.bfloat16)  # scales that were cast on the way
    else:
        saved[name] = saved[name].t().contiguous()
    with pytest.raises(ConfigError, match=r"experts\.[56]\.down_proj"):
        store.load(1, saved)
    assert store.generation == 0
    assert same_bytes(published(store), before)


def test_iteration_notices_that_its_generation_is_gone() -> None:
    store = make_store()
    fill(store, 0)
    iterator = store.canonical()
    next(iterator)
    fill(store, 1, make_masters(store, seed=1))
    with pytest.raises(GenerationError, match=r"wants generation 0.*1 is sealed"):
        next(iterator)


# Leases.


def test_begin_waits_for_readers_and_names_them_at_the_deadline() -> None:
    store = make_store()
    fill(store, 0)
    entered, leave = threading.Event(), threading.Event()

    def read() -> None:
        with store.reading(purpose="export of version 7"):
            entered.set()
            leave.wait(30)

    thread = threading.Thread(daemon=True, target=read)
    thread.start()
    entered.wait(30)
    with pytest.raises(DeadlineError, match=r"begin\(1\).*0\.1 s.*export of version 7"):
        store.begin(1, timeout=0.1)
    assert store.generation == 0  # still readable: the failed begin changed nothing
    leave.set()
    thread.join(60)
    store.begin(1, timeout=30)


def test_begin_goes_on_as_soon_as_the_last_reader_leaves() -> None:
    store = make_store()
    fill(store, 0)
    order = []
    entered, leave = [threading.Event(), threading.Event()], [threading.Event(), threading.Event()]

    def read(i: int) -> None:
        with store.reading(0, purpose=f"reader {i}"):
            entered[i].set()
            leave[i].wait(30)
            order.append(f"reader {i}")

    threads = [threading.Thread(daemon=True, target=read, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for event in entered:
        event.wait(30)
    writer = threading.Thread(daemon=True, target=lambda: (store.begin(1, timeout=30), order.append("begin")))
    writer.start()
    leave[1].set()
    threads[1].join(60)
    assert store.state is StoreState.SEALED
    leave[0].set()
    writer.join(60)
    threads[0].join(60)
    assert order == ["reader 1", "reader 0", "begin"]


def test_reader_waits_for_the_running_step() -> None:
    store = make_store()
    masters = make_masters(store)
    fill(store, 0, masters)
    held = []
    store.begin(1)

    def read() -> None:
        with store.reading(purpose="save", timeout=30) as generation:
            held.append(generation)

    thread = threading.Thread(daemon=True, target=read)
    thread.start()
    for name, master in masters.items():
        store.writer()(name, master)
    assert held == []
    store.seal()
    thread.join(60)
    assert held == [1]


def test_reader_of_a_hanging_step_gives_up_at_its_deadline() -> None:
    store = make_store()
    fill(store, 0)
    store.begin(1)
    caught = []

    def read() -> None:
        try:
            with store.reading(purpose="save", timeout=0.05):
                pass
        except DeadlineError as error:
            caught.append(str(error))

    thread = threading.Thread(daemon=True, target=read)
    thread.start()
    thread.join(60)
    assert len(caught) == 1
    assert "save waited" in caught[0]
    assert "generation 1" in caught[0]


def test_a_lease_of_another_generation_is_refused() -> None:
    store = make_store()
    fill(store, 3)
    with pytest.raises(GenerationError, match=r"wants generation 2.*3 is sealed"), store.reading(2):
        pass


def test_waiting_for_oneself_is_refused_at_once() -> None:
    store = make_store(lease_timeout=40.0)
    fill(store, 0)
    started = time.monotonic()
    with store.reading(purpose="publish"):
        with pytest.raises(StateError, match=r"own lease \(publish\)"):
            store.begin(1)
        with pytest.raises(StateError, match="own lease"):
            store.offload()
    store.begin(1)
    with pytest.raises(GenerationError, match="would wait for itself"), store.reading():
        pass
    assert time.monotonic() - started < 20


def test_lease_ends_when_its_block_raises() -> None:
    store = make_store()
    fill(store, 0)
    with pytest.raises(RuntimeError, match="disk"), store.reading(purpose="export"):
        raise RuntimeError("disk")
    store.begin(1, timeout=0)


def test_negative_generation_is_refused() -> None:
    with pytest.raises(ConfigError, match="-1"):
        make_store().begin(-1)
