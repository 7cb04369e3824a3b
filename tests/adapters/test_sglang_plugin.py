"""A whole SGLang engine on the CPU, TP 2 and EP 2: its real schedulers, weight updater, tokenizer manager and
processes, with the plugin in every worker. Only the forward pass is replaced (see `cpu_engine`): a token is the one
before plus the version of the weights, so every answer shows which weights made each of its tokens.
"""

import asyncio
import json
import os
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import fp8_tensors
from cpu_engine import ENGINE, LAG_S, SWITCHES, environment, install_plugins
from layouts import LAYOUTS

from weftpub.channel import Deadlines
from weftpub.errors import ChannelError, ChecksumError, DeadlineError, StateError, TornError
from weftpub.plan import Plan
from weftpub.publisher import CurveKeys, Observer, Publisher
from weftpub.version import EngineState as S
from weftpub_adapters.sglang.driver import (
    ColocatedEngine,
    Completion,
    DriverDeadlines,
    EnginePhase,
    LocalEngine,
    TcpAccess,
    base,
)
from weftpub_adapters.sglang.driver.model_directory import write_engine_directory
from weftpub_adapters.sglang.plugin import ReceiverSettings

# An engine changes its process: signal handlers, start method, SGLang's runtime context. Other tests have their own.
pytestmark = [pytest.mark.isolated("sglang-engine"), pytest.mark.slow]

LAYOUT = "tp2-ep2"
CONFIG = LAYOUTS[LAYOUT].config
RUN = "plugin-test"
OTHER = "next"
DEADLINES = DriverDeadlines(start=60, drain=60, flush=20, memory=20, release=60, resume=60, control=60, shutdown=30)


class Impatient(ReceiverSettings):
    """A test waits for a worker that does not come to rest."""

    pause: float = 2.0


@dataclass
class World:
    """A running engine, its publisher, and requests in flight."""

    engine: LocalEngine
    publisher: Publisher
    step: ColocatedEngine
    folder: Path
    pool: ThreadPoolExecutor

    def ask(self, count: int, tokens: int, **sampling: Any) -> list[Future[list[Completion]]]:
        """Requests whose prompts end in 1, 2, ..., each from a thread of its own."""
        sampling = {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True, **sampling}
        return [self.pool.submit(self.engine.generate, [[9, first + 1]], sampling) for first in range(count)]

    @contextmanager
    def switched(self, name: str) -> Iterator[None]:
        """Have the engine's workers do what a switch says, see `cpu_engine`."""
        switch = switches(self.folder) / name
        switch.touch()
        try:
            yield
        finally:
            switch.unlink()

    def ask_slowly(self, count: int, tokens: int) -> list[Future[list[Completion]]]:
        """Requests that have made tokens, and have not made all of them yet: inside of `switched("slow")`."""
        progress = switches(self.folder) / "progress"
        progress.unlink(missing_ok=True)
        asked = self.ask(count, tokens)
        wait_for(lambda: progress.exists() and progress.read_text() == str(count), "requests to be decoded together")
        return asked

    @property
    def next(self) -> int:
        """A version above all that the engine ever held, which it may have lost."""
        told = self.engine.weight_version()
        known = [int(told) if told.isdecimal() else 0]
        for report in self.publisher.status().values():
            known += [version for version in (report.version, report.incoming, report.lost) if version is not None]
        return max(known) + 1

    def settle(self) -> None:
        """Have the engine serve a version that is known, whatever the test before this one left."""
        for switch in switches(self.folder).iterdir():
            switch.unlink()
        try:
            self.engine.start_receivers(RUN, self.folder / "s")  # finds those that are there
        except ChannelError:
            self.engine.stop_receivers(OTHER)
            self.engine.start_receivers(RUN, self.folder / "s")
        self.publisher.take_over()
        told = self.engine.weight_version()
        standing = {(r.state, str(r.version), r.resting, r.may_serve) for r in self.publisher.status().values()}
        phase = self.step.standing[self.engine.name].phase
        if self.engine.in_flight or phase is not EnginePhase.SERVING or standing != {(S.SERVING, told, False, True)}:
            self.step = ColocatedEngine(self.engine, self.publisher, deadlines=DEADLINES)
            self.publish(self.next, "abort")

    def publish(self, version: int, mode: Any = "retract", **arguments: Any) -> None:
        """A whole step."""
        self.step.drain(mode)
        self.step.release()
        self.step.publish(version, sources(version), **arguments)
        self.step.resume()
        self.step.continue_()


