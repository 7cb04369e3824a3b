"""A worker's engine side on SGLang's real layers, with a scheduler that says what it is told to."""

import asyncio
import json
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from threading import Timer
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from weftpub.errors import ConfigError, DeadlineError, StateError, TornError
from weftpub.receive import EngineSide, Readiness
from weftpub_adapters.sglang import build_model
from weftpub_adapters.sglang.driver import DriverDeadlines, LocalEngine
from weftpub_adapters.sglang.plugin import hooks, worker
from weftpub_adapters.sglang.plugin.checks import faults_of, refuse_unfit
from weftpub_adapters.sglang.plugin.doing import doing_of
from weftpub_adapters.sglang.plugin.live import LiveEngine
from weftpub_adapters.sglang.plugin.settings import ReceiverSettings
from weftpub_adapters.sglang.plugin.worker import WorkerReceiver, _checked, _fitting

pytestmark = pytest.mark.isolated("sglang")


class Config:
    """A transformers configuration, as far as it is asked."""

    def __init__(self, data: dict[str, Any]) -> None:
        self._data = data

    def to_json_string(self, use_diff: bool = True) -> str:
        return json.dumps(self._data)


@pytest.fixture
def alone() -> Iterator[Any]:
    """The group of an engine's workers, where there is one."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.fixture
def scheduler(hf_config: dict[str, Any], alone: Any) -> Iterator[Any]:
    served = build_model(hf_config)
    runner = SimpleNamespace(model=served.model, model_config=SimpleNamespace(hf_config=Config(hf_config)))
    with served.active():
        yield SimpleNamespace(
            tp_worker=SimpleNamespace(model_runner=runner),
            weight_updater=SimpleNamespace(offload_tags=set(), tp_cpu_group=alone),
            memory_saver_adapter=SimpleNamespace(enabled=True),
            server_args=SimpleNamespace(cpu_offload_gb=0, enable_lora=False, weight_cache_mode="off"),
            disaggregation_mode=SimpleNamespace(value="null"),
            draft_worker=None,
            _engine_paused=True,
            is_fully_idle=lambda ignore_waiting: True,
            grammar_manager=SimpleNamespace(has_waiting_grammars=lambda: False),
        )


def live(scheduler: Any, version: int | None = None) -> LiveEngine:
    return LiveEngine(
        scheduler, ReceiverSettings(run_id="run", engine="sglang", first_rank=3, version=version, pause=0.05)
    )


def test_a_worker_serves_only_what_was_committed_in_memory_that_stayed(scheduler: Any) -> None:
    """An engine went on with weights whose memory had been released and given back; their addresses were the same."""
    engine = live(scheduler)
    assert isinstance(engine, EngineSide)
    assert engine.describe().rank == 3
    assert not engine.may_serve
    with pytest.raises(TornError, match="no version is committed"):
        engine.resume()
    engine.post_process()
    engine.commit(1)
    assert not engine.may_serve
    engine.resume()
    assert engine.may_serve
    scheduler.weight_updater.offload_tags.add("kv_cache")
    assert not engine.may_serve
    assert engine.why_not() == "the memory of kv_cache is released"
    scheduler.weight_updater.offload_tags.clear()
    engine.memory_released()
    with pytest.raises(StateError, match="live_tensors refused, the memory of its weights is released"):
        engine.live_tensors()
    scheduler.weight_updater.offload_tags.add("weights")
    plugin: Any = engine.describe().settings["plugin"]  # a driver that was restarted learns what is away
    assert plugin["released"] == ["weights"]
    scheduler.weight_updater.offload_tags.clear()
    engine.memory_resumed()
    assert not engine.weights_intact()
    engine.post_process()
    engine.memory_released()
    engine.memory_resumed()
    with pytest.raises(StateError, match="released after version 2 was verified"):
        engine.commit(2)
    engine.fence("chunk 3 failed")
    with pytest.raises(TornError, match="the weights are torn: chunk 3 failed"):
        engine.resume()
    engine.post_process()
    engine.commit(3)
    engine.resume()
    assert (engine.may_serve, engine.fenced) == (True, "")
    assert engine.readiness() == Readiness("", resting=True)
    scheduler.weight_updater.offload_tags.add("kv_cache")
    scheduler._engine_paused = False
    assert engine.readiness() == Readiness("the memory of kv_cache is released", resting=False)


def test_a_release_refuses_new_receives_before_it_looks_for_old_ones(
    scheduler: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the look for a receive under way and the release one more began, and wrote into memory that went."""
    engine = live(scheduler, version=1)
    seen: list[bool] = []
    worker = SimpleNamespace(live=engine, await_quiet=lambda: seen.append(engine.resident()))
    monkeypatch.setattr(hooks, "worker_of", lambda scheduler: worker)
    updater = SimpleNamespace(scheduler=scheduler, memory_saver_adapter=None)

    def release(updater: Any, request: Any) -> str:
        scheduler.weight_updater.offload_tags.update(request.tags)
        return "released"

    def resume(updater: Any, request: Any) -> str:
        scheduler.weight_updater.offload_tags.difference_update(request.tags)
        return "resumed"

    assert hooks._release(release, updater, SimpleNamespace(tags=["kv_cache"])) == "released"
    assert (seen, engine.resident()) == ([], True)
    assert hooks._release(release, updater, SimpleNamespace(tags=["weights"])) == "released"
    assert (seen, engine.resident()) == ([False], False)
    assert hooks._resume(resume, updater, SimpleNamespace(tags=None)) == "resumed"
    assert engine.resident()
    assert not engine.weights_intact()


