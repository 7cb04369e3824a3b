"""Experts that never move, on one GPU: one physical W that a trainer's process writes and an engine's process serves.

    python tests/gpu/zero_copy.py --out OUT [--only mechanism,speed,engine] [--tiny] [--cycles 10]

Writes OUT/zero_copy.json and exits with 1 if any check fails. Sections:

    mechanism   several processes map one allocation: the quantizer writes in one, a captured CUDA graph of the
                other sees it without a pointer changed; either side is killed at the worst moment and comes back; what
                the other may do meanwhile; a protected mapping catches a write at the wrong time; nothing is left
                behind on the GPU
    speed       the experts of Qwen3.5-35B-A3B at expert parallel size 8 (4.03e9 parameters), 3.3 GB of other weights:
                from the last matrix that the quantizer wrote to the engine serving the new version, checksums on.
                Shared experts, copied experts (CUDA IPC), and the other weights alone; GPU memory of each; W^T stored
                and rebuilt

    engine      a real SGLang engine with CUDA graphs and the memory saver (not by default; needs SGLang): experts
                shared, the memory reserved at first given back, tokens by version, a torn step, a restarted engine

`--tiny` runs all of it on the CPU as a check of this script: a memory file stands for the GPU's memory.
"""

import argparse
import contextlib
import gc
import json
import multiprocessing as mp
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from ran_on import ran_on

from weftpub.channel import Deadlines, unix_address
from weftpub.memory import Access, SharedAllocation, SharedAllocator, sharing_obstacle
from weftpub.plan import Destination, Plan, Shard, ViewSpec, dtype_name, make_plan
from weftpub.publisher import Peer, Publisher, SourceBuffers
from weftpub.receive import EngineDescription, Receiver, ReceiverThread, parameter_specs
from weftpub.receive.shared import SharedEngineSide
from weftpub.store import ExpertStore, StoreLayout
from weftpub.store.shared import shared_catalogue, verify_shared
from weftpub.wire import gpu_uuid

DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
RUN = "zero-copy"
NAME = "experts"


@dataclass(frozen=True)
class Sizes:
    """Of the experts on one GPU, and of the other weights."""

    layers: int
    experts: int
    hidden: int
    intermediate: int
    vocabulary: int
    dense: int  # rows of each of four other matrices in a layer

    @property
    def layout(self) -> StoreLayout:
        return StoreLayout(tuple(range(self.layers)), tuple(range(self.experts)), self.hidden, self.intermediate)

    @property
    def numel(self) -> int:
        return self.layers * self.experts * 3 * self.hidden * self.intermediate

    def rest(self) -> dict[str, tuple[int, int]]:
        """Names and shapes of the other weights, BF16."""
        found = {"model.embed_tokens.weight": (self.vocabulary, self.hidden)}
        for layer in range(self.layers):
            for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
                found[f"model.layers.{layer}.self_attn.{name}.weight"] = (self.dense, self.hidden)
        return found


QWEN35 = Sizes(40, 32, 2048, 512, 151_936, 4096)
MIDDLE = Sizes(2, 8, 2048, 512, 512, 128)
TINY = Sizes(2, 4, 256, 128, 300, 64)


class Report:
    """Numbers and checks; a failed check is remembered and the run goes on."""

    def __init__(self) -> None:
        self.data: dict[str, Any] = {"checks": {}, "failed": [], "numbers": {}}

    def check(self, name: str, passed: bool, detail: Any = None) -> None:
        self.data["checks"][name] = {"passed": bool(passed), "detail": detail}
        if not passed:
            self.data["failed"].append(name)
        print(f"  {'ok  ' if passed else 'FAIL'} {name}" + ("" if detail is None else f": {detail}"), flush=True)

    def number(self, name: str, value: Any) -> None:
        self.data["numbers"][name] = value
        print(f"  {name}: {value}", flush=True)


def settle() -> None:
    """Wait for the GPU."""
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def free_bytes() -> int:
    """Free memory of the GPU; on a CPU, 0 as a stand-in."""
    return torch.cuda.mem_get_info()[0] if DEVICE.type == "cuda" else 0