def switches(folder: Path) -> Path:
    return folder / "switches"


def wait_for(condition: Callable[[], object], what: str, seconds: float = 60.0) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, f"waited {seconds:g} s for {what}"
        time.sleep(0.01)


def sources(version: int) -> dict[str, torch.Tensor]:
    """The trainer's tensors of a version, which the final norm's first element names."""
    tensors = fp8_tensors(CONFIG, seed=version)
    tensors["model.norm.weight"][0] = version
    return tensors


def answers(asked: list[Future[list[Completion]]]) -> list[Completion]:
    return [one for future in asked for one in future.result(120)]


def check_tokens(answer: Completion, first: int) -> None:
    """Every token was made by the version that the answer's spans name."""
    token = first
    for span in answer.versions:
        for position in range(span.start, span.end):
            token = (token + int(span.version)) % CONFIG["vocab_size"]
            assert answer.tokens[position] == token, f"{answer.versions}, token {position}: {answer.tokens}"
    assert answer.versions[0].start == 0
    assert answer.versions[-1].end == len(answer.tokens)


@pytest.fixture(scope="module")
def started_world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("engine")
    install_plugins(folder / "site")
    (folder / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    model = write_engine_directory(folder / "model", folder / "config.json")
    engine = started(folder, model)
    patch = pytest.MonkeyPatch()
    patch.setattr(base, "ReceiverSettings", Impatient)
    try:
        started_on_one_rank_only(engine, folder)
        peers = engine.start_receivers(RUN, folder / "s")
        waits = Deadlines.all(60.0)
        with Publisher(RUN, None, peers, commit_path=folder / "commit.json", deadlines=waits) as publisher:
            publisher.set_plan(planned(publisher))
            step = ColocatedEngine(engine, publisher, deadlines=DEADLINES)
            with ThreadPoolExecutor(16) as pool:
                made = World(engine, publisher, step, folder, pool)
                try:
                    yield made
                finally:
                    engine = made.engine
                    for switch in switches(folder).iterdir():
                        switch.unlink()
                    engine.shutdown()  # ends what a test left waiting
    finally:
        patch.undo()
        engine.shutdown()


@pytest.fixture
def world(started_world: World) -> World:
    """The engine, serving: a test that failed leaves nothing to the next one."""
    started_world.settle()
    return started_world


def started(folder: Path, model: Path) -> LocalEngine:
    """An engine with two workers."""
    before = dict(os.environ)
    switches(folder).mkdir(exist_ok=True)
    os.environ.update({**environment(2), SWITCHES: str(switches(folder))})
    try:
        return LocalEngine.start(model_path=str(model), tp_size=2, ep_size=2, deadlines=DEADLINES, **ENGINE)
    finally:
        os.environ.clear()
        os.environ.update(before)


def started_on_one_rank_only(engine: LocalEngine, folder: Path) -> None:
    """One rank is unfit: all say so before any comes to rest. A rank that had stopped alone would leave the other in
    the middle of a forward pass, waiting for it."""
    (switches(folder) / "refuse").touch()
    with pytest.raises(ChannelError, match="did not start: tensor parallel rank 1: ConfigError: rank 1 cannot be"):
        engine.start_receivers(RUN, folder / "s")
    (switches(folder) / "refuse").unlink()
    assert len(engine.generate([[9, 1]], {"max_new_tokens": 2, "temperature": 0, "ignore_eos": True})[0].tokens) == 2


def planned(publisher: Publisher) -> Plan:
    """A plan as a trainer makes it, in a process that holds AWEX, from what the live workers say."""
    described = [one.model_dump(mode="json") for one in publisher.describe()]
    for one in described:
        one["settings"]["hf_config"] = CONFIG  # the trainer's own
    worker = Path(__file__).with_name("plan_worker.py")
    made = subprocess.run(
        [sys.executable, str(worker)],
        input=json.dumps({LAYOUT: described}),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert made.returncode == 0, made.stderr[-3000:]
    return Plan.from_json(json.loads(made.stdout)[LAYOUT])


def test_every_worker_listens_and_serves_nothing_before_the_first_version(started_world: World) -> None:
    """The engine was started with random weights; AWEX is in none of its workers."""
    world = started_world
    described = world.publisher.describe()
    plugins: list[Any] = [one.settings["plugin"] for one in described]
    assert [one.rank for one in described] == [0, 1]
    assert all(plugin["faults"] == [] and plugin["planner_loaded"] is False for plugin in plugins)
    assert len({os.getpid(), *(plugin["pid"] for plugin in plugins)}) == 3
    assert {report.state for report in world.publisher.status().values()} == {S.TORN}
    with pytest.raises(StateError, match="call drain first"):
        world.step.continue_()
    waiting = world.ask(1, 4)
    time.sleep(1.0)
    assert not waiting[0].done()
    world.step.drain()
    with pytest.raises(TornError, match="no version was published"):
        world.step.continue_()
    world.engine.continue_()  # a driver that does not ask, and SGLang's own verb
    time.sleep(1.0)
    assert not waiting[0].done()
    world.publish(1, verify_sha256=True)
    (answer,) = answers(waiting)
    assert (answer.tokens, answer.finish, answer.attempts) == ((2, 3, 4, 5), "length", 1)
    assert world.engine.weight_version() == "1"
    assert {span.version for span in answer.versions} == {"1"}


@pytest.mark.parametrize("mode", ["retract", "drain", "restart", "abort"])
def test_requests_in_flight_are_treated_as_the_mode_promises(world: World, mode: str) -> None:
    """A peer's version update aborted every request in flight."""
    old = int(world.engine.weight_version())
    with world.switched("slow"):
        asked = world.ask_slowly(4, 40)
        if mode != "drain":
            world.publish(old + 1, mode)
    if mode == "drain":
        world.publish(old + 1, mode)
    found = answers(asked)
    assert len(found) == 4
    for first, answer in enumerate(found):
        check_tokens(answer, first + 1)
    spans = [[span.version for span in answer.versions] for answer in found]
    lengths = {len(answer.tokens) for answer in found}
    if mode == "retract":
        assert spans == [[str(old), str(old + 1)]] * 4
    if mode == "drain":
        assert spans == [[str(old)]] * 4
    if mode == "restart":
        assert spans == [[str(old + 1)]] * 4
        assert {answer.attempts for answer in found} == {2}
    if mode == "abort":
        assert {answer.finish for answer in found} == {"abort"}
        assert max(lengths) < 40
    else:
        assert lengths == {40}
        assert {answer.finish for answer in found} == {"length"}
    assert world.engine.weight_version() == str(old + 1)


def test_a_restart_takes_back_what_is_still_on_its_way(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """An abort that overtakes its request is ignored by the scheduler, and SGLang passes no second one on: a restart
    waited for the whole answer, which was the old version's."""
    old = int(world.engine.weight_version())
    manager: Any = world.engine._manager
    send = manager._send_one_request
    held: list[Any] = []
    arrives = threading.Event()

    async def later(tokenized: Any) -> None:
        held.append(tokenized)
        while not arrives.is_set():
            await asyncio.sleep(0.01)
        await send(tokenized)

    progress = switches(world.folder) / "progress"
    with world.switched("slow"):
        monkeypatch.setattr(manager, "_send_one_request", later)
        asked = world.ask(2, 60)
        wait_for(lambda: len(held) == 2, "requests on their way")
        world.step.drain("restart")
        monkeypatch.setattr(manager, "_send_one_request", send)
        arrives.set()
        world.publish(old + 1, "restart")
        assert not any(future.done() for future in asked)
        wait_for(lambda: progress.exists() and progress.read_text() == "2", "tokens of the next version")
        world.publish(old + 2, "restart")
        assert not any(future.done() for future in asked)
    for first, answer in enumerate(answers(asked)):
        check_tokens(answer, first + 1)
        assert [span.version for span in answer.versions] == [str(old + 2)]


@pytest.mark.parametrize("mode", ["retract", "drain", "restart", "abort"])
def test_requests_that_wait_for_their_grammar_wait_through_a_publish(world: World, mode: str) -> None:
    """A paused scheduler never looks into its grammar queue, and counts what is there as work: draining it ended at the
    deadline. And aborting what is there makes SGLang say that the request was wrong: it was lost."""
    old = int(world.engine.weight_version())
    with world.switched("compiling"):
        asked = world.ask(2, 4, json_schema=json.dumps({"title": mode}))
        wait_for(lambda: world.engine.in_flight == 2, "requests under way")
        drained = world.pool.submit(world.step.drain, mode)
        if mode in ("retract", "restart"):
            wait_for(lambda: all(one.resting for one in world.engine.workers()), "the engine to be paused")
        if mode == "retract":
            words = {"2 waiting for a grammar to be compiled"}
            wait_for(lambda: {one.doing for one in world.engine.workers()} == words, "both to wait for their grammar")
        if mode == "abort":
            drained.result(60)
    drained.result(60)
    world.publish(old + 1, mode)
    for first, answer in enumerate(answers(asked)):
        if mode == "abort":
            assert (answer.tokens, answer.finish) == ((), "abort")
            continue
        check_tokens(answer, first + 1)
        assert [span.version for span in answer.versions] == [str(old if mode == "drain" else old + 1)]
        assert (len(answer.tokens), answer.finish) == (4, "length")


def test_memory_has_moved_on_every_worker_when_a_call_returns(world: World) -> None:
    """SGLang answers when one worker is done. A driver that went on then measured the memory of the others before they
    had released it, and found their cache still away when it was to serve."""
    world.step.drain()
    with world.switched("lag"):
        for call, away in ((world.engine.release, True), (world.engine.resume, False)):
            began = time.monotonic()
            call(["kv_cache"])
            reasons = [report.why_not for report in world.publisher.status().values()]
            assert [("kv_cache" in reason) for reason in reasons] == [away, away]
            assert time.monotonic() - began >= LAG_S, "rank 1 was not late"
    world.step.continue_()
    assert len(answers(world.ask(1, 2))[0].tokens) == 2


def test_a_cache_is_flushed_on_every_worker_or_the_driver_hears_of_it(world: World) -> None:
    """SGLang passes the first worker's answer on. Another one had a request left, kept its cache, and would have served
    keys and values of the old version after the publish."""
    world.step.drain()
    with world.switched("busy"):
        assert not world.engine.flush()
    assert world.engine.flush()
    world.step.continue_()
    assert len(answers(world.ask(1, 2))[0].tokens) == 2


def test_a_worker_that_refuses_to_go_on_is_named_to_the_driver(world: World) -> None:
    """Somebody else had released the cache; the workers did not go on, only their logs said so, and the driver called
    the engine serving."""
    world.step.drain()
    world.engine.release(["kv_cache"])  # behind the driver's back
    with pytest.raises(
        StateError, match="refuse: receiver rank 0: the memory of kv_cache is released; receiver rank 1"
    ):
        world.step.continue_()
    reports = world.publisher.status().values()
    assert {(report.may_serve, report.resting) for report in reports} == {(False, True)}
    world.engine.resume(["kv_cache"])
    world.step.continue_()
    assert len(answers(world.ask(1, 2))[0].tokens) == 2
    assert {(r.may_serve, r.resting) for r in world.publisher.status().values()} == {(True, False)}


def test_changed_bytes_fence_the_engine_until_a_complete_publish(world: World) -> None:
    """A byte differs from what the trainer's checksum says: nothing of the version is served, nothing is lost."""
    old = int(world.engine.weight_version())
    with world.switched("slow"):
        asked = world.ask_slowly(2, 60)
        world.step.drain("retract")
    world.step.release()
    with pytest.raises(ChecksumError, match=r"model\.norm\.weight"):
        world.step.publish(old + 1, sources(old + 1), {"model.norm.weight": 1})
    world.step.resume()
    assert world.engine.weight_version() == str(old)
    reports = world.publisher.status().values()
    assert {(report.state, report.lost, report.intact) for report in reports} == {(S.TORN, old, False)}
    assert all("could not be verified" in report.reason for report in reports)
    with pytest.raises(TornError, match=f"version {old} is lost"):
        world.step.continue_()
    world.engine.continue_()
    time.sleep(0.5)
    assert not any(future.done() for future in asked)
    world.publish(old + 2)
    for first, answer in enumerate(answers(asked)):
        check_tokens(answer, first + 1)
        assert [span.version for span in answer.versions] == [str(old), str(old + 2)]


def test_a_publish_to_an_engine_that_was_not_drained_is_refused_and_harmless(world: World) -> None:
    """Ranks of one engine must stop at the same step; a receiver cannot stop its own."""
    old = world.engine.weight_version()
    with world.switched("slow"):
        asked = world.ask_slowly(1, 30)
        with pytest.raises(StateError, match="was not paused"):
            world.publisher.publish(int(old) + 1, sources(int(old) + 1))
    (answer,) = answers(asked)
    check_tokens(answer, 1)
    assert {report.state for report in world.publisher.status().values()} == {S.SERVING}


def test_weights_that_were_released_and_not_published_are_not_served(world: World) -> None:
    """An offload left the weights undefined, and the engine went on with them."""
    old = int(world.engine.weight_version())
    world.step.drain()
    world.engine.release(["weights"])  # behind the driver's back
    world.engine.resume(["weights"])
    with pytest.raises(TornError, match="offload took version"):
        world.step.continue_()
    world.step.publish(old + 1, sources(old + 1))
    world.step.continue_()
    assert answers(world.ask(1, 2))[0].tokens == ((old + 2) % 500, (2 * old + 3) % 500)


def test_a_restarted_driver_finds_the_receivers_and_another_run_does_not_take_them(world: World) -> None:
    states = {rank: (report.state, report.version) for rank, report in world.publisher.status().items()}
    again = world.engine.start_receivers(RUN, world.folder / "s")
    assert [peer.rank for peer in again] == [0, 1]
    assert len(world.publisher.status()) == 2  # asking did not take its place
    with Publisher(
        RUN, world.publisher.plan, again, commit_path=world.folder / "commit.json", deadlines=Deadlines.all(30.0)
    ) as restarted:
        assert {rank: (r.state, r.version) for rank, r in restarted.status().items()} == states
        with pytest.raises(StateError, match="stale"):
            world.publisher.status()
    world.publisher.take_over()
    assert len(world.publisher.status()) == 2
    with pytest.raises(ChannelError, match=f"tensor parallel rank 1: StateError: a receiver of run '{RUN}'"):
        world.engine.start_receivers("another", world.folder / "other")


def test_a_driver_that_ends_between_release_and_publish_is_followed_by_another(world: World) -> None:
    """A trainer ended while it trained, with the engine's weights released. Its successor was refused everything: the
    workers would not describe themselves, nobody brought the weights back, and releasing them again ended the engine.
    """
    old = int(world.engine.weight_version())
    with world.switched("slow"):
        asked = world.ask_slowly(1, 40)
        world.step.drain()
    world.step.release()
    peers = world.engine.start_receivers(RUN, world.folder / "s")
    waits = Deadlines.all(60.0)
    with Publisher(
        RUN, world.publisher.plan, peers, commit_path=world.folder / "commit.json", deadlines=waits
    ) as later:
        assert [one.settings["plugin"]["released"] for one in later.describe()] == [["kv_cache", "weights"]] * 2  # type: ignore[index,call-overload]
        step = ColocatedEngine(world.engine, later, deadlines=DEADLINES)
        step.drain()
        for call in (world.step.drain, world.step.resume, lambda: world.step.publish(old + 1, {})):
            with pytest.raises(StateError, match="stale"):
                call()
        world.engine.release(["kv_cache", "weights"])  # by somebody who does not ask
        step.publish(old + 1, sources(old + 1))
        step.resume()
        world.engine.resume(["kv_cache", "weights"])
        step.continue_()
        (answer,) = answers(asked)
        check_tokens(answer, 1)
        assert [span.version for span in answer.versions] == [str(old), str(old + 1)]
    world.publisher.take_over()
    world.publish(old + 2)  # by a driver that believes the engine drained, and its memory away
    assert answers(world.ask(1, 2))[0].versions[0].version == str(old + 2)


def test_stopped_receivers_leave_the_engine_serving(world: World) -> None:
    """The next ones listen on TCP, as where the publisher leads engines of other hosts, to whom they know by key."""
    old = int(world.engine.weight_version())
    world.engine.stop_receivers(RUN)
    assert len(answers(world.ask(1, 3))[0].tokens) == 3
    server, client, stranger = (CurveKeys.generate_pair() for _ in range(3))
    access = TcpAccess("127.0.0.1", CurveKeys(*server, (client[0],)), CurveKeys(*client, (server[0],)))
    peers = world.engine.start_receivers(OTHER, world.folder / "n", version=old, tcp=access)
    assert [peer.address.rpartition(":")[0] for peer in peers] == ["tcp://127.0.0.1"] * 2
    assert stat.S_IMODE((world.folder / "n" / "receivers.json").stat().st_mode) == 0o600, "it holds a secret"
    unknown = [replace(peer, keys=CurveKeys(*stranger, (server[0],))) for peer in peers]
    with Observer(OTHER, unknown, deadlines=Deadlines.all(0.5)) as asking, pytest.raises(DeadlineError):
        asking.status()
    with Publisher(
        OTHER, world.publisher.plan, peers, commit_path=world.folder / "next.json", deadlines=Deadlines.all(60.0)
    ) as publisher:
        assert {(r.state, r.version) for r in publisher.status().values()} == {(S.SERVING, old)}
        step = ColocatedEngine(world.engine, publisher, deadlines=DEADLINES)
        step.drain("drain")
        step.publish(old + 1, sources(old + 1))
        step.continue_()
    assert answers(world.ask(1, 1))[0].versions[0].version == str(old + 1)


def test_a_worker_that_dies_is_named_and_the_restarted_engine_rejoins(world: World) -> None:
    """SGLang ends the whole process tree of an engine's parent when a worker dies: here that is the trainer. The engine
    that takes its place reports that it has no version, and computes nothing until it has all of one."""
    publisher, step, version = world.publisher, world.step, world.next
    plugins: list[Any] = [one.settings["plugin"] for one in publisher.describe()]
    victim = plugins[1]["pid"]
    threading.Timer(0.5, os.kill, (victim, 9)).start()
    with pytest.raises(ChannelError, match=f"worker processes .*{victim}.* have ended"):
        ask_until(world.engine, time.monotonic() + 60)
    with pytest.raises(ChannelError, match="have ended"):
        step.drain()
    world.engine.shutdown()
    world.engine = started(world.folder, world.folder / "model")
    world.engine.start_receivers(RUN, world.folder / "s")
    standing = publisher.status()
    assert {(r.state, r.version, r.may_serve) for r in standing.values()} == {(S.TORN, None, False)}
    step.rejoin(world.engine)
    waiting = world.ask(2, 3)
    with pytest.raises(TornError, match="no version was published to this engine since it started"):
        step.continue_()
    world.engine.continue_()  # SGLang's own verb
    time.sleep(0.5)
    assert not any(future.done() for future in waiting)
    step.release()
    step.publish(version, sources(version), verify_sha256=True)
    step.resume()
    step.continue_()
    for first, answer in enumerate(answers(waiting)):
        check_tokens(answer, first + 1)
        assert [span.version for span in answer.versions] == [str(version)]
    assert {(r.state, r.version) for r in publisher.status().values()} == {(S.SERVING, version)}


def ask_until(engine: LocalEngine, until: float) -> None:
    while time.monotonic() < until:
        engine.server_info()
        time.sleep(0.1)
