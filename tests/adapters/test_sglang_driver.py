"""The five calls of a colocated step against an engine that behaves as SGLang does, its fatal assertions included."""

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from weftpub.errors import ChannelError, ConfigError, DeadlineError, StateError, TornError, WeftpubError
from weftpub.plan import ParameterSpec
from weftpub.publisher import EngineOutcome, Peer, PublishReport, ThreadGroup
from weftpub.receive import EngineDescription
from weftpub.version import EngineState
from weftpub.wire.messages import StatusReport
from weftpub_adapters.sglang import support
from weftpub_adapters.sglang.driver import (
    MODES,
    ColocatedEngine,
    Completion,
    DriverDeadlines,
    EngineHandle,
    EnginePhase,
    TagState,
    WorkerStanding,
)
from weftpub_adapters.sglang.driver import colocated as colocated_module
from weftpub_adapters.sglang.driver import memory as memory_module
from weftpub_adapters.sglang.driver.memory import wait_for_free
from weftpub_adapters.sglang.driver.requests import completion_of

GPU = "GPU-0"
SOON = DriverDeadlines(*(30.0,) * 8)  # of the clock below
WEIGHTS, CACHE = 1000, 400
TAGS = {"weights": WEIGHTS, "kv_cache": CACHE, "cuda_graph": 0}


class FatalAssertion(AssertionError):
    """What would have ended SGLang's scheduler."""


class FakeGpu:
    def __init__(self, free: int = 100) -> None:
        self.free = free
        self.coming: list[int] = []  # what is free at the next looks

    def measure(self, device: str) -> int | None:
        assert device == GPU
        self.free = self.coming.pop(0) if self.coming else self.free
        return self.free


class FakeEngine:
    """One engine: its memory, its pause, its version."""

    def __init__(self, gpu: FakeGpu, name: str = "sglang") -> None:
        self.name = name
        self.gpu = gpu
        self.calls: list[str] = []
        self.away: set[str] = set()
        self.paused = False
        self.version = "default"
        self.saver = True
        self.busy = 0  # flushes that still fail
        self.keeps = False  # memory that is not freed although release answers
        self.silent = ""  # the call that does not answer
        self.deaf = 0  # looks at its workers in which they still rest after continue_
        self.refusal = ""  # why they do not go on
        self.cached = True  # keys and values that its weights made
        self.publisher = FakePublisher.session  # that its receiver listens to
        self.going: tuple[int, ...] = ()  # other workers, which compute requests
        self.doing = ""  # what its workers say of their requests

    def start_receivers(
        self, run_id: str, directory: Any, *, first_rank: int = 0, version: int | None = None, tcp: Any = None
    ) -> Any:
        return [Peer(first_rank, f"ipc:///{self.name}", self.name)]

    def stop_receivers(self, run_id: str) -> None: ...

    def generate(
        self, prompts: Any, sampling: Any, *, logprobs: bool = False, seconds: float = 1.0
    ) -> list[Completion]:
        return []

    def pause(self, mode: str) -> None:
        self.calls.append(f"pause {mode}")
        self.paused = True

    def continue_(self) -> None:
        if self.away:
            raise FatalAssertion("a forward pass without memory")
        self.calls.append("continue")
        self.paused, self.cached = False, True

    def workers(self) -> tuple[WorkerStanding, ...]:
        self.deaf -= 1
        rests = self.paused or bool(self.refusal) or self.deaf >= 0
        return (
            WorkerStanding(0, rests, self.refusal, self.publisher, self.doing),
            *(WorkerStanding(rank, False, "", self.publisher, self.doing) for rank in self.going),
        )

    def flush(self) -> bool:
        self.busy -= 1
        flushed = self.paused and self.busy < 0
        self.cached = self.cached and not flushed
        return flushed

    def release(self, tags: Sequence[str]) -> None:
        self._answer("release", tags)
        for tag in tags:
            if not self.paused or tag in self.away:
                raise FatalAssertion(f"release of {tag}")
            self.away.add(tag)
            self.gpu.free += 0 if self.keeps else TAGS[tag]

    def resume(self, tags: Sequence[str]) -> None:
        self._answer("resume", tags)
        for tag in tags:
            if tag not in self.away or self.gpu.free < TAGS[tag]:
                raise FatalAssertion(f"resume of {tag}")
            self.away.discard(tag)
            self.gpu.free -= TAGS[tag]

    def set_weight_version(self, version: str) -> None:
        self.calls.append(f"version {version}")
        self.version = version

    def weight_version(self) -> str:
        return self.version

    def server_info(self) -> Mapping[str, Any]:
        return {"enable_memory_saver": self.saver}

    def shutdown(self) -> None: ...

    def _answer(self, call: str, tags: Sequence[str]) -> None:
        if self.silent == call:
            raise DeadlineError(f"{call}: no answer")
        self.calls.append(f"{call} {','.join(tags)}")