def masters_of(store: ExpertStore, seed: int) -> Callable[[str], torch.Tensor]:
    """Masters that follow from seed and name, a few shared among all matrices of a shape: the store is what counts."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    made = {
        matrix.projection: [
            torch.randn(store.layout.shape(matrix.projection), generator=generator, device=DEVICE) * 0.02
            for _ in range(7)
        ]
        for matrix in store.layout.matrices[:2]
    }
    index = {matrix.name: (matrix.projection, i % 7) for i, matrix in enumerate(store.layout.matrices)}
    return lambda name: made[index[name][0]][index[name][1]]


# A process beside this one.


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
        catalogue = shared_catalogue(self.sizes.layout) if create else None
        self.memory = SharedAllocation.join(folder, NAME, DEVICE, catalogue, create=create, protected=protected)
        return {
            "id": self.memory.id,
            "created": self.memory.created,
            "ms": (time.perf_counter() - start) * 1e3,
            "nbytes": self.memory.nbytes,
        }

    def make_store(self) -> None:
        """A store over the memory."""
        s = self.sizes
        self.store = ExpertStore(
            range(s.layers),
            range(s.experts),
            s.hidden,
            s.intermediate,
            device=DEVICE,
            allocator=SharedAllocator(self.memory),
            measure_change=False,
        )

    def write(self, generation: int, recover: bool = False) -> dict[str, Any]:
        """Quantize a generation straight into it."""
        if self.store is None:
            self.make_store()
        masters, writer = masters_of(self.store, generation), self.store.writer()
        with self.store.writing(generation, recover=recover):
            for matrix in self.store.layout.matrices:
                writer(matrix.name, masters(matrix.name))
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
        return sum(int(_bits(t).to(torch.int64).sum()) for t in tensors)

    def capture(self) -> None:
        """Capture that sum in a CUDA graph over the parameters; on a CPU the function itself stands for it."""
        out = torch.zeros((), dtype=torch.int64, device=DEVICE)

        def compute() -> None:
            out.zero_()
            for parameter in self.parameters.values():
                out.add_(_bits(parameter.data).to(torch.int64).sum())

        if DEVICE.type != "cuda":
            self.graph = compute, out
            return
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            compute()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            compute()
        self.graph = graph.replay, out

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
        import hashlib

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


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8 if tensor.element_size() == 1 else torch.int32)


class Process:
    """A process of its own. It starts at once, and is given its object (a `Worker`, a `SpeedEngine`) when it is due."""

    def __init__(self) -> None:
        context = mp.get_context("spawn")
        self._pipe, there = context.Pipe()
        self._process = context.Process(target=_serve, args=(there,), daemon=True)
        self._process.start()
        there.close()

    def make(self, what: Callable[..., Any], *args: Any) -> "Process":
        """Build the object there."""
        self._pipe.send((what, args))
        self._take("start", 300)
        return self

    def __call__(self, method: str, *args: Any) -> Any:
        self._pipe.send((method, args))
        return self._take(method, 300)

    def ends_at(self, method: str, *args: Any) -> Any:
        """Call what may end the process; its answer, or its exit code."""
        self._pipe.send((method, args))
        if not self._pipe.poll(120):
            return "no answer"
        try:
            return self._pipe.recv()[1]
        except EOFError:
            self._process.join(30)
            return self._process.exitcode

    def kill(self) -> None:
        """kill -9."""
        self._process.kill()
        self._process.join(30)

    def _take(self, method: str, seconds: float) -> Any:
        if not self._pipe.poll(seconds):
            raise SystemExit(f"{method}: no answer in {seconds} s")
        try:
            good, value = self._pipe.recv()
        except EOFError:
            self._process.join(30)
            raise SystemExit(f"{method}: the process ended with {self._process.exitcode}") from None
        if not good:
            raise SystemExit(f"{method}: {value}")
        return value


def _serve(pipe: Any) -> None:
    torch.set_num_threads(1)
    worker: Any = None
    while True:
        try:
            method, args = pipe.recv()
        except EOFError:
            os._exit(0)  # the experiment is over
        try:
            if worker is None:
                worker = method(*args)
                pipe.send((True, None))
            else:
                pipe.send((True, getattr(worker, method)(*args)))
        except Exception as error:  # told to the experiment, which ends
            pipe.send((False, f"{type(error).__name__}: {error}"))


# Mechanism.


def mechanism(report: Report, sizes: Sizes) -> None:
    """One allocation, several processes."""
    settle()
    gc.collect()
    with tempfile.TemporaryDirectory(prefix="weft-") as folder:
        start = time.perf_counter()
        obstacle = sharing_obstacle(DEVICE, folder)
        report.number("preflight_ms", (time.perf_counter() - start) * 1e3)
        report.check("preflight allows it", obstacle is None, obstacle)
        if DEVICE.type == "cuda":
            torch.cuda.empty_cache()
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
        while DEVICE.type == "cuda" and abs(free_bytes() - before) > 64 << 20 and time.monotonic() < deadline:
            time.sleep(0.2)
        left = before - free_bytes()
        report.check("freed when the last process is gone", abs(left) <= 64 << 20, f"{left} bytes differ")


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


# Speed.


class SpeedEngine:
    """An engine rank with parameters of SGLang's names and shapes, and its receiver; lives in a process of its own.

    Args:
        sizes: of the model.
        folder: for sockets and, if `shared`, for the allocation.
        parts: "experts", "rest" or both.
        shared: whether the experts are the trainer's own memory.
    """

    def __init__(self, sizes: Sizes, folder: str, parts: tuple[str, ...], shared: bool) -> None:
        self.parameters: dict[str, torch.Tensor] = {}
        self.serving = False
        self.version: int | None = None
        self.intact = False
        memory: Any = None
        if "experts" in parts:
            if shared:
                memory = SharedAllocation.join(folder, NAME, DEVICE, create=False)
            for name, shape, dtype in expert_parameters(sizes):
                layer, kind = name.split(".")[2], name.rpartition(".")[2]
                short = kind.replace("_weight_scale_inv", "_scale").replace("_weight", "")
                own = (
                    memory.tensor(f"layers.{layer}.{short}")
                    if shared
                    else torch.empty(shape, dtype=dtype, device=DEVICE)
                )
                assert tuple(own.shape) == shape, name
                self.parameters[name] = own
        if "rest" in parts:
            for name, shape in sizes.rest().items():
                self.parameters[name] = torch.empty(shape, dtype=torch.bfloat16, device=DEVICE)
        side: Any = SharedEngineSide(self, memory) if shared else self
        receiver = Receiver(side, run_id=RUN)
        self.address = unix_address(Path(folder) / "s", f"r{int(shared)}{len(parts)}")
        self._thread = ReceiverThread(receiver, self.address)
        self._thread.__enter__()

    def where(self) -> str:
        """The receiver's address."""
        return self.address

    def allocated(self) -> int:
        """Bytes that this process' torch holds."""
        return torch.cuda.memory_reserved() if DEVICE.type == "cuda" else 0

    def state(self) -> tuple[bool, int | None]:
        """Whether it serves, and what."""
        return self.serving, self.version

    # EngineSide.

    def describe(self) -> EngineDescription:
        device = gpu_uuid(0) if DEVICE.type == "cuda" else "cpu"
        specs = parameter_specs(self.parameters)
        return EngineDescription(engine="engine", rank=0, world_size=1, device=device, parameters=specs)

    def live_tensors(self) -> Mapping[str, torch.Tensor]:
        return self.parameters

    def weights_intact(self) -> bool:
        return self.intact

    def pause(self) -> None:
        self.serving = False

    def resume(self) -> None:
        self.serving = True

    def post_process(self) -> None:
        pass

    def commit(self, version: int) -> None:
        self.version, self.intact = version, True

    def fence(self, reason: str) -> None:
        self.serving = self.intact = False


