"""Serve a receiver at an address: the loop between its socket and its state machine, in this thread or in one of its
own.
"""

import threading
from collections.abc import Callable

from weftpub.channel import ChannelServer, CurveKeys
from weftpub.errors import ChannelError
from weftpub.receive.receiver import Receiver
from weftpub.wire.messages import decode_request, encode, request_number

__all__ = ["ReceiverThread", "serve"]

_POLL_S = 0.1
_AWAKE_S = 0.002  # how long the loop stays awake after an answer


def serve(
    receiver: Receiver,
    address: str,
    stop: threading.Event | None = None,
    *,
    keys: CurveKeys | None = None,
    ready: Callable[[str], None] | None = None,
) -> None:
    """Answer requests at `address` until `stop` is set (forever without it), then close the receiver.

    Every error of a request, the engine's own too, goes back to the publisher as a reply: a rank that fails must not
    fall silent and leave the others waiting. The receiver has fenced itself by then if bytes were written.

    Args:
        receiver: called from this thread only.
        address: from `unix_address`, or TCP with keys.
        stop: looked at every tenth of a second.
        keys: for TCP.
        ready: called with the bound address once requests are accepted.

    Raises:
        ChannelError: the address cannot be used.
    """
    with ChannelServer(address, keys) as server:
        try:
            if ready is not None:
                ready(server.address)
            answered = False
            while stop is None or not stop.is_set():
                received = server.receive(_POLL_S, _AWAKE_S if answered else 0.0)
                answered = received is not None
                if received is not None:
                    client, data = received
                    answer = answer_to(receiver, data)
                    if answer is not None:
                        server.send(client, answer)
                receiver.tick()
        finally:
            receiver.close()


def answer_to(receiver: Receiver, data: bytes) -> bytes | None:
    """The encoded reply to one encoded request; None for data in which not even a request number can be read."""
    try:
        request = decode_request(data)
    except ChannelError as error:
        number = request_number(data)
        return None if number is None else encode(receiver.failure(number, error))
    try:
        return encode(receiver.handle(request))
    except Exception as error:  # reported, not swallowed: the publisher raises it
        return encode(receiver.failure(request.request, error))


class ReceiverThread:
    """A receiver served by a thread of this process, as a context manager.

    Args:
        receiver: called from the new thread only, as long as the thread runs.
        address, keys: as in `serve`.
        seconds: how long starting and stopping may take.

    Raises:
        ChannelError: on entering, if the address cannot be used.
    """

    def __init__(
        self, receiver: Receiver, address: str, *, keys: CurveKeys | None = None, seconds: float = 30.0
    ) -> None:
        self.receiver = receiver
        self.address = address
        self._keys = keys
        self._seconds = seconds
        self._stop = threading.Event()
        self._ready = threading.Event()
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name=f"weftpub receiver {receiver.rank}", daemon=True)

    def __enter__(self) -> "ReceiverThread":
        self._thread.start()
        if not self._ready.wait(self._seconds):
            raise ChannelError(f"{self.address}: the receiver did not start within {self._seconds:g} s")
        if self._error is not None:
            raise self._error
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Stop serving; raises the error that ended the thread, if one did."""
        self._stop.set()
        self._thread.join(self._seconds)
        if self._thread.is_alive():
            raise ChannelError(
                f"{self.address}: the receiver did not stop within {self._seconds:g} s; is a copy or the engine stuck?"
            )
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            serve(self.receiver, self.address, self._stop, keys=self._keys, ready=self._started)
        except Exception as error:  # raised again in the thread that asks
            self._error = error
            self._ready.set()

    def _started(self, address: str) -> None:
        self.address = address
        self._ready.set()
