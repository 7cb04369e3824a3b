"""A run that is told to end: what it hears, whether it waits for a rollout, and that all ranks stop after one step. A
run that ends by an error: what the other ranks learn of it.
"""

import os
import signal
import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from weftmoe import settings as composed
from weftmoe.loop import run as module
from weftmoe.loop.checkpoint import LoopState
from weftmoe.loop.stop import CutShort, Pace, StopNotice, run_until
from weftmoe.rundir import claim, going_path, note_stop, stopped_path
from weftmoe.telemetry import Counters, Timers
from weftpub.errors import ChannelError, ConfigError, StateError

LIMIT_S = 60.0


# Hearing.


def test_a_signal_that_came_before_anybody_listened_counts() -> None:
    """A rank takes half a minute to load its modules; a job that was told to end in that time must not forget it."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    try:
        signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)  # pytest has threads that block nothing
        with StopNotice(1000.0) as notice:
            assert notice.given
            assert 0 < notice.left <= 1000.0
            left = notice.left
            os.kill(os.getpid(), signal.SIGUSR1)
            assert notice.left <= left, "it is said again and again; the first time counts"
        assert signal.SIGUSR1 in signal.pthread_sigmask(signal.SIG_BLOCK, ())
    finally:
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})


def test_what_is_said_after_the_end_ends_nobody() -> None:
    """The signal is repeated until the process is gone, and its exit code would be that of a death by it."""
    before = signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    try:
        with StopNotice(1000.0) as notice:
            assert not notice.given
            assert notice.left == float("inf")
        assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL
        with StopNotice(1000.0):
            os.kill(os.getpid(), signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGUSR1)
    finally:
        signal.signal(signal.SIGUSR1, before)


# Deciding.


def notice(left: float, grace: float = 100.0) -> Any:
    return SimpleNamespace(given=True, left=left, grace=grace)


@pytest.mark.parametrize(
    ("pace", "elapsed", "left", "enough"),
    [
        (Pace(), 0.0, 1e9, False),  # nothing is known yet, and nothing is lost
        (Pace(rollout=50, rest=20, save=12), 0.0, 90.0, True),  # 50 + 1.25 x 32
        (Pace(rollout=50, rest=20, save=12), 0.0, 89.0, False),
        (Pace(rollout=50, rest=20, save=12), 40.0, 50.0, True),
        (Pace(rollout=50, rest=20, save=12), 80.0, 40.0, True),  # it takes longer than the last one, and may yet
        (Pace(rollout=50, rest=20, save=12), 80.0, 39.0, False),
        (Pace(rollout=0, rest=20), 0.0, 57.0, True),  # a quarter of the grace for a save that nobody has seen
        (Pace(rollout=0, rest=20), 0.0, 56.0, False),
    ],
)
def test_a_rollout_goes_on_while_its_step_still_fits(pace: Pace, elapsed: float, left: float, enough: bool) -> None:
    assert pace.enough(notice(left), elapsed) is enough
    silent: Any = SimpleNamespace(given=False)
    assert pace.enough(silent, elapsed)


def test_the_pace_is_that_of_the_last_step() -> None:
    pace = Pace()
    pace.learn({"rollout": 5.0, "reward": 1.0, "train": 3.0, "save": 2.0, "total": 12.0})
    assert (pace.rollout, pace.rest, pace.save) == (6.0, 4.0, 2.0)
    pace.learn({"rollout": 5.0, "train": 3.0, "total": 9.0})
    assert (pace.rollout, pace.rest, pace.save) == (5.0, 4.0, 2.0)


# Waiting.


def test_work_that_is_waited_for_gives_its_result_or_raises() -> None:
    def fails() -> None:
        raise TimeoutError("its own")

    assert run_until(lambda: threading.current_thread().name, lambda elapsed: True) == "rollout"
    with pytest.raises(TimeoutError, match="its own"):
        run_until(fails, lambda elapsed: True)


def test_work_is_cut_short_and_not_begun_without_time() -> None:
    done, asked = threading.Event(), []

    def enough(elapsed: float) -> bool:
        asked.append(elapsed)
        return len(asked) < 3

    try:
        assert run_until(lambda: done.wait(LIMIT_S), enough) == CutShort()
    finally:
        done.set()
    assert asked[0] == 0.0
    assert len(asked) == 3
    began: list[int] = []
    assert run_until(lambda: began.append(1), lambda elapsed: False) == CutShort()
    assert began == []


# Sharing.


@pytest.mark.parametrize("in_place", [0, 60, 200])
def test_a_run_that_was_to_share_memory_does_not_copy_silently(monkeypatch: pytest.MonkeyPatch, in_place: int) -> None:
    """Both sides only warn when they cannot share: the run went on with twice the memory that was planned."""
    made: Any = object.__new__(module._Run)
    made._progress, made._timers = SimpleNamespace(stage=lambda text: None), Timers()
    made._rollout, made._trainer = SimpleNamespace(connect=lambda *_: None), SimpleNamespace(plan=None)
    made._trainer.expert_bytes = 100
    made._ranks = SimpleNamespace(gather=lambda mine: [mine, 100], broadcast=lambda value: value)
    made._state, made._shared = LoopState(0, {}, Counters(), {}), "/run/weft"
    published = SimpleNamespace(check=SimpleNamespace(in_place=in_place))
    monkeypatch.setattr(module, "publish_version", lambda *_: published)
    if in_place == 200:
        made._connect()
    else:
        with pytest.raises(ConfigError, match=rf"{in_place} of the experts' 200 bytes .* Set publish\.experts='copy'"):
            made._connect()


# The loop, whose trainer and engine are told to do nothing.


class Together:
    """Ranks that are threads of this process. A collective that not all of them join breaks, it does not hang."""

    def __init__(self, world: int) -> None:
        self._meeting = threading.Barrier(world, timeout=LIMIT_S)
        self._values: dict[int, Any] = {}

    def of(self, rank: int) -> Any:
        def gather(value: Any) -> list[Any]:
            self._values[rank] = value
            self._meeting.wait()
            found = [self._values[one] for one in sorted(self._values)]
            self._meeting.wait()
            return found

        return SimpleNamespace(
            first=rank == 0, gather=gather, broadcast=lambda value: gather(value)[0], barrier=self._meeting.wait
        )


class Looped:
    """`_Run` of one rank, with everything around its loop replaced by a list of what was asked for.

    Args:
        hears: called with what happens ("rollout 2", "train 2", "publish 2"); True from then on is the signal.
    """

    def __init__(self, out: Path, rank: int, ranks: Any, hears: Callable[[str], bool], *overrides: str) -> None:
        self.events: list[str] = []
        self.ended = threading.Event()
        self._hears = hears
        made: Any = object.__new__(module._Run)
        made._settings = composed.load(
            "fp8", smoke="cpu", overrides=[f"out={out}", "steps=5", "checkpoint.save=100", *overrides]
        )
        made._ranks, made._timers, made._device, made._pace = ranks, Timers(), None, Pace()
        made._notice = SimpleNamespace(given=False, left=0.0, grace=1.0)
        made._progress = SimpleNamespace(**dict.fromkeys(("phase", "advance", "note", "step"), lambda *_: None))
        made._state = LoopState(0, {}, Counters(), {})
        made._path = made._fixed = made._log = None
        made._identity, made._stopping, made._began, made._saved = {}, False, 0, 0
        made._sampler = SimpleNamespace(state=dict)
        made._memory = SimpleNamespace(look=lambda: None, take=lambda ranks: {})
        made._sinks = SimpleNamespace(write=lambda record: None)
        nothing: dict[str, Any] = {name: lambda *_: None for name in ("drain", "release", "attend", "dismiss")}
        made._rollout = SimpleNamespace(**nothing, close=self._close)
        made._trainer = SimpleNamespace(reload=lambda: self.note("reload"), rank=rank)
        made._collector = SimpleNamespace(collect=self._collect)
        made._record = lambda step, *_: SimpleNamespace(reward=0.5, seconds={"total": 1.0, "rollout": 0.1})
        made._require_version = lambda collected, served: None
        self.run = made

    def note(self, event: str) -> None:
        self.events.append(event)
        self.run._notice.given |= self._hears(event)

    def _collect(self, step: int, *_: Any, published: Any) -> Any:
        assert list(published) == list(range(step))
        self.note(f"rollout {step}")
        if self.run._notice.given:  # it is not to end by itself
            assert self.ended.wait(LIMIT_S)
        return SimpleNamespace(sequences=(), prompt_tokens=0, completion_tokens=0, completions=0)

    def _close(self) -> None:
        self.note("close")
        self.ended.set()


@pytest.fixture
def loops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Any]]:
    by_trainer: dict[int, Looped] = {}

    def noted(name: str, *, trainer: int, step: int) -> Callable[..., Any]:
        return lambda *args, **_: by_trainer[id(args[trainer])].note(f"{name} {args[step]}")

    monkeypatch.setattr(module, "train_step", noted("train", trainer=1, step=3))
    monkeypatch.setattr(module, "publish_version", noted("publish", trainer=0, step=2))
    monkeypatch.setattr(module, "allocator_memory", lambda device: {})
    monkeypatch.setattr(
        module.checkpoint,
        "save",
        lambda out, trainer, state, ranks: by_trainer[id(trainer)].note(f"save {state.step}"),
    )
    monkeypatch.setattr(module.checkpoint, "delete_old", lambda out, keep: None)

    def run(
        hears: list[Callable[[str], bool]],
        *overrides: str,
        prepare: Mapping[int, Callable[[Looped], None]] | None = None,
    ) -> list[Any]:
        """Each rank's events and result, or what it raised."""
        together, found = Together(len(hears)), [None] * len(hears)
        ranks = [Looped(tmp_path, rank, together.of(rank), heard, *overrides) for rank, heard in enumerate(hears)]
        by_trainer.update({id(one.run._trainer): one for one in ranks})
        for rank, change in (prepare or {}).items():
            change(ranks[rank])

        def go(rank: int) -> None:
            try:
                found[rank] = (ranks[rank].events, ranks[rank].run.steps())
            except BaseException as error:
                found[rank] = (ranks[rank].events, error)

        threads = [threading.Thread(target=go, args=(rank,), daemon=True) for rank in range(len(hears))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LIMIT_S)
        assert None not in found, "a rank hangs"
        return found

    return run


