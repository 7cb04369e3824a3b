"""Publishing within one process: every layout, in place or packed, all engines or none, and every way to fail."""

import hashlib
import json
import re
import threading
import time
from collections.abc import Callable, Generator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import zmq
from publish_room import Room, open_room
from publish_world import FakeEngine, World, assert_serves

import weftpub.wire.messages as m
import weftpub_kernels
from weftpub.channel import Deadline, Deadlines, unix_address
from weftpub.errors import (
    ChannelError,
    CheckpointError,
    ChecksumError,
    ConfigError,
    DeadlineError,
    PlanError,
    StaleError,
    StateError,
    TornError,
    WeftpubError,
)
from weftpub.plan import Destination, ViewSpec, cut_pieces, make_plan
from weftpub.publisher import CurveKeys, Observer, Peer, Publisher, SourceBuffers
from weftpub.publisher.coordinator import Coordinator
from weftpub.publisher.evidence import compare_sha256
from weftpub.publisher.peers import PeerLink, exchange
from weftpub.publisher.transfer import Transfer
from weftpub.receive import Receiver, ReceiverThread
from weftpub.receive.reception import Reception
from weftpub.receive.views import ReceiveViews
from weftpub.transport import CopyTable, RegionTable
from weftpub.version import EngineState as S
from weftpub.wire import local_identity

SMALL = World(experts=2, ep=2, extra=(("model.norm.weight", (256,), torch.float32),))
GATE = "model.layers.0.mlp.experts.0.gate_proj.weight"


@pytest.fixture
def room(tmp_path: Path) -> Generator[Room]:
    with open_room(SMALL, tmp_path) as opened:
        yield opened


def only(**seconds: float) -> Deadlines:
    """Deadlines that a test is about; the others no busy machine misses."""
    return Deadlines(**{**vars(Deadlines.all(30)), **seconds})


def states(publisher: Publisher) -> list[str]:
    return [str(status.state) for status in publisher.status().values()]


@pytest.mark.parametrize(
    "world",
    [
        pytest.param(World(experts=2, ep=1), id="one-to-one"),
        pytest.param(World(experts=4, ep=2), id="ep2"),
        pytest.param(World(experts=2, ep=1, tp=2), id="tp2"),
        pytest.param(World(experts=4, ep=2, tp=2, up_first=True), id="ep2-tp2-up-first"),
        pytest.param(World(experts=3, ep=3), id="three-ranks"),
        pytest.param(World(experts=2, ep=1, engines=2), id="two-engines"),
    ],
)
def test_three_publishes_with_an_offload_before_each(world: World, tmp_path: Path) -> None:
    """A plan's views from before an offload were used after it. Weights move between publishes here, into memory full
    of NaN bytes; every byte of every parameter is compared."""
    with open_room(world, tmp_path, version=None) as room:
        publisher = room.publisher()
        for version in (1, 2, 3):
            if version > 1:
                publisher.pause()
                for engine in room.engines:
                    engine.offload()
            report = publisher.publish(version, world.sources(0, version))
            for engine in room.engines:
                assert_serves(engine, version)
                assert (engine.version, engine.serving) == (version, True)
            assert report.version == room.recorded() == version
            assert report.staging_bytes <= 1 << 17


def test_the_report_is_plain_data(room: Room) -> None:
    sources = SMALL.sources(0, 1)
    report = room.publisher().publish(1, sources, verify_sha256=True)
    data = json.loads(json.dumps(report.as_dict()))
    assert type(report).from_dict(data) == report
    phases = {"hello", "plan", "pause", "checksum", "begin", "transfer", "verify", "record", "commit", "resume"}
    assert phases | {"sha256", "total"} == set(report.ms)
    assert report.engines["engine0"].state == "serving"
    assert report.transports == {0: "inprocess", 1: "inprocess"}
    assert report.nbytes >= sum(t.nbytes for t in sources.values())
    assert report.sha256 == {
        name: hashlib.sha256(t.view(torch.uint8).numpy().tobytes()).hexdigest() for name, t in sources.items()
    }


def test_identical_bytes_n_times_leave_identical_tensors(room: Room) -> None:
    publisher, sources = room.publisher(), SMALL.sources(0, 1)
    for _ in range(3):
        publisher.publish(1, sources)
        for engine in room.engines:
            assert_serves(engine, 1)
    assert [e.calls.count("post_process") for e in room.engines] == [3, 3]


def stacked(world: World, version: int, **options: Any) -> SourceBuffers:
    """A trainer that keeps all experts' gates, ups and downs in one tensor each, beside the other tensors."""
    plain = world.sources(0, version)
    buffers: dict[str, torch.Tensor] = {}
    views: dict[str, ViewSpec] = {}
    groups: dict[str, list[str]] = {}
    for name in plain:
        head, _, tail = name.partition(".experts.")
        groups.setdefault(f"{head}.{tail.partition('.')[2]}" if tail else name, []).append(name)
    for group, names in groups.items():
        buffers[group] = torch.stack([plain[name].view(torch.uint8) for name in names]).view(plain[names[0]].dtype)
        for slot, name in enumerate(names):
            part = buffers[group][slot]
            views[name] = ViewSpec(group, part.storage_offset(), tuple(part.shape), part.stride(), str(part.dtype)[6:])
    return SourceBuffers(buffers, views, **options)


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("tp", [1, 2])
def test_buffers_can_be_shown_where_they_are(tmp_path: Path, tp: int, in_place: bool) -> None:
    """With tensor parallel size 2 the down projections are strided in the trainer's buffer: they are packed, the rest
    is shown in place."""
    world = World(experts=2, ep=1, tp=tp)
    with open_room(world, tmp_path) as room:
        publisher = room.publisher()
        for version in (1, 2):
            sources = stacked(world, version, in_place=in_place)
            report = publisher.publish(version, sources)
            for engine in room.engines:
                assert_serves(engine, version)
            assert (report.staging_bytes == 0) == (in_place and tp == 1)
            if in_place and tp == 1:
                assert report.chunks == 1
            for buffer in sources.buffers.values():  # nothing holds the trainer's memory any more
                buffer.untyped_storage().resize_(0)


