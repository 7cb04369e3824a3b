"""Requests of one handle: when they may begin, which are under way, and how they are taken back.

A desk admits requests while it is open. To drain an engine it closes: what is under way ends, what comes waits. To
restart requests it takes them back: the paused engine is told to abort them, and each begins again from its prompt when
the desk opens. So a publish loses no request that came this way, whatever the mode; requests that others send to the
same server are theirs to repeat.

What SGLang does with an abort decides how they are taken back. It passes one abort of a request on, and ignores every
later one. A scheduler ignores the abort of a request that has not reached it, and gives what waits in a paused
scheduler back at once. So the engine is paused first. Whatever has computed a token lies in its queue then and is given
back; what an abort misses is still on its way, has computed nothing, and will be answered by the next version alone.
Only such a request cannot be aborted a second time, at the next publish: an answer of it that mixes versions is thrown
away, and it begins again.
"""

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from weftpub.errors import ChannelError, ConfigError
from weftpub_adapters.sglang.driver.handle import Completion, VersionSpan
from weftpub_adapters.sglang.driver.loop import LoopThread

__all__ = ["Ask", "RequestDesk", "completion_of"]


@dataclass(frozen=True)
class Ask:
    """One request.

    Attributes:
        prompt: token ids.
        sampling: SGLang's sampling parameters.
        logprobs: with log-probabilities of output tokens.
        score_from: position from which on the prompt's own tokens are scored; 0 for not at all.
    """

    prompt: list[int]
    sampling: Mapping[str, Any]
    logprobs: bool
    score_from: int = 0

    def fields(self) -> dict[str, Any]:
        """As SGLang's engine and server name them."""
        named: dict[str, Any] = {
            "input_ids": self.prompt,
            "sampling_params": dict(self.sampling),
            "return_logprob": self.logprobs or self.score_from > 0,
        }
        if self.score_from:
            named["logprob_start_len"] = self.score_from - 1  # the entry of the first token is empty
        return named


type Send = Callable[[str, "Ask"], Awaitable[Mapping[str, Any]]]
type Cancel = Callable[[str], Awaitable[None]]


