"""Versions: legal moves only, one atomic record, and the recovery rule as a table."""

import json
import os
from pathlib import Path

import pytest

from weftpub.errors import StateError, TornError
from weftpub.version import CommitRecord, EngineState, VersionState, decide_recovery
from weftpub.version.states import _LEGAL

S = EngineState
DIGEST = "a" * 64


def moved(*steps: tuple[str, tuple]) -> VersionState:
    """A state that served version 4 and then took the steps."""
    state = VersionState.started(4)
    for name, args in steps:
        getattr(state, name)(*args)
    return state


PAUSE, BEGIN, VERIFY = ("pause", ()), ("begin", (5,)), ("verify", (DIGEST,))
REACH = {
    S.SERVING: (),
    S.PAUSED: (PAUSE,),
    S.RECEIVING: (PAUSE, BEGIN),
    S.VERIFIED: (PAUSE, BEGIN, VERIFY),
    S.COMMITTED: (PAUSE, BEGIN, VERIFY, ("commit", ())),
    S.TORN: (PAUSE, BEGIN, ("tear", ("cut",))),
}
MOVES = {
    "pause": ((), S.PAUSED),
    "resume": ((), S.SERVING),
    "begin": ((6,), S.RECEIVING),
    "withdraw": ((), S.PAUSED),
    "verify": ((DIGEST,), S.VERIFIED),
    "commit": ((), S.COMMITTED),
    "tear": (("cut",), S.TORN),
}


@pytest.mark.parametrize("state", list(S))
@pytest.mark.parametrize("move", list(MOVES))
def test_every_move_from_every_state(state: EngineState, move: str) -> None:
    args, target = MOVES[move]
    machine = moved(*REACH[state])
    before = vars(machine).copy()
    # withdraw and pause end in the same state; which of the two arrows it is follows from where it starts
    legal = target in _LEGAL[state] or (move == "tear" and state is S.TORN)
    if legal:
        getattr(machine, move)(*args)
        assert machine.state is target
    else:
        with pytest.raises(StateError):
            getattr(machine, move)(*args)
        assert vars(machine) == before


def test_readers_see_the_old_version_until_commit() -> None:
    """The version was bumped with the first bucket, and a failed third one left a new version with old weights."""
    machine = moved(PAUSE, BEGIN)
    assert (machine.held, machine.incoming) == (4, 5)
    machine.verify(DIGEST)
    assert machine.held == 4
    machine.commit()
    assert (machine.held, machine.incoming, machine.lost) == (5, None, None)
    machine.resume()
    assert machine.require_serving() == 5


def test_a_torn_engine_says_what_it_lost_and_only_a_publish_opens_it() -> None:
    machine = moved(PAUSE, BEGIN)
    machine.tear("the trainer died")
    with pytest.raises(TornError, match="version 4 is lost: the trainer died; publish a complete version"):
        machine.resume()
    with pytest.raises(TornError):
        machine.require_serving()
    machine.tear("again")
    assert machine.reason == "the trainer died"
    machine.begin(7)
    machine.tear("again")
    assert (machine.lost, machine.reason) == (4, "again")
    machine.begin(7)
    machine.verify(DIGEST)
    machine.commit()
    machine.resume()
    assert machine.require_serving() == 7
    assert (machine.lost, machine.reason) == (None, "")


def test_a_new_engine_holds_nothing() -> None:
    machine = VersionState.started(None)
    with pytest.raises(TornError, match="no version to go back to"):
        machine.require_serving()


def test_a_paused_engine_serves_nothing() -> None:
    with pytest.raises(StateError, match="is paused, not serving"):
        moved(PAUSE).require_serving()


def record(version: int = 5, **changes: object) -> CommitRecord:
    return CommitRecord(**{"run_id": "run", "version": version, "digest": DIGEST, "engines": ["a"], **changes})


def test_a_record_survives_on_disk(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "commit.json"
    assert CommitRecord.read(path) is None
    record(5).write(path)
    record(6).write(path)
    assert CommitRecord.read(path) == record(6)
    assert os.listdir(path.parent) == ["commit.json"]


def test_a_record_that_cannot_be_written_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "commit.json"
    record(5).write(path)

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        record(6).write(path)
    assert CommitRecord.read(path) == record(5)
    assert os.listdir(tmp_path) == ["commit.json"]


def test_the_record_is_on_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda fd: (order.append("fsync"), fsync(fd))[1])
    monkeypatch.setattr(os, "replace", lambda a, b: (order.append("rename"), replace(a, b))[1])
    record().write(tmp_path / "commit.json")
    assert order == ["fsync", "fsync", "rename", "fsync"]


def test_a_staged_record_counts_once_it_is_committed(tmp_path: Path) -> None:
    path = tmp_path / "commit.json"
    record(5).write(path)
    dropped, staged = record(6).stage(path), record(7).stage(path)
    assert CommitRecord.read(path) == record(5)
    dropped.close()
    dropped.close()
    staged.commit()
    assert CommitRecord.read(path) == record(7)
    staged.close()
    assert CommitRecord.read(path) == record(7)
    assert os.listdir(tmp_path) == ["commit.json"]


@pytest.mark.parametrize("text", ["", "{}", json.dumps({"run_id": "r", "version": -1, "digest": "x", "engines": []})])
def test_a_damaged_record_is_an_error(tmp_path: Path, text: str) -> None:
    path = tmp_path / "commit.json"
    path.write_text(text)
    with pytest.raises(StateError, match="not a commit record"):
        CommitRecord.read(path)


def test_a_record_that_cannot_be_read_is_an_error_of_ours(tmp_path: Path) -> None:
    with pytest.raises(StateError, match=r"cannot be read.*check commit_path"):
        CommitRecord.read(tmp_path)


V5, C5 = (S.VERIFIED, 5, DIGEST, False), (S.COMMITTED, 5, DIGEST, True)
S5, P5 = (S.SERVING, 5, DIGEST, True), (S.PAUSED, 5, DIGEST, True)


@pytest.mark.parametrize(
    ("ranks", "choice"),
    [
        pytest.param([V5, V5], "finish", id="nobody-heard"),
        pytest.param([C5, V5], "finish", id="one-heard"),
        pytest.param([S5, S5], "finish", id="all-serve"),
        pytest.param([P5, P5], "finish", id="paused-and-whole"),
        pytest.param([P5, V5], "finish", id="one-paused-and-whole"),
        pytest.param([V5, (S.VERIFIED, 5, "b" * 64, False)], "publish", id="other-digest"),
        pytest.param([V5, (S.TORN, None, "", False)], "publish", id="one-torn"),
        pytest.param([V5, (S.SERVING, 4, DIGEST, True)], "publish", id="one-old"),
        pytest.param([V5, (S.RECEIVING, 5, DIGEST, True)], "publish", id="one-receiving"),
        pytest.param([P5, (S.PAUSED, 5, DIGEST, False)], "publish", id="one-paused-after-an-offload"),
        pytest.param([C5, (S.COMMITTED, 5, DIGEST, False)], "publish", id="one-offloaded-before-it-served"),
        pytest.param([P5, (S.PAUSED, 5, "", True)], "publish", id="loaded-with-it"),
        pytest.param([], "publish", id="no-ranks"),
    ],
)
def test_recovery(ranks: list, choice: str) -> None:
    assert decide_recovery(record(), "run", {"a": ranks}) == {"a": choice}


def test_recovery_needs_the_record_of_this_run_and_engine() -> None:
    for given in (None, record(run_id="other"), record(engines=["b"]), record(version=6)):
        assert decide_recovery(given, "run", {"a": [V5, V5]}) == {"a": "publish"}