class FakePublisher:
    """Receivers as a publisher sees them, one per engine."""

    session = "5" * 32

    def __init__(self, *engines: FakeEngine) -> None:
        self.engines = list(engines)
        self.states = {engine.name: EngineState.SERVING for engine in engines}
        self.reasons: dict[str, str] = {}
        self.fails: Exception | None = None
        self.left_out: dict[str, str] = {}
        self.versions: dict[str, int | None] = dict.fromkeys(self.states)
        self.absent: set[str] = set()  # engines that cannot be described
        self.refusals: dict[str, str] = {}  # why an engine's worker would not go on
        self.stale = False
        self.asked = 0

    def pause(self) -> None:
        for name, state in self.states.items():
            if state is EngineState.SERVING:
                self.states[name] = EngineState.PAUSED

    def describe(self) -> list[EngineDescription]:
        specs = (ParameterSpec("w", (WEIGHTS,), (1,), "uint8"), ParameterSpec("rope", (10**9,), (1,), "uint8"))
        return [
            EngineDescription(
                engine=engine.name,
                rank=rank,
                world_size=1,
                device=GPU,
                parameters=specs,
                settings={"kept": ["rope"], "plugin": {"released": sorted(engine.away)}},
            )
            for rank, engine in enumerate(self.engines)
            if engine.name not in self.absent
        ]

    def publish(self, version: int, sources: Any, checksums: Any, *, resume: bool, **_: Any) -> PublishReport:
        assert not resume
        assert all(engine.paused and "weights" not in engine.away for engine in self.engines)
        assert not any(engine.cached for engine in self.engines), "keys and values of the old version stay"
        if self.fails is not None:
            self.states = dict.fromkeys(self.states, EngineState.TORN)
            raise self.fails
        outcomes = {}
        for name in self.states:
            lost = self.left_out.get(name, "")
            self.states[name] = EngineState.TORN if lost else EngineState.COMMITTED
            self.versions[name] = None if lost else version
            outcomes[name] = EngineOutcome(str(self.states[name]), None if lost else version, lost)
        return PublishReport("run", version, "0" * 64, {}, 0, 0, 0, 0, outcomes)

    def resume(self) -> None:
        for name, state in self.states.items():
            if state is EngineState.TORN and not self.left_out:
                raise TornError(f"{name} is torn")
            if state is not EngineState.TORN:
                self.states[name] = EngineState.SERVING

    def status(self) -> dict[int, StatusReport]:
        self.asked += 1
        if self.stale:
            raise StateError("a publisher that came later has taken over; this one is stale")
        fields: dict[str, Any] = {"digest": "", "incoming": None, "lost": None, "plan_digest": ""}
        return {
            rank: StatusReport(
                state=state,
                version=self.versions[name],
                intact=state is not EngineState.TORN,
                reason=self.reasons.get(name, ""),
                may_serve=name not in self.refusals,
                why_not=self.refusals.get(name, ""),
                resting=engine.paused,
                **fields,
            )
            for rank, (engine, (name, state)) in enumerate(zip(self.engines, self.states.items(), strict=True))
        }


class Clock:
    """Time that passes while a driver sleeps, and only then: no busy machine is late, and no deadline takes long."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    for module in (colocated_module, memory_module):
        monkeypatch.setattr(module, "time", made)
    return made


@pytest.fixture
def gpu() -> FakeGpu:
    return FakeGpu()


@pytest.fixture
def engine(gpu: FakeGpu) -> FakeEngine:
    return FakeEngine(gpu)


@pytest.fixture
def publisher(engine: FakeEngine) -> FakePublisher:
    return FakePublisher(engine)


@pytest.fixture
def step(engine: FakeEngine, publisher: FakePublisher, gpu: FakeGpu) -> ColocatedEngine:
    return colocated(engine, publisher, gpu)


def colocated(handles: Any, publisher: Any, gpu: FakeGpu, **settings: Any) -> ColocatedEngine:
    settings = {"deadlines": SOON, **settings}
    return ColocatedEngine(handles, publisher, measure=gpu.measure, spare_bytes=0, **settings)


def test_a_step_makes_its_calls_in_order_and_the_version_comes_last(
    step: ColocatedEngine, engine: FakeEngine, gpu: FakeGpu
) -> None:
    """A peer's version was visible with each bucket; a failed third one left the new version with old weights."""
    assert isinstance(engine, EngineHandle)
    step.drain("retract")
    step.release()
    assert gpu.free == 100 + WEIGHTS + CACHE
    report = step.publish(7, {})
    step.resume()
    step.continue_()
    assert report.version == 7
    assert engine.calls == [
        "pause retract",
        "release kv_cache",
        "release weights",
        "resume weights",
        "version 7",
        "resume kv_cache",
        "continue",
    ]
    assert step.standing["sglang"].phase is EnginePhase.SERVING
    assert step.standing["sglang"].version == 7
    assert gpu.free == 100
    assert {"drain", "release", "publish", "resume", "continue"} <= step.ms.keys()


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_reaches_the_engine(step: ColocatedEngine, engine: FakeEngine, mode: Any) -> None:
    step.drain(mode)
    step.drain(mode)
    assert engine.calls == [f"pause {mode}"]


