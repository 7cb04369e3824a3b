"""A directory that appears whole or not at all.

Files are written into a hidden sibling of the target, each one fsynced, then the sibling is fsynced and renamed.
Whatever fails before the rename leaves the target as it was and no file of ours behind. An existing target is exchanged
with the new directory in one system call where the kernel and the file system can (Linux renameat2), else moved aside
and restored if the second rename fails.

A process that is killed leaves its sibling. The writer holds a lock on it, so the next one for the same target knows it
for abandoned, and removes it first. Where directories cannot be locked, as on some network file systems, nothing is
removed.
"""

import contextlib
import ctypes
import errno
import fcntl
import os
import re
import secrets
import shutil
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Self

from weftpub.errors import CheckpointError

__all__ = ["AtomicDirectory"]

Chunk = bytes | bytearray | memoryview

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


class AtomicDirectory:
    """Context manager: write files with `write`; the target exists with all of them after the block, or is untouched.

    Args:
        target: the directory to create.
        needed: bytes that will be written. Free space below that is refused before the first byte.
        overwrite: replace an existing target; without it an existing target is refused.

    Raises:
        CheckpointError: any operating-system error; names the file, the bytes needed and the bytes free.
    """

    def __init__(self, target: Path, *, needed: int, overwrite: bool = False) -> None:
        self.target = Path(os.path.realpath(target))
        self._needed = needed
        self._overwrite = overwrite
        self._partial = self._new_name()
        self._lock: int | None = None

    def __enter__(self) -> Self:
        if self.target.exists() and not self._overwrite:
            raise CheckpointError(f"{self.target}: exists; give another directory, or overwrite=True to replace it")
        if self.target.exists() and not self.target.is_dir():
            raise CheckpointError(f"{self.target}: is a file, and only a directory is ever replaced; move it away")
        try:
            self.target.parent.mkdir(parents=True, exist_ok=True)
            self._sweep()
            free = shutil.disk_usage(self.target.parent).free
            if free < self._needed:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self._make_partial()
        except OSError as error:
            raise self._failure(self.target, error) from error
        return self

    def _new_name(self) -> Path:
        return self.target.parent / f".{self.target.name}.partial-{secrets.token_hex(6)}"

    def _make_partial(self) -> None:
        """Make the sibling and lock it. A sweeper that sees it before the lock may remove it: then make another."""
        while self._lock is None:
            self._partial.mkdir()
            handle = os.open(self._partial, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            if _try_lock(handle) is not False and self._partial.exists():
                self._lock = handle
            else:
                os.close(handle)
                self._partial = self._new_name()

    def _sweep(self) -> None:
        """Remove siblings whose writers were killed."""
        ours = re.compile(re.escape(f".{self.target.name}.partial-") + "[0-9a-f]{12}")
        for path in self.target.parent.iterdir():
            if ours.fullmatch(path.name) is None:
                continue
            with contextlib.suppress(OSError):  # gone meanwhile, or of another user
                handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
                try:
                    if _try_lock(handle):
                        shutil.rmtree(path, ignore_errors=True)
                finally:
                    os.close(handle)

    def write(self, name: str, chunks: Iterable[Chunk]) -> None:
        """Write one file from `chunks`, in order, and fsync it. An error raised by `chunks` itself passes through."""
        path = self._partial / name
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise self._failure(path, error) from error
        try:
            for chunk in chunks:
                self._write_all(path, descriptor, memoryview(chunk).cast("B"))
            self._fsync(path, descriptor)
        finally:
            os.close(descriptor)

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._commit()
        finally:
            shutil.rmtree(self._partial, ignore_errors=True)
            if self._lock is not None:
                os.close(self._lock)
                self._lock = None

    def _commit(self) -> None:
        self._fsync_directory(self._partial)
        try:
            _replace_directory(self._partial, self.target)
        except OSError as error:
            raise self._failure(self.target, error) from error
        self._fsync_directory(self.target.parent)

    def _write_all(self, path: Path, descriptor: int, rest: memoryview) -> None:
        while len(rest):
            try:
                written = os.write(descriptor, rest)
            except OSError as error:
                raise self._failure(path, error) from error
            rest = rest[written:]

    def _fsync(self, path: Path, descriptor: int) -> None:
        try:
            os.fsync(descriptor)
        except OSError as error:
            raise self._failure(path, error) from error

    def _fsync_directory(self, path: Path) -> None:
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise self._failure(path, error) from error
        try:
            self._fsync(path, descriptor)
        finally:
            os.close(descriptor)

    def _failure(self, path: Path, error: OSError) -> CheckpointError:
        try:
            free = f"{shutil.disk_usage(self._existing_parent()).free} bytes are free"
        except OSError:
            free = "free bytes unknown"
        state = "the existing one is untouched" if self.target.exists() else "nothing was left behind"
        return CheckpointError(
            error.errno,
            f"{path}: {os.strerror(error.errno) if error.errno else error}; "
            f"{self._needed} bytes are needed for {self.target}, {free}; {state}; free space or choose another disk",
        )

    def _existing_parent(self) -> Path:
        return next(parent for parent in self.target.parents if parent.exists())


def _try_lock(handle: int) -> bool | None:
    """Whether this process has the lock now; None where the file system has no locks for directories."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _replace_directory(new: Path, target: Path) -> None:
    """Rename `new` to `target`; what `target` was before ends up under the name `new`, or nothing does."""
    if not target.exists():
        os.rename(new, target)
        return
    if _exchange(new, target):
        return
    aside = new.with_name(new.name + "-old")
    os.rename(target, aside)
    try:
        os.rename(new, target)
    except OSError:
        os.rename(aside, target)
        raise
    os.rename(aside, new)


def _exchange(first: Path, second: Path) -> bool:
    """Swap two directories in one system call; False where the C library, kernel or file system cannot."""
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except AttributeError:
        return False
    if renameat2(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP):
        return False
    raise OSError(code, os.strerror(code), str(second))
