"""Handing descriptors of shared memory to another process of the same user: a Unix socket in a folder that only its
owner can enter, peers checked by the kernel's word for who they are.

    client connects -> both sides check the other's user id (SO_PEERCRED)
    server sends    -> the facts as JSON and the two descriptors (SCM_RIGHTS), and closes

Every process that maps an allocation answers on a socket of its own, so any of them can bring in a newcomer, and none
is needed for the others to live.
"""

import contextlib
import os
import socket
import struct
import threading
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from weftpub.errors import ChannelError, TransportError
from weftpub.wire.identity import process_ended

__all__ = ["Facts", "HandoverServer", "peer_user", "take"]

_LARGEST = 4096
_DESCRIPTORS = 2
_PATIENCE_S = 5.0
_AGAIN_S = 0.05


class Facts(BaseModel):
    """What comes with the descriptors.

    Attributes:
        allocation: name of the allocation, drawn when it was made and never used twice.
        device: "cpu", or the UUID of the GPU that holds it.
        nbytes: bytes of the tensors' memory.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    allocation: str = Field(pattern=r"^[0-9a-f]{32}$")
    device: str = Field(min_length=1, max_length=100)
    nbytes: int = Field(ge=1)


def peer_user(connection: socket.socket) -> int:
    """User id of the process at the other end, as it was when it connected or listened."""
    return _credentials(connection)[1]


def _credentials(connection: socket.socket) -> tuple[int, int, int]:
    """Process id (0 if it is none of this namespace), user id and group id of the other end."""
    size = struct.calcsize("3i")
    return struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))


class HandoverServer:
    """Answers on one socket from a thread of its own, until it is closed.

    Args:
        path: of the socket, in a checked folder.
        facts: what to say.
        descriptors: the memory's and the header's; they stay the caller's, who closes the server first.
    """

    def __init__(self, path: str, facts: Facts, descriptors: tuple[int, int]) -> None:
        self.path = path
        self._text = facts.model_dump_json().encode()
        self._descriptors = descriptors
        self.refused: list[int] = []
        self._closed = threading.Event()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._listener.bind(path)
            os.chmod(path, 0o600)
            self._listener.listen()
        except OSError as error:
            self._listener.close()
            raise ChannelError(f"{path}: shared memory cannot be offered there: {error.strerror}") from error
        self._thread = threading.Thread(target=self._serve, name=f"handover {Path(path).name}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop answering and remove the socket. Twice does nothing."""
        if self._listener.fileno() < 0:
            return
        self._closed.set()
        Path(self.path).unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # not every system shuts listeners down
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread; closing alone would not
        self._thread.join(_PATIENCE_S)
        self._listener.close()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:  # closed; or no descriptor was free, which passes
                if self._closed.wait(_AGAIN_S):
                    return
                continue
            with connection:
                self._answer(connection)

    def _answer(self, connection: socket.socket) -> None:
        user = peer_user(connection)
        if user != os.geteuid():
            self.refused.append(user)
            return
        connection.settimeout(_PATIENCE_S)
        try:
            socket.send_fds(connection, [self._text], list(self._descriptors))
        except OSError:
            return  # the newcomer is gone; it asks again if it wants to


def take(path: str) -> tuple[Facts, int, int] | None:
    """Ask the process that listens at `path`.

    Returns:
        facts, the memory's descriptor and the header's, both owned by the caller; None if nobody listens there. A dead
        process' children, forked from it, may keep its socket open, and answer nobody.

    Raises:
        ChannelError: another user listens, or what came is no hand-over. TransportError: no answer in time.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(_PATIENCE_S)
        try:
            connection.connect(path)
        except (ConnectionRefusedError, FileNotFoundError):
            return None
        except OSError as error:
            raise ChannelError(f"{path}: cannot be asked for shared memory: {error}") from error
        pid, user = _credentials(connection)[0], peer_user(connection)
        if process_ended(pid):
            return None
        if user != os.geteuid():
            raise ChannelError(
                f"{path}: user {user} listens there, expected {os.geteuid()}; run trainer and engine as one user"
            )
        try:
            text, descriptors, _, _ = socket.recv_fds(connection, _LARGEST, _DESCRIPTORS, socket.MSG_CMSG_CLOEXEC)
        except TimeoutError:
            if process_ended(pid):
                return None
            raise TransportError(
                f"{path}: its process did not hand over within {_PATIENCE_S:g} s; is it stopped?"
            ) from None
        except OSError:  # it ended in between
            return None
    if not text and not descriptors:
        if not os.path.exists(path):
            return None  # it is closing
        raise ChannelError(f"{path}: its process handed nothing over; it takes this process for another user's")
    try:
        if len(descriptors) != _DESCRIPTORS:
            raise ChannelError(f"{path}: handed over {len(descriptors)} descriptors, expected {_DESCRIPTORS}")
        facts = Facts.model_validate_json(text)
    except (ChannelError, ValidationError) as error:
        for descriptor in descriptors:
            os.close(descriptor)
        if isinstance(error, ChannelError):
            raise
        raise ChannelError(
            f"{path}: what it says about its memory is not of this release ({error.error_count()} faults)"
        ) from None
    return facts, descriptors[0], descriptors[1]
