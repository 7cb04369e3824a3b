"""Publishing on a GPU between processes: CUDA IPC, packed and in place, with offloads, crashes and the fallback."""

from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
import torch
from publish_world import RemoteEngine, World, start_remote

from weftpub.channel import Deadlines
from weftpub.errors import ChannelError
from weftpub.plan import ViewSpec, dtype_name
from weftpub.publisher import Publisher, SourceBuffers
from weftpub.publisher.transfer import Transfer

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

WORLD = World(experts=4, ep=2, hidden=1024, intermediate=512)
MIB = 1 << 20


@pytest.fixture(scope="module")
def remotes(tmp_path_factory: pytest.TempPathFactory) -> Generator[list[RemoteEngine]]:
    folder = tmp_path_factory.mktemp("g")
    started = [start_remote(folder, WORLD, 0, r, receiver={"version": None}, device="cuda:0") for r in range(2)]
    yield started
    for remote in started:
        remote.stop()


def make_publisher(remotes: list[RemoteEngine], folder: Path, **options: Any) -> Publisher:
    peers = [remote.peer for remote in remotes]
    defaults: dict[str, Any] = {
        "commit_path": folder / "commit.json",
        "deadlines": Deadlines.all(60),
        "max_staging_bytes": 4 * MIB,
    }
    return Publisher("run", WORLD.plan(), peers, **{**defaults, **options})


def check_all(remotes: list[RemoteEngine], version: int) -> None:
    for remote in remotes:
        assert remote.call("check", version) == ""


def buffers(version: int, **options: Any) -> SourceBuffers:
    """Every tensor in one large allocation of the trainer, as a store would keep them."""
    plain = WORLD.sources(0, version)
    by_dtype: dict[torch.dtype, list[str]] = {}
    for name, tensor in plain.items():
        by_dtype.setdefault(tensor.dtype, []).append(name)
    held: dict[str, torch.Tensor] = {}
    views: dict[str, ViewSpec] = {}
    for dtype, names in by_dtype.items():
        key, offset = dtype_name(dtype), 0
        held[key] = torch.cat([plain[n].view(torch.uint8).reshape(-1) for n in names]).view(dtype).cuda()
        for name in names:
            tensor = plain[name]
            views[name] = ViewSpec(key, offset, tuple(tensor.shape), tensor.stride(), key)
            offset += tensor.numel()
    return SourceBuffers(held, views, **options)


def test_packed_over_cuda_ipc_with_moved_storage(remotes: list[RemoteEngine], tmp_path: Path) -> None:
    with make_publisher(remotes, tmp_path) as publisher:
        for version in (1, 2, 3):
            publisher.pause()
            for remote in remotes:
                remote.call("pause")
                remote.call("offload")
            report = publisher.publish(version, WORLD.sources(0, version, "cuda"), verify_sha256=version == 2)
            assert report.transports == {0: "cuda_ipc", 1: "cuda_ipc"}
            assert report.reasons == {}
            assert report.staging_bytes <= 4 * MIB
            check_all(remotes, version)


@pytest.mark.parametrize("keep", [False, True])
def test_in_place_over_cuda_ipc(remotes: list[RemoteEngine], tmp_path: Path, keep: bool) -> None:
    with make_publisher(remotes, tmp_path) as publisher:
        for version in (13, 14) if keep else (11, 12):
            sources = buffers(version, in_place=True, keep=keep)
            report = publisher.publish(version, sources)
            assert report.staging_bytes == 0
            assert report.chunks == 2
            check_all(remotes, version)


def test_memory_is_flat_over_fifty_publishes(remotes: list[RemoteEngine], tmp_path: Path) -> None:
    def free() -> int:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info()[0]

    with make_publisher(remotes, tmp_path) as publisher:
        packed, in_place = WORLD.sources(0, 21, "cuda"), buffers(21, in_place=True)
        publisher.publish(21, packed)
        publisher.publish(21, in_place)
        before = free()
        for _ in range(25):
            publisher.publish(21, packed)
            publisher.publish(21, in_place)
        assert abs(free() - before) < 16 * MIB
        check_all(remotes, 21)


def test_memory_shown_in_place_is_really_free_afterwards(remotes: list[RemoteEngine], tmp_path: Path) -> None:
    """A mapping that outlived the publish would keep the trainer's memory from the engine."""
    with make_publisher(remotes, tmp_path) as publisher:
        sources = buffers(31, in_place=True)
        ballast = torch.zeros(1 << 30, dtype=torch.uint8, device="cuda")
        held = {**sources.buffers, "ballast": ballast}
        publisher.publish(31, SourceBuffers(held, sources.views, in_place=True))
        before = torch.cuda.mem_get_info()[0]
        del held, ballast
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        assert torch.cuda.mem_get_info()[0] - before >= 1 << 30


def test_an_engine_that_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(experts=2, ep=1, hidden=1024, intermediate=512)
    options = {"receiver": {"version": None}, "device": "cuda:0"}
    remote = start_remote(tmp_path, world, 0, 0, **options)
    defaults: dict[str, Any] = {
        "commit_path": tmp_path / "c.json",
        "max_staging_bytes": MIB,
        "deadlines": Deadlines.all(60),
    }
    post = Transfer._post_next

    def kill(self: Transfer, progress: Any, link: Any) -> bool:
        if self.chunks == 2:
            remote.kill()
        return post(self, progress, link)

    with Publisher("run", world.plan(), [remote.peer], **defaults) as publisher:
        publisher.publish(1, world.sources(0, 1, "cuda"))
        with monkeypatch.context() as patch:
            patch.setattr(Transfer, "_post_next", kill)
            with pytest.raises(ChannelError, match="its process ended"):
                publisher.publish(2, world.sources(0, 2, "cuda"))
        again = start_remote(tmp_path, world, 0, 0, **options)
        publisher.publish(3, world.sources(0, 3, "cuda"))
        assert again.call("check", 3) == ""
        again.stop()


def test_an_engine_without_the_gpu_gets_the_bytes_through_pinned_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(experts=2, ep=1)
    with monkeypatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        remote = start_remote(tmp_path, world, 0, 0, receiver={"version": None})
    with Publisher("run", world.plan(), [remote.peer], commit_path=tmp_path / "c.json") as publisher:
        report = publisher.publish(1, world.sources(0, 1, "cuda"))
    assert report.transports == {0: "shared_memory"}
    assert "the engine cannot see GPU-" in report.reasons["cuda_ipc, receiver rank 0"]
    assert remote.call("check", 1) == ""
    remote.stop()


def test_pinned_shared_memory_between_two_gpu_processes(remotes: list[RemoteEngine], tmp_path: Path) -> None:
    with make_publisher(remotes, tmp_path, transport="shared_memory") as publisher:
        for version in (41, 42):
            report = publisher.publish(version, WORLD.sources(0, version, "cuda"))
            assert set(report.transports.values()) == {"shared_memory"}
            check_all(remotes, version)
