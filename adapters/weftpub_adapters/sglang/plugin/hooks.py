"""The plugin's entry point, and the places where it meets SGLang.

Doors into a worker, each on all ranks at once:

    init_weights_update_group(backend="weftpub", master_address=FOLDER)   over HTTP and from an Engine
    collective_rpc("weftpub_start_receiver", directory=FOLDER)            from an Engine
    init_weights_update_group(backend="weftpub-standing")                 which workers compute requests, and why not

The first two only name the folder in which `receivers.json` says what is asked for. Wrapped are also the release and
resume of memory, which take the weights away, and are answered when all workers are done; the flush of the cache, which
all workers do or none; `continue_generation`, which a worker that may not serve does not obey: its requests wait; and
the idle turns of a paused scheduler, in which requests that wait for their grammar go on to wait for the scheduler.
Without a receiver every hook passes through, but for two things that an engine needs in any case: memory is unmapped
when the GPU is done with it, and groups of data-parallel attention draw random numbers of their own.
"""

import logging
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from weftpub.errors import StateError
from weftpub_adapters.sglang.plugin.checks import HOOKED
from weftpub_adapters.sglang.plugin.settings import BACKEND, STANDING
from weftpub_adapters.sglang.plugin.worker import (
    all_idle,
    all_may_serve,
    await_all,
    standing_together,
    start_together,
    stop_together,
    worker_of,
)
from weftpub_adapters.sglang.shared_experts import share_on_load
from weftpub_adapters.sglang.support import require_supported

__all__ = ["register"]

logger = logging.getLogger(__name__)

_SCHEDULER = "sglang.srt.managers.scheduler"
_WEIGHTS = "weights"
_REST_S = 0.0002  # what a control call may wait longer for a paused scheduler


def register() -> None:
    """Entry point: SGLang calls it in every process of an engine, before anything else is built.

    A process that has not loaded the scheduler's module runs no scheduler, and is spared the import.

    Raises:
        ConfigError: this SGLang is not supported. SGLang logs it and goes on without the plugin, which a driver notices
            when it starts receivers.
    """
    require_supported()
    if _SCHEDULER not in sys.modules:
        return
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for name, hook in _HOOKS.items():
        HookRegistry.register(HOOKED[name], hook, HookType.AROUND)
    Scheduler.weftpub_start_receiver = _rpc_start
    Scheduler.weftpub_stop_receiver = _rpc_stop


def _rpc_start(scheduler: Any, directory: str) -> None:
    """Scheduler method: start this worker's receiver."""
    success, message = start_together(scheduler, directory)
    if not success:
        raise StateError(message)


def _rpc_stop(scheduler: Any) -> None:
    """Scheduler method: stop this worker's receiver."""
    success, message = stop_together(scheduler)
    if not success:
        raise StateError(message)


def _start(original: Callable[..., Any], updater: Any, request: Any) -> Any:
    if request.backend not in (BACKEND, STANDING):
        return original(updater, request)
    from sglang.srt.managers.io_struct import InitWeightsUpdateGroupReqOutput

    if request.backend == STANDING:
        success, message = standing_together(updater.scheduler)
    else:
        success, message = start_together(updater.scheduler, request.master_address)
    return InitWeightsUpdateGroupReqOutput(success=success, message=message)


def _stop(original: Callable[..., Any], updater: Any, request: Any) -> Any:
    worker = worker_of(updater.scheduler)
    if worker is None or worker.settings.run_id != request.group_name:
        return original(updater, request)
    from sglang.srt.managers.io_struct import DestroyWeightsUpdateGroupReqOutput

    success, message = stop_together(updater.scheduler)
    return DestroyWeightsUpdateGroupReqOutput(success=success, message=message)


class _SettledSaver:
    """A memory saver that unmaps nothing while the GPU may still use it.

    torch_memory_saver's `pause` waits for no kernel. SGLang answers requests when their results have been copied, while
    what a forward pass does afterwards may be under way, and copies the weights' buffers right before it lets go of
    them: on a busy GPU the engine ended by an illegal memory access (sgl-project/sglang#37932).
    """

    def __init__(self, saver: Any) -> None:
        self._saver = saver

    def pause(self, tag: str) -> None:
        torch.get_device_module().synchronize()
        self._saver.pause(tag)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._saver, name)


def _draw_apart(original: Callable[..., Any], scheduler: Any) -> Any:
    """Data-parallel groups of workers draw different random numbers.

    SGLang seeds all of them alike, and deals requests to them in turn: completions of one prompt, in as many groups at
    the same place of their batches, met the same random numbers and came out equal, token by token. Workers of one
    group sample each for itself, and stay alike. Requests with seeds of their own are not concerned.
    """
    output = original(scheduler)
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    group = parallel.attn_dp_rank if parallel.dp_rank is None else parallel.dp_rank
    if group:
        torch.manual_seed(scheduler.random_seed + group)
    return output


