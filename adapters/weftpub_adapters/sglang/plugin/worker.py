"""The receiver of one worker: started and stopped on its scheduler's thread, served by a thread of its own.

All workers of an engine start and stop together: each tells the others how it went, over SGLang's own CPU group, and if
one cannot, none does. The same goes for the question whether requests may go on: ranks that disagreed would wait for
each other in the middle of a forward pass.
"""

import json
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from weftpub.errors import ChannelError, ConfigError, StateError, WeftpubError
from weftpub.plan.types import digest_of
from weftpub.receive import Receiver, serve
from weftpub.version import EngineState
from weftpub_adapters.sglang.plugin.checks import apart, refuse_unfit
from weftpub_adapters.sglang.plugin.doing import doing_of
from weftpub_adapters.sglang.plugin.live import LiveEngine
from weftpub_adapters.sglang.plugin.settings import ReceiverSettings
from weftpub_adapters.sglang.shared_experts import engine_side

__all__ = [
    "WorkerReceiver",
    "all_idle",
    "all_may_serve",
    "await_all",
    "standing_together",
    "start_together",
    "stop_together",
    "worker_of",
]

logger = logging.getLogger(__name__)

_ATTRIBUTE = "_weftpub_receiver"
_REPORT_BYTES = 4096  # of one rank's account of a start or stop
_THREAD_S = 30.0
_POLL_S = 0.02


class WorkerReceiver:
    """A receiver and the thread that serves it.

    Args:
        scheduler: of this worker; called on its thread, while its model's memory is resident. At rest, unless the
            weights hold a version.
        settings: what the driver asked for.
        directory: of the sockets.

    Raises:
        WeftpubError: this worker cannot be published to, or its socket cannot be served.
    """

    def __init__(self, scheduler: Any, settings: ReceiverSettings, directory: str) -> None:
        self.settings = settings
        self.directory = directory
        self.live = LiveEngine(scheduler, settings)
        side = engine_side(self.live, scheduler.tp_worker.model_runner.model, settings.version)
        self.receiver = Receiver(side, run_id=settings.run_id, version=settings.version, silence=settings.silence)
        self.address = settings.address(directory, self.live.rank)
        self._stop = threading.Event()
        self._ready = threading.Event()
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="weftpub receiver", daemon=True)

    @property
    def running(self) -> bool:
        """Whether it is served."""
        return self._thread.is_alive()

    def start(self) -> None:
        """Serve; on return requests are accepted. ChannelError if the socket cannot be used."""
        self._thread.start()
        if not self._ready.wait(_THREAD_S):
            raise ChannelError(f"{self.address}: the receiver did not start within {_THREAD_S:g} s")
        if self._error is not None:
            raise self._error

    def stop(self) -> None:
        """Serve no longer; what the weights hold, and whether they may be served, stays as it is."""
        self._stop.set()
        self._thread.join(_THREAD_S)
        if self._thread.is_alive():
            raise ChannelError(f"{self.address}: the receiver did not stop within {_THREAD_S:g} s; is a copy stuck?")

    def await_quiet(self) -> None:
        """Return when no bytes are on their way into the weights: their memory must not go from under a copy.

        Called once `live` says that the memory goes: then the next word of the publisher ends the receive. One that
        falls silent is given up after `silence` seconds, so this ends.
        """
        until = time.monotonic() + self.settings.silence + _THREAD_S
        while self.running and self.receiver.state.state is EngineState.RECEIVING and time.monotonic() < until:
            time.sleep(_POLL_S)

    def _listens(self, address: str) -> None:
        self.address = address
        self._ready.set()

    def _run(self) -> None:
        try:
            if self.live.device.type == "cuda":
                torch.cuda.set_device(self.live.device)  # a new thread's current device is the first one
            with torch.no_grad():
                keys = None if self.settings.tcp is None else self.settings.tcp.keys
                serve(self.receiver, self.address, self._stop, keys=keys, ready=self._listens)
        except Exception as error:  # kept for whoever starts it; SGLang's log has it in any case
            self._error = error
            logger.exception("weftpub: the receiver at %s ended", self.address)
            self._ready.set()


