"""The commit point: one small file that names the version which all ranks verified, replaced atomically and on disk
before any rank is told.

A crash leaves either the old record or the new one, never half of one: the text goes to a temporary file in the same
folder, is fsynced, renamed over the record, and the folder is fsynced too.
"""

import errno
import os
import tempfile
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from weftpub.errors import StateError

__all__ = ["CommitRecord"]


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
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(self.model_dump_json().encode())
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, target)
        except OSError:
            Path(temporary).unlink(missing_ok=True)
            raise
        folder = os.open(target.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

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
