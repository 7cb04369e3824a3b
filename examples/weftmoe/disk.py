"""What a run says when a file cannot be written: which one, why, how much was free, and that it can go on.

The parts that know what they write raise errors of their own. What else writes (logs, TensorBoard, an engine's folder)
raises the operating system's error, and the process that ends by one says it as one message.
"""

import errno
import os
import shutil
from pathlib import Path

__all__ = ["MIB", "cannot_write", "free_bytes_at"]

MIB = 1 << 20

# Of a disk that is full, over its quota, failing, or not to be written; not of files that are missing.
_DISK = frozenset(
    {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO, errno.ESTALE}
)


def free_bytes_at(path: Path) -> int | None:
    """Bytes that are free where a file is, or would be; None if nobody knows."""
    for folder in (path, *path.absolute().parents):
        try:
            return shutil.disk_usage(folder).free
        except OSError:
            continue
    return None


def cannot_write(error: OSError, out: Path) -> str | None:
    """The message; None for an error that is not about a disk.

    Args:
        error: what the operating system said.
        out: the run's directory.
    """
    if error.errno not in _DISK:
        return None
    path = out if error.filename is None else Path(os.fsdecode(error.filename))
    free = free_bytes_at(path)
    room = "" if free is None else f"; {free // MIB} MiB are free there"
    return (
        f"{path} cannot be written: {os.strerror(error.errno)}{room}. Free space, or make it writable, and start again "
        f"with --out {out}: checkpoints are whole, and the run goes on from the newest"
    )
