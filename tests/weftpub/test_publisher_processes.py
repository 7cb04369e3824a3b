"""Receivers, and a trainer, in processes of their own: bytes through shared memory, crashes of either side, and no
leaks.
"""

import multiprocessing as mp
import os
import signal
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
import torch
from publish_world import RemoteEngine, World, start_remote

from weftpub.channel import Deadlines
from weftpub.errors import ChannelError
from weftpub.publisher import Publisher
from weftpub.publisher.transfer import Transfer
from weftpub.version import EngineState as S

WORLD = World(experts=4, ep=2, extra=(("model.norm.weight", (256,), torch.float32),))
SILENCE_S = 3.0

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def remotes(tmp_path_factory: pytest.TempPathFactory) -> Generator[list[RemoteEngine]]:
    """Two receiver processes of one engine; a test that kills one starts it again."""
    folder = tmp_path_factory.mktemp("r")
    started = [
        start_remote(folder, WORLD, 0, rank, receiver={"version": None, "silence": SILENCE_S}) for rank in range(2)
    ]
    yield started
    for remote in started:
        remote.stop()


@pytest.fixture
def publisher(remotes: list[RemoteEngine], tmp_path: Path) -> Generator[Publisher]:
    with make_publisher(remotes, tmp_path) as made:
        yield made


def make_publisher(remotes: list[RemoteEngine], folder: Path) -> Publisher:
    peers = [remote.peer for remote in remotes]
    options: dict[str, Any] = {"commit_path": folder / "commit.json", "deadlines": Deadlines.all(30)}
    return Publisher("run", WORLD.plan(), peers, max_staging_bytes=1 << 17, **options)


def check_all(remotes: list[RemoteEngine], version: int) -> None:
    for remote in remotes:
        assert remote.call("check", version) == ""
        assert remote.call("get", "version") == version


def shared_files() -> list[str]:
    return [name for name in os.listdir("/dev/shm") if name.startswith(f"weftpub-{os.getuid()}-run-")]


def test_three_publishes_with_moved_storage(remotes: list[RemoteEngine], publisher: Publisher) -> None:
    for version in (1, 2, 3):
        publisher.pause()
        for remote in remotes:
            remote.call("pause")
            remote.call("offload")
        report = publisher.publish(version, WORLD.sources(0, version), verify_sha256=version == 2)
        assert report.transports == {0: "shared_memory", 1: "shared_memory"}
        check_all(remotes, version)
        assert shared_files() == []


def usage(pid: int) -> tuple[int, int, int]:
    """Open files, mappings of shared memory, and memory mappings of a process."""
    maps = Path(f"/proc/{pid}/maps").read_text()
    return len(os.listdir(f"/proc/{pid}/fd")), maps.count("weftpub-"), len(maps.splitlines())


def test_fifty_publishes_leave_nothing_behind(remotes: list[RemoteEngine], publisher: Publisher) -> None:
    """Handles leaked 4 to 5 GB a step. After a few publishes to warm up, nothing grows on either side."""
    sources = WORLD.sources(0, 9)
    pids = [os.getpid(), *(remote.process.pid for remote in remotes)]
    for version in range(10, 15):
        publisher.publish(version, sources)
    before = [usage(pid) for pid in pids]
    for version in range(15, 65):
        publisher.publish(version, sources)
    after = [usage(pid) for pid in pids]
    assert shared_files() == []
    for (files, segments, maps), (files_before, _, maps_before) in zip(after, before, strict=True):
        assert segments == 0
        assert files <= files_before
        assert maps <= maps_before + 8  # the allocator's arenas breathe; 50 leaked mappings would show
    for remote in remotes:
        assert remote.call("check", 9) == ""


def test_a_receiver_that_is_killed_while_it_receives(
    remotes: list[RemoteEngine], publisher: Publisher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine died mid-transfer, and the trainer waited. The error comes at once and names the dead process; the
    other rank is torn; a restarted receiver is published to again."""
    post = Transfer._post_next
    victims = [remotes[1]]

    def kill(self: Transfer, progress: Any, link: Any) -> bool:
        if self.chunks == 3 and victims:  # asked again for the other receiver, when this one is gone
            victims.pop().kill()
        return post(self, progress, link)

    start = time.monotonic()
    with monkeypatch.context() as patch:
        patch.setattr(Transfer, "_post_next", kill)
        with pytest.raises(
            ChannelError, match=r"receiver rank 1 \(host .*, pid \d+.*: its process ended in phase"
        ) as caught:
            publisher.publish(101, WORLD.sources(0, 101))
    assert time.monotonic() - start < 25, "the death was only noticed by the deadline"
    assert any("engine engine0 is" in note and "torn" in note for note in caught.value.__notes__)
    assert remotes[0].call("get", "serving") is False
    options = {"receiver": {"version": None, "silence": SILENCE_S}}
    folder = Path(remotes[1].peer.address.removeprefix("ipc://")).parent.parent
    remotes[1] = start_remote(folder, WORLD, 0, 1, **options)
    assert [s.state for s in publisher.status().values()] == [S.TORN, S.TORN]
    publisher.publish(102, WORLD.sources(0, 102))
    check_all(remotes, 102)
    assert shared_files() == []


def _trainer(remotes_peers: list[Any], folder: str, pipe: Any) -> None:
    torch.set_num_threads(1)
    post = Transfer._post_next

    def stop(self: Transfer, progress: Any, link: Any) -> bool:
        if self.chunks == 3:
            pipe.send("in the middle")
            time.sleep(600)
        return post(self, progress, link)

    Transfer._post_next = stop  # type: ignore[method-assign]
    options: dict[str, Any] = {"commit_path": Path(folder) / "commit.json", "max_staging_bytes": 1 << 17}
    Publisher("run", WORLD.plan(), remotes_peers, **options).publish(201, WORLD.sources(0, 201))


def test_a_trainer_that_is_killed_while_it_sends(remotes: list[RemoteEngine], tmp_path: Path) -> None:
    """Receivers notice by the silence, fence themselves, and let go of the dead trainer's memory."""
    context = mp.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_trainer, args=([r.peer for r in remotes], str(tmp_path), there), daemon=True)
    process.start()
    assert here.poll(120)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join(30)
    limit = time.monotonic() + 60
    while not all(remote.call("get", "fenced") for remote in remotes):
        assert time.monotonic() < limit, "a receiver still waits for the dead trainer"
        time.sleep(0.2)
    assert "said nothing for 3 s in the middle of version 201" in remotes[0].call("get", "fenced")
    with make_publisher(remotes, tmp_path) as publisher:
        assert publisher.recover().finished == ()
        publisher.publish(202, WORLD.sources(0, 202))
    check_all(remotes, 202)
    assert shared_files() == []
    for remote in remotes:
        assert usage(remote.process.pid)[1] == 0
