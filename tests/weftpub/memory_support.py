"""Another process that joins shared memory, commanded through a pipe: what a trainer or an engine does to it, and what
happens when that process is killed.
"""

import multiprocessing as mp
import os
import signal
import time
import traceback
from pathlib import Path
from typing import Any

import torch
from store_support import EXPERTS, HIDDEN, INTERMEDIATE, LAYERS, fill, make_masters, make_store

from weftpub.memory import Access, SharedAllocation, SharedAllocator
from weftpub.store import StoreLayout
from weftpub.store.shared import shared_catalogue, verify_shared

LAYOUT = StoreLayout(LAYERS, EXPERTS, HIDDEN, INTERMEDIATE)
CATALOGUE = shared_catalogue(LAYOUT)


class Partner:
    """A process that holds at most one allocation and one store over it."""

    def __init__(self) -> None:
        context = mp.get_context("forkserver")  # torch is imported once for all of them
        context.set_forkserver_preload(["weftpub.store.shared", "weftpub.receive"])
        self._pipe, there = context.Pipe()
        self.process: Any = context.Process(target=_main, args=(there,), daemon=True)
        self.process.start()
        there.close()

    def __call__(self, command: str, *args: object) -> Any:
        """Run a command there; what it raised is raised here as AssertionError with the text."""
        self.send(command, *args)
        return self.take(command)

    def send(self, command: str, *args: object) -> None:
        """Have a command run there, without waiting."""
        self._pipe.send((command, args))

    def take(self, command: str) -> Any:
        """The answer to what was sent."""
        assert self._pipe.poll(60), f"no answer to {command}"
        try:
            good, value = self._pipe.recv()
        except EOFError:
            self.process.join(30)
            raise AssertionError(f"{command}: the process ended with {self.process.exitcode}") from None
        if not good:
            raise AssertionError(value)
        return value

    def dies_of(self, command: str, *args: object) -> int:
        """Run a command that ends the process; its exit code."""
        self._pipe.send((command, args))
        self.process.join(60)
        return int(self.process.exitcode)

    def kill(self) -> None:
        """kill -9."""
        self.process.kill()
        self.process.join(30)

    def hold(self) -> None:
        """Stop it, as a debugger does; it has stopped on return. `go_on` undoes it."""
        os.kill(self.process.pid, signal.SIGSTOP)
        until = time.monotonic() + 30
        tasks = Path(f"/proc/{self.process.pid}/task")
        while any((task / "stat").read_text().rpartition(")")[2].split()[0] != "T" for task in tasks.iterdir()):
            assert time.monotonic() < until, "it does not stop"
            time.sleep(0.005)

    def go_on(self) -> None:
        """After `hold`."""
        os.kill(self.process.pid, signal.SIGCONT)

    def stop(self) -> None:
        """End it, if it has not ended yet."""
        self.kill()
        self._pipe.close()


class _Commands:
    """What a partner can be asked to do."""

    def __init__(self) -> None:
        self.memory: Any = None
        self.store: Any = None

    def join(
        self, folder: str, name: str, create: bool = True, protected: bool = False, device: str = "cpu"
    ) -> tuple[str, bool]:
        self.memory = SharedAllocation.join(folder, name, device, CATALOGUE, create=create, protected=protected)
        return self.memory.id, self.memory.created

    def leave(self) -> None:
        self.memory.leave()
        self.memory = self.store = None

    def fill(self, generation: int, seed: int) -> dict[str, str]:
        """Write a generation with a store over the memory; sha256 by canonical name."""
        self.make_store()
        fill(self.store, generation, make_masters(self.store, seed))
        return self.store.sha256()

    def make_store(self) -> None:
        if self.store is None:
            self.store = make_store(allocator=SharedAllocator(self.memory), device=self.memory.device)

    def write_half(self, generation: int, seed: int) -> None:
        """Begin a generation and write one matrix of it."""
        self.make_store()
        self.store.begin(generation)
        name, master = next(iter(make_masters(self.store, seed).items()))
        self.store.writer()(name, master)

    def do(self, method: str, *args: object) -> Any:
        """A method of the allocation."""
        return getattr(self.memory, method)(*args)

    def verify(self) -> int:
        return verify_shared(self.memory)

    def read(self, name: str, start: int, count: int) -> list[int]:
        return self.memory.tensor(name).view(torch.uint8).reshape(-1)[start : start + count].tolist()

    def write(self, name: str, start: int, value: int) -> None:
        self.memory.tensor(name).view(torch.uint8).reshape(-1)[start] = value
        if self.memory.device.type == "cuda":
            torch.cuda.synchronize()

    def fork(self) -> int:
        """A child that does nothing, as a data loader's worker that outlives its trainer; its process id."""
        child = os.fork()
        if child == 0:
            signal.pause()
            os._exit(0)
        return child

    def protect(self, access: int) -> None:
        self.memory._pages.protect(Access(access))

    def mappings(self) -> int:
        return mappings()

    def other_user(self, path: str) -> str:
        """Ask for memory as another user; what came."""
        from weftpub.memory import handover

        os.setuid(65534)
        return repr(_raw_ask(path)) if self.memory is None else repr(handover.take(path))


def _raw_ask(path: str) -> tuple[bytes, list[int]]:
    """Ask without any check of this side's own."""
    import socket

    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.connect(path)
        text, descriptors, _, _ = socket.recv_fds(connection, 4096, 2)
    return text, descriptors


def mappings() -> int:
    """Mappings of shared experts that this process has."""
    return Path("/proc/self/maps").read_text().count("memfd:weftpub-experts")


def _main(pipe: Any) -> None:
    torch.set_num_threads(1)
    commands = _Commands()
    while True:
        try:
            name, args = pipe.recv()
        except EOFError:
            os._exit(3)  # the test is gone
        try:
            pipe.send((True, getattr(commands, name)(*args)))
        except Exception as error:
            traceback.print_exc()
            pipe.send((False, f"{type(error).__name__}: {error}"))