def expert_parameters(sizes: Sizes) -> Iterator[tuple[str, tuple[int, ...], torch.dtype]]:
    """Names, shapes and dtypes of FusedMoE's parameters."""
    for layer in sizes.layout.layers:
        for name, (shape, dtype) in sizes.layout.buffer_shapes().items():
            kind = name.replace("_scale", "") + "_weight" + ("_scale_inv" if name.endswith("_scale") else "")
            yield f"model.layers.{layer}.mlp.experts.{kind}", shape, dtype


def make_speed_plan(sizes: Sizes, parts: tuple[str, ...]) -> Plan:
    """Everything from sender 0 to receiver 0."""
    sources: list[Shard] = []
    destinations: list[Destination] = []
    if "experts" in parts:
        for entry in sizes.layout.entries():
            kind, suffix = dtype_name(entry.dtype), "_scale_inv" if entry.role == "scale" else ""
            numel, expert = entry.shape[0] * entry.shape[1], entry.matrix.expert
            name = "w2" if entry.part == "down_proj" else "w13"
            offset = expert * numel if name == "w2" else (2 * expert + (entry.part == "up_proj")) * numel
            param = f"model.layers.{entry.matrix.layer}.mlp.experts.{name}_weight{suffix}"
            shard = Shard(entry.name, kind, entry.shape, entry.shape, (0, 0), 0)
            sources.append(shard)
            destinations.append(Destination(shard, ViewSpec(param, offset, entry.shape, (entry.shape[1], 1), kind)))
    if "rest" in parts:
        for name, shape in sizes.rest().items():
            shard = Shard(name, "bfloat16", shape, shape, (0, 0), 0)
            sources.append(shard)
            destinations.append(Destination(shard, ViewSpec(name, 0, shape, (shape[1], 1), "bfloat16")))
    return make_plan(sources, destinations)


