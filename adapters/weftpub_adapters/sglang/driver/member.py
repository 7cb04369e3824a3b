"""What a driver knows of one engine, and what must hold before the engine may do something."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

import torch

from weftpub.errors import StateError, TornError
from weftpub.version import EngineState
from weftpub.wire.description import EngineDescription
from weftpub.wire.messages import StatusReport
from weftpub_adapters.sglang.driver.handle import EngineHandle, WorkerStanding
from weftpub_adapters.sglang.driver.memory import MemoryTags, TagState

__all__ = ["EnginePhase", "EngineStanding", "Member", "parameter_bytes", "refuse"]


class EnginePhase(StrEnum):
    """What the driver lets an engine do."""

    SERVING = "serving"
    DRAINED = "drained"


@dataclass(frozen=True)
class EngineStanding:
    """Where one engine stands, as its driver knows.

    Attributes:
        phase: serving or drained.
        tags: state of every memory tag.
        version: the version that was committed last through this driver, None before the first.
        fenced: why it may not serve, "" if it may.
        out: why it takes no part any more, "" if it does.
    """

    phase: EnginePhase
    tags: dict[str, str]
    version: int | None
    fenced: str
    out: str


@dataclass
class Member:
    """One engine and what is known of it."""

    handle: EngineHandle
    tags: MemoryTags
    phase: EnginePhase = EnginePhase.SERVING
    version: int | None = None
    fenced: str = ""
    out: str = ""
    behind: int | None = None  # restarted: the version that it must hold before it serves, unless it is published to
    freed: dict[str, dict[str, int]] = field(default_factory=dict)  # tag -> GPU -> bytes that its release gave back
    weights: dict[str, int] | None = None  # GPU -> bytes of parameters
    saves: bool | None = None  # whether its memory can be released
    flushed: bool = False  # whether its cache is empty, as nothing was computed since it was flushed
    workers: tuple[WorkerStanding, ...] = ()  # as they stood when they were asked last

    @property
    def name(self) -> str:
        return self.handle.name

    @property
    def devices(self) -> tuple[str, ...]:
        return tuple(self.weights or ())

    def require_drained(self, call: str) -> None:
        if self.phase is not EnginePhase.DRAINED:
            raise StateError(f"engine {self.name}: {call} refused while it is serving; call drain first")

    def require_resident(self) -> None:
        """StateError while some of its memory is away."""
        if not self.tags.resident:
            states = {tag: self.tags[tag] for tag in self.tags}
            away = ", ".join(f"{tag} {state}" for tag, state in states.items() if state is not TagState.RESIDENT)
            raise StateError(
                f"engine {self.name} cannot go on, its memory is away ({away}); publish brings back the weights, "
                "resume the rest"
            )

    def require_ready(self, ranks: Mapping[int, StatusReport | None]) -> None:
        """See by the word of its ranks that it may serve, and note the version: a commit whose end the driver did not
        hear of is a commit all the same.

        Raises:
            TornError: a rank does not serve, or what it would serve is not what was committed last. StateError: a rank
                would not go on; names it, with its reason.
        """
        versions = {report.version for report in ranks.values() if report is not None}
        idle = {rank: report for rank, report in ranks.items() if report is None or not _serves(report)}
        if idle or len(versions) != 1:
            why = "; ".join(_standing(rank, report) for rank, report in idle.items())
            why = why or f"its ranks hold versions {sorted(map(str, versions))}"
            raise TornError(
                f"engine {self.name} may not serve: {f'{self.fenced}; ' if self.fenced else ''}{why}; publish a "
                "complete version"
            )
        if self.behind is not None and versions != {self.behind}:
            raise TornError(
                f"engine {self.name} was restarted and holds version {versions.pop()}, version {self.behind} was "
                "committed last; publish a complete version"
            )
        refuse(self.name, {rank: r.why_not for rank, r in ranks.items() if r is not None and not r.may_serve})
        self.version = versions.pop()


def refuse(engine: str, reasons: Mapping[int, str]) -> None:
    """StateError, naming the workers, if some would not go on."""
    if reasons:
        named = "; ".join(f"receiver rank {rank}: {reason}" for rank, reason in reasons.items())
        raise StateError(f"engine {engine} does not go on, and its requests wait, as workers refuse: {named}")


def parameter_bytes(one: EngineDescription) -> int:
    """Bytes of a rank's parameters; what the engine keeps, and experts that the trainer maps too, stay through a
    release.
    """
    stays = one.settings.get("kept")
    shared = one.settings.get("shared_memory")
    kept = (set(stays) if isinstance(stays, list) else set()) | (set(shared) if isinstance(shared, dict) else set())
    sizes = (
        torch.Size(spec.shape).numel() * getattr(torch, spec.dtype).itemsize
        for spec in one.parameters
        if spec.name not in kept
    )
    return sum(sizes)


def _serves(report: StatusReport) -> bool:
    return report.state is EngineState.SERVING


def _standing(rank: int, report: StatusReport | None) -> str:
    """Where a rank stands, in words."""
    if report is None:
        return f"receiver rank {rank} says nothing"
    return f"receiver rank {rank} is {report.state}{f', {report.reason}' if report.reason else ''}"
