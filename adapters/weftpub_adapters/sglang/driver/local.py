"""An engine that this process started: `sglang.Engine`, driven through its own loop.

`Engine`'s blocking methods run its loop themselves and so cannot be used while requests are under way; here the loop
runs in a thread, and everything goes through the handle. Two habits of `Engine` do not suit a trainer's process and are
kept out by `LocalEngine.start`: a worker's death ends the whole process tree, and shutting down ends every child of the
process, whoever started it.
"""

import atexit
import os
import signal
import threading
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, Self

from weftpub.errors import ChannelError, ConfigError
from weftpub_adapters.sglang.driver.base import BaseEngine
from weftpub_adapters.sglang.driver.handle import DriverDeadlines
from weftpub_adapters.sglang.driver.loop import LoopThread
from weftpub_adapters.sglang.driver.replies import OwnReplies
from weftpub_adapters.sglang.driver.requests import Ask
from weftpub_adapters.sglang.support import require_supported

__all__ = ["LocalEngine", "note_death"]


class LocalEngine(BaseEngine):
    """`EngineHandle` over an `sglang.Engine` of this process.

    Args:
        engine: the engine; its own methods are not to be called any more.
        name: of the engine.
        deadlines: for every wait.
        silence: seconds without a word in the middle of a publish after which its publisher is taken for dead.
    """

    def __init__(
        self,
        engine: Any,
        *,
        name: str = "sglang",
        deadlines: DriverDeadlines | None = None,
        silence: float = 180.0,
    ) -> None:
        super().__init__(name, LoopThread(f"sglang engine {name}", engine.loop), deadlines, silence)
        self._engine = engine
        self._manager = engine.tokenizer_manager
        self._replies = OwnReplies()
        self._workers = {pid: _started(pid) for pid in engine.get_all_child_pids()}
        self._down = False

    @classmethod
    def start(
        cls,
        *,
        name: str = "sglang",
        deadlines: DriverDeadlines | None = None,
        silence: float = 180.0,
        **engine_arguments: Any,
    ) -> Self:
        """Start an engine whose workers may die without taking this process along.

        Args:
            engine_arguments: of `sglang.Engine`.

        Raises:
            ConfigError: this SGLang is not supported, or its signal of a dead worker would end this process.
        """
        require_supported()
        _require_quit_handler()
        from sglang.srt.entrypoints.engine import Engine

        engine = Engine(**{"custom_sigquit_handler": note_death, **engine_arguments})
        atexit.unregister(engine.shutdown)  # it would end every child of this process
        handle = cls(engine, name=name, deadlines=deadlines, silence=silence)
        atexit.register(handle.shutdown)
        return handle

    def shutdown(self) -> None:
        """End the engine's processes, and no others."""
        if self._down:
            return
        self._down = True
        atexit.unregister(self.shutdown)
        watchdog = getattr(self._manager, "_subprocess_watchdog", None)
        if watchdog is not None:
            watchdog.stop()
        self._loop.close()
        _end(self._workers, self._deadlines.shutdown)

    def _require_alive(self) -> None:
        ended = [pid for pid, started in self._workers.items() if not _exists(pid, started)]
        if ended:
            raise ChannelError(
                f"{self.where}: its worker processes {ended} have ended; shut the handle down and start the engine anew"
            )

    async def _send(self, request: str, ask: Ask) -> Mapping[str, Any]:
        try:
            return await self._engine.async_generate(**ask.fields(), rid=request)
        except ValueError as error:
            raise ChannelError(f"{self.where}: refused a request: {error}") from error

    async def _cancel(self, request: str) -> None:
        self._manager.abort_request(rid=request)

    async def _start(self, directory: str, run_id: str, backend: str) -> tuple[bool, str]:
        from sglang.srt.managers.io_struct import InitWeightsUpdateGroupReqInput

        request = InitWeightsUpdateGroupReqInput(
            master_address=directory,
            master_port=0,
            rank_offset=0,
            world_size=0,
            group_name=run_id,
            backend=backend,
        )
        return await self._together("start", lambda: self._manager.init_weights_update_group(request))

    async def _stop(self, run_id: str) -> tuple[bool, str]:
        from sglang.srt.managers.io_struct import DestroyWeightsUpdateGroupReqInput

        request = DestroyWeightsUpdateGroupReqInput(group_name=run_id)
        return await self._together("stop", lambda: self._manager.destroy_weights_update_group(request))

    async def _together(self, kind: str, call: Callable[[], Awaitable[tuple[bool, str]]]) -> tuple[bool, str]:
        """A call through a door that SGLang closes by assertions for engines that are several replicas."""
        try:
            return await self._replies(kind, call)
        except AssertionError as error:
            return False, f"SGLang refuses: {error}; start every replica as an engine of its own (dp_size=1)"

    async def _pause(self, mode: str) -> None:
        from sglang.srt.managers.io_struct import PauseGenerationReqInput

        self._manager.auto_create_handle_loop()
        await self._manager.pause_generation(PauseGenerationReqInput(mode=mode))

    async def _continue(self) -> None:
        from sglang.srt.managers.io_struct import ContinueGenerationReqInput

        self._manager.auto_create_handle_loop()
        await self._manager.continue_generation(ContinueGenerationReqInput(torch_empty_cache=False))

    async def _flush(self) -> bool:
        return bool((await self._replies("flush", lambda: self._manager.flush_cache(timeout_s=0.0))).success)

    async def _release(self, tags: list[str]) -> None:
        from sglang.srt.managers.io_struct import ReleaseMemoryOccupationReqInput

        request = ReleaseMemoryOccupationReqInput(tags=tags)
        await self._replies("release", lambda: self._manager.release_memory_occupation(request, None))

    async def _bring_back(self, tags: list[str]) -> None:
        from sglang.srt.managers.io_struct import ResumeMemoryOccupationReqInput

        request = ResumeMemoryOccupationReqInput(tags=tags)
        await self._replies("resume", lambda: self._manager.resume_memory_occupation(request, None))

    async def _set_version(self, version: str) -> None:
        from sglang.srt.managers.io_struct import UpdateWeightVersionReqInput

        request = UpdateWeightVersionReqInput(new_version=version, abort_all_requests=False)
        await self._replies("version", lambda: self._manager.update_weight_version(request))

    async def _version(self) -> str:
        return str(self._manager.config_value("weight_version"))

    async def _info(self) -> Mapping[str, Any]:
        from sglang.version import __version__

        states = await self._replies("state", self._manager.get_internal_state)
        return {**self._manager.server_args.resolved_dict(), "internal_states": states, "version": __version__}


