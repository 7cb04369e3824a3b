"""The demo's engine: its receiver processes, started together, asked together, and ended together."""

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from weftpub_demo.checks import CheckBook
from weftpub_demo.peer import PeerError, Pending, ReceiverProcess

__all__ = ["ENGINE", "RECEIVERS", "Receivers", "start_receivers"]

ENGINE = "sglang"
RECEIVERS = 2  # expert parallel


class Receivers:
    """All receiver processes of the engine, by rank."""

    def __init__(self, peers: tuple[ReceiverProcess, ...], limit_s: float) -> None:
        self.peers = peers
        self._limit_s = limit_s

    def ask(self, do: str, **fields: Any) -> Callable[[], list[dict[str, Any]]]:
        """Send one request to every receiver at once; call the result to wait for all answers, by rank."""
        pending: list[Pending] = [peer.ask(do, limit_s=self._limit_s, **fields) for peer in self.peers]
        return lambda: [one.result() for one in pending]

    def call(self, do: str, **fields: Any) -> list[dict[str, Any]]:
        """Ask every receiver at once and wait for all answers."""
        return self.ask(do, **fields)()

    def require_alive(self, phase: str) -> None:
        """Raise PeerError if a receiver has ended; a publisher would wait for another to take its place."""
        for peer in self.peers:
            if peer.died():
                raise PeerError(peer.obituary(phase))

    def require_offloaded(self, answers: list[dict[str, Any]], book: CheckBook) -> None:
        """Check that every weight of every receiver was made anew, at another address, and is NaN throughout."""
        for peer, answer in zip(self.peers, answers, strict=True):
            found = f"{peer}: {answer['moved']} of {answer['parameters']} parameters moved, {answer['clean']} not NaN"
            book.require("poisoned", answer["clean"] == 0, found)
            book.require("rebound", answer["moved"] == answer["parameters"], found)

    def require_served(self, version: int, book: CheckBook) -> None:
        """Check that no poison is left and that every receiver serves `version`."""
        for peer, answer in zip(self.peers, self.call("status"), strict=True):
            book.require("coverage", answer["poisoned"] == 0, f"{peer}: {answer['poisoned']} elements are still NaN")
            book.require(
                "committed",
                answer["version"] == version and answer["serving"],
                f"{peer} serves {answer['version']} (serving: {answer['serving']}), expected version {version}",
            )


@contextmanager
def start_receivers(model: Path, *, format: str, device: str, logs: Path, limit_s: float) -> Iterator[Receivers]:
    """Start the engine's processes; they are gone when the block ends, however it ends.

    They build their models meanwhile: `Receivers.call("hello")` is answered when that is done.
    """
    with ExitStack() as stack:
        peers = tuple(
            stack.enter_context(
                ReceiverProcess(
                    f"receiver {rank} (expert-parallel rank {rank} of {RECEIVERS})",
                    [
                        *(sys.executable, "-m", "weftpub_demo.receiver"),
                        *("--model", str(model), "--name", ENGINE, "--rank", str(rank), "--ranks", str(RECEIVERS)),
                        *("--format", format, "--device", device),
                    ],
                    log=logs / f"receiver-{rank}.log",
                    environment=_environment(device),
                )
            )
            for rank in range(RECEIVERS)
        )
        yield Receivers(peers, limit_s)


def _environment(device: str) -> Mapping[str, str]:
    """This process's environment and SGLang's own switches: no check for a kernel package that a CPU does not need."""
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK": "1",
        "SGLANG_ENABLE_JIT_DEEPGEMM": "0",
    }
    environment.pop("SGLANG_USE_CPU_ENGINE", None)  # it would repack the weights for other kernels
    if device == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    return environment
