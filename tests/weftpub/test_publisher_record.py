"""The commit record is staged while ranks receive, and only what was staged for the same commit is used."""

import os
from pathlib import Path

import pytest

from weftpub.publisher.record import RecordKeeper
from weftpub.version import CommitRecord


def record(version: int, *engines: str) -> CommitRecord:
    return CommitRecord(run_id="run", version=version, digest="0" * 64, engines=list(engines or ("a",)))


@pytest.fixture
def keeper(tmp_path: Path):
    made = RecordKeeper(tmp_path / "commit.json")
    yield made
    made.close()
    assert [name for name in os.listdir(tmp_path) if name != "commit.json"] == []


def present(folder: Path) -> CommitRecord | None:
    return CommitRecord.read(folder / "commit.json")


def test_what_was_prepared_is_committed(keeper: RecordKeeper, tmp_path: Path) -> None:
    for version in (1, 2, 3):
        keeper.prepare(record(version))
        assert present(tmp_path) == (record(version - 1) if version > 1 else None)
        keeper.commit(record(version))
        assert present(tmp_path) == record(version)


def test_an_engine_that_was_left_out_meanwhile_is_not_in_the_record(keeper: RecordKeeper, tmp_path: Path) -> None:
    keeper.prepare(record(1, "a", "b"))
    keeper.commit(record(1, "a"))
    assert present(tmp_path) == record(1, "a")


def test_a_failed_publish_leaves_the_old_record(keeper: RecordKeeper, tmp_path: Path) -> None:
    keeper.prepare(record(1))
    keeper.commit(record(1))
    keeper.prepare(record(2))
    keeper.discard()
    keeper.prepare(record(3))
    assert present(tmp_path) == record(1)


def test_a_full_disk_is_an_error_at_the_commit(
    keeper: RecordKeeper, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        keeper.prepare(record(1))
        with pytest.raises(OSError, match="No space left"):
            keeper.commit(record(1))
    assert present(tmp_path) is None
    keeper.prepare(record(2))
    keeper.commit(record(2))
    assert present(tmp_path) == record(2)