def test_releasing_and_resuming_out_of_turn_is_refused_before_sglang_sees_it(
    step: ColocatedEngine, engine: FakeEngine
) -> None:
    """Releasing a tag twice, or resuming one never released, ended the engine."""
    for call in (step.release, step.resume, step.continue_, lambda: step.publish(1, {})):
        with pytest.raises(StateError, match="call drain first"):
            call()
    step.drain()
    step.release(["kv_cache"])
    with pytest.raises(StateError, match="kv_cache is released and cannot be released"):
        step.release()
    with pytest.raises(ConfigError, match=r"\['kv'\]: expected some of kv_cache, weights"):
        step.release(["kv"])
    step.release(["weights"])
    with pytest.raises(StateError, match="publish before resume"):
        step.resume()
    with pytest.raises(StateError, match=r"its memory is away \(kv_cache released, weights released\)"):
        step.continue_()
    step.publish(1, {})
    step.publish(2, {})
    step.resume()
    step.resume()
    step.continue_()
    assert engine.calls.count("resume weights") == engine.calls.count("resume kv_cache") == 1


def test_a_call_that_never_answers_leaves_its_tag_unknown_until_the_engine_is_restarted(
    step: ColocatedEngine, engine: FakeEngine
) -> None:
    step.drain()
    engine.silent = "release"
    with pytest.raises(DeadlineError, match="no answer"):
        step.release(["kv_cache"])
    engine.silent = ""
    with pytest.raises(StateError, match=r"kv_cache is unknown .* restart the engine"):
        step.release(["kv_cache"])
    assert step.standing["sglang"].tags["kv_cache"] == TagState.UNKNOWN


def test_memory_is_not_taken_for_free_because_release_answered(
    step: ColocatedEngine, engine: FakeEngine, gpu: FakeGpu
) -> None:
    """release returned before the memory was free, and the trainer ran out of memory."""
    step.drain()
    engine.keeps = True
    with pytest.raises(DeadlineError, match=r"release of weights of engine sglang: 1050 bytes .* 100 bytes"):
        step.release()
    assert gpu.free == 100


def test_weights_come_back_only_when_their_memory_is_there(
    step: ColocatedEngine, engine: FakeEngine, gpu: FakeGpu
) -> None:
    step.drain()
    step.release()
    gpu.free = WEIGHTS - 1  # the trainer kept too much
    with pytest.raises(DeadlineError, match=r"resume of weights .*: 1000 bytes .* 999 bytes .*empty_cache"):
        step.publish(1, {})
    assert "weights" in engine.away
    gpu.coming = [WEIGHTS - 1] * 3 + [WEIGHTS + CACHE]
    step.publish(1, {})
    step.resume()
    step.continue_()


def test_an_engine_without_a_memory_saver_is_told_so(step: ColocatedEngine, engine: FakeEngine) -> None:
    engine.saver = False
    step.drain()
    with pytest.raises(ConfigError, match="--enable-memory-saver"):
        step.release()


def test_a_busy_cache_is_waited_for_and_then_named(step: ColocatedEngine, engine: FakeEngine) -> None:
    engine.busy = 1
    step.drain()
    step.publish(1, {})
    step.continue_()
    engine.busy = 10**6
    with pytest.raises(DeadlineError, match="requests still hold it; it is paused"):
        step.drain()
    engine.doing, engine.going = "2 waiting for a grammar to be compiled", (1,)
    words = r"requests still hold it \(requests of rank 0, 1: 2 waiting for a grammar to be compiled\); it is paused"
    with pytest.raises(DeadlineError, match=words):
        step.drain()


