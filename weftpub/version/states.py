"""Which version an engine rank serves, and the only moves between its states.

    SERVING(v)    -> PAUSED(v)       pause
    PAUSED(v)     -> SERVING(v)      resume, only while the weights still hold v
    PAUSED(v)     -> RECEIVING(w)    begin: views are bound, no byte has been written
    PAUSED(v)     -> TORN            an offload took v, and no publish replaced it
    RECEIVING(w)  -> PAUSED(v)       abort before the first byte, the weights still hold v
    RECEIVING(w)  -> TORN            any failure after the first byte, or earlier if v was gone already
    RECEIVING(w)  -> VERIFIED(w)     every byte arrived, was post-processed once, has its checksum
    VERIFIED(w)   -> TORN            abort: v is overwritten and w will not be served
    VERIFIED(w)   -> COMMITTED(w)    the commit record is on disk and names this manifest
    COMMITTED(w)  -> SERVING(w)      resume
    COMMITTED(w)  -> RECEIVING(x)    publish again in full
    COMMITTED(w)  -> TORN            an offload took w before it was served
    TORN          -> RECEIVING(w)    only a complete publish opens a torn engine

Readers see v until every rank has committed w: `held` changes in one place, on the move to COMMITTED. An engine that
never was published to, because it has just been started or restarted, is TORN with no lost version.
"""

from dataclasses import dataclass
from enum import StrEnum

from weftpub.errors import StateError, TornError

__all__ = ["EngineState", "VersionState"]


class EngineState(StrEnum):
    """Where an engine rank stands."""

    SERVING = "serving"
    PAUSED = "paused"
    RECEIVING = "receiving"
    VERIFIED = "verified"
    COMMITTED = "committed"
    TORN = "torn"


_S = EngineState
_LEGAL: dict[EngineState, frozenset[EngineState]] = {
    _S.SERVING: frozenset({_S.PAUSED}),
    _S.PAUSED: frozenset({_S.SERVING, _S.RECEIVING, _S.TORN}),
    _S.RECEIVING: frozenset({_S.PAUSED, _S.TORN, _S.VERIFIED}),
    _S.VERIFIED: frozenset({_S.TORN, _S.COMMITTED}),
    _S.COMMITTED: frozenset({_S.SERVING, _S.RECEIVING, _S.TORN}),
    _S.TORN: frozenset({_S.RECEIVING}),
}


@dataclass
class VersionState:
    """The state of one engine rank. Every method is one arrow of the table above; an illegal one raises StateError and
    changes nothing.

    Attributes:
        state: where it stands.
        held: the version whose bytes are served, or were served last; None if there never was one or it is lost.
        digest: manifest digest of `held`, or of `incoming` once it is verified; "" if unknown.
        incoming: the version that is being received or is verified.
        lost: the version that a failure overwrote, while TORN.
        reason: why it is TORN.
    """

    state: EngineState
    held: int | None = None
    digest: str = ""
    incoming: int | None = None
    lost: int | None = None
    reason: str = ""

    @classmethod
    def started(cls, version: int | None) -> "VersionState":
        """State of an engine that has just started: serving the `version` it was loaded with, or torn if that is no
        published version.
        """
        if version is None:
            return cls(EngineState.TORN, reason="no version was published to this engine since it started")
        return cls(EngineState.SERVING, held=version)

    def pause(self) -> None:
        """SERVING -> PAUSED."""
        self._move(EngineState.PAUSED)

    def resume(self) -> None:
        """PAUSED or COMMITTED -> SERVING; TornError from TORN."""
        if self.state is EngineState.TORN:
            raise self.torn_error()
        self._move(EngineState.SERVING)

    def begin(self, version: int) -> None:
        """PAUSED, COMMITTED or TORN -> RECEIVING(version)."""
        self._move(EngineState.RECEIVING)
        self.incoming = version

    def withdraw(self) -> None:
        """RECEIVING -> PAUSED: no byte was written, the old version is intact."""
        self._move(EngineState.PAUSED)
        self.incoming = None

    def verify(self, digest: str) -> None:
        """RECEIVING -> VERIFIED: all of the manifest with this digest is in place."""
        self._move(EngineState.VERIFIED)
        self.digest = digest

    def commit(self) -> None:
        """VERIFIED -> COMMITTED: from here on `held` is the new version."""
        self._move(EngineState.COMMITTED)
        self.held, self.incoming, self.lost, self.reason = self.incoming, None, None, ""

    def tear(self, reason: str) -> None:
        """PAUSED, RECEIVING, VERIFIED or COMMITTED -> TORN, remembering which version was lost. A torn engine stays as
        it is.
        """
        if self.state is EngineState.TORN:
            return
        self._move(EngineState.TORN)
        if self.held is not None:
            self.lost = self.held
        self.held, self.incoming, self.digest, self.reason = None, None, "", reason

    def require_serving(self) -> int:
        """The version that is served; StateError or TornError, with the reason, if none is."""
        if self.state is EngineState.TORN:
            raise self.torn_error()
        if self.state is not EngineState.SERVING or self.held is None:
            raise StateError(f"the engine is {self.state}, not serving; resume it after a publish or an abort")
        return self.held

    def torn_error(self) -> TornError:
        """The error that says what was lost, why, and what opens the engine again."""
        lost = "no version to go back to" if self.lost is None else f"version {self.lost} is lost"
        return TornError(f"the engine is torn, {lost}: {self.reason}; publish a complete version to open it")

    def _move(self, target: EngineState) -> None:
        if target not in _LEGAL[self.state]:
            legal = ", ".join(sorted(_LEGAL[self.state]))
            raise StateError(
                f"the engine is {self.state} (version {self.held}) and cannot become {target}; from here it can "
                f"become {legal}"
            )
        self.state = target