VARIANTS = {
    "other weights alone": (("rest",), False),
    "experts shared": (("experts", "rest"), True),
    "experts copied": (("experts", "rest"), False),
}


def speed(report: Report, sizes: Sizes, cycles: int) -> None:
    """The three variants, in one run."""
    generator = torch.Generator(DEVICE).manual_seed(3)
    rest = {
        name: torch.randn(shape, generator=generator, device=DEVICE).bfloat16() for name, shape in sizes.rest().items()
    }
    report.number("expert_parameters", sizes.numel)
    report.number("other_bytes", sum(tensor.nbytes for tensor in rest.values()))
    rows: dict[str, Any] = {}
    engines = [Process() for _ in VARIANTS]
    for name, (parts, shared) in VARIANTS.items():
        with tempfile.TemporaryDirectory(prefix="weft-") as folder, contextlib.ExitStack() as stack:
            engine = engines.pop(0)
            stack.callback(engine.kill)
            rows[name] = _speed_of(report, name, sizes, cycles, parts, shared, rest, folder, engine, stack)
        gc.collect()
        if DEVICE.type == "cuda":
            torch.cuda.empty_cache()
        report.number(name, rows[name])
    alone, shared_ms = rows["other weights alone"]["median_ms"], rows["experts shared"]["median_ms"]
    extra = shared_ms - alone
    report.number("shared_minus_other_ms", extra)
    report.number("copied_minus_other_ms", rows["experts copied"]["median_ms"] - alone)
    if DEVICE.type == "cuda":
        report.check("at most 5 ms more than the other weights alone", extra <= 5.0, f"{extra:.2f} ms")