def worker_of(scheduler: Any) -> WorkerReceiver | None:
    """The receiver of a scheduler, running or stopped; None if there never was one."""
    return getattr(scheduler, _ATTRIBUTE, None)


def start_together(scheduler: Any, directory: str) -> tuple[bool, str]:
    """Start the receivers of all workers of an engine; called on every worker's scheduler thread at the same step.

    First all say whether they can; only then does any of them come to rest. A receiver that runs already for the same
    run and engine is left as it is, with its state.

    Returns:
        whether all serve now, and a JSON list of their ranks and addresses, or what kept some of them from it.
    """
    fault = apart()
    if fault:
        return False, fault
    before = worker_of(scheduler)
    settings, fault = _tried(lambda: _checked(scheduler, before, directory), directory)
    running = before is not None and before.running
    asked = "" if settings is None else digest_of(settings.model_dump(mode="json"))
    reports = _gather(scheduler, {"error": fault, "running": running, "asked": asked})
    faults = _faults(reports)
    if not faults and len({one["running"] for one in reports}) > 1:
        faults = "receivers run on some ranks and have ended on others; stop them all first (stop_receivers)"
    if not faults and len({one["asked"] for one in reports}) > 1:  # some would come to rest, and others would not
        faults = f"the settings in {directory} were replaced while workers read them; is another driver there?"
    if faults:
        return False, faults
    if before is not None and settings is None:  # they run already
        return True, json.dumps(_gather(scheduler, {"rank": before.live.rank, "address": before.address}))
    assert settings is not None
    rested = settings.version is None and not scheduler._engine_paused
    if rested:
        _come_to_rest(scheduler)
    worker, fault = _tried(lambda: _started(scheduler, settings, directory), directory)
    placed = {} if worker is None else {"rank": worker.live.rank, "address": worker.address}
    reports = _gather(scheduler, {"error": fault, **placed})
    faults = _faults(reports)
    if not faults:
        _keep(scheduler, worker)
        return True, json.dumps([{key: one[key] for key in ("rank", "address")} for one in reports])
    if worker is not None:
        worker.stop()
    if rested:
        _go_on(scheduler)
    return False, faults