def test_what_is_released_or_resumed_already_does_not_end_the_scheduler(
    scheduler: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A driver released what another one had released in the meantime, and SGLang's scheduler ended: a driver knows
    only what went through itself."""
    from sglang.srt.managers.io_struct import ReleaseMemoryOccupationReqInput, ResumeMemoryOccupationReqInput
    from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager as Updater

    engine = live(scheduler, version=1)
    worker = SimpleNamespace(live=engine, await_quiet=lambda: None)
    monkeypatch.setattr(hooks, "worker_of", lambda scheduler: worker)
    away: set[str] = scheduler.weight_updater.offload_tags
    saver = SimpleNamespace(pause=lambda tag: paused.append(tag), resume=lambda tag: paused.remove(tag))
    paused: list[str] = []
    updater: Any = SimpleNamespace(
        scheduler=scheduler,
        offload_tags=away,
        is_fully_idle=lambda ignore_waiting: True,
        memory_saver_adapter=saver,
        flush_cache=lambda: None,
    )
    monkeypatch.setattr("torch.get_device_module", lambda: SimpleNamespace(synchronize=lambda: None))
    release, resume = Updater.release_memory_occupation, Updater.resume_memory_occupation
    for _ in range(2):
        hooks._release(release, updater, ReleaseMemoryOccupationReqInput(tags=["kv_cache"]))
        assert paused == ["kv_cache"]
    hooks._release(release, updater, ReleaseMemoryOccupationReqInput(tags=["kv_cache", "cuda_graph"]))
    assert paused == ["kv_cache", "cuda_graph"]
    for _ in range(2):
        hooks._resume(resume, updater, ResumeMemoryOccupationReqInput(tags=None))
        assert (paused, away) == ([], set())
    assert engine.weights_intact()


@pytest.mark.parametrize("receiver", [True, False], ids=["receiver", "none"])
def test_memory_is_unmapped_when_the_gpu_is_done_with_it(
    scheduler: Any, monkeypatch: pytest.MonkeyPatch, receiver: bool
) -> None:
    """On an H200 that three engines shared, one ended by an illegal memory access: it copied its weights' buffers, and
    unmapped the weights before the copies had run."""
    from sglang.srt.managers.io_struct import ReleaseMemoryOccupationReqInput
    from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager as Updater

    calls: list[str] = []

    class Model:
        def named_buffers(self) -> list[tuple[str, Any]]:
            calls.append("copy of the buffers")
            return []

    worker = SimpleNamespace(live=live(scheduler, version=1), await_quiet=lambda: None)
    monkeypatch.setattr(hooks, "worker_of", lambda scheduler: worker if receiver else None)
    monkeypatch.setattr("torch.get_device_module", lambda: SimpleNamespace(synchronize=lambda: calls.append("wait")))
    monkeypatch.setattr("torch.distributed.barrier", lambda group: None)
    saver = SimpleNamespace(pause=calls.append)
    updater: Any = SimpleNamespace(
        scheduler=scheduler,
        offload_tags=set(),
        is_fully_idle=lambda ignore_waiting: True,
        memory_saver_adapter=saver,
        flush_cache=lambda: None,
        tp_worker=SimpleNamespace(model_runner=SimpleNamespace(model=Model())),
        tp_cpu_group=None,
        _assert_weight_cache_inactive=lambda what: None,
    )
    hooks._release(Updater.release_memory_occupation, updater, ReleaseMemoryOccupationReqInput(tags=None))
    assert calls[:-1] == ["wait", "kv_cache", "copy of the buffers", "wait", "weights", "wait", "cuda_graph"]
    assert updater.memory_saver_adapter is saver


def test_a_scheduler_that_works_is_not_taken_for_one_at_rest(scheduler: Any) -> None:
    engine = live(scheduler, version=1)
    assert engine.may_serve
    scheduler._engine_paused = False
    with pytest.raises(StateError, match=r"was not paused after 0\.05 s; drain the engine"):
        engine.pause()
    scheduler._engine_paused, scheduler.is_fully_idle = True, lambda ignore_waiting: False
    with pytest.raises(StateError, match="still works on requests"):
        engine.pause()
    assert engine.may_serve
    scheduler.is_fully_idle = lambda ignore_waiting: ignore_waiting
    engine.pause()
    assert not engine.may_serve


def test_a_scheduler_that_is_going_on_is_not_found_at_rest(scheduler: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A publisher found the scheduler paused just while it was told to continue: it went on, the engine was taken for
    paused, and weights were written while requests read them."""
    engine = live(scheduler, version=1)
    worker = SimpleNamespace(live=engine)
    found: list[str] = []

    def vote(scheduler: Any, worker: Any) -> bool:
        allowed = worker.live.may_serve
        with pytest.raises(StateError):  # the receiver's thread comes between the vote and its consequence
            engine.pause()
        return allowed

    def go_on(scheduler: Any, request: Any) -> str:
        scheduler._engine_paused = False
        found.append("serves" if engine.may_serve else "serves although it was closed")
        return "went on"

    monkeypatch.setattr(hooks, "worker_of", lambda scheduler: worker)
    monkeypatch.setattr(hooks, "all_may_serve", vote)
    assert hooks._continue(go_on, scheduler, None) == "went on"
    assert found == ["serves"]
    scheduler._engine_paused = True
    engine.pause()
    monkeypatch.setattr(hooks, "all_may_serve", lambda scheduler, worker: worker.live.may_serve)
    assert hooks._continue(go_on, scheduler, None) is None


def test_stopped_receivers_start_again_only_with_the_version_that_the_weights_hold(
    scheduler: Any, tmp_path: Path
) -> None:
    """Receivers were stopped at version 2 and started again as version 7, a slip of the driver's: the engine served
    version 2, and all its answers said 7."""
    folder = tmp_path / "s"

    def asked(version: int | None) -> ReceiverSettings:
        settings = ReceiverSettings(run_id="run", engine="sglang", first_rank=3, version=version, pause=0.05)
        settings.write(folder)
        return settings

    before = WorkerReceiver(scheduler, asked(1), str(folder))
    assert not before.running
    assert _checked(scheduler, before, str(folder)) == asked(1)
    before.receiver.state.held = 2  # what a publish leaves
    for version in (1, 7):
        asked(version)
        with pytest.raises(
            ConfigError,
            match=f"engine sglang receiver rank 3: .* said to be version {version}, but hold version 2.*version=2",
        ):
            _checked(scheduler, before, str(folder))
    for version in (2, None):
        settings = asked(version)
        assert _checked(scheduler, before, str(folder)) == settings
    before.live.memory_released()
    asked(2)
    with pytest.raises(ConfigError, match="hold no committed version"):
        _checked(scheduler, before, str(folder))


def test_a_long_error_with_signs_to_escape_fits_into_a_report() -> None:
    """An error full of quotes grew when it was escaped, its report was cut in the middle, and reading it ended every
    scheduler of the engine."""
    for error in ("'\"\\" * 700, "ö" * 2048, "plain", ""):
        data = _fitting({"error": error, "running": False})
        assert len(data) == len(_fitting({"error": "", "running": True}))
        found = json.loads(data.decode())
        assert error.startswith(found["error"])
        assert bool(found["error"]) == bool(error)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"draft_worker": object()}, "speculative_algorithm"),
        ({"disaggregation_mode": SimpleNamespace(value="prefill")}, "disaggregation_mode"),
        ({"server_args": SimpleNamespace(cpu_offload_gb=4)}, "cpu_offload_gb"),
        ({"server_args": SimpleNamespace(enable_lora=True)}, "enable_lora"),
        ({"server_args": SimpleNamespace(weight_cache_mode="daemon")}, "weight_cache_mode"),
        ({"server_args": SimpleNamespace(tokenizer_worker_num=2)}, "tokenizer_worker_num"),
    ],
)
def test_engines_whose_weights_are_not_only_the_published_ones_are_refused(
    scheduler: Any, change: dict[str, Any], named: str
) -> None:
    refuse_unfit(scheduler)
    for name, value in change.items():
        setattr(scheduler, name, value)
    with pytest.raises(ConfigError, match=f"SGLang's {named} cannot be published to"):
        refuse_unfit(scheduler)


