"""A directory appears whole or not at all: full disks, file size limits, failing renames, readers that raise."""

import errno
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from checkpoint_support import CONFIG, model_store, other_tensors

from weftpub.checkpoint import export_hf
from weftpub.checkpoint.atomic import AtomicDirectory
from weftpub.errors import CheckpointError


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """A complete earlier export."""
    target = tmp_path / "out"
    export_hf(target, model_store(seed=1), other_tensors(), CONFIG, version=1)
    return target


def _snapshot(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


@contextmanager
def _file_size_limit(nbytes: int) -> Iterator[None]:
    """The kernel's own limit: a write beyond it fails with EFBIG."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    previous = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, previous)


def _export_again(target: Path) -> None:
    export_hf(target, model_store(), other_tensors(), CONFIG, version=2, overwrite=True)


def test_disk_that_fills_up_leaves_the_old_export(old: Path) -> None:
    before = _snapshot(old.parent)
    with _file_size_limit(300_000), pytest.raises(CheckpointError) as caught:
        _export_again(old)
    message = str(caught.value)
    assert caught.value.errno == errno.EFBIG
    assert "model.safetensors" in message
    assert "bytes are needed" in message
    assert "bytes are free" in message
    assert "the existing one is untouched" in message
    assert _snapshot(old.parent) == before


def test_disk_that_fills_up_leaves_nothing_where_nothing_was(tmp_path: Path) -> None:
    with _file_size_limit(300_000), pytest.raises(CheckpointError, match="nothing was left behind"):
        export_hf(tmp_path / "out", model_store(), other_tensors(), CONFIG, version=2)
    assert list(tmp_path.iterdir()) == []


def test_too_little_free_space_is_seen_before_the_first_byte(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = _snapshot(old.parent)
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 1000})())
    monkeypatch.setattr("os.open", lambda *args, **kwargs: pytest.fail("a file was opened"))
    with pytest.raises(CheckpointError, match=r"No space left.* bytes are needed .* 1000 bytes are free"):
        _export_again(old)
    monkeypatch.undo()
    assert _snapshot(old.parent) == before


@pytest.mark.parametrize("call", ["write", "fsync", "mkdir", "open"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EROFS])
def test_any_failing_system_call_leaves_the_old_export(old: Path, monkeypatch, call: str, code: int) -> None:
    before = _snapshot(old.parent)

    def fail(*args: object, **kwargs: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, call, fail)
    with pytest.raises(CheckpointError) as caught:
        _export_again(old)
    monkeypatch.undo()
    assert caught.value.errno == code
    assert isinstance(caught.value, OSError)
    assert _snapshot(old.parent) == before


@pytest.mark.parametrize("exchange", [True, False])
def test_failing_rename_leaves_the_old_export(old: Path, monkeypatch, exchange: bool) -> None:
    """With and without the system call that exchanges two directories."""
    before = _snapshot(old.parent)
    if exchange:
        monkeypatch.setattr("weftpub.checkpoint.atomic._exchange", _raise_busy)
    else:
        monkeypatch.setattr("weftpub.checkpoint.atomic._exchange", lambda first, second: False)
        rename, calls = os.rename, []

        def second_fails(source: object, target: object) -> None:
            calls.append(source)
            if len(calls) == 2:
                _raise_busy()
            rename(source, target)

        monkeypatch.setattr(os, "rename", second_fails)
    with pytest.raises(CheckpointError, match="busy"):
        _export_again(old)
    monkeypatch.undo()
    assert _snapshot(old.parent) == before


def _raise_busy(*args: object) -> None:
    raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))


@pytest.mark.parametrize("exchange", [True, False])
def test_replacing_works_with_and_without_the_exchange_call(old: Path, monkeypatch, exchange: bool) -> None:
    if not exchange:
        monkeypatch.setattr("weftpub.checkpoint.atomic._exchange", lambda first, second: False)
    before = _snapshot(old)
    _export_again(old)
    after = _snapshot(old)
    assert after.keys() == before.keys()
    assert after != before
    assert [path.name for path in old.parent.iterdir()] == ["out"]


def test_failing_source_passes_through_and_leaves_nothing(tmp_path: Path) -> None:
    def chunks() -> Iterator[bytes]:
        yield b"half"
        raise RuntimeError("device lost")

    with pytest.raises(RuntimeError, match="device lost"), AtomicDirectory(tmp_path / "out", needed=8) as directory:
        directory.write("a.bin", chunks())
    assert list(tmp_path.iterdir()) == []


_KILLED = """
import os, signal, sys
from pathlib import Path
from weftpub.checkpoint.atomic import AtomicDirectory
with AtomicDirectory(Path(sys.argv[1]), needed=1, overwrite=True) as target:
    target.write("half", [b"x" * 1000])
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_writer_left_is_removed_by_the_next(old: Path) -> None:
    """A save was killed, and again, and again: each left half a checkpoint in a hidden directory that nothing ever
    removed, until the disk was full of them."""
    before = _snapshot(old)
    ended = subprocess.run([sys.executable, "-c", _KILLED, str(old)], timeout=400, check=False)
    assert ended.returncode == -signal.SIGKILL
    left = [path for path in old.parent.iterdir() if path != old]
    assert [path.name.rpartition("-")[0] for path in left] == [".out.partial"]
    assert _snapshot(old) == before
    (old.parent / ".out.partial-notes").mkdir()  # somebody else's
    _export_again(old)
    assert sorted(path.name for path in old.parent.iterdir()) == [".out.partial-notes", "out"]


def test_a_living_writer_keeps_what_it_has(tmp_path: Path) -> None:
    with AtomicDirectory(tmp_path / "out", needed=1, overwrite=True) as first:
        first.write("a", [b"1"])
        with AtomicDirectory(tmp_path / "out", needed=1, overwrite=True) as second:
            second.write("b", [b"2"])
        first.write("c", [b"3"])
    assert _snapshot(tmp_path / "out") == {"a": b"1", "c": b"3"}
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_directories_that_cannot_be_locked_are_never_swept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("fcntl.flock", refuse)
    other = tmp_path / ".out.partial-0123456789ab"
    other.mkdir()
    with AtomicDirectory(tmp_path / "out", needed=1) as target:
        target.write("a", [b"1"])
    assert other.exists()
    assert (tmp_path / "out" / "a").read_bytes() == b"1"


def test_short_writes_are_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:7]))
    with AtomicDirectory(tmp_path / "out", needed=100) as directory:
        directory.write("a.bin", [b"0123456789" * 5, b"", bytearray(b"xyz")])
    assert (tmp_path / "out" / "a.bin").read_bytes() == b"0123456789" * 5 + b"xyz"


