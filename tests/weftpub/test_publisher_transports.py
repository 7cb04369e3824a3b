"""A transport that does not work between two processes is passed over with its reason; without any, nothing is sent."""

from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
import torch
from publish_room import Room, open_room
from publish_world import World, assert_serves

from weftpub.errors import TransportError
from weftpub.receive import receiver
from weftpub.transport import InProcessReceive, SharedMemoryReceive
from weftpub.wire import local_identity

WORLD = World(experts=2, ep=1, extra=(("model.norm.weight", (256,), torch.float32),))


@pytest.fixture
def room(tmp_path: Path) -> Generator[Room]:
    with open_room(WORLD, tmp_path) as opened:
        yield opened


def refuse(words: str) -> Any:
    def opening(*_: object) -> None:
        raise TransportError(words)

    return opening


def test_shared_memory_where_a_better_way_fails(room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    """Handles of one container could not be opened in another one, and every publish failed. What a small buffer cannot
    do is not tried with weights; the next way is taken and the report says why."""
    monkeypatch.setattr(InProcessReceive, "open", refuse("cuIpcOpenMemHandle failed: invalid device context"))
    publisher = room.publisher()
    for version in (1, 2):
        report = publisher.publish(version, WORLD.sources(0, version))
        assert report.transports == {0: "shared_memory"}
        assert "invalid device context" in report.reasons["inprocess, receiver rank 0"]
        assert_serves(room.engines[0], version)


def test_no_way_at_all(room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(InProcessReceive, "open", refuse("no handles here"))
    monkeypatch.setattr(SharedMemoryReceive, "open", refuse("another /dev/shm"))
    with pytest.raises(
        TransportError, match=r"receiver rank 0 .*no transport works: .*no handles here.*another /dev/shm"
    ):
        room.publisher().publish(1, WORLD.sources(0, 1))
    assert_serves(room.engines[0], 0)
    assert room.engines[0].serving


@pytest.mark.parametrize(
    ("change", "words"),
    [({"uid": 4321, "pid": 1}, "run as two users"), ({"boot": "other", "host": "far"}, "run on two hosts")],
)
def test_peers_that_share_no_memory(
    room: Room, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], words: str
) -> None:
    elsewhere = local_identity().model_copy(update=change)
    monkeypatch.setattr(receiver, "local_identity", lambda: elsewhere)
    with pytest.raises(TransportError, match=words):
        room.publisher().publish(1, WORLD.sources(0, 1))
    assert_serves(room.engines[0], 0)
    assert room.engines[0].serving
