"""What a driver needs of a serving engine, whichever way it reaches it: the protocol, and the plain data it speaks in.

A handle stands for one engine, all of its ranks. It is the only place that knows how requests and control calls get
there; `ColocatedEngine` decides which of them are allowed when.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

from weftpub.errors import ConfigError, WeftpubError
from weftpub.publisher import CurveKeys, Peer

__all__ = [
    "MODES",
    "Completion",
    "DriverDeadlines",
    "EngineHandle",
    "Mode",
    "TcpAccess",
    "VersionSpan",
    "WorkerStanding",
    "work_of",
]

Mode = Literal["drain", "retract", "restart", "abort"]
MODES: tuple[Mode, ...] = ("drain", "retract", "restart", "abort")


@dataclass(frozen=True)
class DriverDeadlines:
    """Seconds that each wait of a driver may take. Every wait has one.

    Attributes:
        start: until every worker serves its receiver.
        drain: until the requests in flight have ended, or have been given back.
        flush: until the cache could be flushed.
        memory: until memory that was released is measured as free, or memory that is needed becomes free.
        release, resume: until a memory tag is released or back.
        control: until any other call is answered.
        shutdown: until the engine's processes have ended.
    """

    start: float = 120.0
    drain: float = 600.0
    flush: float = 60.0
    memory: float = 60.0
    release: float = 120.0
    resume: float = 120.0
    control: float = 60.0
    shutdown: float = 60.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not 0 < value < 86_400:
                raise ConfigError(f"driver deadline {name}: expected seconds between 0 and a day, found {value}")


@dataclass(frozen=True)
class VersionSpan:
    """Output tokens `start` up to but not including `end` come from weights of `version`."""

    version: str
    start: int
    end: int


@dataclass(frozen=True)
class Completion:
    """One answer.

    Attributes:
        tokens: output token ids.
        text: as the engine decoded it; "" if it serves tokens only.
        finish: why it ended: "stop", "length", or "abort" for a request that was taken back unfinished.
        logprobs: of each output token, if asked for, else empty.
        scores: log-probabilities of the prompt's own tokens from `score_from` on, if asked for, else empty.
        versions: which weights made which tokens, in order, without gaps.
        attempts: how often it was begun; more than 1 after a `restart`.
        meta: the engine's own account of it.
    """

    tokens: tuple[int, ...]
    text: str
    finish: str
    logprobs: tuple[float, ...]
    scores: tuple[float, ...]
    versions: tuple[VersionSpan, ...]
    attempts: int
    meta: Mapping[str, Any]


@dataclass(frozen=True)
class WorkerStanding:
    """One worker of an engine, by its scheduler's word.

    Attributes:
        rank: receiver rank.
        resting: whether it computes no requests now.
        why_not: why it would not compute them if it was told to; "" if it would.
        publisher: session of the publisher that its receiver listens to; "" while none has come in.
        doing: how many requests it computes, or keeps waiting for what; "" if it has none.
    """

    rank: int
    resting: bool
    why_not: str
    publisher: str
    doing: str = ""


def work_of(handle: "EngineHandle") -> str:
    """What an engine's workers say of their requests, for the message of a wait that has ended in vain; "" if they say
    nothing.
    """
    try:
        workers = handle.workers()
    except WeftpubError:  # no receivers, or no answer: the message must do without
        return ""
    ranks: dict[str, list[int]] = {}
    for worker in workers:
        if worker.doing:
            ranks.setdefault(worker.doing, []).append(worker.rank)
    return "; ".join(f"requests of rank {', '.join(map(str, of))}: {doing}" for doing, of in ranks.items())


@dataclass(frozen=True)
class TcpAccess:
    """How receivers can be reached from other hosts.

    Attributes:
        host: this host's name or address there.
        receivers: their keys, and those that they admit; the secret goes to the engine's workers in an owner-only file.
        own: this process's keys, by which it looks whether they listen.
    """

    host: str
    receivers: CurveKeys
    own: CurveKeys


@runtime_checkable
class EngineHandle(Protocol):
    """One engine, all of its ranks. Methods may be called from several threads; each has a deadline of its own.

    Every method raises DeadlineError naming the engine when its wait outlives the deadline, and ChannelError when the
    engine refuses or is gone.
    """

    @property
    def name(self) -> str:
        """Name of the engine, shared by its ranks."""
        ...

    def start_receivers(
        self,
        run_id: str,
        directory: str | os.PathLike[str],
        *,
        first_rank: int = 0,
        version: int | None = None,
        tcp: TcpAccess | None = None,
    ) -> list[Peer]:
        """Have every worker serve a receiver, and prove that each does.

        Args:
            run_id: the run whose publishers are listened to.
            directory: owner-only folder for the sockets; made if it is not there. Short: a socket path has 107 bytes.
            first_rank: receiver rank of the engine's first worker, counted through all engines of the plan.
            version: the published version that the engine was loaded with, or holds by now if it was published to;
                None if it holds none, then it serves nothing until a complete publish.
            tcp: listen there, for an engine that a publisher on another host leads; None: on Unix sockets.

        Returns:
            a peer per worker, in the order of ranks; over TCP with this process's keys.
        """
        ...

    def stop_receivers(self, run_id: str) -> None:
        """End the receivers of a run; the engine goes on with the weights it has."""
        ...

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Mapping[str, Any] | Sequence[Mapping[str, Any]],
        *,
        logprobs: bool = False,
        score_from: Sequence[int] | None = None,
        seconds: float = 3600.0,
    ) -> list[Completion]:
        """Answer prompts (token ids); returns when all are answered. Requests made while the engine is held wait.

        Args:
            sampling: SGLang's sampling parameters, for all or one per prompt.
            logprobs: with the log-probability of each output token.
            score_from: for each prompt the position, 1 or later, from which on its own tokens are scored.
            seconds: for all of it, pauses included.
        """
        ...

    def pause(self, mode: Mode) -> None:
        """Stop computing with the weights, and let no new request begin.

        Args:
            mode: what becomes of requests in flight. "drain": they end first. "retract": they stop where they are and
                go on from there. "restart": they are taken back and begin again from their prompts. "abort": they end
                unfinished.
        """
        ...

    def continue_(self) -> None:
        """Go on computing, and admit requests."""
        ...

    def workers(self) -> tuple[WorkerStanding, ...]:
        """Every worker as it stands. Answered by the schedulers, after everything that they were told before."""
        ...

    def flush(self) -> bool:
        """Throw away the cache of keys and values; False if requests still use it."""
        ...

    def release(self, tags: Sequence[str]) -> None:
        """Free the memory behind tags. Only on an idle engine, and only tags that are resident: others kill it."""
        ...

    def resume(self, tags: Sequence[str]) -> None:
        """Bring memory back. Only tags that were released: others kill the engine."""
        ...

    def set_weight_version(self, version: str) -> None:
        """What answers report as the version of the weights, from here on."""
        ...

    def weight_version(self) -> str:
        """What answers report now."""
        ...

    def server_info(self) -> Mapping[str, Any]:
        """The engine's settings as it resolved them, and its state."""
        ...

    def shutdown(self) -> None:
        """End the engine's processes, if they are this handle's to end. May be called twice."""
        ...
