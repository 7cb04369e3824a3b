"""Where a control channel listens, and who may connect.

On one host: a Unix socket in a folder that only its owner can enter. Between hosts: TCP with CURVE keys, encrypted and
authenticated on both sides; TCP without keys is refused, on loopback too, because every user of a host can reach its
loopback.
"""

import os
import socket
import stat
from dataclasses import dataclass, field
from pathlib import Path

import zmq

from weftpub.errors import ChannelError

__all__ = ["CurveKeys", "check_address", "check_socket_owner", "claim_socket_path", "socket_path", "unix_address"]

_LONGEST_PATH = 107  # sockaddr_un.sun_path without its closing zero


@dataclass(frozen=True)
class CurveKeys:
    """Keys of one end of a TCP channel, in ZeroMQ's 40-character form.

    Attributes:
        public, secret: this end's pair.
        peers: public keys of the other end: a client holds its server's one key, a server the keys of all clients that
            it admits.
    """

    public: str
    secret: str = field(repr=False)
    peers: tuple[str, ...]

    def __post_init__(self) -> None:
        for name, key in (("public", self.public), ("secret", self.secret), *(("peer", peer) for peer in self.peers)):
            if len(key) != 40:
                raise ChannelError(
                    f"CURVE {name} key: expected 40 characters of Z85 text, found {len(key)}; make keys with "
                    "CurveKeys.generate_pair"
                )
        if not self.peers:
            raise ChannelError("CURVE keys without a peer's key admit nobody; add the other end's public key")

    @staticmethod
    def generate_pair() -> tuple[str, str]:
        """A new (public, secret) pair."""
        public, secret = zmq.curve_keypair()
        return public.decode(), secret.decode()


def unix_address(folder: str | os.PathLike[str], name: str) -> str:
    """The address of socket `name` in `folder`, which is made with mode 0700, or checked if it is there.

    Raises:
        ChannelError: the folder cannot be made, belongs to somebody else or lets others in, or the path is too long for
            a socket.
    """
    if name in ("", ".", "..") or "/" in name or "\0" in name:
        raise ChannelError(f"socket name {name!r}: expected the name of a file in {folder}, without a path")
    path = Path(folder).absolute()
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except FileExistsError:
        pass  # a file, or a link that leads nowhere: the check says what it is
    except (OSError, ValueError) as error:
        raise ChannelError(f"{path}: the folder for sockets cannot be made: {error}; use another folder") from error
    _check_folder(path)
    full = str(path / name)
    if len(os.fsencode(full)) > _LONGEST_PATH:
        raise ChannelError(
            f"{full}: {len(os.fsencode(full))} bytes are too long for a socket path, the limit is {_LONGEST_PATH}; "
            "use a shorter folder"
        )
    return f"ipc://{full}"


def check_address(address: str, keys: CurveKeys | None) -> None:
    """Refuse addresses that cannot be trusted: ChannelError unless it is a Unix socket, or TCP with keys."""
    scheme = address.partition("://")[0]
    if scheme == "ipc":
        # "@name" is a socket without a file, which every user can reach, and "*" a name that ZeroMQ makes up.
        if not os.path.isabs(socket_path(address)):
            raise ChannelError(f"{address}: expected the absolute path of a socket; make the address with unix_address")
        _check_folder(Path(socket_path(address)).parent)
    elif scheme == "tcp":
        if keys is None:
            raise ChannelError(
                f"{address}: TCP without CURVE keys is refused; pass CurveKeys, or use a Unix socket (unix_address) "
                "on one host"
            )
    else:
        raise ChannelError(f"{address}: expected ipc://PATH or tcp://HOST:PORT with CURVE keys")


def socket_path(address: str) -> str:
    """The file of a Unix socket address."""
    return address.removeprefix("ipc://")


def claim_socket_path(path: str) -> None:
    """Make sure that nobody else listens at `path`; a file that a dead server left is removed.

    ZeroMQ would silently take the path over from a living server.
    """
    try:
        facts = os.lstat(path)
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(facts.st_mode):
        raise ChannelError(f"{path}: is there and is no socket; choose another name, or remove it")
    probe = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        probe.settimeout(1.0)
        probe.connect(path)
    except ConnectionRefusedError:
        Path(path).unlink(missing_ok=True)
        return
    except OSError as error:
        raise ChannelError(f"{path}: cannot be used as a socket: {error.strerror}") from error
    finally:
        probe.close()
    raise ChannelError(
        f"{path}: another process listens there; give every receiver its own name, or stop the other one"
    )


def check_socket_owner(path: str) -> None:
    """ChannelError if the socket at `path` belongs to another user; nothing if it does not exist yet."""
    try:
        facts = os.stat(path)
    except FileNotFoundError:
        return
    if facts.st_uid != os.getuid():
        raise ChannelError(
            f"{path}: belongs to user {facts.st_uid}, expected {os.getuid()}; run trainer and engine as one user"
        )


def _check_folder(path: Path) -> None:
    try:
        facts = path.lstat()
    except FileNotFoundError:
        raise ChannelError(f"{path}: no such folder; make the address with unix_address, which creates it") from None
    if not stat.S_ISDIR(facts.st_mode):
        raise ChannelError(f"{path}: not a folder (a link is not followed); use a folder of your own")
    if facts.st_uid != os.getuid():
        raise ChannelError(f"{path}: belongs to user {facts.st_uid}, expected {os.getuid()}; use a folder of your own")
    if stat.S_IMODE(facts.st_mode) & 0o077:
        raise ChannelError(
            f"{path}: has mode {stat.S_IMODE(facts.st_mode):o}, others can enter it; chmod 700 it, or use another "
            "folder"
        )
