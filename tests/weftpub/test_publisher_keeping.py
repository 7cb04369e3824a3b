"""What a receiver keeps open across publishes, and when it lets go: before the sender is told that it may free, and as
soon as what it kept is not shown any more."""

from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
import torch
from publish_room import Room, open_room
from publish_world import World, assert_serves

from weftpub.errors import ManifestError, PlanError, TransportError
from weftpub.publisher import SourceBuffers
from weftpub.receive.copies import LayoutMemory
from weftpub.receive.reception import Reception
from weftpub.transport import InProcessReceive, InProcessSend
from weftpub.wire import InProcessOffer
from weftpub.wire import messages as m

WORLD = World(experts=2, ep=1)


class Keeping:
    """The in-process transport, made to behave as CUDA IPC does: exports are named by allocation, and a receiver keeps
    what it may."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open: set[str] = set()
        self.log: list[str] = []
        self.answered: list[set[str]] = []
        export, opening = InProcessSend.export, InProcessReceive.open

        def named(sender: InProcessSend, tensor: torch.Tensor, keep: bool) -> Any:
            offer, offset = export(sender, tensor, keep)
            self.names[offer.allocation] = tensor.data_ptr()
            return offer.model_copy(update={"keep": keep, "allocation": f"at-{tensor.data_ptr()}"}), offset

        def found(receiver: InProcessReceive, offer: InProcessOffer) -> torch.Tensor:
            if not offer.allocation.startswith("at-"):
                return opening(receiver, offer)  # a buffer of the sender's own
            self.open.add(offer.allocation)
            self.log.append(f"open {offer.allocation}")
            real = next(name for name, address in reversed(self.names.items()) if f"at-{address}" == offer.allocation)
            return opening(receiver, offer.model_copy(update={"allocation": real}))

        def done(_: InProcessReceive, offer: InProcessOffer) -> None:
            if not offer.keep:
                self.open.discard(offer.allocation)

        def drop(_: InProcessReceive, allocations: tuple[str, ...]) -> None:
            self.open -= set(allocations)
            self.log += [f"drop {name}" for name in allocations]

        self.names: dict[str, int] = {}
        monkeypatch.setattr(InProcessSend, "export", named)
        monkeypatch.setattr(InProcessReceive, "open", found)
        monkeypatch.setattr(InProcessReceive, "done", done)
        monkeypatch.setattr(InProcessReceive, "drop", drop)


@pytest.fixture
def keeping(monkeypatch: pytest.MonkeyPatch) -> Keeping:
    return Keeping(monkeypatch)


@pytest.fixture
def room(tmp_path: Path) -> Generator[Room]:
    with open_room(WORLD, tmp_path) as opened:
        yield opened


def addresses(tensors: dict[str, torch.Tensor]) -> set[str]:
    return {f"at-{t.data_ptr()}" for t in tensors.values()}


def test_what_need_not_stay_is_closed_when_the_publish_returns(keeping: Keeping, room: Room) -> None:
    """Completion was signalled before references were dropped, and the trainer freed memory that was being read."""
    tensors = WORLD.sources(0, 1)
    room.publisher().publish(1, SourceBuffers.of_tensors(tensors, in_place=True))
    assert len([line for line in keeping.log if "open at" in line]) == len(tensors)
    assert keeping.open & addresses(tensors) == set()
    assert_serves(room.engines[0], 1)


def test_what_was_replaced_is_let_go(keeping: Keeping, room: Room) -> None:
    """A mapping of freed memory keeps it from everybody; handles leaked 4 to 5 GB a step."""
    publisher, previous = room.publisher(), set()
    for version in (1, 2, 3):
        tensors = WORLD.sources(0, version)
        publisher.publish(version, SourceBuffers.of_tensors(tensors, in_place=True, keep=True))
        assert_serves(room.engines[0], version)
        assert keeping.open & (addresses(tensors) | previous) == addresses(tensors)
        previous |= addresses(tensors)
        kept = tensors  # the new ones are made while these are alive: addresses differ
    del kept


def test_the_same_memory_is_kept(keeping: Keeping, room: Room) -> None:
    publisher, tensors = room.publisher(), WORLD.sources(0, 1)
    sources = SourceBuffers.of_tensors(tensors, in_place=True, keep=True)
    for version in (1, 2, 3):
        for name, tensor in WORLD.sources(0, version).items():
            tensors[name].view(torch.uint8).copy_(tensor.view(torch.uint8))
        publisher.publish(version, sources)
        assert_serves(room.engines[0], version)
    assert not [line for line in keeping.log if "drop at" in line]


def test_sources_are_released_on_request(keeping: Keeping, room: Room) -> None:
    publisher, tensors = room.publisher(), WORLD.sources(0, 1)
    publisher.release_sources()
    publisher.publish(1, SourceBuffers.of_tensors(tensors, in_place=True, keep=True))
    assert addresses(tensors) <= keeping.open
    publisher.release_sources()
    assert keeping.open & addresses(tensors) == set()


def test_a_receiver_that_cannot_let_go_is_an_error(
    keeping: Keeping, room: Room, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stuck(*_: object) -> None:
        raise TransportError("cuIpcCloseMemHandle failed")

    publisher, tensors = room.publisher(), WORLD.sources(0, 1)
    publisher.publish(1, SourceBuffers.of_tensors(tensors, in_place=True, keep=True))
    monkeypatch.setattr(InProcessReceive, "drop", stuck)
    with pytest.raises(TransportError, match=r"receiver rank 0 .*cuIpcCloseMemHandle failed"):
        publisher.release_sources()


def test_the_lists_of_a_chunk_travel_once(keeping: Keeping, room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lists of a large model are hundreds of kilobytes and the same at every publish. A receiver says what it
    remembers, so one that was started again is sent them again."""
    sent: list[str] = []
    take = Reception.take

    def note(self: Reception, chunk: m.ChunkMessage, transports: Any) -> None:
        sent.append(chunk.layout.layout)
        take(self, chunk, transports)

    monkeypatch.setattr(Reception, "take", note)
    tensors = WORLD.sources(0, 1)
    publisher = room.publisher()
    for version in (1, 2, 3):
        publisher.publish(version, SourceBuffers.of_tensors(tensors, in_place=True, keep=True))
        assert room.engines[0].version == version
    assert sent == ["listed", "known", "known"]
    room.publisher().publish(4, SourceBuffers.of_tensors(tensors, in_place=True, keep=True))
    assert sent[3:] == ["known"]
    other = WORLD.sources(0, 5)  # other memory is offered
    for _ in range(2):
        room.publisher().publish(5, SourceBuffers.of_tensors(other, in_place=True))
    assert sent[4:] == ["listed", "known"]
    assert_serves(room.engines[0], 5)