@pytest.mark.parametrize("setting", ["enable_dp_attention_local_control_broadcast", "elastic_ep_backend"])
def test_workers_that_act_at_different_steps_are_refused_before_they_wait_for_each_other(
    scheduler: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, setting: str
) -> None:
    """Groups of workers that were told to start receivers in different turns met in different exchanges: one waited for
    a report, the other for the sizes of the next batch."""
    parallel = SimpleNamespace(enable_dp_attention_local_control_broadcast=setting.startswith("enable"))
    backend = "mooncake" if setting.startswith("elastic") else None
    execution = SimpleNamespace(moe=SimpleNamespace(elastic_ep_backend=backend))
    monkeypatch.setattr("sglang.srt.runtime_context.get_parallel", lambda: parallel)
    monkeypatch.setattr("sglang.srt.runtime_context.get_exec", lambda: execution)
    monkeypatch.setattr(worker, "_gather", lambda *_: pytest.fail("waited for the others"))
    success, message = worker.start_together(scheduler, str(tmp_path))
    assert not success
    assert message.startswith(f"SGLang's {setting} cannot be published to")


@pytest.mark.parametrize("named", ["dp_rank", "attn_dp_rank"])
def test_data_parallel_groups_draw_random_numbers_of_their_own(monkeypatch: pytest.MonkeyPatch, named: str) -> None:
    """An engine with data-parallel attention over two groups was asked for four completions of one prompt: the first
    two came out equal, token by token, and so did the others. A group of GRPO's was half of what it seemed to be."""

    def drawn(group: int) -> list[int]:
        parallel = SimpleNamespace(**{"dp_rank": None, "attn_dp_rank": 0, named: group})
        monkeypatch.setattr("sglang.srt.runtime_context.get_parallel", lambda: parallel)
        scheduler = SimpleNamespace(random_seed=7)
        assert hooks._draw_apart(lambda one: torch.manual_seed(one.random_seed) and "made", scheduler) == "made"
        return torch.multinomial(torch.ones(4, 1000), 1).flatten().tolist()

    with torch.random.fork_rng(devices=[]):
        first, second, again = drawn(0), drawn(1), drawn(1)
    assert first != second
    assert second == again, "workers of one group sample alike"


