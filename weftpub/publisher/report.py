"""What a publish did: plain data, for logs, tables and the next decision."""

import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

from weftpub.wire.manifest import Manifest

__all__ = ["EngineOutcome", "PhaseClock", "PublishReport", "RecoveryReport"]


@dataclass(frozen=True)
class EngineOutcome:
    """How one engine came out of a publish.

    Attributes:
        state: the state that its ranks report; several, separated by commas, if they differ.
        version: the version it holds; None if it holds none or its ranks differ.
        error: why it was left out; "" if it was not.
    """

    state: str
    version: int | None
    error: str = ""


@dataclass(frozen=True)
class PublishReport:
    """One publish.

    Attributes:
        digest: manifest digest of the version.
        ms: milliseconds per phase, as the coordinator saw them, and "total".
        nbytes, chunks, pieces: what moved, over all senders.
        shared_nbytes: what did not have to: bytes in memory that trainer and engines both map.
        staging_bytes: staging buffers of the sender rank that used most: the peak of extra memory.
        engines: outcome by engine name.
        transports: receiver rank to the transport of sender rank 0's bytes to it, or of the first sender that has any.
        reasons: why a better transport was not used, by transport.
        sha256: sha256 of every published piece by name, equal in trainer and engines; empty unless asked for.
    """

    run_id: str
    version: int
    digest: str
    ms: dict[str, float]
    nbytes: int
    chunks: int
    pieces: int
    staging_bytes: int
    engines: dict[str, EngineOutcome]
    shared_nbytes: int = 0
    transports: dict[int, str] = field(default_factory=dict[int, str])
    reasons: dict[str, str] = field(default_factory=dict[str, str])
    sha256: dict[str, str] = field(default_factory=dict[str, str])

    @classmethod
    def of(
        cls,
        manifest: Manifest,
        ms: dict[str, float],
        pieces: int,
        engines: dict[str, EngineOutcome],
        sent: Sequence[Mapping[str, Any]],
        sha256: dict[str, str],
    ) -> "PublishReport":
        """Put a report together from what the sender ranks sent (`Sender.totals`)."""
        transports: dict[int, str] = {}
        reasons: dict[str, str] = {}
        for totals in reversed(sent):
            transports.update({int(rank): kind for rank, kind in totals["transports"].items()})
            reasons.update(totals["reasons"])
        return cls(
            run_id=manifest.run_id,
            version=manifest.version,
            digest=manifest.digest,
            ms=ms,
            nbytes=sum(totals["nbytes"] for totals in sent),
            chunks=sum(totals["chunks"] for totals in sent),
            pieces=pieces,
            staging_bytes=max(totals["staging_bytes"] for totals in sent),
            engines=engines,
            shared_nbytes=sum(totals["shared_nbytes"] for totals in sent),
            transports=transports,
            reasons=reasons,
            sha256=sha256,
        )

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON; keys of `transports` become text."""
        data = asdict(self)
        data["transports"] = {str(rank): kind for rank, kind in self.transports.items()}
        return data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "PublishReport":
        """The report that `as_dict` made."""
        fields = dict(data)
        fields["engines"] = {name: EngineOutcome(**outcome) for name, outcome in data["engines"].items()}
        fields["transports"] = {int(rank): kind for rank, kind in data["transports"].items()}
        return cls(**fields)


@dataclass(frozen=True)
class RecoveryReport:
    """What a restarted driver found and did.

    Attributes:
        version: the committed version of the record, None without a record.
        finished: engines that now serve it, or are ready to.
        publish: engines that need a complete publish, each with the reason.
    """

    version: int | None
    finished: tuple[str, ...]
    publish: dict[str, str]

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {"version": self.version, "finished": list(self.finished), "publish": dict(self.publish)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "RecoveryReport":
        """The report that `as_dict` made."""
        return cls(data["version"], tuple(data["finished"]), dict(data["publish"]))


class PhaseClock:
    """Adds up milliseconds per phase."""

    def __init__(self) -> None:
        self.ms: dict[str, float] = {}
        self._start = time.perf_counter()

    @contextmanager
    def phase(self, name: str) -> Generator[None]:
        """Time a block."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.ms[name] = self.ms.get(name, 0.0) + (time.perf_counter() - start) * 1e3

    def total(self) -> dict[str, float]:
        """All phases so far, and the total since the clock was made."""
        return {**self.ms, "total": (time.perf_counter() - self._start) * 1e3}