def test_a_failed_publish_keeps_the_engine_paused_until_a_complete_one(
    step: ColocatedEngine, engine: FakeEngine, publisher: FakePublisher
) -> None:
    """A peer's `continue` ran after a failure, too, and the engine served what had arrived by then."""
    step.drain()
    step.release()
    publisher.fails = ChannelError("receiver rank 0: its process ended in phase chunk")
    with pytest.raises(ChannelError, match="process ended"):
        step.publish(5, {})
    step.resume()
    assert "version 5 was not committed" in step.standing["sglang"].fenced
    with pytest.raises(TornError):
        step.continue_()
    assert engine.paused
    assert engine.version == "default"
    publisher.fails = None
    step.drain()  # the loop's next step
    step.release()
    step.publish(6, {})
    step.resume()
    step.continue_()
    assert engine.version == "6"
    assert step.standing["sglang"].fenced == ""


def test_a_version_that_was_not_told_is_told_before_serving(step: ColocatedEngine, engine: FakeEngine) -> None:
    step.drain()
    step.publish(3, {})
    engine.version = "default"
    step.continue_()
    assert engine.calls[-2:] == ["version 3", "continue"]


def test_a_failed_engine_is_left_out_and_rejoins_after_a_restart(gpu: FakeGpu) -> None:
    first, second = FakeEngine(gpu, "a"), FakeEngine(gpu, "b")
    publisher = FakePublisher(first, second)
    step = colocated([first, second], publisher, gpu, on_engine_failure="continue")
    step.drain()
    publisher.left_out = {"b": "receiver rank 1: its process ended"}
    step.publish(1, {})
    step.continue_()
    assert (first.paused, second.paused) == (False, True)
    assert "its process ended" in step.standing["b"].out
    publisher.left_out = {}
    restarted = FakeEngine(gpu, "b")
    publisher.engines[1] = restarted
    step.drain()
    step.rejoin(restarted)
    with pytest.raises(TornError):
        step.continue_()
    assert "restarted" in step.standing["b"].fenced
    step.publish(2, {})
    step.continue_()
    assert (first.version, restarted.version) == ("2", "2")
    assert not restarted.paused
    with pytest.raises(ConfigError, match="keep its name"):
        step.rejoin(FakeEngine(gpu, "c"))


def test_an_engine_that_was_away_at_the_first_drain_joins_all_the_same(gpu: FakeGpu) -> None:
    """An engine that had died before the first drain was restarted and published to, and was held for torn for ever."""
    first, second = FakeEngine(gpu, "a"), FakeEngine(gpu, "b")
    publisher = FakePublisher(first, second)
    publisher.absent = {"b"}
    step = colocated([first, second], publisher, gpu, on_engine_failure="continue")
    step.drain()
    publisher.absent = set()
    restarted = FakeEngine(gpu, "b")
    publisher.engines[1] = restarted
    step.rejoin(restarted)
    step.publish(1, {})
    step.continue_()
    assert (restarted.version, restarted.paused) == ("1", False)
    step.drain()
    step.release(("weights",))
    assert step.standing["b"].tags["weights"] == "released"


def test_a_drain_that_fails_leaves_an_engine_that_can_go_on(engine: FakeEngine, step: ColocatedEngine) -> None:
    """The first drain gave up on the cache and said that continue_ lets the engine go on; it did not."""
    engine.busy = 1000
    with pytest.raises(DeadlineError, match="continue_ lets it go on"):
        step.drain()
    step.continue_()
    assert not engine.paused


def test_a_restarted_engine_of_an_older_version_stays_out_until_it_is_published_to(gpu: FakeGpu) -> None:
    """An engine was restarted from an old export, its receivers said so, and it served the old version beside others
    that served the present one."""
    first, second = FakeEngine(gpu, "a"), FakeEngine(gpu, "b")
    publisher = FakePublisher(first, second)
    step = colocated([first, second], publisher, gpu)
    step.drain()
    step.publish(4, {})
    step.continue_()
    step.drain()
    for version in (3, 4):
        restarted = publisher.engines[1] = FakeEngine(gpu, "b")
        publisher.states["b"], publisher.versions["b"] = EngineState.PAUSED, version
        step.rejoin(restarted)
        if version == 3:
            with pytest.raises(TornError, match="was restarted and holds version 3, version 4 was committed last"):
                step.continue_()
            assert restarted.paused
    step.continue_()
    assert (restarted.paused, restarted.version) == (False, "4")


