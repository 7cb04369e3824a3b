"""Publishing what trainer and engine both map: written, verified, committed, and not a byte copied."""

from collections.abc import Generator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from publish_world import FakeEngine, World
from store_support import fill, make_masters

from weftpub.channel import Deadlines, unix_address
from weftpub.errors import ChecksumError, StateError, TornError, TransportError
from weftpub.memory import SharedAllocation, SharedAllocator
from weftpub.plan.coincide import Place, find_coincidences, places_of
from weftpub.publisher import Peer, Publisher, SourceBuffers
from weftpub.publisher.sources import as_buffers
from weftpub.receive import Receiver, ReceiverThread
from weftpub.receive.shared import SharedEngineSide
from weftpub.store import ExpertStore, StoreLayout
from weftpub.store.shared import shared_catalogue
from weftpub.transport.shared_store import moving, source_places
from weftpub.version import EngineState

NORM = "model.norm.weight"
WORLD = World(experts=3, ep=1, layers=2, extra=((NORM, (256,), torch.float32),))
LAYOUT = StoreLayout((0, 1), (0, 1, 2), WORLD.hidden, WORLD.intermediate)
EXPERT_BYTES = sum(entry.nbytes for entry in shared_catalogue(LAYOUT).entries)


def rebind(engine: FakeEngine, memory: SharedAllocation, layers: tuple[int, ...] = (0, 1)) -> None:
    """Give an engine's experts the shared memory of these layers."""
    for layer in layers:
        prefix = f"model.layers.{layer}.mlp.experts."
        for short, name in (("w13", "w13_weight"), ("w2", "w2_weight")):
            engine.parameters[prefix + name].data = memory.tensor(f"layers.{layer}.{short}")
            engine.parameters[prefix + name + "_scale_inv"].data = memory.tensor(f"layers.{layer}.{short}_scale")


@dataclass
class Pair:
    """A trainer and an engine on one device, with one allocation between them."""

    store: ExpertStore
    memory: SharedAllocation
    engine: FakeEngine
    side: SharedEngineSide
    receiver: Receiver
    publisher: Publisher

    def step(self, version: int) -> None:
        """Write a generation."""
        self.publisher.pause()
        fill(self.store, version, make_masters(self.store, version))

    def publish(self, version: int, **options: Any) -> Any:
        """Publish the store and the rest of the world."""
        sources = {item.name: item.tensor for item in self.store.canonical()}
        sources[NORM] = WORLD.value(NORM, version)
        return self.publisher.publish(version, sources, self.store.checksums, **options)

    def served(self) -> dict[str, str]:
        """What the engine serves, by sha256 of each buffer."""
        return {name: str(tensor.tolist()) for name, tensor in self.engine.served().items()}


@pytest.fixture
def build(tmp_path: Path) -> Generator[Any]:
    with ExitStack() as stack:

        def make(layers: tuple[int, ...] = (0, 1), protected: bool = False) -> Pair:
            memory = SharedAllocation.join(
                tmp_path / "m", "experts", "cpu", shared_catalogue(LAYOUT), protected=protected
            )
            stack.callback(memory.leave)
            store = ExpertStore(
                LAYOUT.layers, LAYOUT.experts, LAYOUT.hidden, LAYOUT.intermediate, allocator=SharedAllocator(memory)
            )
            engine = FakeEngine(WORLD)
            rebind(engine, memory, layers)
            side = SharedEngineSide(engine, memory)
            receiver = Receiver(side, run_id="run", version=None)
            address = unix_address(tmp_path / "s", "r0")
            stack.enter_context(ReceiverThread(receiver, address))
            publisher = Publisher(
                "run",
                WORLD.plan(),
                [Peer(0, address, engine.name)],
                commit_path=tmp_path / "commit.json",
                max_staging_bytes=1 << 17,
                deadlines=Deadlines.all(20),
            )
            stack.enter_context(publisher)
            return Pair(store, memory, engine, side, receiver, publisher)

        yield make


def test_a_publish_of_shared_experts_moves_only_the_rest(build: Any) -> None:
    pair = build()
    for version in (1, 2, 3):
        pair.step(version)
        report = pair.publish(version, verify_sha256=True)
        assert (report.shared_nbytes, report.nbytes) == (EXPERT_BYTES, 256 * 4)
        assert pair.receiver.state.state is EngineState.SERVING
        assert pair.engine.version == version
        assert {n: report.sha256[n] for n in pair.store.checksums} == pair.store.sha256()
        assert pair.memory.standing().committed.version == version
        with pytest.raises(StateError, match="serves from the same memory; pause the engine first"):
            pair.store.begin(version + 1)


