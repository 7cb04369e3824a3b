"""The `mechanism` section of zero_copy.py: several processes map one allocation; each is killed at the worst time."""

import gc
import hashlib
import tempfile
import time
from typing import Any

import torch
from zero_copy_base import (
    DEVICE,
    NAME,
    Process,
    Report,
    Sizes,
    bits,
    capture,
    free_bytes,
    make_store,
    masters_of,
    settle,
    tidy,
    write_all,
)

from weftpub.memory import Access, SharedAllocation, sharing_obstacle
from weftpub.store.shared import shared_catalogue, verify_shared

__all__ = ["mechanism"]


class Worker:
    """What a process of the experiment can be told to do; its methods run there."""

    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes
        self.memory: Any = None
        self.store: Any = None
        self.graph: Any = None
        self.parameters: dict[str, torch.nn.Parameter] = {}
        self.pointers: dict[str, int] = {}

    def join(self, folder: str, create: bool = True, protected: bool = False) -> dict[str, Any]:
        """Join the allocation."""
        start = time.perf_counter()
        catalogue = shared_catalogue(self.sizes.layout()) if create else None
        self.memory = SharedAllocation.join(folder, NAME, DEVICE, catalogue, create=create, protected=protected)
        return {
            "id": self.memory.id,
            "created": self.memory.created,
            "ms": (time.perf_counter() - start) * 1e3,
            "nbytes": self.memory.nbytes,
        }

    def make_store(self) -> None:
        """A store over the memory."""
        self.store = make_store(self.sizes, memory=self.memory, wt="store")

    def write(self, generation: int, recover: bool = False) -> dict[str, Any]:
        """Quantize a generation straight into it."""
        if self.store is None:
            self.make_store()
        write_all(self.store, generation, generation, recover=recover)
        self.store.seal()
        return {"sum": self.sum(), "sha256": self.store.sha256()["model.layers.1.mlp.experts.0.down_proj.weight"]}

    def write_half(self, generation: int) -> None:
        """Begin a generation and stop in the middle."""
        masters, writer = masters_of(self.store, generation), self.store.writer()
        self.store.begin(generation)
        for matrix in self.store.layout.matrices[: len(self.store.layout.matrices) // 2]:
            writer(matrix.name, masters(matrix.name))
        settle()

    def offload(self) -> dict[str, Any]:
        """Offload and reload the store; W must not move."""
        address, before = self.store.layer(0).w13.data_ptr(), free_bytes()
        self.store.offload()
        freed = free_bytes() - before
        self.store.reload()
        self.store.check_wt()
        return {
            "same": self.store.layer(0).w13.data_ptr() == address,
            "freed": freed,
            "footprint": self.store.footprint(),
        }

    def do(self, method: str, *args: Any) -> Any:
        """A method of the allocation; its error's text if it raises."""
        try:
            return getattr(self.memory, method)(*args)
        except Exception as error:
            return f"{type(error).__name__}: {error}"

    def begin(self, generation: int) -> str:
        """Begin and cancel a generation of the store; the error's text, "" if it was allowed."""
        try:
            self.store.begin(generation)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        self.store.cancel()
        return ""

    def rebind(self) -> int:
        """Engine's side: parameters with their own memory are given the shared one; their number."""
        for name, tensor in self.memory.tensors().items():
            own = torch.empty(tensor.shape, dtype=tensor.dtype, device=DEVICE)
            parameter = torch.nn.Parameter(own, requires_grad=False)
            parameter.data = tensor
            self.parameters[name] = parameter
        self.pointers = {name: p.data_ptr() for name, p in self.parameters.items()}
        return len(self.parameters)

    def sum(self) -> int:
        """Sum over the codes of all W and the bits of all scales, read by ordinary kernels."""
        tensors = self.memory.tensors().values()
        return sum(int(bits(t).to(torch.int64).sum()) for t in tensors)

    def capture(self) -> None:
        """Capture that sum in a CUDA graph over the parameters; on a CPU the function itself stands for it."""
        out = torch.zeros((), dtype=torch.int64, device=DEVICE)

        def compute() -> None:
            out.zero_()
            for parameter in self.parameters.values():
                out.add_(bits(parameter.data).to(torch.int64).sum())

        self.graph = capture(compute), out

    def replay(self) -> dict[str, Any]:
        """Replay the graph; the sum, and whether every parameter is where it was."""
        run, out = self.graph
        run()
        settle()
        moved = [name for name, parameter in self.parameters.items() if parameter.data_ptr() != self.pointers[name]]
        return {"sum": int(out), "moved": moved}

    def verify(self) -> dict[str, Any]:
        """Prove the committed version from the bytes alone."""
        start = time.perf_counter()
        version = verify_shared(self.memory)
        return {"version": version, "ms": (time.perf_counter() - start) * 1e3}

    def sha256(self) -> str:
        """Of one tensor, as this process reads it."""
        tensor = self.memory.tensor("layers.1.w2")[0]
        return hashlib.sha256(tensor.view(torch.uint8).cpu().numpy().tobytes()).hexdigest()

    def protect_ms(self) -> dict[str, float]:
        """What a change of the mapping costs."""
        found: dict[str, float] = {}
        for access in (Access.READ, Access.WRITE, Access.NONE, Access.READ):
            settle()
            start = time.perf_counter()
            self.memory._pages.protect(access)
            found[access.name] = (time.perf_counter() - start) * 1e3
        return found

    def touch(self, write: bool) -> str:
        """Read or write one byte of W; what came of it. On a CPU the process ends instead."""
        flat = self.memory.tensor("layers.0.w13").view(torch.uint8).reshape(-1)
        try:
            if write:
                flat[:1024].fill_(1)
                settle()
            else:
                return f"read {int(flat[:1024].sum())}"
        except RuntimeError as error:
            return f"caught: {str(error).splitlines()[0]}"
        return "written"

    def leave(self) -> None:
        """Leave the allocation."""
        self.memory.leave()
        self.memory = self.store = self.graph = None
        self.parameters.clear()
        gc.collect()


def mechanism(report: Report, sizes: Sizes) -> None:
    """One allocation, several processes."""
    tidy()
    with tempfile.TemporaryDirectory(prefix="weft-") as folder:
        start = time.perf_counter()
        obstacle = sharing_obstacle(DEVICE, folder)
        report.number("preflight_ms", (time.perf_counter() - start) * 1e3)
        report.check("preflight allows it", obstacle is None, obstacle)
        before = free_bytes()
        processes = [Process() for _ in range(6)]
        try:
            trainer, engine, second, third, *others = (process.make(Worker, sizes) for process in processes)
            _two_sides(report, trainer, engine, folder)
            _trainer_dies(report, trainer, engine, folder, second)
            _engine_dies(report, second, engine, folder, third)
            _protected(report, second, folder, others)
        finally:
            for process in processes:
                process.kill()
        deadline = time.monotonic() + 30
        while abs(before - free_bytes()) > 64 << 20 and time.monotonic() < deadline and not report.beside:
            time.sleep(0.2)
        left = before - free_bytes()
        report.check("freed when the last process is gone", left <= 64 << 20, f"{left} bytes differ", memory=True)


def _two_sides(report: Report, trainer: Process, engine: Process, folder: str) -> None:
    made, joined = trainer("join", folder), engine("join", folder, False)
    report.check("one allocation", made["id"] == joined["id"] and made["created"] and not joined["created"], made)
    report.number("join_ms", {"make": made["ms"], "join": joined["ms"]})
    report.number("rebound", engine("rebind"))
    first = trainer("write", 1)
    engine("capture")
    seen = engine("replay")
    report.check("the engine's graph sees what the quantizer wrote", seen == {"sum": first["sum"], "moved": []}, seen)
    report.check("sha256 agrees", engine("sha256") == first["sha256"], first["sha256"][:16])
    refused = engine("do", "start_serving")
    report.check("not served before a commit", "not committed" in str(refused), refused)
    engine("do", "commit", 1)
    report.check("served after it", engine("do", "start_serving") == 1)
    refused = trainer("begin", 2)
    report.check("not written while it is served", "pause the engine first" in refused, refused)
    engine("do", "stop_serving")
    second = trainer("write", 2)
    seen = engine("replay")
    report.check("a replay sees the next generation", seen == {"sum": second["sum"], "moved": []}, seen)
    report.check("generations differ", first["sum"] != second["sum"])
    moved = trainer("offload")
    report.check("offload leaves W in place", moved["same"], moved)
    report.check("and its bytes", engine("replay") == {"sum": second["sum"], "moved": []})
    engine("do", "commit", 2)


def _trainer_dies(report: Report, trainer: Process, engine: Process, folder: str, again: Process) -> None:
    trainer("write_half", 3)
    trainer.kill()
    refused = str(engine("do", "start_serving"))
    report.check("a half-written generation is not served", "died while it wrote generation 3" in refused, refused)
    torn = engine("replay")
    report.check("the memory outlived its maker", torn["moved"] == [], torn)
    joined = again("join", folder, False)
    report.check("the engine brings the new trainer in", not joined["created"], joined)
    third = again("write", 3, True)
    engine("do", "commit", 3)
    report.check("written again in full, served", engine("do", "start_serving") == 3)
    report.check("the old graph still reads it", engine("replay") == {"sum": third["sum"], "moved": []})


def _engine_dies(report: Report, trainer: Process, engine: Process, folder: str, again: Process) -> None:
    expected = engine("replay")["sum"]
    engine.kill()
    joined, proof = again("join", folder, False), again("verify")
    report.check("an engine that comes back proves the committed version", proof["version"] == 3, proof)
    again("rebind")
    again("capture")
    report.check("and serves it", again("do", "start_serving") == 3 and again("replay")["sum"] == expected)
    report.number("restart_ms", {"join": joined["ms"], "verify": proof["ms"], "bytes_moved": 0})
    again("do", "stop_serving")
    report.check("the trainer goes on", trainer("write", 4)["sum"] == again("replay")["sum"])
    again("do", "commit", 4)


def _protected(report: Report, trainer: Process, folder: str, others: list[Process]) -> None:
    before = trainer("sum")
    cases = ("a write while the engine serves", True), ("a read while the trainer writes", False)
    for (what, write), other in zip(cases, others, strict=True):
        other("join", folder, False, True)
        if write:
            report.number("protect_ms", other("protect_ms"))
            allowed = other("touch", False)
            report.check("reading a read-only mapping works", allowed.startswith("read"), allowed)
        else:
            other("do", "stop_serving")
        caught = other.ends_at("touch", write)
        report.check(f"{what} is caught", caught == -11 or str(caught).startswith("caught"), caught)
        other.kill()
    report.check("nobody else noticed", trainer("sum") == before)