def test_a_worker_that_would_not_go_on_is_named_and_nothing_is_told_to_go_on(
    engine: FakeEngine, publisher: FakePublisher, step: ColocatedEngine
) -> None:
    """A worker refused to go on and only its log said so: the engine was called serving, and its requests waited."""
    step.drain()
    step.publish(1, {})
    publisher.refusals = {"sglang": "the memory of kv_cache is released"}
    with pytest.raises(StateError, match="workers refuse: receiver rank 0: the memory of kv_cache is released"):
        step.continue_()
    assert "continue" not in engine.calls
    publisher.refusals = {}
    step.continue_()
    assert step.standing["sglang"].phase is EnginePhase.SERVING


def test_what_an_engine_computed_since_it_was_drained_is_not_kept(
    engine: FakeEngine, publisher: FakePublisher, step: ColocatedEngine
) -> None:
    """An engine that went on, though not with all workers, was paused again and published to at once: the new version
    served keys and values of the old one. So did one that had rejoined with the version that it served."""
    step.drain()
    step.publish(1, {})
    engine.deaf = 10**6
    with pytest.raises(DeadlineError, match="still at rest"):
        step.continue_()
    assert engine.cached
    engine.deaf = 0
    step.publish(2, {})
    step.continue_()
    publisher.engines[0] = restarted = FakeEngine(engine.gpu)
    step.rejoin(restarted)
    step.publish(3, {})
    assert not restarted.cached


def test_going_on_is_seen_not_assumed(engine: FakeEngine, publisher: FakePublisher, step: ColocatedEngine) -> None:
    step.drain()
    step.publish(1, {})
    engine.deaf = 3  # its scheduler is slow to hear
    step.continue_()
    assert step.standing["sglang"].phase is EnginePhase.SERVING
    step.drain()
    engine.deaf = 10**6
    with pytest.raises(DeadlineError, match=r"engine sglang, receiver ranks \[0\]: still at rest .* after continue_"):
        step.continue_()
    assert step.standing["sglang"].phase is EnginePhase.DRAINED
    assert engine.calls[-2:] == ["continue", "pause retract"]
    engine.deaf, engine.refusal = 0, "the memory of kv_cache is released"  # since the receivers were asked
    with pytest.raises(StateError, match="refuse: receiver rank 0: the memory of kv_cache is released"):
        step.continue_()
    assert engine.paused


def test_an_engine_that_does_not_go_on_is_left_out_where_the_policy_says_so(gpu: FakeGpu) -> None:
    first, second = FakeEngine(gpu, "a"), FakeEngine(gpu, "b")
    step = colocated([first, second], FakePublisher(first, second), gpu, on_engine_failure="continue")
    step.drain()
    step.publish(1, {})
    second.deaf = 10**6
    step.continue_()
    assert "still at rest" in step.standing["b"].out
    assert (step.standing["a"].phase, step.standing["b"].phase) == (EnginePhase.SERVING, EnginePhase.DRAINED)
    first.deaf = 10**6
    step.drain()
    with pytest.raises(StateError, match=r"no engine takes part any more: a: continue: engine a, receiver ranks \[0\]"):
        step.continue_()


def test_a_commit_that_the_driver_did_not_hear_of_is_told_before_serving(
    engine: FakeEngine, publisher: FakePublisher, step: ColocatedEngine
) -> None:
    """The reply to a commit was lost; the engine went on with version 5 and said that it was version 4."""
    step.drain()
    step.publish(4, {})
    step.continue_()
    step.drain()
    publisher.fails = ChannelError("no answer in phase commit")
    with pytest.raises(ChannelError):
        step.publish(5, {})
    publisher.states["sglang"], publisher.versions["sglang"] = EngineState.COMMITTED, 5
    step.continue_()
    assert engine.calls[-2:] == ["version 5", "continue"]
    assert step.standing["sglang"].version == 5


def test_memory_that_an_earlier_driver_released_is_known_to_be_away(gpu: FakeGpu) -> None:
    """A driver ended between publish and resume; the next one released the same cache again, and the worker ended."""
    engine = FakeEngine(gpu)
    before = colocated(engine, FakePublisher(engine), gpu)
    before.drain()
    before.release()
    before.publish(1, {})
    step = colocated(engine, FakePublisher(engine), gpu)
    step.drain()
    with pytest.raises(StateError, match="kv_cache is released and cannot be released"):
        step.release()
    with pytest.raises(StateError, match="its memory is away"):
        step.continue_()
    step.resume()
    step.continue_()
    assert not engine.paused


