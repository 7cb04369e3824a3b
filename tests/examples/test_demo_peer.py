"""The driver's remote control of a child process: answers, refusals, deaths and deadlines."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from weftpub.errors import DeadlineError
from weftpub_demo import peer as peer_module
from weftpub_demo.peer import PeerError, ReceiverProcess, explain

ECHO = """
import json, os, sys, time
for line in sys.stdin:
    ask = json.loads(line)
    do = ask.pop("do")
    if do == "echo": print(json.dumps({"ok": True, **ask}), flush=True)
    if do == "refuse": print(json.dumps({"id": ask["id"], "ok": False, "error": "no such layer"}), flush=True)
    if do == "chatter": print("hello", flush=True)
    if do == "die": print("out of memory", file=sys.stderr, flush=True); os._exit(7)
    if do == "count":
        for n in range(3): print(json.dumps({"id": ask["id"], "progress": {"done": n}}), flush=True)
        time.sleep(1)  # more than the driver waits for a line
        print(json.dumps({"id": ask["id"], "ok": True}), flush=True)
    if do == "sleep": time.sleep(ask["seconds"]); print(json.dumps({"id": ask["id"], "ok": True}), flush=True)
"""
RECEIVER = """
from weftpub_demo.control import Control

def chatty(request):
    print("a library prints to standard output")
    return {"double": 2 * request["number"]}

def failing(request):
    raise KeyError("layer 9")

def slow(request):
    control.progress(done=1)
    control.progress(done=2)
    return {"done": 3}

control = Control()
control.serve({"chatty": chatty, "failing": failing, "slow": slow})
"""
BUSY = "from weftpub_demo.control import Control; Control(); import time; time.sleep(600)"
DRIVER = f"""
import os, sys, time
from pathlib import Path
from weftpub_demo.peer import ReceiverProcess
child = ReceiverProcess("receiver 0", [sys.executable, "-c", {BUSY!r}], log=Path(sys.argv[1]), environment=os.environ)
print(child.pid, flush=True)
time.sleep(600)
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

        def publish() -> None:
            with explain([peer]) as phase:
                phase("publish of version 3")
                raise DeadlineError("receiver 1 is silent")

        with pytest.raises(PeerError, match="SIGKILL during 'publish of version 3'") as found:
            publish()
        assert "DeadlineError: receiver 1 is silent" in str(found.value)


def test_an_error_of_the_living_stays_what_it_was(tmp_path: Path) -> None:
    with child(tmp_path) as peer, pytest.raises(DeadlineError, match=r"^silent$"), explain([peer]):
        raise DeadlineError("silent")


def test_a_late_answer_does_not_answer_the_next_request(tmp_path: Path) -> None:
    with child(tmp_path) as peer:
        with pytest.raises(DeadlineError, match=r"'sleep' after .* \(allowed 0.1 s\)"):
            peer.call("sleep", limit_s=0.1, seconds=1.0)
        assert peer.call("echo", limit_s=20, layer=5) == {"layer": 5}


def test_word_of_progress_begins_the_limit_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[int] = []

    def hear(word: Mapping[str, Any]) -> None:
        heard.append(word["done"])

    with child(tmp_path) as peer:
        # A clock that goes on by 100 s with each word, and stands still otherwise.
        monkeypatch.setattr(peer_module, "time", SimpleNamespace(monotonic=lambda: 100.0 * len(heard)))
        assert peer.call("count", limit_s=150, progress=hear) == {}
        monkeypatch.undo()
    assert heard == [0, 1, 2]


def test_a_handler_tells_how_far_it_is(tmp_path: Path) -> None:
    heard: list[Any] = []
    with child(tmp_path, RECEIVER) as peer:
        assert peer.call("slow", limit_s=20, progress=heard.append) == {"done": 3}
        assert peer.call("slow", limit_s=20) == {"done": 3}
    assert heard == [{"done": 1}, {"done": 2}]


def test_a_child_that_will_not_leave_is_ended(tmp_path: Path) -> None:
    with child(tmp_path, STUBBORN) as peer:
        peer.close(grace_s=0.1)
        assert peer.died()
        assert not psutil.pid_exists(peer.pid)


def test_what_libraries_print_is_no_answer_and_goes_to_the_log(tmp_path: Path) -> None:
    with child(tmp_path, RECEIVER) as peer:
        assert peer.call("chatty", limit_s=20, number=21) == {"double": 42}
    assert "a library prints" in (tmp_path / "log.txt").read_text()


def test_a_failing_request_is_answered_and_the_receiver_lives_on(tmp_path: Path) -> None:
    with child(tmp_path, RECEIVER) as peer:
        with pytest.raises(PeerError, match="KeyError: 'layer 9'"):
            peer.call("failing", limit_s=20)
        with pytest.raises(PeerError, match="KeyError: 'unknown'"):
            peer.call("unknown", limit_s=20)
        assert peer.call("chatty", limit_s=20, number=1) == {"double": 2}
    assert "Traceback" in (tmp_path / "log.txt").read_text()


def test_a_busy_receiver_does_not_outlive_a_killed_driver(tmp_path: Path) -> None:
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER, str(tmp_path / "log.txt")], stdout=subprocess.PIPE, text=True
    )
    try:
        assert driver.stdout is not None
        receiver = psutil.Process(int(driver.stdout.readline()))
        assert receiver.is_running()
    finally:
        driver.kill()
        driver.wait()
    _, alive = psutil.wait_procs([receiver], timeout=20)
    assert alive == []
