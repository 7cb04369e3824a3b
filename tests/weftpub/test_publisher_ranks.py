"""Several sender ranks: each sends its own, replicas are proven equal, one rank's failure ends the publish on all."""

import multiprocessing as mp
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from publish_room import Room, open_room
from publish_world import World, assert_serves

from weftpub.channel import Deadlines
from weftpub.errors import ChannelError, ConfigError, DeadlineError, ManifestError, PlanError, WeftpubError
from weftpub.plan import Move
from weftpub.publisher import (
    CurveKeys,
    Peer,
    Publisher,
    RankGroup,
    SoloGroup,
    StoreMail,
    ThreadGroup,
    TorchGroup,
    barrier,
)
from weftpub.publisher import mail as mail_module
from weftpub.publisher.agreement import agree
from weftpub.publisher.sender import Sender
from weftpub.publisher.transfer import Transfer
from weftpub.receive import Receiver, ReceiverThread
from weftpub.receive.reception import Reception
from weftpub.version import EngineState

EXTRA = (("model.norm.weight", (256,), torch.float32),)


def run_ranks(works: Sequence[Callable[[], Any]]) -> list[Any]:
    """Run one callable per rank at the same time; results, or the errors raised."""

    def attempt(work: Callable[[], Any]) -> Any:
        try:
            return work()
        except WeftpubError as error:
            return error

    with ThreadPoolExecutor(len(works)) as pool:
        return list(pool.map(attempt, works))


def publishers(room: Room, **options: Any) -> list[Publisher]:
    ranks = room.world.send_ep * room.world.replicas
    return [room.publisher(group=group, **options) for group in ThreadGroup.of_size(ranks)]


def publish_all(
    room: Room, senders: Sequence[Publisher], version: int, versions: Sequence[int] | None = None
) -> list[Any]:
    """Publish on every rank; `versions` makes ranks hold other bytes."""
    held = versions or [version] * len(senders)
    return run_ranks(
        [lambda r=r, p=p: p.publish(version, room.world.sources(r, held[r])) for r, p in enumerate(senders)]
    )


SIX = {"experts": 6, "hidden": 128, "intermediate": 128, "extra": EXTRA}


@pytest.mark.parametrize(
    "world",
    [
        World(experts=4, ep=2, send_ep=2),
        World(experts=4, ep=1, tp=2, send_ep=3),
        *(World(send_ep=senders, ep=ep, **SIX) for senders, ep in ((1, 6), (6, 1), (2, 3), (3, 2), (6, 6), (5, 3))),
        World(send_ep=3, ep=3, engines=2, **SIX),
    ],
    ids=lambda w: f"{w.send_ep * w.replicas}-to-{w.engines}x{w.ranks}",
)
def test_every_rank_sends_its_own(world: World, tmp_path: Path) -> None:
    with open_room(world, tmp_path, version=None) as room:
        senders = publishers(room)
        for version in (1, 2):
            reports = publish_all(room, senders, version)
            assert all(report == reports[0] for report in reports)
            assert reports[0].engines["engine0"].state == "serving"
            for engine in room.engines:
                assert_serves(engine, version)


class TestReplicas:
    """Data-parallel sender ranks hold the same bytes; exactly one of them sends each, and a checksum proves it."""

    world = World(experts=2, ep=1, replicas=2, extra=EXTRA)

    def test_exactly_one_sends(self, tmp_path: Path) -> None:
        moves: dict[str, list[Move]] = {}
        for move in self.world.plan().moves:
            moves.setdefault(move.name, []).append(move)
        assert all(len(found) == 1 for found in moves.values())
        with open_room(self.world, tmp_path) as room:
            reports = publish_all(room, publishers(room), 1)
            assert_serves(room.engines[0], 1)
            sent = sum(t.nbytes for t in self.world.sources(0, 1).values())
            assert reports[0].nbytes < 1.01 * sent

    def test_replicas_that_differ_are_named_and_nothing_is_sent(self, tmp_path: Path) -> None:
        with open_room(self.world, tmp_path) as room:
            senders = publishers(room)
            errors = publish_all(room, senders, 1, versions=[1, 2])
            for error in errors:
                assert isinstance(error, ManifestError)
                assert "replicas differ" in str(error)
                assert "sender rank 0: " in str(error)
                assert "sender rank 1: " in str(error)
            assert_serves(room.engines[0], 0)
            assert room.engines[0].serving
            publish_all(room, senders, 2)
            assert_serves(room.engines[0], 2)


