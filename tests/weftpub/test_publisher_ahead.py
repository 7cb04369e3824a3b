"""With one sender and one receiver, requests are sent ahead of the answers before them; what goes wrong is told as if
they had waited."""

from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
import torch
from publish_room import Room, open_room
from publish_world import World, assert_serves

from weftpub.errors import ChannelError, ManifestError, StateError
from weftpub.receive.reception import Reception

WORLD = World(experts=2, ep=1, extra=(("model.norm.weight", (256,), torch.float32),))


@pytest.fixture
def room(tmp_path: Path) -> Generator[Room]:
    with open_room(WORLD, tmp_path) as opened:
        yield opened


def test_a_refused_announcement_is_the_error_and_writes_nothing(room: Room) -> None:
    """The chunk behind it is refused too, for a reason that says nothing."""
    publisher = room.publisher()
    publisher.publish(5, WORLD.sources(0, 5))
    for _ in range(2):
        with pytest.raises(StateError, match="version 4 is older than version 5, which the engine holds"):
            publisher.publish(4, WORLD.sources(0, 4))
        assert_serves(room.engines[0], 5)
        assert room.engines[0].serving
    publisher.publish(4, WORLD.sources(0, 4), allow_rollback=True)
    assert_serves(room.engines[0], 4)


def test_an_engine_that_fails_to_begin(room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    publisher = room.publisher()
    publisher.publish(1, WORLD.sources(0, 1))

    def broken(*_: Any) -> None:
        raise RuntimeError("no views today")

    with monkeypatch.context() as patch:
        patch.setattr(Reception, "__init__", broken)
        with pytest.raises(ChannelError, match="no views today"):
            publisher.publish(2, WORLD.sources(0, 2))
    assert_serves(room.engines[0], 1)
    publisher.publish(3, WORLD.sources(0, 3))
    assert_serves(room.engines[0], 3)


def test_a_chunk_that_fails_under_a_good_announcement(room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    publisher = room.publisher()
    publisher.publish(1, WORLD.sources(0, 1))

    def broken(*_: Any) -> None:
        raise ManifestError("not this chunk")

    with monkeypatch.context() as patch:
        patch.setattr(Reception, "take", broken)
        with pytest.raises(ManifestError, match="not this chunk"):
            publisher.publish(2, WORLD.sources(0, 2))
    assert_serves(room.engines[0], 1)  # not a byte was written
    assert room.engines[0].serving
    for version in (3, 4):
        publisher.publish(version, WORLD.sources(0, version))
        assert_serves(room.engines[0], version)