def on(event: str) -> Callable[[str], bool]:
    return lambda happened: happened == event


def never(event: str) -> bool:
    return False


def test_told_in_the_training_a_step_is_finished_saved_and_published(loops: Any, tmp_path: Path) -> None:
    ((events, result),) = loops([on("train 2")])
    step_1 = ["rollout 1", "reload", "train 1", "publish 1"]
    assert events == [*step_1, "rollout 2", "reload", "train 2", "save 2", "publish 2"]
    assert (result.steps, result.version, result.stopped) == (2, 2, True)
    assert stopped_path(tmp_path).read_text() == '{"step": 2}\n'


def test_told_in_the_rollout_the_step_before_is_saved(loops: Any, tmp_path: Path) -> None:
    ((events, result),) = loops([on("rollout 3")])
    assert events[-5:] == ["publish 2", "rollout 3", "close", "reload", "save 2"]
    assert (result.steps, result.version, result.stopped) == (2, 2, True)
    assert stopped_path(tmp_path).read_text() == '{"step": 2}\n'


def test_what_ends_a_rollout_ends_it_for_all_ranks(loops: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others waited for completions that would never come, until torchrun ended them."""

    def dies(event: str) -> bool:
        if event == "rollout 2":
            raise ChannelError("engine sglang-node-1: its worker processes [7] have ended")
        return False

    first, second = loops([dies, never])
    assert str(first[1]) == "engine sglang-node-1: its worker processes [7] have ended"
    assert str(second[1]) == f"sender rank 0: {first[1]}"
    assert isinstance(second[1], ChannelError)


def test_a_rank_whose_engine_failed_raises_its_own_error(loops: Any) -> None:
    """Rank 0 was told in words, and all ranks raised these: none raised the error that another start would meet again,
    and the job was queued again.
    """
    fault = KeyError("what the engine does fails")

    def told(event: str) -> bool:
        raise ChannelError(f"sender rank 1: KeyError: {fault}")

    def failed(one: Looped) -> None:
        one.run._rollout.attend = lambda *_: fault

    first, second = loops([told, never], prepare={1: failed})
    assert isinstance(first[1], ChannelError)
    assert second[1] is fault


def test_an_engine_that_does_not_end_keeps_nobody_from_saving(
    loops: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def close(self: Looped) -> None:
        self.ended.set()
        raise ChannelError("engine workers [7] did not end within 30 s")

    monkeypatch.setattr(Looped, "_close", close)
    ((events, result),) = loops([on("rollout 3")])
    assert events[-2:] == ["reload", "save 2"]
    assert (result.steps, result.stopped) == (2, True)


@pytest.mark.parametrize(("every", "saves"), [("100", ["save 2"]), ("2", []), ("off", [])])
def test_data_that_have_been_drawn_often_enough_end_the_run_as_its_last_step_does(
    loops: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, every: str, saves: list[str]
) -> None:
    """Epochs of the data could end a run in the texts only; and nothing of its last steps would have been saved."""
    collect = Looped._collect
    monkeypatch.setattr(
        Looped,
        "_collect",
        lambda self, step, *_, published: collect(self, step, published=published) if step < 3 else None,
    )
    ((events, result),) = loops([never], f"checkpoint.save={every}")
    assert events[events.index("publish 2") + 1 :] == ["close", *(["reload"] if saves else []), *saves]
    assert (result.steps, result.version, result.stopped) == (2, 2, False)
    assert not stopped_path(tmp_path).exists()


def test_a_run_that_makes_steps_says_so(loops: Any, tmp_path: Path) -> None:
    loops([on("train 2"), never])
    assert going_path(tmp_path).exists()


def test_what_is_saved_already_is_not_saved_again(loops: Any) -> None:
    ((events, result),) = loops([on("rollout 3")], "checkpoint.save=2")
    assert events[-4:] == ["save 2", "publish 2", "rollout 3", "close"]
    assert (result.steps, result.stopped) == (2, True)


def test_told_before_the_first_step_there_is_nothing_to_save(loops: Any) -> None:
    ((events, result),) = loops([on("rollout 1")])
    assert events == ["rollout 1", "close"]
    assert (result.steps, result.stopped) == (0, True)


@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.parametrize("event", ["train 2", "save 2", "publish 2"])
def test_all_ranks_stop_after_the_same_step_whoever_heard_it_when(loops: Any, rank: int, event: str) -> None:
    """A signal reaches ranks one after the other: one had gone on to the next step, and waited there for those that had
    left."""
    found = loops([on(event) if one == rank else never for one in range(3)], "checkpoint.save=2")
    assert [result.stopped for _, result in found] == [True] * 3
    assert len({result.steps for _, result in found}) == 1
    trained = [[happened for happened in events if happened.startswith(("train", "save"))] for events, _ in found]
    assert trained[0] == trained[1] == trained[2]
    last = found[0][1].steps
    assert trained[0][-1] == f"save {last}"
    # Before the ranks have decided, it is this step; after that, the next one, which rank 0 does not begin.
    assert last == (2 if event == "train 2" or rank == 0 else 3)


def test_the_last_step_is_the_end_and_no_stop(loops: Any, tmp_path: Path) -> None:
    ((events, result),) = loops([on("train 5")])
    assert events[-3:] == ["train 5", "save 5", "publish 5"]
    assert (result.steps, result.stopped) == (5, False)
    assert not stopped_path(tmp_path).exists()


@pytest.mark.parametrize("event", ["train 2", "rollout 2"])
def test_a_run_that_may_not_save_says_that_nothing_is_left_of_it(loops: Any, tmp_path: Path, event: str) -> None:
    """It must not be queued again: it would come to the same point, and no further."""
    ((events, error),) = loops([on(event)], "checkpoint.save=off")
    assert not [happened for happened in events if happened.startswith("save")]
    assert isinstance(error, StateError)
    assert "checkpoint.save is 'off': nothing was saved" in str(error)
    assert not stopped_path(tmp_path).exists()


@pytest.mark.parametrize("event", ["train 2", "rollout 3"])
def test_a_run_that_begins_anew_at_every_start_is_not_to_come_again(loops: Any, tmp_path: Path, event: str) -> None:
    """A job that was queued again with its `checkpoint.resume=false` set aside what it had just saved, every time, and
    never came further than one time limit."""
    ((events, error),) = loops([on(event)], "checkpoint.resume=false")
    assert "save 2" in events
    assert isinstance(error, StateError)
    assert "start it again with checkpoint.resume=true" in str(error)
    assert not stopped_path(tmp_path).exists()


def test_a_new_start_forgets_that_the_last_one_stopped(tmp_path: Path) -> None:
    """It would end with the code of a run that is to come again, for ever."""
    note_stop(tmp_path, 3)
    lock = claim(composed.load("fp8", smoke="cpu", overrides=[f"out={tmp_path}"]))
    assert lock is not None
    os.close(lock)
    assert not stopped_path(tmp_path).exists()


# Ending by an error.


@pytest.mark.parametrize(("error", "lost"), [(ConfigError("no such layout"), False), (ChannelError("it fell"), True)])
def test_an_error_is_told_before_anything_is_closed(
    error: Exception, lost: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank with an error of its own ended its engine first, for seconds. Meanwhile another one, which had been told
    of the error or had lost the connection, left with the code of a run that is to be queued again; and the job was.
    """
    seen: list[bool] = []

    class Fails:
        def __init__(self, settings: Any, device: Any, stack: ExitStack, notice: Any) -> None:
            stack.callback(lambda: seen.append(going_path(tmp_path).exists()))

        def steps(self) -> None:
            going_path(tmp_path).touch()
            raise error

    monkeypatch.setattr(module, "prepare_process", lambda settings: None)
    monkeypatch.setattr(module, "_Run", Fails)
    with pytest.raises(type(error), match=str(error)):
        module.run(composed.load("fp8", smoke="cpu", overrides=[f"out={tmp_path}"]))
    assert seen == [lost]


@pytest.mark.parametrize(
    ("world", "fails", "left"), [(1, False, True), (1, True, True), (2, False, True), (2, True, False)]
)
def test_a_rank_that_fails_keeps_others_connected_until_it_has_said_why(world: int, fails: bool, left: bool) -> None:
    """The others ended by a closed connection within a moment, and torchrun ended the rank whose fault it was while it
    still waited for its engine: nobody ever read its reason.
    """
    closed: list[bool] = []
    trainer: Any = SimpleNamespace(close=lambda: closed.append(True))
    with suppress(ConfigError), ExitStack() as stack:
        stack.push(partial(module._leave, trainer, world))
        if fails:
            raise ConfigError("no such layout")
    assert bool(closed) is left
