"""The commit record of one publisher: put on disk while ranks still receive, so that the commit itself is short."""

import os
from concurrent.futures import Future, ThreadPoolExecutor

from weftpub.version import CommitRecord, StagedRecord

__all__ = ["RecordKeeper"]


class RecordKeeper:
    """Stages and commits records at one path. Used from one thread; staging happens in one of its own.

    Args:
        path: file of the record.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = path
        self._thread: ThreadPoolExecutor | None = None
        self._coming: Future[StagedRecord] | None = None
        self._done: StagedRecord | None = None

    @property
    def proven(self) -> bool:
        """Whether a record was committed at the path before."""
        return self._done is not None

    def prepare(self, record: CommitRecord) -> None:
        """Begin to put a record on disk; it counts once `commit` is called with an equal one."""
        self.discard()
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="weftpub commit record")
        self._coming = self._thread.submit(self._stage, record, self._done)

    def commit(self, record: CommitRecord) -> None:
        """The commit point: on return the record is on disk. OSError leaves the old record as it was."""
        coming, self._coming = self._coming, None
        staged = record.stage(self._path) if coming is None else coming.result()
        if staged.record != record:  # an engine was left out meanwhile
            staged.close()
            staged = record.stage(self._path)
        try:
            staged.commit()
        except OSError:
            staged.close()
            raise
        if self._done is not None:
            self._done.close()
        self._done = staged

    def discard(self) -> None:
        """What was prepared will not be committed."""
        coming, self._coming = self._coming, None
        if coming is not None and coming.exception() is None:
            coming.result().close()

    def close(self) -> None:
        """Let go of everything."""
        self.discard()
        if self._done is not None:
            self._done.close()
            self._done = None
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None

    def _stage(self, record: CommitRecord, last: StagedRecord | None) -> StagedRecord:
        if last is not None:
            last.close()
        return record.stage(self._path)