def _speed_of(
    report: Report,
    name: str,
    sizes: Sizes,
    cycles: int,
    parts: tuple[str, ...],
    shared: bool,
    rest: Mapping[str, torch.Tensor],
    folder: str,
    engine: Process,
    stack: contextlib.ExitStack,
) -> dict[str, Any]:
    free = free_bytes()
    store: Any = None
    if "experts" in parts:
        memory: Any = None
        if shared:
            memory = SharedAllocation.join(folder, NAME, DEVICE, shared_catalogue(sizes.layout))
            stack.callback(memory.leave)
        store = ExpertStore(
            range(sizes.layers),
            range(sizes.experts),
            sizes.hidden,
            sizes.intermediate,
            device=DEVICE,
            allocator=SharedAllocator(memory) if shared else None,
            wt="rebuild",
            measure_change=False,
        )
    engine.make(SpeedEngine, sizes, folder, parts, shared)
    publisher = stack.enter_context(
        Publisher(
            RUN,
            make_speed_plan(sizes, parts),
            [Peer(0, engine("where"), "engine")],
            commit_path=Path(folder) / "commit.json",
            deadlines=Deadlines.all(120),
        )
    )
    sources: Any = None
    walls: list[dict[str, float]] = []
    for version in range(1, cycles + 3):
        publisher.pause()
        if store is not None:
            masters, writer = masters_of(store, version), store.writer()
            store.begin(version)
            for matrix in store.layout.matrices:
                writer(matrix.name, masters(matrix.name))
        settle()
        start = time.perf_counter()  # the last matrix is written
        if store is not None:
            store.seal()
        sealed = time.perf_counter()
        if sources is None:
            tensors = dict(rest) if "rest" in parts else {}
            if store is not None:
                tensors |= {item.name: item.tensor for item in store.canonical()}
            sources = SourceBuffers.of_tensors(tensors, in_place=True, keep=True)
        done = publisher.publish(version, sources, store.checksums if store is not None else None)
        end = time.perf_counter()
        walls.append(
            {"seal": (sealed - start) * 1e3, "total": (end - start) * 1e3, **{f"p.{k}": v for k, v in done.ms.items()}}
        )
    report.check(f"{name}: serves the last version", engine("state") == (True, cycles + 2), engine("state"))
    proof = publisher.publish(
        cycles + 3, sources, store.checksums if store is not None else None, verify_sha256=sizes.numel < 1 << 28
    )
    if store is not None and proof.sha256:
        expected = store.sha256()
        report.check(f"{name}: served bytes are the trainer's", all(proof.sha256[n] == expected[n] for n in expected))
    if shared:
        expected_bytes = sum(entry.nbytes for entry in shared_catalogue(sizes.layout).entries)
        report.check(f"{name}: no expert byte moved", done.shared_nbytes == expected_bytes, done.nbytes)
        if sizes.numel < 1 << 28 or DEVICE.type == "cuda":
            store.verify()
    warm = walls[2:]
    found = {
        "median_ms": statistics.median([w["total"] for w in warm]),
        "min_ms": min(w["total"] for w in warm),
        "max_ms": max(w["total"] for w in warm),
        "phases_ms": {k: statistics.median([w.get(k, 0.0) for w in warm]) for k in warm[-1]},
        "first_ms": walls[0]["total"],
        "moved_bytes": done.nbytes,
        "shared_bytes": done.shared_nbytes,
        "staging_bytes": done.staging_bytes,
        "transports": done.transports,
        "reasons": done.reasons,
        "gpu_bytes_of_both": free - free_bytes(),
    }
    if store is not None:
        found["rebuild_wt_ms"] = _rebuild_ms(store)
        found["footprint"] = store.footprint()
    return found


def _rebuild_ms(store: ExpertStore) -> float:
    """Milliseconds to make W^T of every layer, one after the other, as dgrad would ask for them."""
    times: list[float] = []
    for _ in range(3):
        settle()
        start = time.perf_counter()
        for layer in store.layout.layers:
            store.layer(layer)
        settle()
        times.append((time.perf_counter() - start) * 1e3)
    return min(times)


def engine(report: Report, out: Path, tiny: bool) -> None:
    """A real engine: another file, because its processes import it."""
    sys.path.insert(0, str(Path(__file__).resolve().parent))
    from zero_copy_engine import engine_section

    engine_section(report, out, tiny)


def main() -> int:
    """Run the sections."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", default="mechanism,speed", help="sections, separated by commas")
    parser.add_argument("--tiny", action="store_true", help="small sizes, to check this script")
    parser.add_argument("--cycles", type=int, default=10)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    report = Report()
    report.data["environment"] = ran_on()
    big, small = (TINY, TINY) if options.tiny else (QWEN35, MIDDLE)
    report.data["sizes"] = {"speed": asdict(big), "mechanism": asdict(small)}
    sections: dict[str, Callable[[], None]] = {
        "mechanism": lambda: mechanism(report, small),
        "speed": lambda: speed(report, big, options.cycles),
        "engine": lambda: engine(report, options.out.resolve(), options.tiny),
    }
    for name in options.only.split(","):
        if name not in sections:
            raise SystemExit(f"no section is named {name}; there are {', '.join(sections)}")
        print(f"{name}:", flush=True)
        start = time.perf_counter()
        try:
            sections[name]()
        except (Exception, SystemExit) as error:
            report.check(f"{name} ran to its end", False, f"{type(error).__name__}: {error}")
            if isinstance(error, Exception):
                import traceback

                traceback.print_exc()
        report.number(f"{name}_s", time.perf_counter() - start)
        (options.out / "zero_copy.json").write_text(json.dumps(report.data, indent=1, default=str))
    print("FAILED: " + ", ".join(report.data["failed"]) if report.data["failed"] else "all checks passed", flush=True)
    return 1 if report.data["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