class TestFailures:
    world = World(experts=4, ep=2, send_ep=2, extra=EXTRA)

    def test_a_rank_that_raises_while_it_sends(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """One rank raised, and the others sat in a barrier for two hours."""
        post = Transfer._post_next

        def fail(self: Transfer, progress: Any, link: Any) -> bool:
            if self._sender == 1 and self.chunks == 1:
                raise RuntimeError("CUDA error on this rank")
            return post(self, progress, link)

        with open_room(self.world, tmp_path) as room:
            senders = publishers(room)
            with monkeypatch.context() as patch:
                patch.setattr(Transfer, "_post_next", fail)
                works = [lambda r=r, p=p: p.publish(1, self.world.sources(r, 1)) for r, p in enumerate(senders)]

                def caught() -> str:
                    with pytest.raises(RuntimeError, match="on this rank"):
                        works[1]()
                    return "raised"

                first, second = run_ranks([works[0], caught])
            assert second == "raised"
            assert isinstance(first, ChannelError)
            assert "sender rank 1: RuntimeError: CUDA error on this rank" in str(first)
            assert "torn" in {str(s.state) for s in room.publisher().status().values()}
            senders = publishers(room)
            publish_all(room, senders, 2)
            for engine in room.engines:
                assert_serves(engine, 2)

    @pytest.mark.parametrize("sources", [{}, {"model.norm.weight": None}], ids=["missing", "no-tensor"])
    def test_a_rank_with_wrong_sources(self, tmp_path: Path, sources: Any) -> None:
        """One rank raised and the others sat in a barrier for two hours. Whatever a rank is handed, it tells the others
        before it raises."""
        with open_room(self.world, tmp_path) as room:
            senders = publishers(room)
            works = [lambda: senders[0].publish(1, self.world.sources(0, 1)), lambda: senders[1].publish(1, sources)]
            first, second = run_ranks(works)
            assert isinstance(first, PlanError)
            assert "sender rank 1" in str(first)
            assert isinstance(second, PlanError)
            for engine in room.engines:
                assert_serves(engine, 0)
                assert engine.serving

    def test_a_rank_that_never_comes(self, tmp_path: Path) -> None:
        with open_room(self.world, tmp_path) as room:
            senders = publishers(room, deadlines=Deadlines(**{**vars(Deadlines.all(20)), "group": 0.3}))
            with pytest.raises(
                DeadlineError, match=r"sender rank 1: .* phase open .*under weftpub/run-1/1/1; did it raise"
            ):
                senders[0].publish(1, self.world.sources(0, 1))
            with pytest.raises(DeadlineError, match=r"sender rank 0: .* phase open"):
                publishers(room, deadlines=Deadlines.all(0.1))[1].publish(1, self.world.sources(1, 1))
            for engine in room.engines:
                assert_serves(engine, 0)

    def test_ranks_with_different_plans(self, tmp_path: Path) -> None:
        with open_room(self.world, tmp_path) as room:
            senders = publishers(room)
            senders[1].set_plan(World(experts=2, ep=2, send_ep=2).plan())
            for error in publish_all(room, senders, 1):
                assert isinstance(error, PlanError)
                assert "different plans" in str(error)

    def test_a_plan_for_more_ranks_than_there_are(self, tmp_path: Path) -> None:
        with (
            open_room(self.world, tmp_path) as room,
            pytest.raises(PlanError, match="sender ranks up to 1, the group has 1"),
        ):
            room.publisher().publish(1, self.world.sources(0, 1))

    def test_an_engine_that_fails_one_sender_is_left_out_for_all(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        take = Reception.take
        world = World(experts=4, ep=2, send_ep=2, engines=2, extra=EXTRA)

        def fail(self: Reception, chunk: Any, transports: Any) -> None:
            if self._plans.table.part.rank == 1 and chunk.sender == 1:
                raise RuntimeError("no room")
            take(self, chunk, transports)

        with open_room(world, tmp_path) as room:
            senders = publishers(room, on_engine_failure="continue")
            with monkeypatch.context() as patch:
                patch.setattr(Reception, "take", fail)
                reports = publish_all(room, senders, 1)
            assert [r.engines["engine1"].state for r in reports] == ["serving"] * 2
            assert "no room" in reports[0].engines["engine0"].error
            for engine in room.engines[2:]:
                assert_serves(engine, 1)
            publish_all(room, senders, 2)
            for engine in room.engines:
                assert_serves(engine, 2)


def test_a_sender_that_hashes_for_long_is_not_taken_for_dead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With several sender ranks nobody said a word to the receivers while the slowest one computed its sha256: after
    `silence` seconds they took their publisher for dead, and tore what they had received."""
    world = World(experts=4, ep=2, send_ep=2, extra=EXTRA)
    digests = Sender.sha256
    with open_room(world, tmp_path, silence=5.0) as room:
        receivers = [thread.receiver for thread in room.threads]

        def slowly(self: Sender) -> dict[str, list[str]]:
            until = time.monotonic() + 20.0
            while any(one.state.state is EngineState.RECEIVING for one in receivers) and time.monotonic() < until:
                time.sleep(0.01)
            assert {one.state.state for one in receivers} == {EngineState.VERIFIED}, "a receiver gave up"
            return digests(self)

        monkeypatch.setattr(Sender, "sha256", slowly)
        senders = publishers(room)
        works = [lambda r=r, p=p: p.publish(1, world.sources(r, 1), verify_sha256=True) for r, p in enumerate(senders)]
        reports = run_ranks(works)
        assert reports[0] == reports[1]
        assert reports[0].sha256
        for engine in room.engines:
            assert_serves(engine, 1)


def test_describing_and_recovering_return_on_every_rank(tmp_path: Path) -> None:
    world = World(experts=4, ep=2, send_ep=2, extra=EXTRA)
    with open_room(world, tmp_path) as room:
        senders = publishers(room)
        described = run_ranks([p.describe for p in senders])
        assert described[0] == described[1]
        assert len(described[0]) == 2
        publish_all(room, senders, 1)
        recovered = run_ranks([p.recover for p in senders])
        assert recovered[0] == recovered[1]
        assert recovered[0].finished == ("engine0",)
        status = run_ranks([p.status for p in senders])
        assert status[0] == status[1]


class TestGroups:
    def rounds(self, groups: Sequence[RankGroup]) -> list[Any]:
        def work(group: RankGroup) -> Any:
            group.begin("a")
            gathered = group.gather(bytes([group.rank]), "x", 5)
            told = group.broadcast(b"go" if group.rank == 0 else None, "y", 5)
            barrier(group, "z", 5)
            return gathered, told

        return run_ranks([lambda g=g: work(g) for g in groups])

    def test_gather_and_broadcast(self) -> None:
        assert self.rounds([SoloGroup()]) == [([b"\0"], b"go")]
        assert self.rounds(ThreadGroup.of_size(3)) == [([b"\0", b"\1", b"\2"], b"go"), (None, b"go"), (None, b"go")]

    def test_nothing_of_a_failed_round_reaches_the_next(self) -> None:
        zero, one = ThreadGroup.of_size(2)
        one.begin("a")
        one.gather(b"stale", "x", 1)
        for group in (zero, one):
            group.begin("b")
        one.gather(b"fresh", "x", 1)
        assert zero.gather(b"", "x", 1) == [b"", b"fresh"]

    def test_a_conclusion_that_fails_reaches_everybody(self) -> None:
        def conclude(_: list[Any]) -> Any:
            raise PlanError("no")

        groups = ThreadGroup.of_size(2)
        for group in groups:
            group.begin("a")
        found = run_ranks([lambda g=g: agree(g, "p", 30, lambda: g.rank, conclude, allowance=1) for g in groups])
        assert [str(error) for error in found] == ["no", "sender rank 0: no"]
        assert all(isinstance(error, PlanError) for error in found)

    @pytest.mark.parametrize("size", [0, 7, 8, 9, 100])
    def test_what_is_larger_than_a_value_of_the_store_arrives(self, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
        """Torch's TCP store refuses values above 8 MiB, and closes the connection of whoever sends one."""
        monkeypatch.setattr(mail_module, "_LARGEST_VALUE", 8)
        store, sent = _Small(), bytes(range(size))
        one, other = (_group_over(store, rank) for rank in range(2))
        for group in (one, other):
            group.begin("a")
        other.gather(sent, "p", 5)
        assert one.gather(b"own", "p", 5) == [b"own", sent]
        one.broadcast(sent, "p", 5)
        assert other.broadcast(None, "p", 5) == sent
        assert store.held == {}

    def test_torch_group_needs_torch_distributed(self) -> None:
        with pytest.raises(ConfigError, match="init_process_group"):
            TorchGroup()


class _Small:
    """A store that refuses values of more than 12 bytes: eight, and the number of the other parts."""

    def __init__(self) -> None:
        self.held: dict[str, bytes] = {}

    def set(self, key: str, value: bytes) -> None:
        assert len(value) <= 12, "the connection would be closed"
        self.held[key] = value

    def get(self, key: str) -> bytes:
        return self.held[key]

    def wait(self, keys: list[str], limit: object) -> None:
        assert all(key in self.held for key in keys)

    def delete_key(self, key: str) -> None:
        del self.held[key]


def _group_over(store: _Small, rank: int) -> TorchGroup:
    group = TorchGroup.__new__(TorchGroup)
    group.rank, group.size, group._mail, group._run_id = rank, 2, StoreMail(store), "run"
    return group


class TestHosts:
    """Two hosts, an engine and a sender rank on each: rank 0 reaches the other host's engine over TCP, the other rank
    cannot reach the socket on rank 0's host at all.
    """

    WORLD = World(experts=2, ep=1, engines=2, replicas=2, extra=EXTRA)

    @pytest.fixture
    def senders(self, tmp_path: Path) -> Iterator[tuple[Room, list[Publisher]]]:
        (server, server_secret), *clients = (CurveKeys.generate_pair() for _ in range(3))
        with open_room(self.WORLD, tmp_path) as room:
            room.threads[1].stop()
            keys = CurveKeys(server, server_secret, tuple(public for public, _ in clients))
            receiver = Receiver(room.engines[1], run_id="run", version=0)
            room.threads[1] = ReceiverThread(receiver, "tcp://127.0.0.1:0", keys=keys).__enter__()
            made = []
            for group, (public, secret) in zip(ThreadGroup.of_size(2), clients, strict=True):
                near = Peer(
                    0, room.peers[0].address if group.rank == 0 else f"ipc://{tmp_path}/elsewhere/r0", "engine0"
                )
                far = Peer(1, room.threads[1].address, "engine1", CurveKeys(public, secret, (server,)))
                made.append(
                    room.publisher(group=group, peers=[near, far], deadlines=replace(Deadlines.all(20), hello=1.0))
                )
            yield room, made

    def test_one_version_on_all_hosts(self, senders: tuple[Room, list[Publisher]]) -> None:
        room, made = senders
        assert {(move.send_rank, move.recv_rank) for move in self.WORLD.plan().moves} == {(0, 0), (1, 1)}
        for version in (1, 2):
            reports = publish_all(room, made, version)
            assert all(report == reports[0] for report in reports)
        for engine in room.engines:
            assert engine.serving
            assert_serves(engine, 2)

    @pytest.mark.parametrize("host", [0, 1])
    def test_no_host_serves_a_version_that_one_has_not_verified(
        self, senders: tuple[Room, list[Publisher]], host: int
    ) -> None:
        room, made = senders
        publish_all(room, made, 1)
        room.engines[host].fail_in["post_process"] = "no memory for it"
        errors = publish_all(room, made, 2)
        assert all(isinstance(error, WeftpubError) for error in errors)
        assert all("no memory for it" in str(error) and f"engine{host}" in str(error) for error in errors)
        assert room.recorded() == 1
        assert not any(engine.serving for engine in room.engines)
        assert [engine.version for engine in room.engines] == [1, 1]
        room.engines[host].fail_in.clear()
        publish_all(room, made, 2)
        for engine in room.engines:
            assert engine.serving
            assert_serves(engine, 2)

    def test_a_host_that_is_gone_is_everybodys_error(self, senders: tuple[Room, list[Publisher]]) -> None:
        room, made = senders
        publish_all(room, made, 1)
        room.threads[1].stop()
        errors = publish_all(room, made, 2)
        assert all(isinstance(error, DeadlineError) and "receiver rank 1" in str(error) for error in errors)
        assert room.recorded() == 1
        assert_serves(room.engines[0], 1)

    def test_replicas_on_other_hosts_are_compared(self, senders: tuple[Room, list[Publisher]]) -> None:
        room, made = senders
        errors = publish_all(room, made, 1, versions=[1, 2])
        assert all(isinstance(error, ManifestError) and "replicas differ" in str(error) for error in errors)


def _torch_rank(rank: int, folder: str, peers: list[Any], queue: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    world = World(experts=4, ep=2, send_ep=2, extra=EXTRA)
    group = TorchGroup(run_id="run")
    options: dict[str, Any] = {
        "commit_path": Path(folder) / "commit.json",
        "group": group,
        "deadlines": Deadlines.all(30),
    }
    with Publisher("run", world.plan(), peers, **options) as publisher:
        reports = [publisher.publish(version, world.sources(rank, version)).as_dict() for version in (1, 2)]
    group.begin("last")
    late = ""
    if rank == 0:
        try:
            group.gather(b"", "parting", 0.3)
        except DeadlineError as error:
            late = str(error)
    queue.put((rank, reports, late))
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.slow
def test_two_processes_of_torch_distributed(tmp_path: Path) -> None:
    """Ranks meet in the store of a gloo group: a rank that does not come is named, and the group stays usable."""
    world = World(experts=4, ep=2, send_ep=2, extra=EXTRA)
    context = mp.get_context("spawn")
    with open_room(world, tmp_path) as room:
        queue = context.Queue()
        processes = [
            context.Process(target=_torch_rank, args=(rank, str(tmp_path), room.peers, queue), daemon=True)
            for rank in range(2)
        ]
        for process in processes:
            process.start()
        found = {rank: (reports, late) for rank, reports, late in (queue.get(timeout=400) for _ in processes)}
        for process in processes:
            process.join(60)
            assert process.exitcode == 0
        assert found[0][0] == found[1][0]
        assert "sender rank 1: no answer in phase parting" in found[0][1]
        assert found[0][0][1]["transports"] == {"0": "shared_memory", "1": "shared_memory"}
        for engine in room.engines:
            assert_serves(engine, 2)
