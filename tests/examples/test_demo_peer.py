"""The driver's remote control of a child process: answers, refusals, deaths and deadlines."""

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from weftpub.errors import DeadlineError
from weftpub_demo.peer import PeerError, ReceiverProcess, first_death

ECHO = """
import json, os, sys, time
for line in sys.stdin:
    ask = json.loads(line)
    do = ask.pop("do")
    if do == "echo": print(json.dumps({"ok": True, **ask}), flush=True)
    if do == "refuse": print(json.dumps({"id": ask["id"], "ok": False, "error": "no such layer"}), flush=True)
    if do == "chatter": print("hello", flush=True)
    if do == "die": print("out of memory", file=sys.stderr, flush=True); os._exit(7)
    if do == "sleep": time.sleep(ask["seconds"]); print(json.dumps({"id": ask["id"], "ok": True}), flush=True)
"""
STUBBORN = "import time\nwhile True: time.sleep(60)"


@contextmanager
def child(tmp_path: Path, code: str = ECHO) -> Iterator[ReceiverProcess]:
    command = [sys.executable, "-c", code]
    with ReceiverProcess("receiver 1", command, log=tmp_path / "log.txt", environment=os.environ) as peer:
        yield peer


def test_answers_come_back_to_their_requests(tmp_path: Path) -> None:
    with child(tmp_path) as peer:
        first = peer.ask("echo", limit_s=20, layer=3)
        assert first.result() == {"layer": 3}
        assert peer.call("echo", limit_s=20, text="ä\n") == {"text": "ä\n"}
    assert peer.died()


def test_a_refusal_names_the_peer_and_the_reason(tmp_path: Path) -> None:
    with (
        child(tmp_path) as peer,
        pytest.raises(PeerError, match=r"receiver 1 \(process \d+\).*'refuse': no such layer"),
    ):
        peer.call("refuse", limit_s=20)


def test_an_answer_that_is_no_json_is_an_error(tmp_path: Path) -> None:
    with child(tmp_path) as peer, pytest.raises(PeerError, match="not JSON"):
        peer.call("chatter", limit_s=20)


def test_a_death_is_seen_at_once_and_explained(tmp_path: Path) -> None:
    with child(tmp_path) as peer:
        started = time.monotonic()
        with pytest.raises(PeerError, match=r"(?s)receiver 1 .*exit code 7 during 'die'.*out of memory"):
            peer.call("die", limit_s=600)
        assert time.monotonic() - started < 60  # not the deadline
        with pytest.raises(PeerError, match="during 'echo'"):
            peer.call("echo", limit_s=600)


def test_a_kill_is_named(tmp_path: Path) -> None:
    with child(tmp_path) as peer:
        peer.call("echo", limit_s=20)
        os.kill(peer.pid, 9)
        found = first_death([peer], "publish of version 3", DeadlineError("receiver 1 is silent"))
        assert "SIGKILL during 'publish of version 3'" in str(found)
        assert "receiver 1 is silent" in str(found)


def test_an_error_of_the_living_stays_what_it_was(tmp_path: Path) -> None:
    error = DeadlineError("silent")
    with child(tmp_path) as peer:
        assert first_death([peer], "publish", error) is error


def test_a_late_answer_does_not_answer_the_next_request(tmp_path: Path) -> None:
    with child(tmp_path) as peer:
        with pytest.raises(DeadlineError, match=r"'sleep' after .* \(allowed 0.1 s\)"):
            peer.call("sleep", limit_s=0.1, seconds=1.0)
        assert peer.call("echo", limit_s=20, layer=5) == {"layer": 5}


def test_a_child_that_will_not_leave_is_ended(tmp_path: Path) -> None:
    with child(tmp_path, STUBBORN) as peer:
        peer.close(grace_s=0.1)
        assert peer.died()
        assert not psutil.pid_exists(peer.pid)
