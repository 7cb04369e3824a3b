"""Receivers, and a trainer, in processes of their own: bytes through shared memory, crashes of either side, and no
leaks.
"""

import multiprocessing as mp
import os
import signal
import threading
import time
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from publish_world import RemoteEngine, World, start_remote

from weftpub.channel import Deadlines
from weftpub.errors import ChannelError, ChecksumError, StateError
from weftpub.publisher import Publisher
from weftpub.publisher.coordinator import Coordinator
from weftpub.publisher.transfer import Transfer
from weftpub.transport import CopyTable
from weftpub.version import EngineState as S

WORLD = World(experts=4, ep=2, extra=(("model.norm.weight", (256,), torch.float32),))
SILENCE_S = 6.0  # a busy machine keeps a publisher from speaking for a while

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
    restart(remotes, 1)
    assert [s.state for s in publisher.status().values()] == [S.TORN, S.TORN]
    publisher.publish(102, WORLD.sources(0, 102))
    check_all(remotes, 102)
    assert shared_files() == []


def test_a_receiver_that_is_dead_before_the_greeting(
    remotes: list[RemoteEngine], publisher: Publisher, tmp_path: Path
) -> None:
    """A receiver had died between two publishes, and the publisher waited for it as long as for one that is still
    starting. It is named at once, by a publisher that has never met it, too."""
    publisher.publish(111, WORLD.sources(0, 111))
    dead = remotes[1].process.pid
    remotes[1].kill()
    for asking in (publisher, make_publisher(remotes, tmp_path / "second")):
        start = time.monotonic()
        with pytest.raises(
            ChannelError, match=rf"receiver rank 1 at ipc.*listened there .*pid {dead}\) has ended.*phase hello"
        ):
            asking.publish(112, WORLD.sources(0, 112))
        assert time.monotonic() - start < 25, "the death was only noticed by the deadline"
    asking.close()
    assert remotes[0].call("get", "serving") is True  # nothing was begun
    restart(remotes, 1)
    with make_publisher(remotes, tmp_path) as later:
        later.publish(113, WORLD.sources(0, 113))
    check_all(remotes, 113)


def test_a_receiver_that_dies_before_it_answers_the_greeting(
    remotes: list[RemoteEngine], publisher: Publisher, tmp_path: Path
) -> None:
    """A receiver had taken the greeting and was killed before it answered. Nobody was greeted yet, so nobody was known
    to have died, and the publisher waited until its deadline for a process that "exists but does not answer"."""
    publisher.publish(121, WORLD.sources(0, 121))
    dead = remotes[1].process.pid
    assert dead is not None
    os.kill(dead, signal.SIGSTOP)
    threading.Timer(0.3, remotes[1].kill).start()
    start = time.monotonic()
    with pytest.raises(ChannelError, match=rf"listened there .*pid {dead}\) has ended.*phase hello"):
        publisher.publish(122, WORLD.sources(0, 122))
    assert time.monotonic() - start < 25, "the death was only noticed by the deadline"
    restart(remotes, 1)
    with make_publisher(remotes, tmp_path) as later:
        later.publish(123, WORLD.sources(0, 123))
    check_all(remotes, 123)


def restart(remotes: list[RemoteEngine], rank: int) -> None:
    """Start a killed receiver again at its address."""
    options = {"receiver": {"version": None, "silence": SILENCE_S}}
    folder = Path(remotes[rank].peer.address.removeprefix("ipc://")).parent.parent
    remotes[rank] = start_remote(folder, WORLD, 0, rank, **options)


class Moment:
    """Where a trainer is when it is killed: at the first call of a method of the publisher's that is due, which never
    returns. A receiver that has not come so far by then tells nothing, so calls are due by what receivers answered.
    """

    def __init__(self, owner: type, method: str, due: Callable[..., bool], fenced: str = "") -> None:
        self.owner, self.method, self.due, self.fenced = owner, method, due, fenced


def _at_once(*_: Any, **__: Any) -> bool:
    return True


def _all_have_bytes(transfer: Transfer, progress: Mapping[Any, Any]) -> bool:
    """Every receiver has copied something, and some have not copied all."""
    return all(p.following > len(p.waiting) for p in progress.values()) and not all(
        p.finished for p in progress.values()
    )


def _all_have_all(coordinator: Coordinator, manifest: Any, links: Any = None, **_: Any) -> bool:
    return links is None


SILENT = f"said nothing for {SILENCE_S:g} s in the middle of version"
MOMENTS = {
    "before the first byte": Moment(Transfer, "_post_next", _at_once),
    "in the middle": Moment(Transfer, "_watch", _all_have_bytes, SILENT),
    "after the last byte": Moment(Coordinator, "ask_to_verify", _all_have_all, SILENT),
    "after verification": Moment(Publisher, "_record", _at_once),
    "after the record": Moment(Coordinator, "commit", _at_once),
}