class RequestDesk:
    """Admits, counts and takes back requests. Its coroutines run on one loop; its methods may be called by any thread.

    Args:
        engine: name for messages.
        loop: where requests run.
        send: sends (request id, prompt, sampling parameters, with logprobs) and returns the engine's answer.
        cancel: tells the engine to abort a request.
    """

    def __init__(self, engine: str, loop: LoopThread, send: Send, cancel: Cancel) -> None:
        self._engine = engine
        self._loop = loop
        self._send = send
        self._cancel = cancel
        self._open = asyncio.Event()
        self._open.set()
        self._changed = asyncio.Event()
        self._running: set[str] = set()
        self._recalled: set[str] = set()
        self._given_up: set[str] = set()

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Mapping[str, Any] | Sequence[Mapping[str, Any]],
        *,
        logprobs: bool,
        score_from: Sequence[int] | None,
        seconds: float,
        require_alive: Callable[[], None],
    ) -> list[Completion]:
        """See `EngineHandle.generate`."""
        each = [sampling] * len(prompts) if isinstance(sampling, Mapping) else list(sampling)
        if len(each) != len(prompts):
            raise ConfigError(f"{len(prompts)} prompts came with {len(each)} sets of sampling parameters")
        starts = [0] * len(prompts) if score_from is None else list(score_from)
        if any(not prompt for prompt in prompts):
            raise ConfigError("a prompt has no token; every request needs at least one")
        ends = [len(prompt) for prompt in prompts]
        if len(starts) != len(prompts) or (
            score_from is not None and not all(0 < s < n for s, n in zip(starts, ends, strict=True))
        ):
            raise ConfigError(f"score_from {starts}: expected for each prompt a position inside it, 1 or later")
        asks = [
            Ask(list(prompt), parameters, logprobs, start)
            for prompt, parameters, start in zip(prompts, each, starts, strict=True)
        ]

        async def all_of_them() -> list[Completion]:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._serve(ask)) for ask in asks]
            return [task.result() for task in tasks]

        try:
            return self._loop.call(
                all_of_them(),
                peer=f"engine {self._engine}",
                phase="generate",
                seconds=seconds,
                cause="requests are held while the engine is paused; was continue_ called, and do sampling parameters "
                "end the answers?",
                require_alive=require_alive,
            )
        except BaseExceptionGroup as group:
            first = group.exceptions[0]
            raise first from None

    def hold(self) -> None:
        """Let no new request begin."""
        self._loop.post(self._open.clear)

    def admit(self) -> None:
        """Let requests begin."""
        self._loop.post(self._open.set)

    @property
    def running(self) -> int:
        """Requests that the engine works on, those it has retracted among them."""
        return len(self._running)

    async def ended(self) -> None:
        """Return when no request is under way."""
        while self._running:
            self._changed.clear()
            await self._changed.wait()

    async def give_up(self) -> None:
        """What is under way is about to be aborted, and that is its answer."""
        self._given_up.update(self._running)

    async def take_back(self) -> None:
        """Have a paused engine give back what is under way, to begin again when the desk opens. Returns when the engine
        was told.
        """
        mine = tuple(self._running)
        self._recalled.update(mine)
        await asyncio.gather(*(self._cancel(request) for request in mine))

    async def _serve(self, ask: Ask) -> Completion:
        attempts = 0
        while True:
            await self._open.wait()
            attempts += 1
            request = f"weftpub-{uuid.uuid4().hex}"
            self._running.add(request)
            answer: Mapping[str, Any] | None = None
            try:
                answer = await self._send(request, ask)
            except ChannelError:
                # The abort of a request that still waits for its grammar is answered as a request that was wrong.
                if request not in self._recalled | self._given_up:
                    raise
            except asyncio.CancelledError:
                self._loop.post(lambda rid=request: asyncio.ensure_future(self._cancel(rid)))
                raise
            finally:
                self._running.discard(request)
                recalled = request in self._recalled
                self._recalled.discard(request)
                self._given_up.discard(request)
                self._changed.set()
            if answer is None:
                if recalled:
                    continue
                return Completion((), "", "abort", (), (), (), attempts, {})
            completion = completion_of(answer, attempts, ask)
            mixed = len({span.version for span in completion.versions}) > 1
            if not (recalled and (mixed or completion.finish == "abort")):
                return completion


def completion_of(answer: Mapping[str, Any], attempts: int = 1, ask: Ask | None = None) -> Completion:
    """An SGLang answer as plain data; ChannelError if it is none."""
    meta = answer.get("meta_info")
    if not isinstance(meta, Mapping) or not isinstance(meta.get("finish_reason"), Mapping):
        raise ChannelError(f"expected an answer with meta_info and a finish reason, found {str(answer)[:200]}")
    tokens = tuple(int(token) for token in answer.get("output_ids") or ())
    spans = meta.get("weight_versions") or [{"version": meta.get("weight_version", ""), "start": 0, "end": len(tokens)}]
    return Completion(
        tokens=tokens,
        text=str(answer.get("text") or ""),
        finish=str(meta["finish_reason"].get("type", "")),
        logprobs=tuple(float(entry[0]) for entry in meta.get("output_token_logprobs") or ()),
        scores=() if ask is None or not ask.score_from else _scores(meta, ask),
        versions=tuple(VersionSpan(str(s["version"]), int(s["start"]), int(s["end"])) for s in spans),
        attempts=attempts,
        meta=dict(meta),
    )


def _scores(meta: Mapping[str, Any], ask: Ask) -> tuple[float, ...]:
    """Log-probabilities of the prompt's tokens from `score_from` on; ChannelError if there is not one for each."""
    found = [entry[0] for entry in meta.get("input_token_logprobs") or ()][1:]
    wanted = len(ask.prompt) - ask.score_from
    if len(found) != wanted or any(value is None for value in found):
        raise ChannelError(f"expected {wanted} scores of the prompt's tokens, found {len(found)}")
    return tuple(map(float, found))