def test_an_engine_whose_weights_an_earlier_driver_released_is_published_to(gpu: FakeGpu) -> None:
    """A trainer ended while it trained, between release and publish. The next one could neither be told what was away
    nor bring it back; now it waits, as its own would, until the weights' memory is there."""
    engine = FakeEngine(gpu)
    before = colocated(engine, FakePublisher(engine), gpu)
    before.drain()
    before.release()
    step = colocated(engine, FakePublisher(engine), gpu)
    step.drain()
    gpu.free = WEIGHTS - 1
    with pytest.raises(DeadlineError, match=r"resume of weights .*: 1000 bytes .* 999 bytes"):
        step.publish(1, {})
    gpu.free = WEIGHTS + CACHE
    step.publish(1, {})
    step.resume()
    step.continue_()
    assert not engine.paused


@pytest.mark.parametrize("call", ["drain", "release", "publish", "resume"])
def test_a_driver_that_was_replaced_touches_no_engine(
    step: ColocatedEngine, engine: FakeEngine, publisher: FakePublisher, call: str
) -> None:
    """A trainer that had hung woke up after its successor had started, and paused the engine, which nobody let go on
    again; released, the scheduler would have ended."""
    calls = {
        "drain": step.drain,
        "release": step.release,
        "publish": lambda: step.publish(1, {}),
        "resume": step.resume,
    }
    for earlier in list(calls)[: list(calls).index(call)]:
        calls[earlier]()
    before = list(engine.calls)
    publisher.stale, engine.publisher = True, "a" * 32
    with pytest.raises(StateError, match="this one is stale"):
        calls[call]()
    assert engine.calls == before


def test_receivers_beside_a_serving_scheduler_are_not_asked(
    step: ColocatedEngine, engine: FakeEngine, publisher: FakePublisher
) -> None:
    """Every drain began with a question to each receiver, beside a scheduler that holds the interpreter: 227 ms in the
    median on an H200, where the drain itself took 3.7. The schedulers say to whom their receivers listen."""
    engine.publisher = ""  # nobody has come in yet
    step.drain()
    assert publisher.asked == 1
    engine.publisher = publisher.session
    for version in (1, 2):
        step.release()
        step.publish(version, {})
        step.resume()
        publisher.asked = 0
        step.continue_()
        step.drain()
    assert publisher.asked == 1  # continue_'s, while the engine rests


def test_a_driver_that_takes_over_again_drains_what_its_successor_left_serving(
    step: ColocatedEngine, engine: FakeEngine, publisher: FakePublisher, gpu: FakeGpu
) -> None:
    """Somebody published by hand while a trainer had the engine drained. The trainer took over again, took its engine
    for paused, and every drain after that failed: the engine, which served, "was not paused"."""
    step.drain()
    step.release()
    other = colocated(engine, publisher, gpu)
    other.drain()
    other.publish(1, {})
    other.resume()
    other.continue_()
    step.drain("restart")  # after take_over
    assert engine.calls[-2:] == ["continue", "pause restart"]
    assert set(step.standing["sglang"].tags.values()) == {"resident"}
    step.release()
    step.publish(2, {})
    step.resume()
    step.continue_()
    assert (engine.version, engine.paused, engine.away) == ("2", False, set())


def test_an_engine_of_which_one_worker_goes_on_is_paused_again(gpu: FakeGpu) -> None:
    engine = FakeEngine(gpu)
    publisher = FakePublisher(engine, engine)  # two ranks
    publisher.states, publisher.versions = dict.fromkeys("ab", EngineState.SERVING), dict.fromkeys("ab")
    step = colocated(engine, publisher, gpu)
    step.drain()
    engine.going = (1,)
    step.drain()
    assert engine.calls == ["pause retract"] * 2


@pytest.mark.parametrize("drained", [False, True], ids=["it served", "it was drained"])
def test_memory_that_another_driver_moved_meanwhile_is_read_anew(
    step: ColocatedEngine, engine: FakeEngine, publisher: FakePublisher, gpu: FakeGpu, drained: bool
) -> None:
    """A trainer took over again from a driver that had ended between release and publish. It held the cache and the
    weights for resident, and waited in vain for what a release of them would free."""
    step.drain()
    step.release()
    step.publish(1, {})
    step.resume()
    if not drained:
        step.continue_()
    other = colocated(engine, publisher, gpu)
    other.drain()
    other.release()
    step.drain()  # after take_over
    assert step.standing["sglang"].tags == {"kv_cache": "released", "weights": "released", "cuda_graph": "resident"}
    step.publish(2, {})
    step.resume()
    step.continue_()
    assert (engine.version, engine.paused, engine.away) == ("2", False, set())