def _trainer(peers: list[Any], folder: str, version: int, moment: str, pipe: Any) -> None:
    torch.set_num_threads(1)
    chosen, ask = MOMENTS[moment], Coordinator.ask_to_verify

    def ask_together(coordinator: Coordinator, manifest: Any, links: Any = None, **options: Any) -> None:
        if links is None:  # a receiver that is asked ahead of the others, and verifies, no longer waits for bytes
            ask(coordinator, manifest, **options)

    Coordinator.ask_to_verify = ask_together  # type: ignore[assignment,method-assign]
    method = getattr(chosen.owner, chosen.method)

    def stop(*args: Any, **options: Any) -> Any:
        if chosen.due(*args, **options):
            pipe.send("there")
            time.sleep(600)
        return method(*args, **options)

    setattr(chosen.owner, chosen.method, stop)
    options: dict[str, Any] = {"commit_path": Path(folder) / "commit.json", "max_staging_bytes": 1 << 17}
    Publisher("run", WORLD.plan(), peers, **options).publish(version, WORLD.sources(0, version))


@pytest.mark.parametrize(("number", "moment"), enumerate(MOMENTS), ids=list(MOMENTS))
def test_a_trainer_that_is_killed(remotes: list[RemoteEngine], tmp_path: Path, number: int, moment: str) -> None:
    """Receivers that wait for bytes notice by the silence, fence themselves if any were written, and let go of the dead
    trainer's memory; those that have all of it wait for the next driver, which finishes what the record commits."""
    version = 200 + 10 * number
    with make_publisher(remotes, tmp_path) as publisher:
        publisher.publish(version, WORLD.sources(0, version))
    context = mp.get_context("spawn")
    here, there = context.Pipe()
    arguments = ([r.peer for r in remotes], str(tmp_path), version + 1, moment, there)
    process = context.Process(target=_trainer, args=arguments, daemon=True)
    process.start()
    assert here.poll(120)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join(30)
    fenced = MOMENTS[moment].fenced
    limit = time.monotonic() + 60
    while fenced and not all(remote.call("get", "fenced") for remote in remotes):
        assert time.monotonic() < limit, "a receiver still waits for the dead trainer"
        time.sleep(0.2)
    assert fenced in remotes[0].call("get", "fenced")
    with make_publisher(remotes, tmp_path) as publisher:
        finished = publisher.recover().finished
        if moment == "after the record":
            assert finished == ("engine0",)
            check_all(remotes, version + 1)
        else:
            assert finished == () or moment == "before the first byte"
            assert not any(remote.call("get", "version") == version + 1 for remote in remotes)
        publisher.publish(version + 2, WORLD.sources(0, version + 2))
    check_all(remotes, version + 2)
    assert shared_files() == []
    for remote in remotes:
        assert usage(remote.process.pid)[1] == 0


def test_a_stale_publisher_is_refused_and_the_present_one_goes_on(
    remotes: list[RemoteEngine], publisher: Publisher, tmp_path: Path
) -> None:
    """A trainer that was thought dead woke up and went on publishing into engines that had a new one."""
    publisher.publish(301, WORLD.sources(0, 301))
    with make_publisher(remotes, tmp_path / "present") as present:
        present.publish(302, WORLD.sources(0, 302))
        with pytest.raises(StateError, match="a publisher that came later has taken over"):
            publisher.publish(303, WORLD.sources(0, 303))
        check_all(remotes, 302)
        other = Publisher("other", WORLD.plan(), [r.peer for r in remotes], commit_path=tmp_path / "other.json")
        with other, pytest.raises(StateError, match="belongs to run 'run', the request to run 'other'"):
            other.publish(304, WORLD.sources(0, 304))
        check_all(remotes, 302)
        present.publish(305, WORLD.sources(0, 305))
    check_all(remotes, 305)


@pytest.mark.parametrize(("version", "method"), [(311, "post_process"), (314, "commit")])
def test_a_rank_that_raises_in_its_process(
    remotes: list[RemoteEngine], tmp_path: Path, version: int, method: str
) -> None:
    with make_publisher(remotes, tmp_path) as publisher:
        publisher.publish(version, WORLD.sources(0, version))
        remotes[1].call("set", "fail_in", {method: "out of memory"})
        with pytest.raises(ChannelError, match=r"receiver rank 1 .*RuntimeError: out of memory"):
            publisher.publish(version + 1, WORLD.sources(0, version + 1))
        remotes[1].call("set", "fail_in", {})
        if method == "commit":
            assert publisher.recover().finished == ("engine0",)
            check_all(remotes, version + 1)
        publisher.publish(version + 2, WORLD.sources(0, version + 2))
    check_all(remotes, version + 2)


def test_a_byte_flipped_in_shared_memory(
    remotes: list[RemoteEngine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gather = CopyTable.gather

    def spoil(self: CopyTable, tensors: Any, buffers: Any) -> None:
        gather(self, tensors, buffers)
        buffers[0][7] ^= 0x01

    with make_publisher(remotes, tmp_path) as publisher:
        with monkeypatch.context() as patch:
            patch.setattr(CopyTable, "gather", spoil)
            with pytest.raises(ChecksumError, match=r"differ from what was sent.*publish again"):
                publisher.publish(321, WORLD.sources(0, 321))
        assert [s.state for s in publisher.status().values()] == [S.TORN, S.TORN]
        publisher.publish(322, WORLD.sources(0, 322))
    check_all(remotes, 322)
