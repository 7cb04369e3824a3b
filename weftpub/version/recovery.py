"""What a restarted driver does with engines it finds in any state: finish the commit that the record names, or publish
again in full.
"""

from collections.abc import Mapping, Sequence
from typing import Literal

from weftpub.version.record import CommitRecord
from weftpub.version.states import EngineState

__all__ = ["RecoveryChoice", "decide_recovery"]

RecoveryChoice = Literal["finish", "publish"]

_HOLDING = (EngineState.COMMITTED, EngineState.SERVING, EngineState.PAUSED)


def decide_recovery(
    record: CommitRecord | None, run_id: str, engines: Mapping[str, Sequence[tuple[EngineState, int | None, str, bool]]]
) -> dict[str, RecoveryChoice]:
    """Choose per engine, from what all of its ranks say.

    Args:
        record: the commit record, None if there is none.
        run_id: the run of the driver; a record of another run decides nothing.
        engines: engine name to (state, version, digest, intact) of every rank: the version is the one verified,
            committed, held or served, the digest its manifest's; intact is whether the weights still hold it, which is
            not asked of a rank that has yet to commit.

    Returns:
        "finish" for an engine that the record names and whose every rank holds all of that very manifest: the commit
        happened, some ranks have not heard. "publish" otherwise: no rank may serve what others lack.
    """
    choices: dict[str, RecoveryChoice] = {}
    for engine, ranks in engines.items():
        whole = (
            record is not None
            and record.run_id == run_id
            and engine in record.engines
            and bool(ranks)
            and all(
                (state is EngineState.VERIFIED or (state in _HOLDING and intact))
                and version == record.version
                and digest == record.digest
                for state, version, digest, intact in ranks
            )
        )
        choices[engine] = "finish" if whole else "publish"
    return choices
