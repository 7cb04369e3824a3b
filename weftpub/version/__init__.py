"""Versions: the state machine of an engine rank, the commit record, and the recovery rule."""

from weftpub.version.record import CommitRecord, StagedRecord
from weftpub.version.recovery import RecoveryChoice, decide_recovery
from weftpub.version.states import EngineState, VersionState

__all__ = ["CommitRecord", "EngineState", "RecoveryChoice", "StagedRecord", "VersionState", "decide_recovery"]
