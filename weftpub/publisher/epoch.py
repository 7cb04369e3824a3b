"""Which publisher of a run came last: its epoch, a number that only grows.

Receivers name the epoch that they listen to, and a file beside the commit record keeps the highest one that was taken
there, so that it outlives receivers which are restarted. A publisher takes the next one when it first introduces
itself, and when it takes over. No clock is asked: those of two hosts differ, and one may be set back.
"""

import contextlib
import os
import tempfile
from pathlib import Path

__all__ = ["epoch_file", "take_epoch"]

_LONGEST = 32  # characters of such a file


def epoch_file(commit_path: str | os.PathLike[str]) -> Path:
    """Where the highest epoch is kept."""
    return Path(f"{os.fspath(commit_path)}.epoch")


def take_epoch(commit_path: str | os.PathLike[str], heard: int) -> int:
    """The next epoch, noted in the file before anybody hears of it.

    A path that cannot be written leaves the receivers' word alone: a publish refuses it by itself, and who only asks
    where engines stand needs none.

    Args:
        commit_path: of the commit record.
        heard: the highest epoch that a receiver named.
    """
    target = epoch_file(commit_path)
    epoch = 1 + max(heard, _kept(target))
    with contextlib.suppress(OSError):
        target.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
        try:
            with os.fdopen(handle, "w") as file:
                file.write(str(epoch))
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, target)
        except OSError:
            Path(temporary).unlink(missing_ok=True)
    return epoch


def _kept(path: Path) -> int:
    """The epoch in the file; 0 if there is none, or something else is in it."""
    try:
        with path.open(encoding="ascii") as file:
            text = file.read(_LONGEST).strip()
    except (OSError, UnicodeDecodeError):
        return 0
    return int(text) if text.isdecimal() else 0
