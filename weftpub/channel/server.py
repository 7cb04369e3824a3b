"""The receiving end of a control channel: a ZeroMQ ROUTER that admits the owner of its socket, or the holders of known
keys.
"""

import os
from pathlib import Path
from typing import Any

import zmq
from zmq.auth.thread import ThreadAuthenticator

from weftpub.channel.address import CurveKeys, check_address, claim_socket_path, socket_path
from weftpub.channel.presence import announce, withdraw
from weftpub.channel.waiting import look
from weftpub.errors import ChannelError
from weftpub.wire.messages import MAX_MESSAGE_BYTES

__all__ = ["ChannelServer"]

_DOMAIN = "weftpub"


class ChannelServer:
    """Listen at `address` until closed. Not shared between threads.

    Args:
        address: ``ipc://PATH`` in an owner-only folder, or ``tcp://HOST:PORT`` (port 0 picks one) with keys.
        keys: this end's keys for TCP; `peers` are the clients that are admitted.

    Raises:
        ChannelError: the address cannot be trusted or is taken.
    """

    def __init__(self, address: str, keys: CurveKeys | None = None) -> None:
        check_address(address, keys)
        self._path = socket_path(address) if address.startswith("ipc://") else None
        if self._path is not None:
            claim_socket_path(self._path)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._auth: ThreadAuthenticator | None = None
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.linger = 500
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        try:
            if keys is not None and self._path is None:
                self._admit(keys)
            else:
                self._socket.setsockopt(zmq.IPC_FILTER_UID, os.getuid())
            self._socket.bind(address)
        except zmq.ZMQError as error:
            self.close()
            raise ChannelError(f"{address}: cannot listen: {error}") from error
        if self._path is not None:
            os.chmod(self._path, 0o600)
            try:
                announce(self._path)
            except ChannelError:
                self.close()
                raise
        self.address = str(self._socket.getsockopt_string(zmq.LAST_ENDPOINT))

    def receive(self, seconds: float, awake: float = 0.0) -> tuple[bytes, bytes] | None:
        """The next (client, data), None if there is none within `seconds`.

        For the first `awake` seconds it stays awake: for who has just answered and is likely to be asked again.
        """
        if awake:
            look([self._socket], min(awake, seconds))
        if not self._socket.poll(max(0, int(seconds * 1000)), zmq.POLLIN):
            return None
        frames = self._socket.recv_multipart()
        return (frames[0], frames[1]) if len(frames) == 2 else (frames[0], b"")

    def send(self, client: bytes, data: bytes) -> None:
        """Answer a client; one that has gone is not missed."""
        self._socket.send_multipart([client, data])

    def close(self) -> None:
        """Stop listening and remove the socket file. May be called twice."""
        if self._socket.closed:
            return
        self._socket.close()
        if self._auth is not None:
            self._auth.stop()
        self._context.term()
        if self._path is not None:
            withdraw(self._path)
            Path(self._path).unlink(missing_ok=True)

    def __enter__(self) -> "ChannelServer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _admit(self, keys: CurveKeys) -> None:
        """Turn encryption on and let in only clients with known keys: ZeroMQ by itself lets in every key."""
        self._auth = ThreadAuthenticator(self._context)
        self._auth.start()
        provider: Any = _KnownKeys(keys.peers)
        self._auth.configure_curve_callback(_DOMAIN, credentials_provider=provider)
        self._socket.zap_domain = _DOMAIN.encode()
        self._socket.curve_server = True
        self._socket.curve_publickey = keys.public.encode()
        self._socket.curve_secretkey = keys.secret.encode()


class _KnownKeys:
    """What the authenticator asks about each client."""

    def __init__(self, keys: tuple[str, ...]) -> None:
        self._keys = frozenset(keys)

    def callback(self, domain: str, key: bytes) -> bool:
        """Whether the key is known. The authenticator hands it over in Z85 text."""
        return domain == _DOMAIN and key.decode() in self._keys
