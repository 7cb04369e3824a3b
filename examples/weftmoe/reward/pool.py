"""Worker processes that judge answers, with a deadline each: an expression that hangs costs one zero reward and one
process, not the run.

A worker has one job at a time. It answers, or is ended at the deadline and replaced. A worker that cannot start, such
as for a missing package, is an error.
"""

import contextlib
import json
import os
import queue
import select
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

from weftpub.errors import ConfigError, DeadlineError

__all__ = ["RewardPool", "Verdict"]

Outcome = Literal["judged", "timeout", "error", "died"]
_START_S = 120.0
_GRACE_S = 2.0


@dataclass(frozen=True)
class Verdict:
    """What became of one answer: `reward` is 0.0 unless `outcome` is "judged".

    A "timeout" is found by the worker itself, or by the pool if the worker does not come back.
    """

    reward: float
    outcome: Outcome
    detail: str = ""


class RewardPool:
    """The processes. Use it as a context manager.

    Args:
        workers: how many.
        seconds: that reading the truth, reading the answer, and comparing may take each; the process is ended a little
            later.
        memory_mib: address space of a worker.
        command: what a worker runs; for tests.
    """

    def __init__(
        self, workers: int, *, seconds: float = 10.0, memory_mib: int = 4096, command: Sequence[str] | None = None
    ) -> None:
        if workers < 1 or seconds <= 0:
            raise ConfigError(
                f"reward pool: {workers} workers, {seconds} s; at least one worker and some time are needed"
            )
        self._seconds = max(1, round(seconds))  # math-verify counts whole seconds
        module = [sys.executable, "-m", "weftmoe.reward.worker", str(memory_mib), str(self._seconds)]
        self._command = list(command) if command is not None else module
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="reward")
        self._idle: queue.SimpleQueue[_Worker | None] = queue.SimpleQueue()
        for _ in range(workers):
            self._idle.put(None)  # started when it is needed

    def judge(self, jobs: Sequence[tuple[str, str]]) -> list[Verdict]:
        """Verdicts for (completion, ground truth) pairs, in their order.

        Raises:
            ConfigError: the verifier is not installed. DeadlineError: a worker does not start.
        """
        return list(self._threads.map(lambda job: self._one(*job), jobs))

    def close(self) -> None:
        """End all workers."""
        self._threads.shutdown()
        while True:
            try:
                worker = self._idle.get_nowait()
            except queue.Empty:
                return
            if worker is not None:
                worker.end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _one(self, completion: str, ground_truth: str) -> Verdict:
        worker = self._idle.get()
        try:
            if worker is None:
                worker = _Worker(self._command)
            # Reading the truth, reading the answer and comparing have a limit each, inside the worker.
            answer = worker.ask({"completion": completion, "ground_truth": ground_truth}, 3 * self._seconds + _GRACE_S)
        except BaseException:
            self._idle.put(None)
            raise
        if isinstance(answer, Verdict):
            worker.end()
            worker = None
        self._idle.put(worker)
        if isinstance(answer, Verdict):
            return answer
        if "late" in answer:
            return Verdict(0.0, "timeout", answer["late"])
        if "error" in answer:
            return Verdict(0.0, "error", answer["error"])
        return Verdict(float(answer["reward"]), "judged")


class _Worker:
    """One process."""

    def __init__(self, command: Sequence[str]) -> None:
        self._process = subprocess.Popen(
            list(command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=_environment(),
            start_new_session=True,  # Ctrl-C reaches the driver alone
        )
        hello = self._read(_START_S)
        if isinstance(hello, dict) and hello.get("ready"):
            return
        self.end()
        if isinstance(hello, dict):
            raise ConfigError(hello.get("missing", f"a reward worker said {hello}"))
        if hello == "timeout":
            raise DeadlineError(f"a reward worker did not start within {_START_S:.0f} s: {' '.join(command)}")
        raise ConfigError(f"a reward worker ended at its start: {' '.join(command)}; run it by hand to see why")

    def ask(self, job: dict[str, str], seconds: float) -> dict[str, Any] | Verdict:
        """The worker's answer, or the verdict on one that hangs or has died."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write((json.dumps(job) + "\n").encode())
            self._process.stdin.flush()
        except OSError:
            return Verdict(0.0, "died", "the worker had ended")
        answer = self._read(seconds)
        if isinstance(answer, dict):
            return answer
        if answer == "timeout":
            return Verdict(0.0, "timeout", f"no answer within {seconds:.0f} s")
        return Verdict(0.0, "died", f"the worker ended with code {self._process.poll()}, perhaps out of memory")

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):  # an unsent job; the process is gone
                pipe.close()

    def _read(self, seconds: float) -> dict[str, Any] | Literal["timeout", "ended"]:
        """One line as JSON. The worker writes whole lines, and only one per job."""
        assert self._process.stdout is not None
        descriptor, data, limit = self._process.stdout.fileno(), b"", time.monotonic() + seconds
        while not data.endswith(b"\n"):
            ready, _, _ = select.select([descriptor], [], [], max(0.0, limit - time.monotonic()))
            if not ready:
                return "timeout"
            chunk = os.read(descriptor, 65536)
            if not chunk:
                return "ended"
            data += chunk
        return json.loads(data)


def _environment() -> dict[str, str]:
    """This process's environment, with the folders that its modules were found in."""
    folders = [str(Path(__file__).parents[2]), *(entry for entry in sys.path if entry)]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(dict.fromkeys(folders)), "CUDA_VISIBLE_DEVICES": ""}
