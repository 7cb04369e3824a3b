"""The control channel: trusted addresses only, owner-only sockets, known keys, and deadlines that say who was waited
for.
"""

import os
import socket
import stat
import threading
from pathlib import Path

import pytest
import zmq

from weftpub.channel import ChannelClient, ChannelServer, CurveKeys, Deadline, Deadlines, unix_address, wait_any
from weftpub.channel.address import socket_path
from weftpub.channel.presence import listener
from weftpub.errors import ChannelError, ConfigError, DeadlineError
from weftpub.wire.identity import process_identity


def echo_once(server: ChannelServer) -> None:
    received = server.receive(30)
    assert received is not None
    server.send(received[0], received[1].upper())


def test_a_request_and_its_reply(tmp_path: Path) -> None:
    address = unix_address(tmp_path / "s", "a")
    with ChannelServer(address) as server:
        client = ChannelClient(address)
        assert client.try_send(b"hello", 30)
        echo_once(server)
        assert wait_any([client], 30) == [client]
        assert client.take() == b"HELLO"
        assert client.take() is None
        client.close()
    assert not (tmp_path / "s" / "a").exists()


def test_sockets_are_owner_only(tmp_path: Path) -> None:
    address = unix_address(tmp_path / "s", "a")
    with ChannelServer(address):
        assert stat.S_IMODE(os.stat(tmp_path / "s").st_mode) == 0o700
        assert stat.S_IMODE(os.stat(tmp_path / "s" / "a").st_mode) == 0o600


def test_a_server_says_who_it_is_as_long_as_it_listens(tmp_path: Path) -> None:
    path = socket_path(unix_address(tmp_path / "s", "r0"))
    assert listener(path) is None
    with ChannelServer(f"ipc://{path}"):
        found = listener(path)
        assert found == process_identity()
        assert stat.S_IMODE(os.stat(f"{path}.pid").st_mode) == 0o600
    assert listener(path) is None
    assert os.listdir(tmp_path / "s") == []


@pytest.mark.parametrize("text", ["", "{}", '{"pid": 1}', "x" * 10_000])
def test_a_file_that_names_nobody_is_passed_over(tmp_path: Path, text: str) -> None:
    path = socket_path(unix_address(tmp_path / "s", "r0"))
    Path(f"{path}.pid").write_text(text)
    assert listener(path) is None
    Path(f"{path}.pid").unlink()
    Path(f"{path}.pid").symlink_to("/etc/hostname")
    assert listener(path) is None


def test_a_folder_that_others_can_enter_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "open"
    folder.mkdir(mode=0o755)
    folder.chmod(0o755)
    with pytest.raises(ChannelError, match="mode 755, others can enter"):
        unix_address(folder, "a")
    with pytest.raises(ChannelError, match="mode 755"):
        ChannelServer(f"ipc://{folder}/a")
    with pytest.raises(ChannelError, match="no such folder"):
        ChannelServer(f"ipc://{tmp_path}/none/a")
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(ChannelError, match="not a folder"):
        ChannelServer(f"ipc://{tmp_path}/link/a")


def test_a_socket_of_another_user_is_refused(tmp_path: Path) -> None:
    address = unix_address(tmp_path / "s", "a")
    if os.getuid() != 0:
        pytest.skip("only root can give a file away")
    with ChannelServer(address):
        os.chown(tmp_path / "s" / "a", 12345, -1)
        with pytest.raises(ChannelError, match="belongs to user 12345"):
            ChannelClient(address)


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "nowhere").symlink_to(tmp_path / "gone")
    for folder, words in (("file", "not a folder"), ("nowhere", "not a folder"), ("file/s", "cannot be made")):
        with pytest.raises(ChannelError, match=words):
            unix_address(tmp_path / folder, "a")


@pytest.mark.parametrize("name", ["", ".", "..", "../a", "b/a", "/a", "a\0b"])
def test_a_socket_lies_in_its_folder(tmp_path: Path, name: str) -> None:
    """Only the folder named is checked for who may enter; a name with a path would put the socket into another."""
    with pytest.raises(ChannelError, match="the name of a file"):
        unix_address(tmp_path / "s", name)


@pytest.mark.parametrize("path", ["@weftpub", "*", "", "relative"])
def test_sockets_without_an_absolute_path_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    """ZeroMQ's "@name" is a socket without a file and without rights, that every user can reach. It passed for a file
    in the present folder."""
    tmp_path.chmod(0o700)
    monkeypatch.chdir(tmp_path)
    for kind in (ChannelServer, ChannelClient):
        with pytest.raises(ChannelError, match="absolute path"):
            kind(f"ipc://{path}")