def test_workers_that_read_different_settings_do_not_start(
    scheduler: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Another driver replaced the file while workers read it: one would have come to rest, and the other would have
    waited for it in the middle of a forward pass."""
    ReceiverSettings(run_id="run", engine="sglang").write(tmp_path / "s")
    gather = worker._gather
    monkeypatch.setattr(worker, "_gather", lambda s, own: [*gather(s, own), {**own, "asked": "something else"}])
    monkeypatch.setattr(worker, "_come_to_rest", lambda scheduler: pytest.fail("came to rest"))
    scheduler._engine_paused = False
    success, message = worker.start_together(scheduler, str(tmp_path / "s"))
    assert not success
    assert "were replaced while workers read them" in message


def test_a_cache_is_flushed_by_all_workers_or_by_none(scheduler: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups of data-parallel attention flush for themselves, and SGLang passes one answer on: a group with a request
    that waited for its grammar kept keys and values of the old version."""
    from sglang.srt.managers.io_struct import FlushCacheReqInput
    from sglang.srt.managers.scheduler_components.flush_wrapper import SchedulerFlushWrapper

    class Scheduler(SimpleNamespace):
        def flush_cache(self) -> bool:
            flushed.append(True)
            return True

    flushed: list[bool] = []
    here = Scheduler(**vars(scheduler))
    wrapper = SchedulerFlushWrapper(
        flush_cache=here.flush_cache, is_fully_idle=lambda: True, send_output=lambda *_: None
    )
    own: list[bool] = []

    def others(_: Any, idle: bool) -> bool:
        own.append(idle)
        return idle and not busy

    monkeypatch.setattr(worker, "_all_agree", others)
    busy, asked = True, FlushCacheReqInput(timeout_s=0.0)
    assert hooks._flush(SchedulerFlushWrapper.handle, wrapper, asked).success  # no receiver was ever started
    here._weftpub_receiver = SimpleNamespace()
    assert not hooks._flush(SchedulerFlushWrapper.handle, wrapper, asked).success
    assert (own, flushed) == ([True], [True])
    busy = False
    assert hooks._flush(SchedulerFlushWrapper.handle, wrapper, asked).success
    here.is_fully_idle = lambda ignore_waiting: False
    assert not hooks._flush(SchedulerFlushWrapper.handle, wrapper, asked).success
    assert (own, flushed) == ([True, True, False], [True, True])


def test_a_flush_that_waits_on_one_worker_keeps_every_worker_from_flushing(
    scheduler: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody's flush waited for idle workers, on each of them until a clock of its own had run out. In between the
    driver's was done by those that had stopped waiting, refused by the others, and answered with success."""
    from sglang.srt.managers.io_struct import FlushCacheReqInput
    from sglang.srt.managers.scheduler_components.flush_wrapper import SchedulerFlushWrapper

    class Scheduler(SimpleNamespace):
        def flush_cache(self) -> bool:
            return True

    here = Scheduler(**vars(scheduler), _weftpub_receiver=SimpleNamespace())
    wrapper = SchedulerFlushWrapper(
        flush_cache=here.flush_cache, is_fully_idle=lambda: False, send_output=lambda *_: None
    )
    own: list[bool] = []
    monkeypatch.setattr(worker, "_all_agree", lambda _, mine: own.append(mine) or mine)
    assert hooks._flush(SchedulerFlushWrapper.handle, wrapper, FlushCacheReqInput(timeout_s=600.0)) is None
    asked = FlushCacheReqInput(timeout_s=0.0)
    assert not hooks._flush(SchedulerFlushWrapper.handle, wrapper, asked).success
    wrapper._pending = None
    assert hooks._flush(SchedulerFlushWrapper.handle, wrapper, asked).success
    assert own == [False, True]


def test_a_worker_tells_what_is_missing(scheduler: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang swallows what a plugin raises: here no hook was applied, and the allocator cannot release memory. It was
    taken for one that can where the variable was written with a blank, which torch passes over.
    """

    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64, expandable_segments: True")
    faults = faults_of(scheduler, torch.device("cuda"))
    assert len(faults) == 2
    assert "did not apply the plugin's hooks for start, stop, release, resume, continue" in faults[0]
    assert "PYTORCH_CUDA_ALLOC_CONF sets expandable_segments:True" in faults[1]
    plugin: Any = live(scheduler).describe().settings["plugin"]
    assert plugin["memory_saver"] is True
    assert plugin["planner_loaded"] is False


class Grammars:
    """A grammar backend whose compilations end when the test says so."""

    def __init__(self) -> None:
        self.compiling: Future[Any] = Future()
        self.enable_strict_thinking = False

    def get_request_grammar_key(self, key: Any, **_: Any) -> Any:
        return key

    def get_cached_or_future_value(self, key: Any, reasoning: bool) -> tuple[Any, bool]:
        return self.compiling, False

    def set_cache(self, key: Any, value: Any) -> None: ...

    def reset(self) -> None: ...


def test_requests_that_wait_for_their_grammar_do_not_keep_a_paused_engine_busy(
    scheduler: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A paused scheduler never looked into its grammar queue, counted what was there as work, and could neither be
    flushed nor released: draining the engine ended at its deadline."""
    from sglang.srt.constrained.grammar_manager import GrammarManager
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.sampling.sampling_params import SamplingParams

    grammars: Any = GrammarManager.__new__(GrammarManager)
    backend = Grammars()
    vars(grammars).update(
        scheduler=scheduler,
        grammar_queue=[],
        grammar_backend=backend,
        _enable_strict_thinking=False,
        grammar_sync_size=1,
        pp_rank=0,
        pp_size=1,
        pp_group=None,
        SGLANG_GRAMMAR_POLL_INTERVAL=0.01,
        SGLANG_GRAMMAR_MAX_POLL_ITERATIONS=100,
    )
    nothing = SimpleNamespace(is_empty=lambda: True, any_staging_reqs=lambda: False)
    vars(scheduler).update(
        grammar_manager=grammars,
        waiting_queue=[],
        running_batch=nothing,
        chunked_req=None,
        dllm_manager=nothing,
        last_batch=None,
        enable_overlap=True,
        result_queue=deque(),
        _pp_microbatches_drained=lambda: True,
        enable_hisparse=False,
        enable_hierarchical_cache=False,
        enable_lmcache=False,
    )
    scheduler._add_request_to_queue = scheduler.waiting_queue.append
    request = Req("a", "", [1], SamplingParams(json_schema="{}"), vocab_size=10)
    assert grammars.process_req_with_grammar(request)
    monkeypatch.setattr(hooks, "worker_of", lambda scheduler: SimpleNamespace(running=True))

    def turn(scheduler: Any) -> None: ...

    def idle() -> bool:
        return Scheduler.is_fully_idle(scheduler, ignore_waiting=True)

    hooks._rest(turn, scheduler)
    assert not idle()  # it compiles
    assert doing_of(scheduler) == "1 waiting for a grammar to be compiled"
    backend.compiling.set_result(SimpleNamespace(copy=lambda: None))
    hooks._rest(turn, scheduler)
    assert idle()
    assert (scheduler.waiting_queue, grammars.grammar_queue) == ([request], [])
    assert doing_of(scheduler) == "1 waiting for their turn"
    assert request.grammar is not backend.compiling
    # One more comes between the flush and the release, and compiles while the release waits.
    late = Req("b", "", [1], SamplingParams(json_schema="{}"), vocab_size=10)
    backend.compiling = Future()
    assert grammars.process_req_with_grammar(late)
    worker = SimpleNamespace(running=True, live=live(scheduler), await_quiet=lambda: None)
    monkeypatch.setattr(hooks, "worker_of", lambda scheduler: worker)
    Timer(0.05, backend.compiling.set_result, (SimpleNamespace(copy=lambda: None),)).start()
    updater, tags = SimpleNamespace(scheduler=scheduler, memory_saver_adapter=None), SimpleNamespace(tags=["kv_cache"])
    assert hooks._release(lambda updater, request: idle(), updater, tags)
    assert scheduler.waiting_queue == [request, late]


def test_a_reply_that_comes_late_is_nobodys_but_its_own() -> None:
    """A flush was given up at its deadline. Its reply came later, and the next flush took it for its own: the cache of
    a busy engine was called flushed."""
    from sglang.srt.managers.communicator import FanOutCommunicator
    from sglang.srt.managers.io_struct import FlushCacheReqOutput

    sent: list[Any] = []
    flushes: Any = FanOutCommunicator(sent.append, 1)
    loop = asyncio.new_event_loop()

    async def flush_cache(timeout_s: float) -> Any:
        return (await flushes("flush"))[0]

    manager = SimpleNamespace(flush_cache=flush_cache, _subprocess_watchdog=None)
    engine: Any = SimpleNamespace(loop=loop, tokenizer_manager=manager, get_all_child_pids=list)
    handle = LocalEngine(engine, deadlines=DriverDeadlines(*(1.0,) * 8))

    def reply(success: bool) -> None:
        loop.call_soon_threadsafe(flushes.handle_recv, FlushCacheReqOutput(success=success))

    with pytest.raises(DeadlineError, match="phase flush"):
        handle.flush()
    with pytest.raises(DeadlineError, match="phase flush"):
        handle.flush()
    assert sent == ["flush"]  # the second waits for its turn, and is not sent behind anybody's back
    handle._deadlines = DriverDeadlines(*(60.0,) * 8)
    reply(True)
    loop.call_soon_threadsafe(loop.call_later, 0.05, reply, False)
    assert not handle.flush()
    assert sent == ["flush"] * 2
    handle.shutdown()