def _require_quit_handler() -> None:
    """SGLang signals a dead worker with SIGQUIT. Its handler can only be set by the main thread; without one the signal
    ends the process.
    """
    if threading.current_thread() is threading.main_thread():
        return
    if signal.getsignal(signal.SIGQUIT) in (signal.SIG_DFL, None):
        raise ConfigError(
            "an engine that is started outside of the main thread would take this process along when a worker dies; "
            "call signal.signal(signal.SIGQUIT, weftpub_adapters.sglang.driver.note_death) in the main thread first"
        )


def note_death(signum: int, frame: object) -> None:
    """SGLang's signal that a child has died. The handle notices by itself; this process goes on."""


def _started(pid: int) -> int | None:
    """When a process started, in clock ticks of its kernel; None if it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in ("Z", "X") else int(fields[19])


def _exists(pid: int, started: int | None) -> bool:
    return started is not None and _started(pid) == started


def _end(processes: Mapping[int, int | None], seconds: float) -> None:
    """Ask processes to end, then end them; ChannelError names those that are still there."""
    for sent, allowed in ((signal.SIGTERM, min(5.0, seconds)), (signal.SIGKILL, seconds)):
        left = [pid for pid, started in processes.items() if _exists(pid, started)]
        for pid in left:
            os.kill(pid, sent)
        until = time.monotonic() + allowed
        while left and time.monotonic() < until:
            time.sleep(0.05)
            left = [pid for pid in left if _exists(pid, processes[pid])]
        if not left:
            return
    raise ChannelError(f"engine workers {left} did not end within {seconds:g} s")
