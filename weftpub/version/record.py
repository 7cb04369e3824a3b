"""The commit point: one small file that names the version which all ranks verified, replaced atomically and on disk
before any rank is told.

A crash leaves either the old record or the new one, never half of one: the text goes to a temporary file in the same
folder, is fsynced, renamed over the record, and the folder is fsynced too. Only the last two steps are the commit; the
others can be done while ranks still receive (`CommitRecord.stage`).
"""

import errno
import os
import tempfile
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from weftpub.errors import StateError

__all__ = ["CommitRecord", "StagedRecord"]


class CommitRecord(BaseModel):
    """A version that is committed, whoever has heard of it yet.

    Attributes:
        run_id: the run that published it.
        version: the version.
        digest: digest of its manifest.
        engines: the engines whose ranks all verified it.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    run_id: str = Field(min_length=1)
    version: int = Field(ge=0)
    digest: str = Field(pattern="^[0-9a-f]{64}$")
    engines: list[str] = Field(min_length=1)

    def write(self, path: str | os.PathLike[str]) -> None:
        """Replace the record at `path`; on return it is on disk. OSError leaves the old record as it was."""
        staged = self.stage(path)
        try:
            staged.commit()
        finally:
            staged.close()

    def stage(self, path: str | os.PathLike[str]) -> "StagedRecord":
        """Put this record on disk beside `path`, where it is no record yet. OSError if that is impossible."""
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(self.model_dump_json().encode())
                file.flush()
                os.fsync(file.fileno())
            return StagedRecord(self, target, Path(temporary))
        except OSError:
            Path(temporary).unlink(missing_ok=True)
            raise

    @staticmethod
    def require_writable(path: str | os.PathLike[str]) -> None:
        """OSError unless a record can be written at `path` now, as far as that can be known before it is."""
        target = Path(path)
        if target.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(target))
        target.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
        os.close(handle)
        Path(temporary).unlink()

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> "CommitRecord | None":
        """The record at `path`, None if there is none; StateError if the file is not a record or cannot be read."""
        try:
            text = Path(path).read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise StateError(
                f"{path}: the commit record cannot be read: {error.strerror}; check commit_path"
            ) from error
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            raise StateError(
                f"{path}: not a commit record ({error.error_count()} faults); remove the file and publish in full"
            ) from None

    @classmethod
    def read_own(cls, path: str | os.PathLike[str], run_id: str) -> "CommitRecord | None":
        """The record at `path` of this run, None if there is none; StateError if it is another run's, or as `read`."""
        found = cls.read(path)
        if found is not None and found.run_id != run_id:
            raise StateError(
                f"{path}: the record is of run {found.run_id!r}, version {found.version}, this is run {run_id!r}; give "
                "every run its own commit_path, or remove the file if that run needs no recovery any more"
            )
        return found


class StagedRecord:
    """A record that is on disk under another name, ready to become the record. Made by `CommitRecord.stage`.

    The old record's file is held open until `close`: a file system frees a replaced file's blocks with the last handle,
    and on some disks that takes longer than the commit.
    """

    def __init__(self, record: CommitRecord, target: Path, temporary: Path) -> None:
        self.record = record
        self._target = target
        self._temporary = temporary
        self._folder = os.open(target.parent, os.O_RDONLY | os.O_DIRECTORY)
        self._old: int | None = None
        try:
            os.fsync(self._folder)  # what the folder owes the disk already is not part of the commit
            self._old = os.open(target, os.O_RDONLY)
        except FileNotFoundError:
            pass
        except OSError:
            os.close(self._folder)
            raise

    def commit(self) -> None:
        """The commit point: on return the record is on disk under its name. OSError leaves the old one as it was."""
        os.replace(self._temporary, self._target)
        os.fsync(self._folder)

    def close(self) -> None:
        """Let go of everything; what was not committed disappears. May be called twice."""
        self._temporary.unlink(missing_ok=True)
        for handle in (self._folder, self._old):
            if handle is not None and handle >= 0:
                os.close(handle)
        self._folder, self._old = -1, None