def test_peak_extra_memory_is_capped(tmp_path: Path) -> None:
    """A fused tensor of 8.6 GiB was built during a sync. A tensor many times the cap goes in pieces."""
    world = World(experts=1, ep=1, extra=(("model.embed_tokens.weight", (4000, 256), torch.bfloat16),))
    with open_room(world, tmp_path) as room:
        report = room.publisher(max_staging_bytes=1 << 16).publish(1, world.sources(0, 1))
        assert_serves(room.engines[0], 1)
        assert report.staging_bytes <= 1 << 16
        assert report.pieces > 60


def test_known_checksums_are_used(room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    sources = SMALL.sources(0, 1)
    known = {name: weftpub_kernels.checksum(t) for name, t in sources.items()}
    del known["model.norm.weight"]
    computed: list[int] = []
    compute = RegionTable.checksums

    def count(self: RegionTable, tensors: Any, scratch: int, only: Any = None) -> Any:
        if only is not None:  # the sender asks for some regions, receivers for all
            computed.append(len(only))
        return compute(self, tensors, scratch, only)

    monkeypatch.setattr(RegionTable, "checksums", count)
    room.publisher().publish(1, sources, known)
    assert computed == [1]
    for engine in room.engines:
        assert_serves(engine, 1)


def test_checksums_of_other_bytes_are_caught(room: Room) -> None:
    """The trainer's W and the served W were two quantizations of one matrix. A checksum of what the trainer computes
    with does not fit bytes that took another way."""
    sources, publisher = SMALL.sources(0, 1), room.publisher()
    known = {GATE: weftpub_kernels.checksum(SMALL.value(GATE, 2))}
    with pytest.raises(ChecksumError, match=f"1 of 7 pieces differ from what was sent: {GATE}"):
        publisher.publish(1, sources, known)
    assert states(publisher) == ["torn", "torn"]
    assert room.recorded() is None


def test_a_checksum_under_a_name_that_is_not_published_is_refused(room: Room) -> None:
    """Names that nothing matched were dropped with a warning. A checksum under such a name would be compared with
    nothing, and the tensor that it was meant for would count as checked."""
    known = {GATE.replace("gate_proj", "gate"): weftpub_kernels.checksum(SMALL.value(GATE, 1))}
    with pytest.raises(PlanError, match=r"checksums were given for 1 tensors .*experts\.0\.gate\.weight"):
        room.publisher().publish(1, SMALL.sources(0, 1), known)
    for engine in room.engines:
        assert_serves(engine, 0)
        assert engine.serving


@pytest.mark.parametrize(
    ("change", "words"),
    [
        pytest.param(lambda s: s.pop(GATE), f"1 tensors that were not handed over: {GATE}", id="missing"),
        pytest.param(lambda s: s.update(more=torch.zeros(1)), "the plan does not know: more", id="unknown"),
        pytest.param(lambda s: s.update({GATE: s[GATE].to(torch.bfloat16)}), "handed over bfloat16", id="unquantized"),
        pytest.param(
            lambda s: s.update({GATE + "_scale_inv": s[GATE + "_scale_inv"].bfloat16()}),
            "scale_inv: .*handed over bfloat16",
            id="rounded-scale",
        ),
        pytest.param(lambda s: s.update({GATE: s[GATE][:128]}), "handed over float8_e4m3fn .128, 256.", id="shape"),
        pytest.param(lambda s: s.update({GATE: None}), f"{GATE}: expected a tensor .* found NoneType", id="no-tensor"),
    ],
)
def test_wrong_sources_send_nothing(room: Room, change: Callable[[dict], object], words: str) -> None:
    """A quantizer that failed sent the tensor unquantized with a log line; scales were cast to BF16 on the way. Here
    nothing leaves, and the engines serve on."""
    publisher, sources = room.publisher(), SMALL.sources(0, 1)
    change(sources)
    with pytest.raises(PlanError, match=words):
        publisher.publish(1, sources)
    for engine in room.engines:
        assert_serves(engine, 0)
        assert (engine.version, engine.serving) == (0, True)
    publisher.publish(1, SMALL.sources(0, 1))


@pytest.mark.parametrize("version", [-1, 1.5, "1", True, 2**63, None])
def test_a_version_is_a_whole_number(room: Room, version: object) -> None:
    """A version that came as text from a command line was refused by every receiver for its digest, as if the manifest
    had been damaged on the way; others ended in a validation error of the message library."""
    publisher = room.publisher()
    with pytest.raises(ConfigError, match="whole number from 0"):
        publisher.publish(version, SMALL.sources(0, 1))  # pyright: ignore[reportArgumentType]
    assert states(publisher) == ["serving", "serving"]


def test_scale_bits_arrive_as_they_are(room: Room) -> None:
    sources = SMALL.sources(0, 1)
    name = GATE + "_scale_inv"
    bits = torch.tensor([[1, 0x00800000], [0x7F7FFFFF, 0x3DCCCCCD]], dtype=torch.int32)
    sources[name] = bits.view(torch.float32)
    room.publisher().publish(1, sources)
    served = room.engines[0].parameters["model.layers.0.mlp.experts.w13_weight_scale_inv"][0, :2]
    assert torch.equal(served.view(torch.int32), bits)


def test_memory_that_was_released_is_refused(room: Room) -> None:
    sources = stacked(SMALL, 1)
    buffers = dict(sources.buffers)
    buffers["model.norm.weight"] = torch.empty(0)
    with pytest.raises(PlanError, match="was its memory released"):
        room.publisher().publish(1, SourceBuffers(buffers, sources.views))


@pytest.mark.parametrize("change", [lambda t: t[:128], lambda t: t.view(torch.int32)], ids=["cut", "recast"])
def test_a_source_that_changed_where_it_is(room: Room, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """A buffer that was the same object at the same address as in the publish before was not looked at: what lay behind
    its end was sent, with the right checksum."""
    sources = SourceBuffers.of_tensors(SMALL.sources(0, 1))
    publisher = room.publisher()
    publisher.publish(1, sources)
    norm = sources.buffers["model.norm.weight"]
    norm.data = change(norm.data)
    with pytest.raises(PlanError, match=r"buffer model\.norm\.weight is .* \[(128|256)\], its views are float32"):
        publisher.publish(2, sources)
    for engine in room.engines:
        assert engine.serving
        assert_serves(engine, 1)


class TestEngineFailures:
    """One rank raises or hangs: the publish ends everywhere, the report says who and where, and the next one works."""

    @pytest.mark.parametrize(
        ("method", "after", "served"),
        [("pause", ["serving", "serving"], 0), ("post_process", ["torn", "torn"], None)],
    )
    def test_a_rank_that_raises(self, room: Room, method: str, after: list[str], served: int | None) -> None:
        publisher = room.publisher()
        room.engines[1].fail_in[method] = "CUDA error: out of memory"
        with pytest.raises(ChannelError, match=r"engine0 receiver rank 1 .*RuntimeError: CUDA error") as caught:
            publisher.publish(1, SMALL.sources(0, 1))
        assert states(publisher) == after
        assert any(f"engine engine0 is {after[0]}" in note for note in caught.value.__notes__)
        assert [e.version for e in room.engines] == [0, 0]
        if served is not None:
            for engine in room.engines:
                assert_serves(engine, served)
        room.engines[1].fail_in.clear()
        publisher.publish(1, SMALL.sources(0, 1))
        for engine in room.engines:
            assert_serves(engine, 1)

    def test_a_torn_engine_says_what_it_lost(self, room: Room) -> None:
        publisher = room.publisher()
        room.engines[0].fail_in["post_process"] = "no"
        with pytest.raises(ChannelError):
            publisher.publish(1, SMALL.sources(0, 1))
        report = publisher.status()[1]
        assert (report.state, report.version, report.lost) == (S.TORN, None, 0)
        assert "version 1 failed" in report.reason
        with pytest.raises(TornError, match="version 0 is lost"):
            publisher.resume()
        assert not any(engine.serving for engine in room.engines)

    @pytest.mark.parametrize(
        ("method", "in_place"),
        [("pause", False), ("post_process", False), ("post_process", True), ("commit", False), ("resume", False)],
    )
    def test_a_rank_that_hangs(self, tmp_path: Path, method: str, in_place: bool) -> None:
        """One rank hung and the others sat in a barrier for two hours. The wait ends at its deadline and names rank,
        phase and times; rank 0, which answers, is not held up."""
        with open_room(SMALL, tmp_path) as room:
            phase, limits = method, {method: 0.75}
            if method == "post_process":
                phase, limits = "verify", {"verify": 0.75}
            if in_place:  # before the last chunk is answered
                phase, limits = "chunks of version 1", {"chunk": 0.5, "verify": 0.25}
            publisher = room.publisher(deadlines=only(**limits))
            room.engines[1].hang_in[method] = 2.0
            with pytest.raises(DeadlineError) as caught:
                publisher.publish(1, SourceBuffers.of_tensors(SMALL.sources(0, 1), in_place=in_place))
            # On a busy machine rank 0 may be late as well; then it is named first.
            assert re.search(
                rf"rank 1 \(host .*, pid \d+, cpu\): .* phase {phase} after \d+\.\d s of 0\.75 s",
                "\n".join((str(caught.value), *caught.value.__notes__)),
            )
            room.engines[1].hang_in.clear()
            patient = room.publisher()
            recovered = patient.recover()
            if method in ("commit", "resume"):
                assert recovered.finished == ("engine0",)
                assert states(patient) == ["serving", "serving"]
            else:
                assert recovered.publish.keys() == {"engine0"}
                patient.publish(1, SMALL.sources(0, 1))
            for engine in room.engines:
                assert_serves(engine, 1)

    def test_engines_post_process_side_by_side(self, tmp_path: Path) -> None:
        """Receivers post-processed before they answered their last chunk, and kept its staging buffer for so long.
        There are two: of eight engines the last ones post-processed when six others were done."""
        world = World(experts=2, ep=1, engines=4, extra=())
        with open_room(world, tmp_path) as room:
            together = threading.Barrier(len(room.engines), timeout=20)
            for engine in room.engines:
                engine.post_process = lambda: together.wait() and None  # type: ignore[method-assign]
            room.publisher().publish(1, world.sources(0, 1))
            for engine in room.engines:
                assert_serves(engine, 1)

    def test_nobody_listens(self, room: Room) -> None:
        peers = [*room.peers[:1], Peer(1, room.peers[1].address + "x", "engine0")]
        publisher = room.publisher(peers=peers, deadlines=Deadlines.all(0.3))
        with pytest.raises(DeadlineError, match=r"receiver rank 1 at ipc.*phase hello.*has the receiver been started"):
            publisher.publish(1, SMALL.sources(0, 1))
        assert_serves(room.engines[0], 0)

    def test_addresses_that_are_swapped(self, room: Room) -> None:
        first, second = room.peers
        peers = [Peer(0, second.address, "engine0"), Peer(1, first.address, "engine0")]
        with pytest.raises(ChannelError, match="answers as rank 1 of engine 'engine0', expected rank 0"):
            room.publisher(peers=peers).publish(1, SMALL.sources(0, 1))

    def test_a_byte_flipped_in_flight(self, room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
        publisher, gather = room.publisher(), CopyTable.gather

        def spoil(self: CopyTable, tensors: Any, buffers: Any) -> None:
            gather(self, tensors, buffers)
            buffers[0][3] ^= 0x10

        monkeypatch.setattr(CopyTable, "gather", spoil)
        with pytest.raises(ChecksumError, match=r"differ from what was sent.*publish again"):
            publisher.publish(1, SMALL.sources(0, 1))
        assert states(publisher) == ["torn", "torn"]
        monkeypatch.undo()
        publisher.publish(1, SMALL.sources(0, 1))
        for engine in room.engines:
            assert_serves(engine, 1)

    def test_the_version_is_not_visible_before_all_of_it_is_there(
        self, room: Room, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The version was bumped with each bucket, so a failed third bucket left the new version with old weights."""
        publisher, post, seen = room.publisher(), Transfer._post_next, []

        def fail_third(self: Transfer, progress: Any, link: Any) -> bool:
            seen.append([e.version for e in room.engines])
            if self.chunks == 2:
                raise WeftpubError("the third bucket")
            return post(self, progress, link)

        monkeypatch.setattr(Transfer, "_post_next", fail_third)
        with pytest.raises(WeftpubError, match="the third bucket"):
            publisher.publish(1, SMALL.sources(0, 1))
        assert seen == [[0, 0]] * len(seen)
        assert [e.version for e in room.engines] == [0, 0]
        assert not any(e.serving for e in room.engines if e.fenced)
        assert "torn" in states(publisher)

    def test_replies_to_a_publish_that_failed_are_not_taken_for_others(
        self, room: Room, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The publish ends while a chunk is still being copied; its late answer belongs to nothing that follows."""
        take = Reception.take

        def slow(self: Reception, chunk: Any, transports: Any) -> None:
            if self._plans.table.part.rank == 0:
                threading.Event().wait(0.3)
            else:
                raise RuntimeError("no room")
            take(self, chunk, transports)

        publisher = room.publisher()
        with monkeypatch.context() as patch:
            patch.setattr(Reception, "take", slow)
            with pytest.raises(ChannelError, match="no room") as caught:
                publisher.publish(1, SMALL.sources(0, 1))
        assert any("engine engine0 is" in note and "torn" in note for note in caught.value.__notes__)
        assert "receiving" not in states(publisher)
        publisher.publish(1, SMALL.sources(0, 1))
        for engine in room.engines:
            assert_serves(engine, 1)


class TestSeveralEngines:
    """A version belongs to an engine: the policy says what one engine's failure means for the others."""

    world = World(experts=2, ep=2, engines=2, extra=SMALL.extra)

    @pytest.fixture
    def room(self, tmp_path: Path) -> Generator[Room]:
        with open_room(self.world, tmp_path) as opened:
            yield opened

    def test_continue_leaves_the_failed_one_out(self, room: Room) -> None:
        publisher = room.publisher(on_engine_failure="continue")
        room.engines[1].fail_in["post_process"] = "no"
        report = publisher.publish(1, self.world.sources(0, 1))
        assert {name: o.state for name, o in report.engines.items()} == {"engine0": "torn", "engine1": "serving"}
        assert "RuntimeError: no" in report.engines["engine0"].error
        assert json.loads(room.record.read_text())["engines"] == ["engine1"]
        for engine in room.engines[2:]:
            assert_serves(engine, 1)
        assert all(engine.fenced for engine in room.engines[:2])
        room.engines[1].fail_in.clear()
        report = publisher.publish(2, self.world.sources(0, 2))
        assert {o.state for o in report.engines.values()} == {"serving"}
        for engine in room.engines:
            assert_serves(engine, 2)

    def test_continue_with_an_engine_that_is_not_there(self, room: Room) -> None:
        peers = [*room.peers[:3], Peer(3, room.peers[3].address + "x", "engine1")]
        publisher = room.publisher(on_engine_failure="continue", peers=peers, deadlines=only(hello=1.5))
        report = publisher.publish(1, self.world.sources(0, 1))
        assert report.engines["engine1"].error
        assert [e.version for e in room.engines] == [1, 1, 0, 0]
        assert room.engines[2].serving
        assert_serves(room.engines[2], 0)

    def test_continue_with_an_engine_that_hangs_while_it_copies(
        self, room: Room, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        take, stuck = Reception.take, threading.Event()

        def stall(self: Reception, chunk: Any, transports: Any) -> None:
            if self._plans.table.part.rank == 3 and chunk.sequence == 1 and not stuck.is_set():
                stuck.wait(4.0)
            take(self, chunk, transports)

        monkeypatch.setattr(Reception, "take", stall)
        publisher = room.publisher(on_engine_failure="continue", deadlines=only(chunk=1.5))
        report = publisher.publish(1, self.world.sources(0, 1))
        assert "chunks of version 1" in report.engines["engine1"].error
        for engine in room.engines[:2]:
            assert_serves(engine, 1)
        stuck.set()
        report = room.publisher(on_engine_failure="continue").publish(2, self.world.sources(0, 2))
        for engine in room.engines:
            assert_serves(engine, 2)

    def test_abort_ends_it_for_all(self, room: Room) -> None:
        publisher = room.publisher()
        room.engines[1].fail_in["post_process"] = "no"
        with pytest.raises(ChannelError, match="engine0 receiver rank 1"):
            publisher.publish(1, self.world.sources(0, 1))
        assert states(publisher) == ["torn"] * 4
        assert room.recorded() is None

    def test_no_engine_left(self, room: Room) -> None:
        publisher = room.publisher(on_engine_failure="continue")
        for engine in room.engines:
            engine.fail_in["post_process"] = "no"
        with pytest.raises(ChannelError, match="RuntimeError: no"):
            publisher.publish(1, self.world.sources(0, 1))
        assert room.recorded() is None


class TestDriver:
    """Pausing and resuming by hand, taking over, and finishing what a crash left."""

    def test_a_colocated_step(self, room: Room) -> None:
        publisher = room.publisher()
        publisher.pause()
        for engine in room.engines:
            engine.offload()
        report = publisher.publish(1, SMALL.sources(0, 1), resume=False)
        assert report.engines["engine0"].state == "committed"
        assert not any(e.serving for e in room.engines)
        publisher.resume()
        assert all(e.serving for e in room.engines)
        for engine in room.engines:
            assert_serves(engine, 1)

    def test_a_driver_that_paused_is_not_overruled(self, room: Room) -> None:
        publisher = room.publisher()
        publisher.pause()
        with pytest.raises(PlanError):
            publisher.publish(1, {})
        assert states(publisher) == ["paused", "paused"]
        publisher.resume()
        assert states(publisher) == ["serving", "serving"]

    def test_a_stale_publisher_is_refused(self, room: Room) -> None:
        stale, present = room.publisher(), room.publisher()
        stale.publish(1, SMALL.sources(0, 1))
        present.publish(2, SMALL.sources(0, 2))
        with pytest.raises(StateError, match="came later has taken over"):
            stale.publish(3, SMALL.sources(0, 3))
        for engine in room.engines:
            assert_serves(engine, 2)
            assert engine.serving

    def test_observers_do_not_disturb_a_publisher(self, room: Room) -> None:
        """Whoever started an engine's receivers asked them once, over a publisher of its own; they refused the
        trainer's, which had started earlier, for ever."""
        publisher = room.publisher()
        publisher.publish(1, SMALL.sources(0, 1), resume=False)
        with Observer("run", room.peers, deadlines=Deadlines.all(20)) as asking:
            assert [one.rank for one in asking.describe()] == [0, 1]
            found = asking.status()
            assert {rank: (r.state, r.version) for rank, r in found.items()} == dict.fromkeys((0, 1), (S.COMMITTED, 1))
            assert all((r.may_serve, r.why_not, r.resting) == (True, "", True) for r in found.values())
            room.engines[1].fenced = "out of order"
            assert (asking.status()[1].why_not, asking.status()[1].may_serve) == ("out of order", False)
            publisher.publish(2, SMALL.sources(0, 2))
            assert not asking.status()[1].resting
        publisher.publish(3, SMALL.sources(0, 3))
        assert states(publisher) == ["serving", "serving"]
        for run, peers, found in (("run", [], "one per receiver rank"), ("a b", room.peers, "run id 'a b'")):
            with pytest.raises(ConfigError, match=found):
                Observer(run, peers)

    def test_a_publisher_that_others_came_after_takes_over_again(self, room: Room) -> None:
        publisher = room.publisher()
        publisher.publish(1, SMALL.sources(0, 1))
        room.publisher().status()
        with pytest.raises(WeftpubError, match="this one is stale"):
            publisher.publish(2, SMALL.sources(0, 2))
        publisher.take_over()
        publisher.publish(2, SMALL.sources(0, 2))
        assert states(publisher) == ["serving", "serving"]

    def test_who_came_later_counts_whatever_the_clocks_say(self, room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
        """A driver was restarted on a host whose clock was behind, and receivers called it stale: they went on waiting
        for one that had died."""
        monkeypatch.setattr(time, "time_ns", lambda: 1_000)
        first = room.publisher()
        first.publish(1, SMALL.sources(0, 1))
        monkeypatch.setattr(time, "time_ns", lambda: 900)
        elsewhere = room.publisher(commit_path=room.folder / "other-host" / "commit.json")
        elsewhere.publish(2, SMALL.sources(0, 2))
        with pytest.raises(StateError, match="this one is stale"):
            first.status()
        first.take_over()
        assert states(first) == ["serving", "serving"]
        with pytest.raises(StateError, match="this one is stale"):
            elsewhere.publish(3, SMALL.sources(0, 3))

    @pytest.mark.parametrize("call", ["publish", "status", "recover"])
    def test_who_is_stale_to_one_engine_is_stale_to_all(self, tmp_path: Path, call: str) -> None:
        """A driver was replaced by another one that could not reach every engine yet. Told to go on without engines
        that fail, the old one went on with those that still listened to it, and wrote its version into the commit
        record."""
        world = World(experts=2, ep=2, engines=2)
        with open_room(world, tmp_path) as room:
            old = room.publisher(on_engine_failure="continue")
            old.publish(1, world.sources(0, 1))
            room.publisher(peers=room.peers[:2]).status()
            calls: dict[str, Callable[[], object]] = {
                "publish": lambda: old.publish(2, world.sources(0, 2)),
                "status": old.status,
                "recover": old.recover,
            }
            with pytest.raises(StaleError, match="this one is stale"):
                calls[call]()
            assert room.recorded() == 1
            for engine in room.engines:
                assert_serves(engine, 1)
                assert engine.serving

    def test_an_engine_that_a_later_publisher_takes_in_the_middle_ends_a_publish(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        world = World(experts=2, ep=2, engines=2)
        with open_room(world, tmp_path) as room:
            old, later = room.publisher(on_engine_failure="continue"), room.publisher(peers=room.peers[:2])
            old.publish(1, world.sources(0, 1))
            begin = Coordinator.begin

            def then_taken(self: Coordinator, *args: Any, **named: Any) -> None:
                begin(self, *args, **named)
                later.status()

            monkeypatch.setattr(Coordinator, "begin", then_taken)
            with pytest.raises(StaleError, match="later publisher took over"):
                old.publish(2, world.sources(0, 2))
            assert room.recorded() == 1

    def test_a_stale_publisher_stays_stale_when_every_receiver_was_restarted(self, tmp_path: Path) -> None:
        """Receivers that are restarted remember no epoch; the file beside the commit record does."""
        with open_room(SMALL, tmp_path) as room:
            stale, present = room.publisher(), room.publisher()
            stale.status()
            present.status()
            room.restart_receivers()
            assert states(present) == ["serving", "serving"]
            room.restart_receivers()
            restarted = room.publisher()
            restarted.status()
            for one in (stale, present):
                with pytest.raises(StateError, match="this one is stale"):
                    one.status()

    def test_a_publisher_of_another_run_is_refused(self, room: Room) -> None:
        with pytest.raises(StateError, match="belongs to run 'run'"):
            room.publisher(run_id="other").publish(1, SMALL.sources(0, 1))
        for engine in room.engines:
            assert_serves(engine, 0)

    def test_a_driver_that_died_after_the_record(self, room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(Coordinator, "commit", die)
            with pytest.raises(KeyboardInterrupt) as caught:
                room.publisher().publish(1, SMALL.sources(0, 1))
            assert any("is committed" in note and "recover()" in note for note in caught.value.__notes__)
        assert [e.version for e in room.engines] == [0, 0]
        assert not any(e.serving for e in room.engines)
        restarted = room.publisher()
        assert states(restarted) == ["verified", "verified"]
        report = restarted.recover()
        assert (report.version, report.finished, report.publish) == (1, ("engine0",), {})
        for engine in room.engines:
            assert_serves(engine, 1)
            assert (engine.version, engine.serving) == (1, True)

    def test_a_driver_that_died_between_two_commits(self, room: Room) -> None:
        room.engines[1].fail_in["commit"] = "killed"
        with pytest.raises(ChannelError, match="rank 1"):
            room.publisher().publish(1, SMALL.sources(0, 1))
        room.engines[1].fail_in.clear()
        restarted = room.publisher()
        assert states(restarted) == ["committed", "verified"]
        assert restarted.recover().finished == ("engine0",)
        assert [e.version for e in room.engines] == [1, 1]

    def test_a_driver_that_died_before_the_record(self, room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(Publisher, "_record", die)
            patch.setattr(Coordinator, "abort", lambda *_: [])
            with pytest.raises(KeyboardInterrupt):
                room.publisher().publish(1, SMALL.sources(0, 1))
        restarted = room.publisher()
        assert states(restarted) == ["verified", "verified"]
        report = restarted.recover()
        assert report.finished == ()
        assert "there is no commit record" in report.publish["engine0"]
        restarted.publish(1, SMALL.sources(0, 1))
        for engine in room.engines:
            assert_serves(engine, 1)

    @pytest.mark.parametrize("place", ["file/commit.json", "folder"])
    def test_a_place_where_no_record_can_be_written_is_seen_first(self, room: Room, place: str) -> None:
        """A mistyped commit path was found out at the very end of a publish, when every engine held new bytes that
        could not be committed: all of them were torn, over and over."""
        (room.folder / "file").write_text("")
        (room.folder / "folder").mkdir()
        publisher = room.publisher(commit_path=room.folder / place)
        with pytest.raises(CheckpointError, match=r"could not be written there .*nothing was sent"):
            publisher.publish(1, SMALL.sources(0, 1))
        assert states(publisher) == ["serving", "serving"]
        for engine in room.engines:
            assert_serves(engine, 0)
            assert "pause" not in engine.calls

    def test_a_record_that_cannot_be_written_commits_nothing(self, room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
        def full(*_: object) -> None:
            raise OSError(28, "No space left on device")

        publisher = room.publisher()
        monkeypatch.setattr("os.replace", full)
        with pytest.raises(CheckpointError, match=r"cannot be written .*version 1 is not committed"):
            publisher.publish(1, SMALL.sources(0, 1))
        assert [e.version for e in room.engines] == [0, 0]
        assert states(publisher) == ["torn", "torn"]
        assert not list(room.folder.glob(".commit*"))

    def test_a_record_of_another_run(self, room: Room) -> None:
        room.publisher().publish(1, SMALL.sources(0, 1))
        room.record.write_text(room.record.read_text().replace('"run"', '"other"'))
        with pytest.raises(StateError, match="give every run its own commit_path"):
            room.publisher().recover()

    @pytest.mark.parametrize(("text", "found"), [("other", "the record is of run 'other', version 1"), (None, "not a")])
    def test_a_file_of_somebody_else_is_not_written_over(self, room: Room, text: str | None, found: str) -> None:
        """Two runs were given one commit path. The second wrote its record over that of the first, whose driver was
        restarted then, and could not finish what it had committed."""
        publisher = room.publisher()
        publisher.publish(1, SMALL.sources(0, 1))
        there = room.record.read_text().replace('"run"', f'"{text}"') if text else "learning_rate: 1e-5"
        room.record.write_text(there)
        later = room.publisher()
        before = [list(engine.calls) for engine in room.engines]
        with pytest.raises(StateError, match=rf"{room.record}: {found}.* remove the file"):
            later.publish(2, SMALL.sources(0, 2))
        assert room.record.read_text() == there
        assert states(later) == ["serving", "serving"]
        assert [engine.calls for engine in room.engines] == before
        room.record.unlink()
        later.publish(2, SMALL.sources(0, 2))
        assert room.recorded() == 2

    def test_an_engine_that_rests_with_the_committed_version_needs_no_publish(self, room: Room) -> None:
        """A driver paused its engines and died. Its successor was told to publish all of a version whose bytes lay in
        them, whole and committed."""
        publisher = room.publisher()
        publisher.publish(1, SMALL.sources(0, 1))
        publisher.pause()
        report = room.publisher().recover(resume=False)
        assert (report.version, report.finished, report.publish) == (1, ("engine0",), {})
        assert not any(engine.serving for engine in room.engines)
        restarted = room.publisher()
        assert restarted.recover().finished == ("engine0",)
        assert states(restarted) == ["serving", "serving"]
        for engine in room.engines:
            assert_serves(engine, 1)
        restarted.pause()
        room.engines[1].offload()
        for resume in (False, True):
            report = room.publisher().recover(resume=resume)
            assert report.finished == ()
            assert "paused with version 1, paused without version 1" in report.publish["engine0"]
        assert not any(engine.serving for engine in room.engines)

    def test_recovering_when_nothing_happened(self, room: Room) -> None:
        room.publisher().publish(1, SMALL.sources(0, 1))
        report = room.publisher().recover()
        assert (report.finished, report.publish) == (("engine0",), {})

    def test_engines_describe_themselves(self, room: Room) -> None:
        publisher = room.publisher(plan=None)
        found = publisher.describe()
        assert [d.rank for d in found] == [0, 1]
        assert found[0] == room.engines[0].describe()
        with pytest.raises(StateError, match="no plan was set"):
            publisher.publish(1, SMALL.sources(0, 1))
        publisher.set_plan(SMALL.plan())
        publisher.publish(1, SMALL.sources(0, 1))

    def test_a_new_plan_reaches_the_engines(self, room: Room) -> None:
        """An engine that balances experts moved them between publishes; here expert 0 and 1 swap ranks."""
        publisher = room.publisher()
        publisher.publish(1, SMALL.sources(0, 1))
        plan = SMALL.plan()
        swapped = make_plan(plan.sources, [_other_expert(d, plan.destinations) for d in plan.destinations])
        publisher.set_plan(swapped)
        publisher.publish(2, SMALL.sources(0, 2))
        gate = room.engines[1].parameters["model.layers.0.mlp.experts.w13_weight"].data[0, :256].view(torch.uint8)
        assert torch.equal(gate, SMALL.value(GATE, 2).view(torch.uint8))

    def test_a_late_answer_is_not_the_answer(self, room: Room) -> None:
        """A reply that arrives after its request was given up was taken for the reply to the next one."""
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        link = PeerLink(room.peers[0], "run", "a" * 16, local_identity(), context)
        hello = {"role": "coordinator", "epoch": 1, "identity": local_identity()}
        link.post(m.Hello, Deadline("", "hello", 5), **hello)
        link.post(m.Pause, Deadline("", "pause", 5))
        replies, faults = exchange({link: (m.Describe, {})}, "describe", 5)
        assert not faults
        assert isinstance(replies[link], m.Described)
        link.close()
        context.term()

    def test_over_tcp_with_keys(self, tmp_path: Path) -> None:
        (sp, ss), (cp, cs) = CurveKeys.generate_pair(), CurveKeys.generate_pair()
        world = World(experts=2, ep=1, extra=SMALL.extra)
        engine = FakeEngine(world)
        receiver = Receiver(engine, run_id="run", version=None)
        with ReceiverThread(receiver, "tcp://127.0.0.1:0", keys=CurveKeys(sp, ss, (cp,))) as thread:
            peer = Peer(0, thread.address, keys=CurveKeys(cp, cs, (sp,)))
            with Publisher("run", world.plan(), [peer], commit_path=tmp_path / "c.json") as publisher:
                publisher.publish(1, world.sources(0, 1))
        assert_serves(engine, 1)

    def test_a_plan_for_other_receivers(self, room: Room) -> None:
        with pytest.raises(PlanError, match=r"for receiver ranks \[0\], the publisher has peers for \[0, 1\]"):
            room.publisher(plan=World(experts=2, ep=1, extra=SMALL.extra).plan()).publish(1, SMALL.sources(0, 1))

    def test_a_closed_publisher(self, room: Room) -> None:
        publisher = room.publisher()
        publisher.close()
        publisher.close()
        with pytest.raises(StateError, match="is closed"):
            publisher.status()

    @pytest.mark.parametrize(
        ("change", "words"),
        [
            ({"run_id": "a/b"}, "run id"),
            ({"peers": []}, "expected one per receiver rank"),
            ({"max_staging_bytes": 10}, "max_staging_bytes"),
            ({"on_engine_failure": "shrug"}, "on_engine_failure"),
        ],
    )
    def test_settings_that_cannot_work(self, room: Room, change: dict, words: str) -> None:
        with pytest.raises(ConfigError, match=words):
            room.publisher(**change)


def die(*_: object) -> None:
    """What kill -9 of the driver leaves, as far as one process can show it."""
    raise KeyboardInterrupt


def _other_expert(destination: Destination, all_of_them: tuple[Destination, ...]) -> Destination:
    """The destination that serves the other expert, in this one's place."""
    name = destination.shard.name
    if ".experts." not in name:
        return destination
    other = name.replace(".experts.0.", ".experts.X.").replace(".experts.1.", ".experts.0.").replace("X", "1")
    found = next(d for d in all_of_them if d.shard.name == other)
    return Destination(replace(found.shard, rank=destination.shard.rank), destination.view)


def test_a_version_whose_sha256_differs_is_never_committed(room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine answers with other digests than the trainer has, and with the right checksums. It has verified, so
    only the comparison stands between these bytes and the record."""
    publisher, digests = room.publisher(), ReceiveViews.sha256
    with monkeypatch.context() as patch:
        patch.setattr(ReceiveViews, "sha256", lambda self: ("0" * 64, *digests(self)[1:]))
        with pytest.raises(ChecksumError, match=r"sha256 of 2 tensors differs"):
            publisher.publish(1, SMALL.sources(0, 1), verify_sha256=True)
    assert "serving" not in states(publisher)
    assert [engine.version for engine in room.engines] == [0, 0]
    assert room.publisher().recover().finished == ()
    publisher = room.publisher()
    publisher.publish(2, SMALL.sources(0, 2), verify_sha256=True)
    for engine in room.engines:
        assert_serves(engine, 2)


def test_sha256_that_differ_are_named() -> None:
    table = cut_pieces(World(experts=1, ep=1, extra=()).plan().for_receiver(0), 1 << 20)
    same = ["a" * 64] * len(table.pieces)
    assert len(compare_sha256({0: table}, {0: same}, [{"0": same}])) == 6
    other = ["b" * 64, *same[1:]]
    with pytest.raises(ChecksumError, match=f"sha256 of 1 tensors differs.*{table.describe(0)}"):
        compare_sha256({0: table}, {0: other}, [{"0": same}])
    with pytest.raises(ChecksumError, match="returned 5 sha256 for its 6 pieces"):
        compare_sha256({0: table}, {0: same[1:]}, [{"0": same}])


def test_receivers_that_are_not_there_are_waited_for_together(tmp_path: Path) -> None:
    """An engine of eight ranks had not been started, and a greeting took eight deadlines: each began to be waited for
    when the one before had been given up."""
    peers = [Peer(rank, unix_address(tmp_path / "s", f"r{rank}"), "engine0") for rank in range(8)]
    asked = Observer("run", peers, deadlines=Deadlines.all(2.0))
    ended = threading.Event()
    errors: list[BaseException] = []

    def ask() -> None:
        try:
            asked.status()
        except DeadlineError as error:
            errors.append(error)
        asked.close()
        ended.set()

    threading.Thread(target=ask, daemon=True).start()
    assert ended.wait(12.0), "eight receivers were waited for one after the other"
    assert "nobody listens" in str(errors[0])
    assert len(errors[0].__notes__) == 7


def test_a_receiver_that_is_there_has_all_of_its_time_behind_one_that_is_not(room: Room) -> None:
    room.engines[1].hang_in["describe"] = 0.5
    absent = Peer(0, unix_address(room.folder / "s", "absent"), "engine0")
    here = local_identity()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    links = [PeerLink(peer, "run", "a" * 16, here, context) for peer in (absent, room.peers[1])]
    hello = {"role": "observer", "identity": here}
    exchange({links[1]: (m.Hello, hello)}, "hello", 10.0)
    replies, faults = exchange(dict.fromkeys(links, (m.Describe, {})), "describe", 2.5)
    assert list(replies) == [links[1]]
    assert list(faults) == [links[0]]
    for link in links:
        link.close()
    context.term()
