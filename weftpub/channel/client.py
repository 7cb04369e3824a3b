"""The asking end of a control channel: a ZeroMQ DEALER with one connection, and the wait over several of them."""

from collections.abc import Sequence

import zmq

from weftpub.channel.address import CurveKeys, check_address, check_socket_owner, socket_path
from weftpub.channel.waiting import look
from weftpub.wire.messages import MAX_MESSAGE_BYTES

__all__ = ["ChannelClient", "wait_any"]

_LOOK_S = 0.001  # how long a wait stays awake


class ChannelClient:
    """A connection to one server. Not shared between threads.

    The server may start later or restart at the same address: ZeroMQ connects again. Data is never queued for a server
    that is not there, so a restarted one is not flooded with what was meant for its predecessor.

    Args:
        address: the server's.
        keys: this end's keys for TCP; the first of `peers` is the server's.
        context: a ZeroMQ context to share between clients of one thread; its owner closes it after them.

    Raises:
        ChannelError: the address cannot be trusted, or its socket belongs to another user.
    """

    def __init__(
        self, address: str, keys: CurveKeys | None = None, context: "zmq.Context[zmq.Socket[bytes]] | None" = None
    ) -> None:
        check_address(address, keys)
        self.address = address
        if address.startswith("ipc://"):
            check_socket_owner(socket_path(address))
        self._own_context = context is None
        self._context: zmq.Context[zmq.Socket[bytes]] = context or zmq.Context()
        self.socket = self._context.socket(zmq.DEALER)
        self.socket.linger = 0
        self.socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        self.socket.setsockopt(zmq.IMMEDIATE, 1)
        self.socket.setsockopt(zmq.RECONNECT_IVL, 20)
        self.socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        if keys is not None and address.startswith("tcp://"):
            self.socket.curve_publickey = keys.public.encode()
            self.socket.curve_secretkey = keys.secret.encode()
            self.socket.curve_serverkey = keys.peers[0].encode()
        self.socket.connect(address)

    def try_send(self, data: bytes, seconds: float) -> bool:
        """Send if the server is, or within `seconds` comes, in reach."""
        if self._send_now(data):
            return True
        return bool(self.socket.poll(max(0, int(seconds * 1000)), zmq.POLLOUT)) and self._send_now(data)

    def _send_now(self, data: bytes) -> bool:
        try:
            self.socket.send(data, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def take(self) -> bytes | None:
        """The next reply that has arrived, None if none has."""
        try:
            frames = self.socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return None
        return frames[-1]

    def close(self) -> None:
        """Close the connection. May be called twice."""
        if not self.socket.closed:
            self.socket.close()
            if self._own_context:
                self._context.term()


def wait_any(clients: Sequence[ChannelClient], seconds: float) -> list[ChannelClient]:
    """The clients for which a reply has arrived, after at most `seconds`."""
    look([client.socket for client in clients], min(_LOOK_S, seconds))
    poller = zmq.Poller()
    for client in clients:
        poller.register(client.socket, zmq.POLLIN)
    ready = dict(poller.poll(max(0, int(seconds * 1000))))
    return [client for client in clients if client.socket in ready]
