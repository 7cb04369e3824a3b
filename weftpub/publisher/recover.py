"""Finish the commit that a record names: what rank 0 does after the driver has restarted."""

import os
from collections.abc import Mapping, Sequence

from weftpub.channel import Deadlines
from weftpub.errors import WeftpubError
from weftpub.publisher.coordinator import Coordinator
from weftpub.publisher.peers import PeerLink, by_engine, exchange
from weftpub.publisher.report import RecoveryReport
from weftpub.version import CommitRecord, EngineState, decide_recovery
from weftpub.wire import messages as m

__all__ = ["finish_commit"]

type _Standing = tuple[EngineState, int | None, str, bool]


def finish_commit(
    coordinator: Coordinator, run_id: str, path: str | os.PathLike[str], deadlines: Deadlines, *, resume: bool
) -> RecoveryReport:
    """Commit on every engine whose ranks all hold the recorded manifest; say why the others need a complete publish.

    Args:
        coordinator: has just met every receiver that can be reached.
        resume: let finished engines serve.

    Raises:
        StateError: the record is damaged, or of another run.
    """
    record = CommitRecord.read_own(path, run_id)
    engines = by_engine(coordinator.links)
    reached = {
        engine: [_standing(link) for link in links]
        for engine, links in engines.items()
        if engine not in coordinator.failed
    }
    choices = decide_recovery(record, run_id, reached)
    whole = [link for engine, choice in choices.items() if choice == "finish" for link in engines[engine]]
    faults = {} if record is None else _finish(whole, record, deadlines, resume=resume)
    publish = {engine: str(error) for engine, error in coordinator.failed.items()}
    publish |= {link.engine: str(error) for link, error in faults.items()}
    for engine, choice in choices.items():
        if choice == "publish":
            publish[engine] = _why(reached[engine], record)
    finished = {link.engine for link in whole} - publish.keys()
    return RecoveryReport(None if record is None else record.version, tuple(sorted(finished)), publish)


def _finish(
    whole: Sequence[PeerLink], record: CommitRecord, deadlines: Deadlines, *, resume: bool
) -> Mapping[PeerLink, WeftpubError]:
    fields = {"version": record.version, "digest": record.digest}
    _, faults = exchange(dict.fromkeys(whole, (m.Commit, fields)), "commit", deadlines.commit)
    if resume:
        broken = {link.engine for link in faults}
        ready = [link for link in whole if link.engine not in broken]
        _, more = exchange({link: (m.Resume, {}) for link in ready}, "resume", deadlines.resume)
        faults.update(more)
    return faults


def _standing(link: PeerLink) -> _Standing:
    status = link.status
    if status is None:
        return EngineState.TORN, None, "", False
    return status.state, status.version, status.digest, status.intact


def _why(ranks: Sequence[_Standing], record: CommitRecord | None) -> str:
    states = ", ".join(
        f"{state} {'with' if intact or state is EngineState.VERIFIED else 'without'} version {version}"
        for state, version, _, intact in ranks
    )
    committed = "there is no commit record" if record is None else f"the record commits version {record.version}"
    return f"its ranks are {states}; {committed}"
