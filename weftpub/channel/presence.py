"""Who listens at a Unix socket: a small file beside it that names the process, so that a peer which finds nobody there
can tell a receiver that has died from one that has not started yet.
"""

import os
import tempfile
from pathlib import Path

from pydantic import ValidationError

from weftpub.errors import ChannelError
from weftpub.wire.identity import Identity, process_identity

__all__ = ["announce", "listener", "withdraw"]

_LONGEST = 4096  # bytes of such a file


def announce(socket_file: str) -> None:
    """Write this process's identity beside its socket. ChannelError if that is impossible."""
    target = _path(socket_file)
    try:
        handle, temporary = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)  # mode 0600
        with os.fdopen(handle, "w") as file:
            file.write(process_identity().model_dump_json())
        os.replace(temporary, target)
    except OSError as error:
        raise ChannelError(f"{target}: cannot be written: {error.strerror}; use another folder for sockets") from error


def withdraw(socket_file: str) -> None:
    """Remove the file: nobody listens there any more, in good order."""
    _path(socket_file).unlink(missing_ok=True)


def listener(socket_file: str) -> Identity | None:
    """The process that listened there last; None if none did, left in good order, or cannot be read."""
    try:
        handle = os.open(_path(socket_file), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        if os.fstat(handle).st_uid != os.getuid():
            return None
        return Identity.model_validate_json(os.read(handle, _LONGEST))
    except (OSError, ValidationError):
        return None
    finally:
        os.close(handle)


def _path(socket_file: str) -> Path:
    return Path(f"{socket_file}.pid")