def test_every_file_is_on_disk_before_the_directory_appears(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    fsync, rename = os.fsync, os.rename
    monkeypatch.setattr(os, "fsync", lambda d: (calls.append(Path(os.readlink(f"/proc/self/fd/{d}")).name), fsync(d)))
    monkeypatch.setattr(os, "rename", lambda a, b: (calls.append("rename"), rename(a, b)))
    with AtomicDirectory(tmp_path / "out", needed=10) as directory:
        directory.write("a.bin", [b"a"])
        directory.write("b.bin", [b"b"])
    assert calls[:2] == ["a.bin", "b.bin"]
    assert calls[2].startswith(".out.partial-")
    assert calls[3:] == ["rename", tmp_path.name]


def test_a_file_in_the_way_is_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("mine")
    with pytest.raises(CheckpointError, match="is a file"), AtomicDirectory(tmp_path / "out", needed=1, overwrite=True):
        pass
    assert (tmp_path / "out").read_text() == "mine"


def test_a_link_keeps_pointing_at_the_replaced_directory(tmp_path: Path) -> None:
    (tmp_path / "v1").mkdir()
    (tmp_path / "latest").symlink_to("v1")
    with AtomicDirectory(tmp_path / "latest", needed=1, overwrite=True) as directory:
        directory.write("a.bin", [b"a"])
    assert (tmp_path / "latest").is_symlink()
    assert (tmp_path / "v1" / "a.bin").read_bytes() == b"a"


def test_parents_are_made(tmp_path: Path) -> None:
    with AtomicDirectory(tmp_path / "a" / "b" / "out", needed=1) as directory:
        directory.write("a.bin", [b"a"])
    assert (tmp_path / "a" / "b" / "out" / "a.bin").exists()
