"""The receiver's state machine, request by request: what it refuses, what tears it, and what opens it again."""

import gc
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from weakref import ref

import numpy as np
import pytest
import torch
from publish_world import FakeEngine, World, assert_serves, poisoned

import weftpub.wire.messages as m
from weftpub.errors import ChecksumError, ManifestError, PlanError, StateError, TornError, TransportError
from weftpub.plan import ViewSpec, cut_pieces, dtype_name
from weftpub.receive import Receiver
from weftpub.receive import reception as reception_module
from weftpub.receive.reception import Reception
from weftpub.receive.server import answer_to
from weftpub.transport import CopyTable, FlatTensors, InProcessReceive, InProcessSend, RegionTable, narrow_view
from weftpub.version import EngineState as S
from weftpub.wire import local_identity
from weftpub.wire.manifest import Manifest, pack_checksums

WORLD = World(experts=2, ep=1, extra=(("model.norm.weight", (256,), torch.float32),))
PLAN = WORLD.plan()
LIMIT = 1 << 17


class Driver:
    """A publisher by hand, for one receiver."""

    def __init__(self, engine: FakeEngine | None = None, version: int | None = 1, **options: Any) -> None:
        self.engine = engine or FakeEngine(WORLD)
        if version is not None:
            for name, served in WORLD.expected(0, 0, version).items():
                self.engine.parameters[name].data = served.view(self.engine.parameters[name].dtype).view(
                    self.engine.parameters[name].shape
                )
        self.receiver = Receiver(self.engine, run_id="run", version=version, **options)
        self.table = cut_pieces(PLAN.for_receiver(0), LIMIT)
        self.send = InProcessSend(torch.device("cpu"))
        self.session = "a" * 16
        self.hello()
        self.ask(m.SetPlan, part=PLAN.for_receiver(0).to_json())

    def ask(self, kind: Any, **fields: Any) -> Any:
        return self.receiver.handle(kind(**{"run_id": "run", "session": self.session, "request": 1, **fields}))

    def hello(self, session: str = "a" * 16, epoch: int = 10, role: str = "coordinator") -> Any:
        self.session = session
        return self.ask(m.Hello, role=role, epoch=epoch, identity=local_identity())

    def time_passes(self, seconds: float) -> None:
        """Without a word of the publisher."""
        self.receiver._heard -= seconds

    @property
    def state(self) -> S:
        return self.receiver.state.state

    def begin(self, version: int, nonce: str = "b" * 16, **changes: Any) -> Any:
        self.version, self.nonce = version, nonce
        sources = WORLD.sources(0, version)
        self.flat = FlatTensors(sources, sources)
        self.views: list[ViewSpec] = []
        for piece in self.table.pieces:
            move = self.table.part.moves[piece.move]
            whole = sources[move.name]
            view = ViewSpec(move.name, 0, tuple(whole.shape), whole.stride(), dtype_name(whole.dtype))
            start = tuple(a + b for a, b in zip(move.send_start, piece.start, strict=True))
            self.views.append(narrow_view(view, start, piece.shape))
        values = changes.pop("packed", None) or pack_checksums(RegionTable(self.views).checksums(self.flat, LIMIT))
        manifest = Manifest("run", version, nonce, PLAN.digest, LIMIT, {0: values})
        fields = {
            "version": version,
            "nonce": nonce,
            "plan_digest": PLAN.digest,
            "limit": LIMIT,
            "checksums": manifest.checksums[0],
            "leaves": manifest.leaves,
            "digest": manifest.digest,
        }
        self.digest = manifest.digest
        return self.ask(m.Begin, **{**fields, **changes})

    def chunk(self, index: int, *, spoil: bool = False, **changes: Any) -> Any:
        planned = self.table.chunks[0][index]
        buffer = self.send.allocate(planned.nbytes)
        CopyTable.compile([self.views[i] for i in planned.pieces], planned.offsets).gather(self.flat, [buffer.tensor])
        if spoil:
            buffer.tensor[planned.offsets[0]] ^= 1
        fields = {"version": self.version, "nonce": self.nonce, "sender": 0, "sequence": index}
        fields |= {"offers": (buffer.offer,), "layout": m.PackedLayout()}
        return self.ask(m.ChunkMessage, **{**fields, **changes})

    def chunks(self) -> None:
        for sequence in range(len(self.table.chunks[0])):
            self.chunk(sequence)

    def show(self) -> None:
        """Everything in one chunk, as from memory that is shown where it is."""
        sizes = [-(-piece.nbytes // 16) * 16 for piece in self.table.pieces]
        starts = np.cumsum([0, *sizes]).tolist()
        buffer = self.send.allocate(starts.pop())
        CopyTable.compile(self.views, starts).gather(self.flat, [buffer.tensor])
        layout = listed(list(range(len(starts))), [0] * len(starts), starts)
        self.chunk(0, offers=(buffer.offer,), layout=layout)

    def verify(self, **changes: Any) -> Any:
        return self.ask(m.Verify, **{"version": self.version, "nonce": self.nonce, **changes})

    def commit(self, **changes: Any) -> Any:
        return self.ask(m.Commit, **{"version": self.version, "digest": self.digest, **changes})

    def publish(self, version: int, nonce: str = "b" * 16) -> None:
        self.ask(m.Pause)
        self.begin(version, nonce)
        self.chunks()
        self.verify()
        self.commit()
        self.ask(m.Resume)


@pytest.fixture
def driver() -> Driver:
    return Driver()


@pytest.fixture
def receiving(driver: Driver) -> Driver:
    """Paused and begun, no byte written."""
    driver.ask(m.Pause)
    driver.begin(2)
    return driver


delivery = pytest.mark.parametrize(
    "deliver", [pytest.param(Driver.chunks, id="packed"), pytest.param(Driver.show, id="shown")]
)


def test_a_whole_publish(driver: Driver) -> None:
    driver.publish(2)
    assert_serves(driver.engine, 2)
    assert (driver.engine.version, driver.engine.serving, driver.state) == (2, True, S.SERVING)
    calls = [c for c in driver.engine.calls if c != "describe"]
    assert calls == ["pause", "post_process", "commit", "resume"]


class ReleasingEngine(FakeEngine):
    """Gives its weights' memory away in the middle of the receiver's work, as its own thread may."""

    release_after = ""

    def live_tensors(self) -> Any:
        found = super().live_tensors()
        if self.release_after == "live_tensors":
            self.holds_memory = self.intact = False
        return found


def test_memory_that_goes_while_a_receive_begins_is_not_written() -> None:
    """The scheduler saw no receive under way and released the weights, just as one began with views of them: the copy
    went into memory that was gone, and the worker with it."""
    driver = Driver(ReleasingEngine(WORLD))
    driver.ask(m.Pause)
    driver.engine.release_after = "live_tensors"  # type: ignore[attr-defined]
    with pytest.raises(StateError, match="releases the memory of its weights while version 2 arrives"):
        driver.begin(2)
    assert (driver.state, driver.receiver.state.lost) == (S.TORN, 1)
    with pytest.raises(StateError, match="receives no version"):
        driver.chunk(0)


def test_a_receive_under_way_ends_with_the_next_word_once_the_memory_is_wanted(receiving: Driver) -> None:
    """Who wants to release the memory waits for it: not until the publisher has sent everything."""
    receiving.chunk(0)
    receiving.engine.holds_memory = receiving.engine.intact = False
    with pytest.raises(StateError, match="releases the memory"):
        receiving.chunk(1)
    assert receiving.state is S.TORN


def test_observers_ask_and_leave_the_publisher_alone(receiving: Driver) -> None:
    """Asking an engine once, when its receivers were started, made the trainer's publisher stale."""
    publisher = receiving.session
    receiver = receiving.receiver
    welcome = receiving.hello("e" * 16, epoch=99, role="observer")
    assert welcome.status.state is S.RECEIVING
    assert receiving.ask(m.Describe).description.rank == 0
    assert receiving.ask(m.Status).status.incoming == 2
    for kind, fields in ((m.Pause, {}), (m.Resume, {}), (m.Abort, {"reason": "no"}), (m.Drop, {"allocations": ()})):
        with pytest.raises(StateError, match="an observer may only describe"):
            receiving.ask(kind, **fields)
    receiving.ask(m.Bye)
    with pytest.raises(StateError, match="not the present one"):
        receiving.ask(m.Status)
    receiving.session = publisher
    receiving.chunk(0)
    receiving.time_passes(receiver._silence + 1)
    receiving.hello("f" * 16, epoch=99, role="observer")  # no word of the publisher
    receiver.tick()
    assert receiving.state is S.TORN
    for number in range(20):
        receiving.hello(f"{number:016x}", role="observer")
    with pytest.raises(StateError, match="not the present one"):
        receiving.ask(m.Status, session="f" * 16)


def test_publishing_the_same_bytes_again_changes_nothing(driver: Driver) -> None:
    """Publishing twice corrupted weights, because post-processing ran once per bucket and was not re-entrant."""
    for attempt in range(3):
        driver.publish(2, nonce=f"{attempt:016x}")
        assert_serves(driver.engine, 2)
    assert driver.engine.calls.count("post_process") == 3


def any_chunk(driver: Driver) -> Any:
    """A chunk of a version that was never begun."""
    offer = driver.send.allocate(1).offer
    fields = {"version": 2, "nonce": "b" * 16, "sender": 0, "sequence": 0}
    return driver.ask(m.ChunkMessage, **fields, offers=(offer,), layout=m.PackedLayout())


@pytest.mark.parametrize(
    ("action", "words"),
    [
        pytest.param(any_chunk, "receives no version", id="chunk-before-begin"),
        pytest.param(lambda d: d.ask(m.Verify, version=2, nonce="b" * 16), "receives no version", id="verify-first"),
        pytest.param(
            lambda d: d.ask(m.Commit, version=2, digest="c" * 64), "is not what this engine holds", id="commit-first"
        ),
        pytest.param(lambda d: d.begin(2), "serving .* cannot become receiving", id="begin-while-serving"),
        pytest.param(lambda d: d.begin(2, plan_digest="c" * 64), "does not have; send the plan", id="other-plan"),
        pytest.param(lambda d: d.ask(m.Status, run_id="other"), "belongs to run 'run'", id="other-run"),
        pytest.param(lambda d: d.ask(m.Status, session="c" * 16), "later publisher took over", id="other-session"),
        pytest.param(lambda d: d.hello("c" * 16, epoch=9), "this one is stale", id="older-publisher"),
        pytest.param(lambda d: d.hello("c" * 16, role="sender"), "is not open", id="sender-without-session"),
    ],
)
def test_requests_out_of_turn_change_nothing(driver: Driver, action: Any, words: str) -> None:
    with pytest.raises(StateError, match=words):
        action(driver)
    assert driver.state is S.SERVING
    assert_serves(driver.engine, 1)


@pytest.mark.parametrize("change", [{"version": 3}, {"nonce": "c" * 16}])
def test_stale_messages_are_refused(receiving: Driver, change: dict) -> None:
    """Keys without run id and nonce let a stale "finished" of an earlier publish be taken for the present one."""
    with pytest.raises(StateError, match="is stale: the engine receives version 2"):
        receiving.chunk(0, **change)
    with pytest.raises(StateError, match="is stale"):
        receiving.verify(**change)
    assert receiving.state is S.RECEIVING
    receiving.chunks()
    receiving.verify()
    with pytest.raises(StateError, match="publish it in full"):
        receiving.commit(digest="c" * 64)
    receiving.commit()


def test_a_failure_before_the_first_byte_leaves_the_old_version(receiving: Driver) -> None:
    receiving.ask(m.Abort, reason="another rank failed")
    assert (receiving.state, receiving.receiver.state.held) == (S.PAUSED, 1)
    receiving.ask(m.Resume)
    assert_serves(receiving.engine, 1)
    assert receiving.engine.serving


def test_a_failure_after_the_first_byte_tears(receiving: Driver) -> None:
    receiving.chunk(0)
    reply = receiving.ask(m.Abort, reason="another rank failed")
    assert (reply.status.state, reply.status.lost, reply.status.version) == (S.TORN, 1, None)
    assert receiving.engine.fenced == "another rank failed"
    with pytest.raises(TornError, match="version 1 is lost: another rank failed"):
        receiving.ask(m.Resume)
    assert not receiving.engine.serving
    receiving.publish(3, nonce="d" * 16)
    assert_serves(receiving.engine, 3)
    assert receiving.engine.serving


def test_a_failure_after_an_offload_tears_even_without_a_byte(driver: Driver) -> None:
    """The old version was in memory that the offload gave away: there is nothing to go back to."""
    driver.ask(m.Pause)
    driver.engine.offload()
    driver.begin(2)
    reply = driver.ask(m.Abort, reason="the trainer failed")
    assert (reply.status.state, reply.status.lost) == (S.TORN, 1)


def test_resuming_after_an_offload_without_a_publish_is_refused(driver: Driver) -> None:
    driver.ask(m.Pause)
    driver.engine.offload()
    with pytest.raises(TornError, match="an offload took version 1"):
        driver.ask(m.Resume)


def test_resuming_a_committed_version_that_an_offload_took_is_refused(driver: Driver) -> None:
    """A driver published with resume=False, offloaded the engine once more, and resumed it: only a paused engine was
    asked whether its weights are whole, so a committed one served undefined memory."""
    driver.ask(m.Pause)
    driver.begin(2)
    driver.chunks()
    driver.verify()
    driver.commit()
    driver.engine.offload()
    with pytest.raises(TornError, match="an offload took version 2"):
        driver.ask(m.Resume)
    assert driver.engine.fenced
    assert not driver.engine.serving
    driver.publish(3, "c" * 16)
    assert_serves(driver.engine, 3)


def test_views_are_made_anew_for_every_publish(driver: Driver) -> None:
    """Receive views were cached once, and after an offload writes landed in dead storage. The old storages are kept
    alive here, so that a stale view would write into them and not be noticed by a crash."""
    dead: list[torch.Tensor] = []
    for version in (2, 3, 4):
        dead += [p.data for p in driver.engine.parameters.values()]
        copies = [t.view(torch.uint8).clone() for t in dead]
        driver.ask(m.Pause)
        driver.engine.offload()
        driver.publish(version, nonce=f"{version:016x}")
        assert_serves(driver.engine, version)
        assert all(torch.equal(a.view(torch.uint8), b) for a, b in zip(dead, copies, strict=True))


def test_nothing_keeps_the_engines_memory_between_publishes(driver: Driver) -> None:
    driver.publish(2)
    pointers = {p.data_ptr() for p in driver.engine.parameters.values()}
    driver.ask(m.Pause)
    driver.engine.offload()
    pointers -= {p.data_ptr() for p in driver.engine.parameters.values()}  # the new memory may lie where old memory lay
    gc.collect()
    tensors = [o for o in gc.get_objects() if isinstance(o, torch.Tensor) and o.layout is torch.strided and o.numel()]
    alive = [o for o in tensors if o.data_ptr() in pointers]
    assert alive == []


def test_parameters_whose_memory_was_released_are_refused(driver: Driver) -> None:
    """An engine had released its weights and not brought them back: torch quietly allocates new memory behind a
    tensor that is viewed, so the bytes went where no graph looks."""
    driver.ask(m.Pause)
    next(iter(driver.engine.parameters.values())).data.untyped_storage().resize_(0)
    driver.engine.intact = False
    with pytest.raises(PlanError, match="no memory behind it"):
        driver.begin(2)
    assert driver.state is S.PAUSED


def test_a_parameter_that_moves_in_the_middle(receiving: Driver) -> None:
    receiving.chunk(0)
    parameter = receiving.engine.parameters["model.norm.weight"]
    parameter.data = parameter.data.clone()
    with pytest.raises(PlanError, match=r"moved in the middle of a publish: model\.norm\.weight"):
        receiving.chunk(1)
    assert receiving.state is S.TORN


def test_a_parameter_that_changed_its_layout_since_the_plan(driver: Driver) -> None:
    driver.ask(m.Pause)
    driver.engine.parameters["model.norm.weight"].data = torch.zeros(512)[::2]
    with pytest.raises(PlanError, match=r"have changed since the plan was checked: model\.norm\.weight"):
        driver.begin(2)
    assert driver.state is S.PAUSED


def turned(engine: FakeEngine) -> None:
    """A weight is transposed where it is, as backends do that repack what was loaded."""
    parameter = next(p for p in engine.parameters.values() if p.dim() == 3)
    parameter.data = parameter.data.transpose(1, 2)


def cut(engine: FakeEngine) -> None:
    parameter = engine.parameters["model.norm.weight"]
    parameter.data = parameter.data[:128]


def recast(engine: FakeEngine) -> None:
    parameter = engine.parameters["model.norm.weight"]
    parameter.data = parameter.data.view(torch.int32)


@pytest.mark.parametrize("change", [turned, cut, recast])
def test_a_parameter_that_changed_its_layout_where_it_is(driver: Driver, change: Callable[[FakeEngine], None]) -> None:
    """The same objects at the same addresses were taken for parameters that nobody had touched. Bytes were written by
    the old layout, behind the end of one that had become smaller, and proven by the old layout too."""
    driver.publish(2)
    driver.ask(m.Pause)
    change(driver.engine)
    before = driver.engine.served()
    with pytest.raises(PlanError, match="have changed since the plan was checked"):
        driver.begin(3)
    assert driver.state is S.PAUSED
    assert all(torch.equal(now, before[name]) for name, now in driver.engine.served().items())


@delivery
@pytest.mark.parametrize("change", [turned, cut, recast])
def test_post_processing_that_changes_a_layout_where_it_is(
    receiving: Driver, deliver: Callable[[Driver], None], change: Callable[[FakeEngine], None]
) -> None:
    """An engine that transposes a weight in place computed with the transposed one: at the same address, its bytes were
    those that had been sent."""
    receiving.engine.post_process = lambda: change(receiving.engine)  # type: ignore[method-assign]
    deliver(receiving)
    with pytest.raises(PlanError, match="have changed since the plan was checked"):
        receiving.verify()
    assert receiving.state is S.TORN


def replaced(engine: FakeEngine) -> None:
    engine.parameters["model.norm.weight"] = torch.nn.Parameter(poisoned((256,), torch.float32), requires_grad=False)


def swapped(engine: FakeEngine) -> None:
    engine.parameters["model.norm.weight"].data = poisoned((256,), torch.float32)


@delivery
@pytest.mark.parametrize(
    ("change", "error"), [(turned, PlanError), (cut, PlanError), (swapped, ChecksumError), (replaced, ChecksumError)]
)
def test_parameters_that_change_between_the_last_chunk_and_verify(
    receiving: Driver,
    deliver: Callable[[Driver], None],
    change: Callable[[FakeEngine], None],
    error: type[Exception],
) -> None:
    """Checksums that had begun behind the last copy were compared, of memory that was not served any more: it came out
    when the version was committed already, or, for a layout, never."""
    deliver(receiving)
    change(receiving.engine)
    with pytest.raises(error):
        receiving.verify()
    assert receiving.state is S.TORN


@delivery
def test_parameters_that_move_between_the_last_chunk_and_verify_are_proven_there(
    receiving: Driver, deliver: Callable[[Driver], None]
) -> None:
    deliver(receiving)
    for parameter in receiving.engine.parameters.values():
        parameter.data = parameter.data.clone()
    receiving.verify(sha256=True)
    receiving.commit()
    assert_serves(receiving.engine, 2)


def test_memory_that_is_shown_is_post_processed_behind_while_it_is_copied(receiving: Driver) -> None:
    """What goes wrong there is told when the publisher asks: the bytes have arrived."""
    receiving.engine.fail_in["post_process"] = "no kernel image"
    receiving.show()
    assert receiving.engine.calls.count("post_process") == 1
    assert receiving.state is S.RECEIVING
    with pytest.raises(RuntimeError, match="no kernel image"):
        receiving.verify()
    assert receiving.engine.calls.count("post_process") == 1
    assert receiving.state is S.TORN
    assert "no kernel image" in receiving.engine.fenced
    receiving.engine.fail_in.clear()
    receiving.publish(2, nonce="d" * 16)
    assert_serves(receiving.engine, 2)


@pytest.mark.parametrize("fault", ["", "no kernel image"])
def test_shown_memory_is_let_go_of_when_its_copies_have_ended(
    receiving: Driver, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """Its owner may free it then: whatever the engine does, or fails to do, while the device still copies."""
    log = receiving.engine.calls
    event = SimpleNamespace(synchronize=lambda: log.append("copied"))
    monkeypatch.setattr(reception_module, "enqueued", lambda _: log.append("enqueued") or [event])
    monkeypatch.setattr(InProcessReceive, "done", lambda *_: log.append("let go"))
    if fault:
        receiving.engine.fail_in["post_process"] = fault
    receiving.show()
    assert log[-4:] == ["enqueued", "post_process", "copied", "let go"]


@delivery
@pytest.mark.parametrize("end", ["verify", "abort"])
def test_a_failure_keeps_nothing_of_the_engine(receiving: Driver, deliver: Callable[[Driver], None], end: str) -> None:
    """The error of an engine's post-processing was kept until verify; its traceback led back to the reception that kept
    it. Both stayed, and with them the memory of weights that the engine had given up, until garbage was collected;
    serving engines turn that off."""
    receiving.engine.fail_in["post_process"] = "no kernel image"
    fields: dict[str, Any] = {"run_id": "run", "session": "a" * 16, "request": 9}
    verify, abort = m.Verify(**fields, version=2, nonce="b" * 16), m.Abort(**fields, reason="the trainer failed")
    gc.collect()
    gc.disable()
    try:
        reception = ref(receiving.receiver._reception)
        deliver(receiving)
        answer_to(receiving.receiver, m.encode(verify if end == "verify" else abort))
        assert reception() is None
    finally:
        gc.enable()
    assert receiving.state is S.TORN


@delivery
def test_memory_that_is_wanted_between_the_last_chunk_and_verify(
    receiving: Driver, deliver: Callable[[Driver], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever waits for the memory goes by the state: it leaves RECEIVING once no device reads the weights any more."""
    deliver(receiving)
    waited: list[S] = []
    end = Reception.end
    monkeypatch.setattr(Reception, "end", lambda self: (waited.append(receiving.state), end(self)))
    receiving.engine.holds_memory = receiving.engine.intact = False
    with pytest.raises(StateError, match="releases the memory"):
        receiving.verify()
    assert (waited, receiving.state) == ([S.RECEIVING], S.TORN)


def test_an_engine_that_moves_its_weights_after_verification(receiving: Driver) -> None:
    receiving.chunks()
    receiving.verify()
    receiving.engine.parameters["model.norm.weight"].data = poisoned((256,), torch.float32)
    with pytest.raises(TornError, match="moved after version 2 was verified"):
        receiving.commit()
    assert receiving.engine.version is None


def test_a_flipped_byte(receiving: Driver) -> None:
    for sequence in range(len(receiving.table.chunks[0])):
        receiving.chunk(sequence, spoil=sequence == 1)
    name = receiving.table.describe(receiving.table.chunks[0][1].pieces[0])
    with pytest.raises(ChecksumError, match=f"1 of .* pieces differ.*{name.replace('[', '.').replace(']', '.')}"):
        receiving.verify()
    assert receiving.state is S.TORN


def test_missing_pieces_are_listed(receiving: Driver) -> None:
    """Weights arrived without their scales. The manifest lists what never came, before the version is visible."""
    last = len(receiving.table.chunks[0]) - 1
    for sequence in range(last):
        receiving.chunk(sequence)
    with pytest.raises(ManifestError, match="never arrived"):
        receiving.verify()
    assert receiving.state is S.TORN
    assert "post_process" not in receiving.engine.calls


def test_post_processing_that_changes_bytes_is_caught(receiving: Driver) -> None:
    def requantize() -> None:
        receiving.engine.parameters["model.norm.weight"].data.add_(1)

    receiving.engine.post_process = requantize  # type: ignore[method-assign]
    receiving.chunks()
    with pytest.raises(ChecksumError, match=r"model\.norm\.weight"):
        receiving.verify()


def test_post_processing_may_move_bytes_that_it_keeps(receiving: Driver) -> None:
    """Checksums are computed from what the engine will serve, wherever post-processing has put it."""

    def move() -> None:
        for p in receiving.engine.parameters.values():
            p.data = p.data.clone()

    receiving.engine.post_process = move  # type: ignore[method-assign]
    receiving.chunks()
    receiving.verify()
    receiving.commit()
    assert_serves(receiving.engine, 2)


@pytest.mark.parametrize("sequence", [1, 7])
def test_chunks_come_in_turn(receiving: Driver, sequence: int) -> None:
    with pytest.raises(ManifestError, match=f"chunk {sequence} of sender rank 0 arrived, chunk 0 was due"):
        receiving.chunk(0, sequence=sequence)
    assert receiving.state is S.RECEIVING


def listed(pieces: list[int], buffers: list[int], offsets: list[int]) -> m.ListedLayout:
    return m.ListedLayout(
        **{
            k: np.array(v, dtype="<i8").tobytes()
            for k, v in (("pieces", pieces), ("buffers", buffers), ("offsets", offsets))
        }
    )


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        (listed([0, 0], [0, 0], [0, 0]), "each piece once"),
        (listed([9999], [0], [0]), "outside the"),
        (listed([0], [3], [0]), "names 4 buffers and offers 1"),
        (listed([0], [-1], [0]), "buffers below"),
        (listed([], [], []), "each piece once"),
        (m.ListedLayout(pieces=b"123", buffers=b"", offsets=b""), "64-bit"),
    ],
)
def test_listed_chunks_are_checked(receiving: Driver, layout: m.ListedLayout, words: str) -> None:
    with pytest.raises(ManifestError, match=words):
        receiving.chunk(0, layout=layout)
    assert receiving.state is S.RECEIVING


@pytest.mark.parametrize("offset", [1 << 40, -1, (1 << 63) - 1])
def test_a_piece_beyond_its_allocation_is_refused_and_tears_nothing_else(receiving: Driver, offset: int) -> None:
    """An offset near the largest integer passed for one inside: its end is beyond that integer, and negative."""
    with pytest.raises(TransportError, match="not inside the offered"):
        receiving.chunk(0, layout=listed([0], [0], [offset]))


def test_a_piece_that_arrives_twice(receiving: Driver) -> None:
    first = receiving.table.chunks[0][0]
    receiving.chunk(0)
    with pytest.raises(ManifestError, match="arrived twice"):
        receiving.chunk(0, sequence=1, layout=listed([first.pieces[0]], [0], [0]))
    assert receiving.state is S.TORN


def test_an_offer_that_cannot_be_opened_writes_nothing(receiving: Driver) -> None:
    gone = receiving.send.allocate(8)
    receiving.send.free(gone)
    offer = gone.offer
    del gone
    with pytest.raises(TransportError, match="no longer offered"):
        receiving.chunk(0, offers=(offer,))
    receiving.ask(m.Abort, reason="x")
    assert (receiving.state, receiving.receiver.state.held) == (S.PAUSED, 1)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"packed": b"1" * 16}, r"2 checksums for \d+ pieces"),
        ({"digest": "c" * 64}, "announced was cccc"),
        ({"checksums": b"1" * 16}, "does not hold the checksums"),
        ({"leaves": {0: "c" * 64}}, "does not hold the checksums of receiver rank 0"),
        ({"leaves": {}}, "does not hold the checksums"),
    ],
)
def test_a_manifest_that_does_not_fit(driver: Driver, change: dict, words: str) -> None:
    driver.ask(m.Pause)
    with pytest.raises(ManifestError, match=words):
        driver.begin(2, **change)
    assert driver.state is S.PAUSED


def test_versions_do_not_go_back_by_themselves(driver: Driver) -> None:
    driver.publish(5)
    driver.ask(m.Pause)
    with pytest.raises(StateError, match="older than version 5"):
        driver.begin(4)
    driver.begin(4, allow_rollback=True)
    driver.chunks()
    driver.verify()
    driver.commit()
    driver.ask(m.Resume)
    assert_serves(driver.engine, 4)


def test_a_version_that_was_lost_is_not_gone_behind_by_itself(driver: Driver) -> None:
    """A torn engine took any version: the one publish in which nobody looked at its number."""
    driver.publish(5)
    driver.ask(m.Pause)
    driver.begin(6)
    driver.chunk(0)
    driver.ask(m.Abort, reason="the trainer raised")
    assert driver.state is S.TORN
    with pytest.raises(StateError, match="older than version 5, which the engine lost; set allow_rollback"):
        driver.begin(4)
    driver.publish(5)
    assert_serves(driver.engine, 5)


def test_a_take_over_counts_against_publishers_that_have_not_greeted_yet(driver: Driver) -> None:
    driver.hello("a" * 16, epoch=30)  # take_over() of the present one
    with pytest.raises(StateError, match="this one is stale"):
        driver.hello("e" * 16, epoch=20)
    driver.hello("e" * 16, epoch=31)


def test_of_two_publishers_with_one_epoch_every_receiver_takes_the_same(driver: Driver) -> None:
    """Two that come in at the same moment are told the same epoch, and reach two receivers in different orders: each
    receiver would have listened to another one."""
    other = Driver()
    for one, order in ((driver, "ce"), (other, "ec")):
        for name in order:
            if (name, order) == ("c", "ec"):
                with pytest.raises(StateError, match="this one is stale"):
                    one.hello(name * 16, epoch=11)
            else:
                one.hello(name * 16, epoch=11)
    for one in (driver, other):
        assert one.ask(m.Status, session="e" * 16).status.state is S.SERVING
        with pytest.raises(StateError, match="later publisher took over"):
            one.ask(m.Status, session="c" * 16)


def test_a_newcomer_is_told_the_epoch_and_disturbs_nobody(receiving: Driver) -> None:
    publisher = receiving.session
    assert receiving.hello("c" * 16, epoch=0, role="newcomer").epoch == 10
    with pytest.raises(StateError, match="later publisher took over"):
        receiving.ask(m.Status)
    receiving.session = publisher
    receiving.chunk(0)
    assert receiving.state is S.RECEIVING


def test_a_later_publisher_takes_over(receiving: Driver) -> None:
    receiving.chunk(0)
    receiving.hello("e" * 16, epoch=11)
    assert receiving.state is S.TORN
    assert "another publisher took over" in receiving.engine.fenced
    receiving.session = "a" * 16
    with pytest.raises(StateError, match="later publisher took over"):
        receiving.chunk(1)
    receiving.session = "e" * 16
    receiving.publish(3, nonce="d" * 16)
    assert_serves(receiving.engine, 3)


def test_a_verified_version_waits_for_a_later_publisher(receiving: Driver) -> None:
    receiving.chunks()
    receiving.verify()
    receiving.hello("e" * 16, epoch=11)
    assert receiving.state is S.VERIFIED
    receiving.commit()
    assert receiving.engine.version == 2
    receiving.commit()  # told twice: nothing more happens
    assert receiving.engine.calls.count("commit") == 1


def test_a_verified_version_can_be_replaced_in_full(receiving: Driver) -> None:
    receiving.chunks()
    receiving.verify()
    receiving.publish(3, nonce="d" * 16)
    assert_serves(receiving.engine, 3)


def test_a_silent_publisher_is_taken_for_dead() -> None:
    driver = Driver(silence=60)
    driver.ask(m.Pause)
    driver.begin(2)
    driver.chunk(0)
    driver.receiver.tick()
    assert driver.state is S.RECEIVING
    driver.time_passes(61)
    driver.receiver.tick()
    assert driver.state is S.TORN
    assert "said nothing for 60 s in the middle of version 2" in driver.engine.fenced


def test_a_publisher_of_several_ranks_may_be_silent_while_they_wait_for_each_other() -> None:
    """A rank may be as late as its group's deadline allows, 300 s; the receivers tore what they had after 180 s."""
    driver = Driver(silence=60)
    driver.ask(m.Pause)
    driver.begin(2, quiet=100.0)
    driver.chunk(0)
    driver.time_passes(99)
    driver.receiver.tick()
    assert driver.state is S.RECEIVING
    driver.time_passes(2)
    driver.receiver.tick()
    assert driver.state is S.TORN
    assert "said nothing for 100 s" in driver.engine.fenced
    driver.begin(3)
    driver.time_passes(61)
    driver.receiver.tick()
    assert driver.state is S.TORN


def test_a_new_engine_stays_out_until_it_has_all_of_a_version() -> None:
    driver = Driver(version=None)
    assert driver.state is S.TORN
    assert driver.engine.fenced.startswith("no version was published")
    with pytest.raises(TornError):
        driver.ask(m.Resume)
    driver.publish(7)
    assert_serves(driver.engine, 7)
    assert driver.engine.serving


def test_a_plan_that_forgets_a_tensor_is_refused() -> None:
    engine = FakeEngine(WORLD)
    engine.buffers["rotary.cos"] = torch.zeros(8)
    with pytest.raises(PlanError, match=r"rotary\.cos \(0 of 8"):
        Driver(engine)
    Driver(FakeEngine(WORLD, exempt={"rotary.cos": "restored by the engine"}))


FIRST = PLAN.moves[0]


@pytest.mark.parametrize(
    ("moves", "words"),
    [
        (PLAN.moves[1:], r"gate_proj.weight: the shard .* is written only in part"),
        ((FIRST, *PLAN.moves), "has elements that are written 2 times"),
        ((replace(FIRST, recv_start=(128, 0)), *PLAN.moves[1:]), r"a move writes .* at \[128, 0\], which leaves"),
        ((replace(FIRST, nbytes=FIRST.nbytes + 1), *PLAN.moves[1:]), "does not fit"),
    ],
)
def test_a_plan_that_nobody_checked_is_refused(driver: Driver, moves: Any, words: str) -> None:
    """A plan that was read from a file, without one move: the engine served the rest of the new version with one old
    expert, every piece verified, sha256 included."""
    with pytest.raises(PlanError, match=words):
        driver.ask(m.SetPlan, part=replace(PLAN, moves=moves).for_receiver(0).to_json())


def test_a_plan_for_another_layout_or_rank_is_refused(driver: Driver) -> None:
    with pytest.raises(PlanError, match="have changed since the plan was made"):
        driver.ask(m.SetPlan, part=replace(PLAN, layouts={0: "f" * 64}).for_receiver(0).to_json())
    with pytest.raises(PlanError, match="for receiver rank 1, this engine rank is 0"):
        driver.ask(m.SetPlan, part=World(experts=2, ep=2).plan().for_receiver(1).to_json())
    good = replace(PLAN, layouts={0: driver.engine.describe().layout_digest})
    driver.ask(m.SetPlan, part=good.for_receiver(0).to_json())


def test_errors_go_back_as_data(driver: Driver) -> None:
    reply = m.decode_reply(
        answer_to(
            driver.receiver, m.encode(m.Verify(run_id="run", session="a" * 16, request=9, version=2, nonce="b" * 16))
        )
    )
    assert isinstance(reply, m.Failed)
    assert (reply.error, reply.request, reply.status.state) == ("StateError", 9, S.SERVING)
    reply = m.decode_reply(answer_to(driver.receiver, b'{"kind":"launch","request":4}'))
    assert isinstance(reply, m.Failed)
    assert (reply.error, reply.request) == ("ChannelError", 4)
    assert answer_to(driver.receiver, b"\x80\x04") is None
    driver.engine.fail_in["pause"] = "CUDA error"
    reply = m.decode_reply(answer_to(driver.receiver, m.encode(m.Pause(run_id="run", session="a" * 16, request=5))))
    assert isinstance(reply, m.Failed)
    assert (reply.error, reply.message, reply.status.state) == ("RuntimeError", "CUDA error", S.SERVING)


def test_an_error_in_any_alphabet_goes_back(receiving: Driver) -> None:
    """An engine failed over a file whose name is not UTF-8. Its message could not be put into a reply, that error ended
    the receiver's loop, and the publisher waited out its deadline for a rank that was gone. The reason stays in the
    state and goes into every later reply."""
    receiving.engine.fail_in["post_process"] = "no such file: caf\udce9" + "." * 100_000
    receiving.chunks()
    verify = m.Verify(run_id="run", session="a" * 16, request=9, version=2, nonce="b" * 16)
    reply = m.decode_reply(answer_to(receiving.receiver, m.encode(verify)) or b"")
    assert isinstance(reply, m.Failed)
    assert "no such file: caf?..." in reply.message
    assert reply.status.state is S.TORN
    assert "caf?" in m.decode_reply(m.encode(receiving.ask(m.Status))).status.reason


def test_an_engine_that_cannot_say_whether_it_is_whole_is_answered_for(driver: Driver) -> None:
    """Every reply says whether the weights are whole. When that very question raised, so did the reply to the failure,
    and the receiver's loop ended."""

    def broken() -> bool:
        raise RuntimeError("CUDA error: device-side assert")

    driver.engine.weights_intact = broken
    data = m.encode(m.Status(run_id="run", session="a" * 16, request=9))
    reply = m.decode_reply(answer_to(driver.receiver, data) or b"")
    assert isinstance(reply, m.Failed)
    assert (reply.error, reply.request, reply.status.intact) == ("RuntimeError", 9, False)


def test_closing_in_the_middle_tears(receiving: Driver) -> None:
    receiving.chunk(0)
    receiving.receiver.close()
    assert receiving.state is S.TORN


def test_closing_before_the_commit_tears(receiving: Driver) -> None:
    """Receivers were stopped after all had verified, and started again for the old version: the engine took the new,
    uncommitted bytes for it, since nobody had told it that they were overwritten."""
    receiving.chunks()
    receiving.verify()
    assert receiving.state is S.VERIFIED
    receiving.receiver.close()
    assert receiving.state is S.TORN
    assert not receiving.engine.weights_intact()


def test_a_rank_that_takes_long_does_not_take_its_publisher_for_dead() -> None:
    """A begin outlasted the allowed silence; right after answering it the receiver gave its publisher up."""
    driver = Driver(silence=60)
    driver.ask(m.Pause)
    live = driver.engine.live_tensors

    def slow() -> Any:
        driver.time_passes(61)
        return live()

    driver.engine.live_tensors = slow  # type: ignore[method-assign]
    driver.begin(2)
    driver.receiver.tick()
    assert driver.state is S.RECEIVING


def test_a_plan_made_before_experts_moved_is_dropped_by_whoever_describes() -> None:
    """A second driver described an engine whose experts had moved; the first published by its plan of before, and
    every byte went to a slot that had become another expert's."""
    driver = Driver()
    driver.publish(2)
    before = driver.engine.describe
    driver.ask(m.Describe)
    assert driver.ask(m.Status).status.plan_digest == PLAN.digest
    driver.engine.describe = lambda: before().model_copy(update={"placement": "moved"})  # type: ignore[method-assign]
    driver.ask(m.Describe)
    assert driver.ask(m.Status).status.plan_digest == ""
    driver.ask(m.Pause)
    with pytest.raises(StateError, match="send the plan first"):
        driver.begin(3)
