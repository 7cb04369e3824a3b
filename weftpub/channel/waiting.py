"""Waiting for a message that is nearly there: looking for a moment before going to sleep.

A publish is a handful of short exchanges, and a sleeping thread takes longer to be woken than most of them take. Every
look lets other threads of the process run.
"""

import time
from collections.abc import Sequence

import zmq

__all__ = ["look"]


def look(sockets: "Sequence[zmq.Socket[bytes]]", seconds: float) -> bool:
    """Whether one of the sockets has a message, after looking for at most `seconds`."""
    end = time.monotonic() + seconds
    while True:
        if any(int(socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN for socket in sockets):
            return True
        if time.monotonic() >= end:
            return False
        time.sleep(0)