def test_a_layout_that_nobody_listed_is_refused() -> None:
    memory = LayoutMemory()
    listed = m.ListedLayout(pieces=bytes(8), buffers=bytes(8), offsets=bytes(8))
    known = m.KnownLayout(digest=m.layout_name(listed))
    offers = (InProcessOffer(allocation="a", nbytes=8, keep=True, pid=1),)
    both = m.KnownLayout(digest=m.layout_name(listed, offers))
    for missing in (known, both):
        with pytest.raises(ManifestError, match="not remembered"):
            memory.resolve(missing, ())
    assert memory.resolve(listed, offers) == (known.digest, listed, offers)
    assert memory.resolve(known, offers) == (known.digest, listed, offers)
    assert memory.resolve(both, ()) == (known.digest, listed, offers)
    assert memory.names == (known.digest, both.digest)


class TestSourcesOfSharedStorages:
    def test_a_few_buffers_for_many_tensors(self, room: Room) -> None:
        plain = WORLD.sources(0, 1)
        tensors: dict[str, torch.Tensor] = {}
        for dtype in {tensor.dtype for tensor in plain.values()}:
            names = [name for name, tensor in plain.items() if tensor.dtype == dtype]
            whole = torch.cat([plain[name].view(torch.uint8).reshape(-1) for name in names]).view(dtype)
            parts = whole.split([plain[name].numel() for name in names])
            tensors |= {name: part.view(plain[name].shape) for name, part in zip(names, parts, strict=True)}
        sources = SourceBuffers.of_tensors(tensors, in_place=True)
        assert len(sources.buffers) == 3
        publisher = room.publisher()
        publisher.publish(1, sources)
        assert_serves(room.engines[0], 1)

    def test_storages_that_went_and_came_back(self, room: Room) -> None:
        """A view from before an offload was used after it."""
        tensors, publisher = WORLD.sources(0, 1), room.publisher()
        sources = SourceBuffers.of_tensors(tensors)
        for version in (1, 2):
            sizes = {name: tensor.untyped_storage().nbytes() for name, tensor in tensors.items()}
            for tensor in tensors.values():
                tensor.untyped_storage().resize_(0)
            with pytest.raises(PlanError, match="has no memory behind it"):
                publisher.publish(version, sources)
            for name, value in WORLD.sources(0, version).items():
                tensors[name].untyped_storage().resize_(sizes[name])
                tensors[name].view(torch.uint8).copy_(value.view(torch.uint8))
            publisher.publish(version, sources)
            assert_serves(room.engines[0], version)

    def test_tensors_without_memory_are_refused(self) -> None:
        tensors = WORLD.sources(0, 1)
        tensors["model.norm.weight"].untyped_storage().resize_(0)
        with pytest.raises(PlanError, match=r"model\.norm\.weight: has no memory behind it"):
            SourceBuffers.of_tensors(tensors)
        with pytest.raises(PlanError, match="expected a tensor to publish, found int"):
            SourceBuffers.of_tensors({"a": 1})  # type: ignore[dict-item]
