"""The driver's end of one receiver process: start it, ask it things, and make sure that it is gone afterwards.

Bytes of weights never pass here. This is the demo's own remote control, one JSON object a line over the child's
standard input and output:

    driver -> receiver   {"id": 7, "do": "probe", "layer": 0, ...}
    receiver -> driver   {"id": 7, "ok": true, ...}   or   {"id": 7, "ok": false, "error": "..."}

A long answer may be preceded by word of how far it is, {"id": 7, "progress": {...}}.

The child takes the end of its input as the order to leave, so it cannot outlive a driver that died in any way.
"""

import contextlib
import json
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

from weftpub.errors import ChannelError, DeadlineError

__all__ = ["PeerError", "Pending", "Progress", "ReceiverProcess", "explain"]

Progress = Callable[[Mapping[str, Any]], None]

_POLL_S = 0.2
_LOG_LINES = 6


class PeerError(ChannelError):
    """A receiver process died, or answered a request with an error."""


class Pending:
    """One request that was sent; `result()` waits for its answer."""

    def __init__(self, peer: "ReceiverProcess", number: int, what: str, limit_s: float) -> None:
        self._peer = peer
        self._number = number
        self._what = what
        self._limit_s = limit_s

    def result(self, progress: Progress | None = None) -> dict[str, Any]:
        """The answer's fields.

        Args:
            progress: called with what the peer says before it; each word begins the time limit anew.

        Raises:
            PeerError: the peer died or refused. DeadlineError: it was silent for too long.
        """
        return self._peer._answer(self._number, self._what, self._limit_s, progress)


class ReceiverProcess:
    """A child process under remote control. Use it as a context manager: leaving ends the child."""

    def __init__(self, name: str, command: Sequence[str], *, log: Path, environment: Mapping[str, str]) -> None:
        """Start `command`; its standard error goes to the file `log`."""
        self.name = name
        self.log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as errors:
            self._process = subprocess.Popen(
                list(command),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=dict(environment),
                start_new_session=True,  # Ctrl-C reaches the driver alone, which then ends its receivers in order
            )
        self._lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._last = 0
        threading.Thread(target=self._read, name=f"{name} answers", daemon=True).start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __str__(self) -> str:
        return f"{self.name} (process {self.pid})"

    def ask(self, do: str, *, limit_s: float, **fields: Any) -> Pending:
        """Send one request without waiting. Requests are answered in order, one at a time."""
        self._last += 1
        line = json.dumps({"id": self._last, "do": do, **fields}) + "\n"
        try:
            assert self._process.stdin is not None
            self._process.stdin.write(line.encode())
            self._process.stdin.flush()
        except OSError:
            raise PeerError(self.obituary(do)) from None
        return Pending(self, self._last, do, limit_s)

    def call(self, do: str, *, limit_s: float, progress: Progress | None = None, **fields: Any) -> dict[str, Any]:
        """Send one request and wait for its answer, as `Pending.result` does."""
        return self.ask(do, limit_s=limit_s, **fields).result(progress)

    def died(self) -> bool:
        """Whether the process has ended."""
        return self._process.poll() is not None

    def obituary(self, phase: str) -> str:
        """How the process ended, during what, and the last lines it logged."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=2.0)
        code = self._process.returncode
        if code is None:
            how = "closed its control pipe"
        elif code < 0:
            how = f"was ended by {signal.Signals(-code).name}"
        else:
            how = f"ended with exit code {code}"
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-_LOG_LINES:]
        tail = "; it logged nothing" if not lines else f"; its log {self.log} ends:\n  " + "\n  ".join(lines)
        return f"{self} {how} during {phase!r}{tail}"

    def close(self, *, grace_s: float = 5.0) -> None:
        """End the process: first by closing its input, then by SIGKILL. Only this process is touched."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(timeout=grace_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._process.stdout.close()

    def _answer(self, number: int, what: str, limit_s: float, progress: Progress | None) -> dict[str, Any]:
        started = time.monotonic()
        while True:
            # Died is read before the queue: what a process said before it ended is still heard.
            died = self.died()
            try:
                answer = json.loads(self._lines.get(timeout=_POLL_S))
            except queue.Empty:
                if died:
                    raise PeerError(self.obituary(what)) from None
                elapsed = time.monotonic() - started
                if elapsed > limit_s:
                    raise DeadlineError(
                        f"{self} did not answer {what!r} after {elapsed:.1f} s (allowed {limit_s:.1f} s); "
                        f"it may be out of memory or starved of CPU: see {self.log}, or allow it more time"
                    ) from None
                continue
            except json.JSONDecodeError as error:
                raise PeerError(f"{self} answered {what!r} with something that is not JSON: {error}") from None
            if answer.get("id") != number:
                continue  # the late answer to a request that was given up
            if "progress" in answer:
                started = time.monotonic()
                if progress is not None:
                    progress(answer["progress"])
                continue
            if not answer.get("ok"):
                raise PeerError(f"{self} failed in {what!r}: {answer.get('error', 'no reason given')}")
            return {key: value for key, value in answer.items() if key not in ("id", "ok")}


@contextmanager
def explain(peers: Sequence[ReceiverProcess]) -> Iterator[Callable[[str], None]]:
    """Turn an error inside the block into a PeerError where the death of a receiver explains it.

    Yields a function that says which phase begins; the PeerError names it, and keeps what was seen first.
    """
    current = ["start-up"]
    try:
        yield lambda phase: current.__setitem__(0, phase)
    except PeerError:
        raise
    except Exception as error:
        time.sleep(_POLL_S)  # a killed process takes a moment to be seen as dead
        for peer in peers:
            if peer.died():
                seen = f"{type(error).__name__}: {error}"
                raise PeerError(f"{peer.obituary(current[0])}\n(first seen as {seen})") from error
        raise