def test_an_engine_says_where_its_experts_lie_while_its_own_memory_is_away(
    build: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trainer that had ended between release and publish was followed by one that could not plan."""
    pair = build()
    places = pair.side.describe().settings["shared_memory"]
    assert places
    own = pair.engine.describe()

    def refuse(engine: FakeEngine) -> Any:
        raise StateError("the memory of its weights is released")

    pair.engine.holds_memory = False
    with monkeypatch.context() as patch:
        patch.setattr(FakeEngine, "live_tensors", refuse)
        patch.setattr(pair.engine, "describe", lambda: own)
        assert pair.side.describe().settings["shared_memory"] == places
    pair.engine.holds_memory = True


def test_what_is_shared_and_what_is_shown_where_it_is_go_in_one_chunk(build: Any) -> None:
    """Two chunks, one after the other, cost a millisecond of round trips, as much as reading four gigabytes."""
    pair = build((1,))
    pair.step(1)
    tensors = {item.name: item.tensor for item in pair.store.canonical()} | {NORM: WORLD.value(NORM, 1)}
    sources = SourceBuffers.of_tensors(tensors, in_place=True)
    report = pair.publisher.publish(1, sources, pair.store.checksums, verify_sha256=True)
    assert (report.chunks, report.staging_bytes) == (1, 0)
    assert (report.nbytes, report.shared_nbytes) == (256 * 4, EXPERT_BYTES)
    own = pair.engine.parameters["model.layers.0.mlp.experts.w2_weight"]
    assert torch.equal(own.data.view(torch.uint8), pair.store.layer(0).w2.view(torch.uint8))


@pytest.mark.parametrize("layers", [(), (1,)])
def test_layers_that_the_engine_keeps_to_itself_are_copied(build: Any, layers: tuple[int, ...]) -> None:
    pair = build(layers)
    pair.step(1)
    report = pair.publish(1, verify_sha256=True)
    assert report.nbytes + report.shared_nbytes == EXPERT_BYTES + 256 * 4
    other = pair.engine.parameters["model.layers.0.mlp.experts.w13_weight"]
    assert pair.memory.offset_of(other) is None
    assert torch.equal(other.data.view(torch.uint8), pair.store.layer(0).w13.view(torch.uint8))


def test_bytes_that_somebody_wrote_after_the_seal_are_never_committed(build: Any) -> None:
    pair = build()
    pair.step(1)
    pair.publish(1)
    pair.step(2)
    flat = pair.store.layer(1).w2.view(torch.uint8).reshape(-1)
    flat[5] ^= 1
    with pytest.raises(ChecksumError, match=r"1 of 37 pieces differ .*layers\.1\.mlp\.experts\.0\.down_proj\.weight "):
        pair.publish(2)
    assert pair.receiver.state.state is EngineState.TORN
    assert not pair.engine.serving
    flat[5] ^= 1
    pair.publish(2)
    assert pair.engine.serving


def test_a_trainer_that_stops_in_the_step_leaves_the_engine_fenced(build: Any) -> None:
    """The trainer died between the first and the last expert. The engine was paused with version 1, its own books said
    that nothing had been sent, and a driver that recovered by resuming it would have served a mixture."""
    pair = build()
    pair.step(1)
    pair.publish(1)
    pair.publisher.pause()
    pair.store.begin(2)
    name, master = next(iter(make_masters(pair.store, 2).items()))
    pair.store.writer()(name, master)
    with pytest.raises(TornError, match=r"is torn, version 1 is lost: .* or a trainer that shares its memory began to"):
        pair.publisher.resume()
    assert not pair.engine.serving
    assert pair.engine.fenced
    pair.store.mark_torn("its process was killed")
    with pair.store.writing(1, recover=True):
        for name, master in make_masters(pair.store, 1).items():
            pair.store.writer()(name, master)
    report = pair.publish(1)
    assert report.shared_nbytes == EXPERT_BYTES
    assert pair.engine.serving


def test_an_engine_whose_trainer_shares_nothing_is_published_to_as_ever(build: Any) -> None:
    pair = build()
    report = pair.publisher.publish(1, WORLD.sources(0, 1))
    assert (report.shared_nbytes, pair.engine.serving) == (0, True)
    pair.publisher.publish(2, WORLD.sources(0, 2))
    assert pair.memory.standing().committed.version == 2


def test_the_plan_says_what_coincides_and_why_the_rest_does_not(build: Any) -> None:
    pair = build((1,))
    pair.step(1)
    views = {item.name: item.tensor for item in pair.store.canonical()}
    buffers = as_buffers({**views, NORM: WORLD.value(NORM, 0)})
    description = pair.side.describe()
    target = places_of(description.device, description.settings)
    source = source_places(buffers.views, buffers.buffers)
    found = find_coincidences(WORLD.plan(), {0: source}, {0: target})
    assert found.nbytes == EXPERT_BYTES // 2
    assert {v.move.name for v in found.verdicts if v.in_place} == {n for n in pair.store.checksums if ".layers.1." in n}
    assert [line.partition(": ")[2].partition(": ")[2] for line in found.explain()[:3]] == [
        "trainer and engine map the same bytes",
        "the engine's w13_weight memory is its own",
        "the engine's w2_weight memory is its own",
    ]
    own = {name: tensor.clone() for name, tensor in views.items()}
    aside = as_buffers({**own, NORM: WORLD.value(NORM, 0)})
    whole = {name: Place("cpu", pair.memory.id, 0) for name in pair.engine.parameters}
    apart = find_coincidences(WORLD.plan(), {0: source_places(aside.views, aside.buffers)}, {0: whole})
    assert apart.nbytes == 0
    assert apart.explain() == [apart.explain()[0]]
    assert apart.explain()[0].endswith("the trainer's buffer lies outside of the memory that it shares")
    for change, reason in (
        (Place("GPU-1", "a", 0), "the engine on GPU-1"),
        (Place("cpu", "b", 0), "two different allocations"),
    ):
        moved = {name: Place(change.gpu, change.allocation, p.offset) for name, p in target.items()}
        assert any(reason in line for line in find_coincidences(WORLD.plan(), {0: source}, {0: moved}).explain())
    moved = {name: Place(p.gpu, p.allocation, p.offset + 512) for name, p in target.items()}
    other = find_coincidences(WORLD.plan(), {0: source}, {0: moved})
    assert other.nbytes == 0
    assert any("orders of experts differ" in line for line in other.explain())
    assert find_coincidences(WORLD.plan(), {}, {0: target}).nbytes == 0


def test_copies_within_the_shared_memory_are_refused(build: Any) -> None:
    pair = build()
    base = pair.memory.address
    rows = torch.tensor(
        [[base, base, 64, 1, 64, 64], [base + 8, base + 8, 16, 4, 32, 32], [1, base, 64, 1, 64, 64]], dtype=torch.int64
    ).numpy()
    assert moving(rows).tolist() == [rows[2].tolist()]
    for wrong in ([base, base + 512, 64, 1, 64, 64], [base, base, 16, 4, 32, 64]):
        with pytest.raises(TransportError, match="from which the trainer computes"):
            moving(torch.tensor([wrong], dtype=torch.int64).numpy())


def apart(version: int) -> tuple[ExpertStore, dict[str, torch.Tensor]]:
    """A trainer that shares nothing, with a generation of its own, and what it publishes."""
    store = ExpertStore(LAYOUT.layers, LAYOUT.experts, LAYOUT.hidden, LAYOUT.intermediate)
    fill(store, version, make_masters(store, version))
    return store, {item.name: item.tensor for item in store.canonical()} | {NORM: WORLD.value(NORM, version)}


def test_a_protected_engine_refuses_a_trainer_that_shares_nothing(build: Any) -> None:
    """Its process was ended by the copy of the first expert (SIGSEGV, an illegal access on a GPU): nobody is at fault
    whom the debug mode was to find."""
    pair = build(protected=True)
    pair.memory.begin(0, first=True)  # as an engine fills the memory that it made with what it loaded
    pair.memory.seal()
    store, sources = apart(1)
    with pytest.raises(StateError, match=r"8 parameters lie in protected shared memory .* and no trainer shares it"):
        pair.publisher.publish(1, sources, store.checksums)
    assert pair.receiver.state.reason == "no version was published to this engine since it started"
    assert not pair.memory.writable


def test_a_copy_into_protected_memory_never_begins(build: Any) -> None:
    """A trainer that shared it has gone, and another one comes that does not: its bytes are not to be told from the
    first one's before they come."""
    pair = build(protected=True)
    pair.step(1)
    pair.publish(1)
    store, sources = apart(2)
    with pytest.raises(TransportError, match="copies lead into it, and it is protected here"):
        pair.publisher.publish(2, sources, store.checksums)
    assert pair.receiver.state.state is EngineState.TORN
    pair.step(3)
    assert pair.publish(3).shared_nbytes == EXPERT_BYTES
    assert pair.receiver.state.state is EngineState.SERVING