def test_a_path_that_is_too_long(tmp_path: Path) -> None:
    with pytest.raises(ChannelError, match="too long for a socket path"):
        unix_address(tmp_path / "s", "a" * 120)


def test_a_living_server_keeps_its_path_and_a_dead_one_does_not(tmp_path: Path) -> None:
    address = unix_address(tmp_path / "s", "a")
    with ChannelServer(address), pytest.raises(ChannelError, match="another process listens"):
        ChannelServer(address)
    path = address.removeprefix("ipc://")
    left = socket.socket(socket.AF_UNIX)
    left.bind(path)
    left.close()  # the file stays, as after kill -9
    ChannelServer(address).close()
    Path(path).write_text("precious")
    with pytest.raises(ChannelError, match="is no socket"):
        ChannelServer(address)
    assert Path(path).read_text() == "precious"


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:0", "tcp://*:5555"])
def test_tcp_without_keys_is_refused(address: str) -> None:
    with pytest.raises(ChannelError, match="TCP without CURVE keys is refused"):
        ChannelServer(address)
    with pytest.raises(ChannelError, match="TCP without CURVE keys is refused"):
        ChannelClient(address)
    with pytest.raises(ChannelError, match="expected ipc"):
        ChannelServer("inproc://x")


def keys() -> tuple[CurveKeys, CurveKeys]:
    """Keys of a server and of a client that know each other."""
    (sp, ss), (cp, cs) = CurveKeys.generate_pair(), CurveKeys.generate_pair()
    return CurveKeys(sp, ss, (cp,)), CurveKeys(cp, cs, (sp,))


def test_tcp_admits_known_keys_only() -> None:
    server_keys, client_keys = keys()
    stranger = CurveKeys(*CurveKeys.generate_pair(), (server_keys.public,))
    with ChannelServer("tcp://127.0.0.1:0", server_keys) as server:
        client, other = ChannelClient(server.address, client_keys), ChannelClient(server.address, stranger)
        assert client.try_send(b"hello", 30)
        echo_once(server)
        assert wait_any([client], 30) == [client]
        other.try_send(b"let me in", 1)
        assert server.receive(0.5) is None
        client.close()
        other.close()


def test_a_client_does_not_talk_to_a_server_with_another_key() -> None:
    server_keys, client_keys = keys()
    wrong = CurveKeys(client_keys.public, client_keys.secret, (CurveKeys.generate_pair()[0],))
    with ChannelServer("tcp://127.0.0.1:0", server_keys) as server:
        client = ChannelClient(server.address, wrong)
        client.try_send(b"hello", 1)
        assert server.receive(0.5) is None
        client.close()


def test_keys_are_checked_and_not_shown() -> None:
    public, secret = CurveKeys.generate_pair()
    with pytest.raises(ChannelError, match="40 characters"):
        CurveKeys("short", secret, (public,))
    with pytest.raises(ChannelError, match="admit nobody"):
        CurveKeys(public, secret, ())
    assert secret not in repr(CurveKeys(public, secret, (public,)))


def test_a_message_beyond_the_limit_never_arrives(tmp_path: Path) -> None:
    address = unix_address(tmp_path / "s", "a")
    with ChannelServer(address) as server:
        server._socket.setsockopt(zmq.MAXMSGSIZE, 100)
        server._socket.unbind(server.address)
        server._socket.bind(address)
        client = ChannelClient(address)
        client.try_send(b"x" * 1000, 5)
        assert server.receive(0.5) is None
        client.close()


def test_nothing_is_queued_for_a_server_that_is_not_there(tmp_path: Path) -> None:
    address = unix_address(tmp_path / "s", "a")
    client = ChannelClient(address)
    assert not client.try_send(b"stale", 0.1)
    with ChannelServer(address) as server:
        assert client.try_send(b"fresh", 30)
        received = server.receive(30)
        assert received is not None
        assert received[1] == b"fresh"
    client.close()


def test_deadlines_name_peer_phase_times_and_cause() -> None:
    deadline = Deadline("engine0 rank 1 (host h, pid 7, GPU-x)", "verify", 0.01)
    threading.Event().wait(0.02)
    assert deadline.passed
    assert deadline.left == 0
    with pytest.raises(
        DeadlineError, match=r"engine0 rank 1 \(host h, pid 7, GPU-x\).*verify after \d+\.\d s of 0.01 s allowed; stuck"
    ):
        raise deadline.error("stuck")
    deadline.restart()
    assert isinstance(deadline.error("x"), TimeoutError)


@pytest.mark.parametrize("seconds", [0, -1, 1e9, float("nan")])
def test_every_wait_has_a_sane_deadline(seconds: float) -> None:
    with pytest.raises(ConfigError, match="deadline"):
        Deadlines.all(seconds)