def stop_together(scheduler: Any) -> tuple[bool, str]:
    """Stop the receivers of all workers of an engine; called like `start_together`."""
    worker = worker_of(scheduler)
    error = ""
    try:
        if worker is not None and worker.running:
            worker.stop()
    except WeftpubError as fault:
        error = str(fault)[: _REPORT_BYTES // 2]
    faults = [one["error"] for one in _gather(scheduler, {"error": error}) if one["error"]]
    return not faults, "; ".join(faults) or "receivers stopped"


def standing_together(scheduler: Any) -> tuple[bool, str]:
    """Which workers rest, and why they would not go on; called like `start_together`.

    Returns:
        whether there are receivers, and a JSON list of rank, `resting`, the reason as `error`, the session of the
        `publisher` that each listens to, and what it is `doing` with requests.
    """
    worker = worker_of(scheduler)
    if worker is None:  # on all ranks
        return False, "no receiver was ever started in this engine; start_receivers comes first"
    readiness = worker.live.readiness()
    own = {
        "rank": worker.live.rank,
        "resting": readiness.resting,
        "error": readiness.why_not,
        "publisher": worker.receiver.session,
        "doing": doing_of(scheduler),
    }
    return True, json.dumps(_gather(scheduler, own))


def all_may_serve(scheduler: Any, worker: WorkerReceiver) -> bool:
    """Whether every worker of the engine may compute requests; called on all of them at the same step."""
    return _all_agree(scheduler, worker.live.may_serve)


def all_idle(scheduler: Any, wrapper: Any) -> bool:
    """Whether no worker of the engine has requests that use its cache, or waits with an earlier flush for that, as each
    does by its own clock; called on all of them at the same step.
    """
    idle = scheduler.is_fully_idle(ignore_waiting=scheduler._engine_paused)
    return _all_agree(scheduler, bool(idle) and wrapper._pending is None)


def await_all(scheduler: Any) -> None:
    """Return when every worker of the engine has come here. SGLang answers a driver as soon as one worker is done, and
    the driver would take the others' memory for free, or for back, before it is.
    """
    dist.barrier(group=scheduler.weight_updater.tp_cpu_group)


def _all_agree(scheduler: Any, own: bool) -> bool:
    vote = torch.tensor([1 if own else 0], dtype=torch.int32)
    dist.all_reduce(vote, op=dist.ReduceOp.MIN, group=scheduler.weight_updater.tp_cpu_group)
    return bool(vote.item())


def _tried[T](action: Callable[[], T], directory: str) -> tuple[T | None, str]:
    """What an action gives, or what it raised, in words: SGLang would end the scheduler over it."""
    try:
        return action(), ""
    except Exception as error:  # told to the driver
        logger.exception("weftpub: no receiver for %s", directory)
        return None, f"{type(error).__name__}: {error}"[: _REPORT_BYTES // 2]


def _faults(reports: Sequence[Mapping[str, Any]]) -> str:
    return "; ".join(f"tensor parallel rank {rank}: {one['error']}" for rank, one in enumerate(reports) if one["error"])


def _checked(scheduler: Any, before: WorkerReceiver | None, directory: str) -> ReceiverSettings | None:
    """What is asked for, if this worker can do it; None if its receiver runs already."""
    settings = ReceiverSettings.read(directory)
    if before is not None and before.running:
        here = (before.settings.run_id, before.settings.engine, before.settings.first_rank, before.directory)
        if here == (settings.run_id, settings.engine, settings.first_rank, directory):
            return None
        raise StateError(
            f"a receiver of run {before.settings.run_id!r} runs at {before.address}; stop the receivers of that run "
            "first (stop_receivers)"
        )
    if before is not None and settings.version is not None:
        _require_held(before, settings.version)
    refuse_unfit(scheduler)
    return settings


def _require_held(before: WorkerReceiver, version: int) -> None:
    """ConfigError unless the weights hold the version that they are said to hold: their last receiver knows."""
    if not before.live.weights_intact():
        raise ConfigError(
            f"the weights hold no committed version ({before.live.why_not()}), so they are not version {version}; "
            "start the receivers without a version, and publish"
        )
    held = before.receiver.state.held
    if held != version:
        raise ConfigError(
            f"engine {before.settings.engine} receiver rank {before.live.rank}: its weights are said to be version "
            f"{version}, but hold version {held}, as its receiver noted before it was stopped; start the receivers "
            f"with version={held}, or without a version, and publish"
        )


def _started(scheduler: Any, settings: ReceiverSettings, directory: str) -> WorkerReceiver:
    worker = WorkerReceiver(scheduler, settings, directory)
    worker.start()
    return worker


def _keep(scheduler: Any, worker: WorkerReceiver | None) -> None:
    setattr(scheduler, _ATTRIBUTE, worker)


def _come_to_rest(scheduler: Any) -> None:
    """Stop computing with weights that are no published version: requests wait until one is there."""
    from sglang.srt.managers.io_struct import PauseGenerationReqInput

    scheduler.pause_generation(PauseGenerationReqInput(mode="retract"))


def _go_on(scheduler: Any) -> None:
    """Undo `_come_to_rest`."""
    from sglang.srt.managers.io_struct import ContinueGenerationReqInput

    scheduler.continue_generation(ContinueGenerationReqInput(torch_empty_cache=False))


def _gather(scheduler: Any, report: dict[str, Any]) -> list[dict[str, Any]]:
    """Every rank's report, as JSON in bytes: what ranks tell each other is not unpickled either."""
    group = scheduler.weight_updater.tp_cpu_group
    mine = torch.frombuffer(bytearray(_fitting(report)), dtype=torch.uint8)
    found = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(found, mine, group=group)
    return [json.loads(bytes(one.tolist()).decode()) for one in found]


def _fitting(report: dict[str, Any]) -> bytes:
    """A report in the bytes that all ranks expect, with less of its error if that is too long once it is escaped."""
    while len(data := json.dumps(report).encode()) > _REPORT_BYTES:
        report = {**report, "error": report["error"][: len(report["error"]) // 2]}
    return data.ljust(_REPORT_BYTES)