def test_what_an_engine_says_does_not_stand_for_an_answer_that_never_came(
    step: ColocatedEngine, engine: FakeEngine
) -> None:
    """The call may yet be carried out, right after the engine said that the tag is resident."""
    step.drain()
    engine.silent = "release"
    with pytest.raises(DeadlineError, match="no answer"):
        step.release(["kv_cache"])
    step.drain()
    assert step.standing["sglang"].tags["kv_cache"] == TagState.UNKNOWN


def test_engines_that_serve_already_do_not_keep_another_from_going_on(gpu: FakeGpu) -> None:
    """An engine that was restarted from the present version rejoined while the others served, and nothing let it go
    on: continue_ was refused, as an engine was serving."""
    first, second = FakeEngine(gpu, "a"), FakeEngine(gpu, "b")
    publisher = FakePublisher(first, second)
    step = colocated([first, second], publisher, gpu)
    step.drain()
    step.publish(4, {})
    step.continue_()
    restarted = publisher.engines[1] = FakeEngine(gpu, "b")
    step.rejoin(restarted)
    before = list(first.calls)
    step.continue_()
    assert (restarted.version, restarted.paused) == ("4", False)
    assert first.calls == before
    with pytest.raises(StateError, match="engine a, b: continue_ refused while it is serving; call drain first"):
        step.continue_()


def test_calls_that_failed_half_way_are_repeated_for_the_engines_that_rest(gpu: FakeGpu) -> None:
    """One of two engines failed to go on, or to be drained. continue_ again, as its error says, was refused: the other
    one served."""
    first, second = FakeEngine(gpu, "a"), FakeEngine(gpu, "b")
    step = colocated([first, second], FakePublisher(first, second), gpu)
    step.drain()
    step.publish(1, {})
    second.deaf = 10**6
    with pytest.raises(DeadlineError, match=r"engine b, receiver ranks .*: still at rest"):
        step.continue_()
    second.deaf = 0
    step.continue_()
    assert (first.paused, second.paused) == (False, False)
    first.busy = 10**6
    with pytest.raises(DeadlineError, match="engine a: its cache could not be flushed"):
        step.drain()
    step.continue_()
    assert (first.paused, second.paused) == (False, False)
    assert {one.phase for one in step.standing.values()} == {EnginePhase.SERVING}