def _release(original: Callable[..., Any], updater: Any, request: Any) -> Any:
    saver = updater.memory_saver_adapter
    updater.memory_saver_adapter = _SettledSaver(saver)
    try:
        return _release_settled(original, updater, request)
    finally:
        updater.memory_saver_adapter = saver


def _release_settled(original: Callable[..., Any], updater: Any, request: Any) -> Any:
    scheduler = updater.scheduler
    worker = worker_of(scheduler)
    if worker is None:
        return original(updater, request)
    from sglang.srt.managers.io_struct import ReleaseMemoryOccupationReqOutput

    request.tags = [tag for tag in _tags_of(request) if tag not in scheduler.weight_updater.offload_tags]
    if not request.tags:
        logger.warning("weftpub: a release of memory that is away already changes nothing")
        return ReleaseMemoryOccupationReqOutput()
    if _WEIGHTS in request.tags:
        worker.live.memory_released()  # first: a receive that begins now is refused, or is seen and waited for
        worker.await_quiet()
    while scheduler._engine_paused and scheduler.grammar_manager.has_waiting_grammars():
        _admit_grammars(scheduler)  # one that came since the flush would end the scheduler by an assertion
    output = original(updater, request)
    await_all(scheduler)
    return output


def _resume(original: Callable[..., Any], updater: Any, request: Any) -> Any:
    scheduler = updater.scheduler
    worker = worker_of(scheduler)
    if worker is None:
        return original(updater, request)
    from sglang.srt.managers.io_struct import ResumeMemoryOccupationReqOutput

    request.tags = [tag for tag in _tags_of(request) if tag in scheduler.weight_updater.offload_tags]
    if not request.tags:
        logger.warning("weftpub: a resume of memory that is not away changes nothing")
        return ResumeMemoryOccupationReqOutput()
    output = original(updater, request)
    if _WEIGHTS in request.tags:
        worker.live.memory_resumed()
    await_all(updater.scheduler)
    return output


def _flush(original: Callable[..., Any], wrapper: Any, request: Any) -> Any:
    """Every group of data-parallel attention has a cache and requests of its own, and answers for itself. SGLang passes
    one of the answers on: a group that could not flush would serve keys and values of the old version after a publish.
    """
    scheduler = getattr(wrapper._flush_cache, "__self__", None)
    if scheduler is None or worker_of(scheduler) is None or request.timeout_s:  # one that waits does so on its own
        return original(wrapper, request)
    if not all_idle(scheduler, wrapper):
        from sglang.srt.managers.io_struct import FlushCacheReqOutput

        message = "requests of some worker still use the cache, or an earlier flush waits for them"
        return FlushCacheReqOutput(success=False, message=message)
    output = original(wrapper, request)
    await_all(scheduler)
    return output


def _continue(original: Callable[..., Any], scheduler: Any, request: Any) -> Any:
    worker = worker_of(scheduler)
    if worker is None:
        return original(scheduler, request)
    with worker.live.turn:
        if all_may_serve(scheduler, worker):
            return original(scheduler, request)
    logger.warning("weftpub: this engine does not go on, and requests wait: %s", worker.live.why_not())
    return None


def _rest(original: Callable[..., Any], scheduler: Any) -> Any:
    """A turn of a paused scheduler, whose loop spins: it would take the interpreter from the receiver's thread."""
    output = original(scheduler)
    worker = worker_of(scheduler)
    if worker is not None:  # on all ranks or on none
        _admit_grammars(scheduler)
        if worker.running:
            time.sleep(_REST_S)
    return output


def _admit_grammars(scheduler: Any) -> None:
    """Move requests whose grammar is compiled to those that wait for the scheduler, as a scheduler at work does before
    each batch.

    SGLang takes a paused scheduler for busy as long as one is in its grammar queue, and looks into that queue only when
    it makes a batch: nothing could be flushed, released or published any more. All ranks look in the same turn, as
    SGLang has them agree on which grammars are ready.
    """
    grammars = scheduler.grammar_manager
    if grammars.has_waiting_grammars():
        for request in grammars.get_ready_grammar_requests():
            scheduler._add_request_to_queue(request)


def _tags_of(request: Any) -> list[str]:
    """What a release or resume names, each once; SGLang takes none for all.

    SGLang ends its scheduler over a tag that is released twice, or resumed without having been released. A driver
    refuses both, but knows only what went through itself; the hooks leave out what is done already.
    """
    from sglang.srt.constants import GPU_MEMORY_ALL_TYPES

    return list(dict.fromkeys(request.tags or GPU_MEMORY_ALL_TYPES))


_HOOKS: dict[str, Callable[..., Any]] = {
    "start": _start,
    "stop": _stop,
    "release": _release,
    "resume": _resume,
    "continue": _continue,
    "load": share_on_load,
    "rest": _rest,
    "draw": _draw_apart,
    "flush": _flush,
}
