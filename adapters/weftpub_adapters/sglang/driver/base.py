"""What both ways of reaching an engine have in common: the order of the calls, their deadlines, and the proof that
every worker listens.
"""

import asyncio
import contextlib
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from weftpub.channel import Deadlines
from weftpub.errors import ChannelError, ConfigError, DeadlineError, WeftpubError
from weftpub.publisher import CurveKeys, Observer, Peer
from weftpub_adapters.sglang.driver.handle import (
    MODES,
    Completion,
    DriverDeadlines,
    Mode,
    TcpAccess,
    WorkerStanding,
    work_of,
)
from weftpub_adapters.sglang.driver.loop import LoopThread
from weftpub_adapters.sglang.driver.requests import Ask, RequestDesk
from weftpub_adapters.sglang.plugin.settings import BACKEND, STANDING, ReceiverSettings, TcpSettings
from weftpub_adapters.sglang.support import require_version

__all__ = ["BaseEngine"]

_FLUSH_AGAIN_S = (0.02, 0.5)  # between two looks whether an engine is idle: the first time, and at most
_BETWEEN_ANSWERS = " | "  # what SGLang puts between the messages of several schedulers


class BaseEngine(ABC):
    """An `EngineHandle` over a loop; subclasses say how each call travels.

    Args:
        name: of the engine.
        loop: runs every call; closed with the handle.
        deadlines: for every wait.
        silence: see `ReceiverSettings`.
    """

    def __init__(self, name: str, loop: LoopThread, deadlines: DriverDeadlines | None, silence: float) -> None:
        self.name = name
        self._loop = loop
        self._deadlines = DriverDeadlines() if deadlines is None else deadlines
        self._silence = silence
        self._desk = RequestDesk(name, loop, self._send, self._cancel)

    @property
    def where(self) -> str:
        """The engine in words, for messages."""
        return f"engine {self.name}"

    def start_receivers(
        self,
        run_id: str,
        directory: str | os.PathLike[str],
        *,
        first_rank: int = 0,
        version: int | None = None,
        tcp: TcpAccess | None = None,
    ) -> list[Peer]:
        """See `EngineHandle`. Calling it again for the same run finds the receivers that are there, in their state."""
        require_version(str(self.server_info().get("version", "")))
        folder = Path(directory).absolute()
        settings = ReceiverSettings.checked(
            run_id=run_id,
            engine=self.name,
            first_rank=first_rank,
            version=version,
            silence=self._silence,
            tcp=None if tcp is None else _tcp_settings(tcp),
        )
        settings.write(folder)
        success, message = self._call(
            self._start(str(folder), run_id, BACKEND),
            "start receivers",
            self._deadlines.start,
            "is the weftpub plugin installed where the engine runs, and not excluded by SGLANG_PLUGINS?",
        )
        if not success:
            raise ChannelError(f"{self.where}: receivers did not start: {message}")
        peers = self._peers(message, None if tcp is None else tcp.own)
        self._prove(run_id, peers)
        return peers

    def stop_receivers(self, run_id: str) -> None:
        """See `EngineHandle`."""
        success, message = self._call(self._stop(run_id), "stop receivers", self._deadlines.control)
        if not success:
            raise ChannelError(f"{self.where}: receivers did not stop: {message}")

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Mapping[str, Any] | Sequence[Mapping[str, Any]],
        *,
        logprobs: bool = False,
        score_from: Sequence[int] | None = None,
        seconds: float = 3600.0,
    ) -> list[Completion]:
        """See `EngineHandle`."""
        return self._desk.generate(
            prompts,
            sampling,
            logprobs=logprobs,
            score_from=score_from,
            seconds=seconds,
            require_alive=self._require_alive,
        )

    @property
    def in_flight(self) -> int:
        """Requests of this handle that the engine works on, those it has retracted among them."""
        return self._desk.running

    def pause(self, mode: Mode) -> None:
        """See `EngineHandle`. A pause that does not succeed lets the engine go on."""
        if mode not in MODES:
            raise ConfigError(f"mode {mode!r}: expected one of {', '.join(MODES)}")
        self._desk.hold()
        told = False
        try:
            if mode == "drain":
                self._drain()
            told = True
            if mode == "abort":
                self._call(self._desk.give_up(), "abort", self._deadlines.control)
                self._call(self._pause("abort"), "abort", self._deadlines.drain, "requests have not ended")
            self._call(self._pause("retract"), "pause", self._deadlines.control)
            if mode == "restart":  # after the pause: what an abort misses then has no token yet
                self._call(self._desk.take_back(), "restart", self._deadlines.control)
        except BaseException:
            if told:  # perhaps it paused all the same, and would keep everybody's requests waiting
                with contextlib.suppress(WeftpubError):
                    self._call(self._continue(), "continue after a failed pause", self._deadlines.control)
            self._desk.admit()
            raise

    def continue_(self) -> None:
        """See `EngineHandle`."""
        self._call(self._continue(), "continue", self._deadlines.control)
        self._desk.admit()

    def workers(self) -> tuple[WorkerStanding, ...]:
        """See `EngineHandle`."""
        success, message = self._call(self._start("", "", STANDING), "standing", self._deadlines.control)
        if not success:
            raise ChannelError(f"{self.where}: does not say whether it computes requests: {message}")
        found = {
            int(one["rank"]): WorkerStanding(
                int(one["rank"]),
                bool(one["resting"]),
                str(one["error"]),
                str(one.get("publisher", "")),
                str(one.get("doing", "")),
            )
            for one in self._entries(message)
        }
        return tuple(found.values())

    def flush(self) -> bool:
        """See `EngineHandle`."""
        return self._call(self._flush(), "flush", self._deadlines.flush)

    def release(self, tags: Sequence[str]) -> None:
        """See `EngineHandle`."""
        self._call(self._release(list(tags)), f"release of {', '.join(tags)}", self._deadlines.release)

    def resume(self, tags: Sequence[str]) -> None:
        """See `EngineHandle`."""
        self._call(self._bring_back(list(tags)), f"resume of {', '.join(tags)}", self._deadlines.resume)

    def set_weight_version(self, version: str) -> None:
        """See `EngineHandle`. No request is aborted for it."""
        self._call(self._set_version(version), "set weight version", self._deadlines.control)

    def weight_version(self) -> str:
        """See `EngineHandle`."""
        return self._call(self._version(), "weight version", self._deadlines.control)

    def server_info(self) -> Mapping[str, Any]:
        """See `EngineHandle`."""
        return self._call(self._info(), "server info", self._deadlines.control)

    def _drain(self) -> None:
        """Wait for all requests to end; DeadlineError says what they do instead."""
        cause = "answers are still being generated; give drain more seconds, or use mode 'retract'"
        try:
            self._call(self._drained(), "drain", self._deadlines.drain, cause)
        except DeadlineError as error:
            doing = work_of(self)
            if not doing:
                raise
            raise DeadlineError(f"{error} ({doing})") from None

    def _call[T](self, work: Coroutine[Any, Any, T], phase: str, seconds: float, cause: str = "") -> T:
        return self._loop.call(
            work,
            peer=self.where,
            phase=phase,
            seconds=seconds,
            cause=cause or "the scheduler does not answer; is it stuck in a forward pass, or ended?",
            require_alive=self._require_alive,
        )

    async def _drained(self) -> None:
        """Return when no request is under way, other clients' included, as far as they keep from sending more.

        SGLang would wait for that itself, but every worker by its own clock: at the end some would have flushed and
        others not.
        """
        await self._desk.ended()
        pause, longest = _FLUSH_AGAIN_S
        while not await self._flush():
            await asyncio.sleep(pause)
            pause = min(2 * pause, longest)

    def _peers(self, message: str, keys: CurveKeys | None) -> list[Peer]:
        """The receivers in SGLang's answer."""
        found = {(int(one["rank"]), str(one["address"])) for one in self._entries(message)}
        return [Peer(rank, address, self.name, keys) for rank, address in sorted(found)]

    def _entries(self, message: str) -> list[dict[str, Any]]:
        """What every worker says in SGLang's answer. Every group of data-parallel attention answers for all workers,
        and SGLang joins their answers.
        """
        found: list[dict[str, Any]] = []
        decoder, position = json.JSONDecoder(), 0
        try:
            while position < len(message):
                answer, position = decoder.raw_decode(message, position)
                found += [{"rank": int(one["rank"]), **one} for one in answer]
                position += len(_BETWEEN_ANSWERS)
        except (ValueError, KeyError, TypeError):
            found = []
        if not found:
            raise ChannelError(
                f"{self.where}: expected the receivers' addresses, found {message[:300]!r}; install the same weftpub "
                "where the engine runs"
            )
        return found

    def _prove(self, run_id: str, peers: Sequence[Peer]) -> None:
        """Ask every worker over its own socket: SGLang swallows what a plugin raises, and answers for rank 0 only.
        A publisher that is there already is not disturbed.
        """
        with Observer(run_id, peers, deadlines=Deadlines.all(self._deadlines.start)) as asking:
            described = asking.describe()
        for one in described:
            plugin = one.settings.get("plugin")
            faults = list(plugin.get("faults", ())) if isinstance(plugin, Mapping) else ["its plugin says nothing"]
            if one.world_size != len(peers):
                faults.append(f"it belongs to {one.world_size} workers, {len(peers)} listen")
            if faults:
                raise ConfigError(f"{self.where}, receiver rank {one.rank}: {'; '.join(map(str, faults))}")

    @abstractmethod
    def shutdown(self) -> None:
        """See `EngineHandle`."""

    @abstractmethod
    def _require_alive(self) -> None:
        """ChannelError if the engine is known to have ended."""

    @abstractmethod
    async def _send(self, request: str, ask: Ask) -> Mapping[str, Any]: ...

    @abstractmethod
    async def _cancel(self, request: str) -> None: ...

    @abstractmethod
    async def _start(self, directory: str, run_id: str, backend: str) -> tuple[bool, str]: ...

    @abstractmethod
    async def _stop(self, run_id: str) -> tuple[bool, str]: ...

    @abstractmethod
    async def _pause(self, mode: str) -> None: ...

    @abstractmethod
    async def _continue(self) -> None: ...

    @abstractmethod
    async def _flush(self) -> bool: ...

    @abstractmethod
    async def _release(self, tags: list[str]) -> None: ...

    @abstractmethod
    async def _bring_back(self, tags: list[str]) -> None: ...

    @abstractmethod
    async def _set_version(self, version: str) -> None: ...

    @abstractmethod
    async def _version(self) -> str: ...

    @abstractmethod
    async def _info(self) -> Mapping[str, Any]: ...


def _tcp_settings(tcp: TcpAccess) -> TcpSettings:
    """ConfigError for a name that no host can have."""
    keys = tcp.receivers
    try:
        return TcpSettings(host=tcp.host, public=keys.public, secret=keys.secret, admitted=keys.peers)
    except ValidationError as error:
        raise ConfigError(
            f"receivers on TCP: host {tcp.host!r} cannot be listened at: {error.errors()[0]['msg']}"
        ) from None