def test_ranks_without_handles_take_part_and_hear_of_failures(engine: FakeEngine, gpu: FakeGpu) -> None:
    groups = ThreadGroup.of_size(2)
    publishers = [FakePublisher(engine), FakePublisher(engine)]
    steps = [colocated(engine if rank == 0 else None, publishers[rank], gpu, group=groups[rank]) for rank in range(2)]
    found: list[Any] = [None, None]

    def run(rank: int) -> None:
        steps[rank].drain()
        steps[rank].publish(1, {})
        steps[rank].continue_()
        try:
            steps[rank].release()
        except StateError as error:
            found[rank] = str(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert all("call drain first" in str(text) for text in found)
    with pytest.raises(ConfigError, match="sender rank 1 has handles"):
        colocated(engine, publishers[1], gpu, group=groups[1])


def on_hosts(gpus: Sequence[FakeGpu], **settings: Any) -> tuple[list[FakeEngine], list[ColocatedEngine]]:
    """An engine on each of several hosts, and the ranks that drive them."""
    engines = [FakeEngine(gpu, f"host-{number}") for number, gpu in enumerate(gpus)]
    groups = ThreadGroup.of_size(len(engines))
    steps = [
        colocated(engine, FakePublisher(*engines), gpu, group=group, spread=True, **settings)
        for engine, gpu, group in zip(engines, gpus, groups, strict=True)
    ]
    return engines, steps


def on_all(steps: Sequence[ColocatedEngine], call: Callable[[ColocatedEngine], Any]) -> list[str]:
    """What each rank raises in a call that all make; "" for nothing."""

    def attempt(step: ColocatedEngine) -> str:
        try:
            call(step)
        except WeftpubError as error:
            return f"{type(error).__name__}: {error}"
        return ""

    with ThreadPoolExecutor(len(steps)) as pool:
        return list(pool.map(attempt, steps))


def test_each_host_drives_its_own_engine(gpu: FakeGpu) -> None:
    engines, steps = on_hosts([gpu, FakeGpu()])
    calls: list[Callable[[ColocatedEngine], Any]] = [
        lambda step: step.drain(),
        lambda step: step.release(),
        lambda step: step.publish(3, {}),
        lambda step: step.resume(),
        lambda step: step.continue_(),
    ]
    for call in calls:
        assert on_all(steps, call) == ["", ""]
    for engine in engines:
        assert engine.calls[-3:] == ["version 3", "resume kv_cache", "continue"]
        assert not engine.away
    assert [list(step.standing) for step in steps] == [["host-0"], ["host-1"]]
    refused = "StateError: engine host-0, host-1: continue_ refused while it is serving; call drain first"
    assert [text.removeprefix("sender rank 0: ") for text in on_all(steps, calls[-1])] == [refused] * 2


@pytest.mark.parametrize("host", [0, 1])
def test_what_fails_on_one_host_is_everybodys_error(gpu: FakeGpu, host: int) -> None:
    engines, steps = on_hosts([gpu, FakeGpu()])
    engines[host].busy = 10**6
    errors = on_all(steps, lambda step: step.drain())
    assert errors[host].startswith(f"DeadlineError: engine host-{host}: its cache could not be flushed")
    assert errors[1 - host].startswith(f"DeadlineError: sender rank {host}: engine host-{host}: its cache")
    engines[host].busy = 0
    on_all(steps, lambda step: step.drain())
    on_all(steps, lambda step: step.publish(1, {}))
    engines[host].deaf = 10**6
    errors = on_all(steps, lambda step: step.continue_())
    assert all(f"engine host-{host}, receiver ranks" in text for text in errors)
    engines[host].deaf = 0
    assert on_all(steps, lambda step: step.continue_()) == ["", ""], "the other one serves, and is left alone"
    assert not any(engine.paused for engine in engines)


def test_nothing_is_done_on_any_host_before_all_ranks_have_come(gpu: FakeGpu) -> None:
    engines, steps = on_hosts([gpu, FakeGpu()], deadlines=replace(SOON, control=0.2))
    (error,) = on_all(steps[:1], lambda step: step.drain())
    assert "sender rank 1" in error
    assert [engine.calls for engine in engines] == [[], []]


def test_a_host_whose_publisher_is_stale_touches_no_engine(gpu: FakeGpu) -> None:
    engines, steps = on_hosts([gpu, FakeGpu()])
    engines[1].publisher = "6" * 32  # that came later
    for step in steps:
        step._publisher.stale = True
    assert all("this one is stale" in text for text in on_all(steps, lambda step: step.drain()))
    assert [engine.calls for engine in engines] == [[], []]


def test_free_memory_that_cannot_be_measured_is_not_waited_for() -> None:
    assert wait_for_free(10**15, "GPU-x", "test", 5.0, measure=lambda device: None, remedy="") is None


def test_deadlines_are_checked() -> None:
    with pytest.raises(ConfigError, match="driver deadline flush"):
        replace(SOON, flush=0.0)


def test_answers_are_read_with_their_version_spans() -> None:
    meta = {
        "finish_reason": {"type": "length", "length": 3},
        "weight_version": "2",
        "weight_versions": [{"version": "1", "start": 0, "end": 2}, {"version": "2", "start": 2, "end": 3}],
        "output_token_logprobs": [[-0.5, 4, None], [-1.0, 5, None], [-2.0, 6, None]],
    }
    answer = completion_of({"output_ids": [4, 5, 6], "meta_info": meta})
    assert (answer.tokens, answer.finish, answer.logprobs) == ((4, 5, 6), "length", (-0.5, -1.0, -2.0))
    assert [(s.version, s.start, s.end) for s in answer.versions] == [("1", 0, 2), ("2", 2, 3)]
    plain = completion_of({"output_ids": [4], "meta_info": {"finish_reason": {"type": "stop"}, "weight_version": "1"}})
    assert [(s.version, s.start, s.end) for s in plain.versions] == [("1", 0, 1)]
    with pytest.raises(ChannelError, match="finish reason"):
        completion_of({"error": {"message": "boom"}})


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        ("0.5.10.post1", "no plugin entry points"),
        ("0.5.12", "requests in flight would be lost"),
        ("0.5.20", "requests in flight would be lost"),
        ("0.5.24", "0.5.24 is not supported; "),
        ("", "of an unknown version"),
    ],
)
def test_releases_that_were_not_checked_are_refused_with_the_reason(found: str, reason: str) -> None:
    """0.5.10.post1 is the release that AReaL pins."""
    with pytest.raises(ConfigError, match=f"{reason}.*0.5.21 to 0.5.23"):
        support.require_version(found)


@pytest.mark.parametrize("found", ["0.5.21", "0.5.22", "0.5.23", "0.5.23+local"])
def test_releases_that_were_checked_are_accepted(found: str) -> None:
    support.require_version(found)
