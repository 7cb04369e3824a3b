"""What the sections of zero_copy.py share: sizes, the report, processes beside this one, and an engine rank without
SGLang: parameters of its names and shapes, and a real receiver.
"""

import gc
import json
import multiprocessing as mp
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from weftpub.channel import unix_address
from weftpub.memory import Allocator, SharedAllocation, SharedAllocator
from weftpub.plan import Destination, Plan, Shard, ViewSpec, dtype_name, make_plan
from weftpub.receive import EngineDescription, Readiness, Receiver, ReceiverThread, parameter_specs
from weftpub.receive.shared import SharedEngineSide
from weftpub.store import ExpertStore, StoreLayout
from weftpub.store.layout import Format, Wt
from weftpub.wire import gpu_uuid

__all__ = [
    "DEVICE",
    "GPU",
    "MIDDLE",
    "NAME",
    "QWEN35",
    "RUN",
    "TINY",
    "EngineRank",
    "Process",
    "Report",
    "Sizes",
    "bits",
    "capture",
    "expert_parameters",
    "expert_shards",
    "free_bytes",
    "make_store",
    "masters_of",
    "plan_of",
    "settle",
    "tidy",
    "write_all",
]

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda", 0) if GPU else torch.device("cpu")
RUN = "zero-copy"
NAME = "experts"
GIB = 1 << 30


@dataclass(frozen=True)
class Sizes:
    """Of the experts on one GPU, and of the other weights."""

    layers: int
    experts: int
    hidden: int
    intermediate: int
    vocabulary: int
    heads: int
    head: int
    kv_cache: int  # bytes of an engine's cache, where memory is looked at

    def layout(self, format: Format = "fp8") -> StoreLayout:
        layers, experts = tuple(range(self.layers)), tuple(range(self.experts))
        return StoreLayout(layers, experts, self.hidden, self.intermediate, format)

    @property
    def numel(self) -> int:
        return self.layers * self.experts * 3 * self.hidden * self.intermediate

    def rest(self) -> dict[str, tuple[int, int]]:
        """Names and shapes of the other weights, BF16."""
        found = {"model.embed_tokens.weight": (self.vocabulary, self.hidden)}
        width = self.heads * self.head
        for layer in range(self.layers):
            for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
                shape = (self.hidden, width) if name == "o_proj" else (width, self.hidden)
                found[f"model.layers.{layer}.self_attn.{name}.weight"] = shape
        return found


# The experts of Qwen3.5-35B-A3B at expert parallel size 8.
QWEN35 = Sizes(40, 32, 2048, 512, 151_936, 32, 128, 16 * GIB)
MIDDLE = Sizes(2, 8, 2048, 512, 512, 4, 64, 1 << 20)
TINY = Sizes(2, 4, 256, 128, 320, 2, 32, 1 << 20)


class Report:
    """Numbers and checks, written as they come; a failed check is remembered and the run goes on.

    Args:
        path: of the JSON.
        beside: whether others use this GPU: then what is free says nothing, and is noted but not judged.
    """

    def __init__(self, path: Path, *, beside: bool = False) -> None:
        self._path = path
        self._started = time.monotonic()
        self.beside = beside
        self.data: dict[str, Any] = {"checks": {}, "failed": [], "numbers": {}}

    def check(self, name: str, passed: bool, detail: Any = None, *, memory: bool = False) -> bool:
        """Note a check; `memory` says that it is about free memory."""
        judged = not (memory and self.beside)
        self.data["checks"][name] = {"passed": bool(passed) if judged else None, "detail": detail}
        if judged and not passed:
            self.data["failed"].append(name)
        word = ("ok  " if passed else "FAIL") if judged else "seen"
        self._say(f"{word} {name}" + ("" if detail is None else f": {detail}"))
        return bool(passed)

    def number(self, name: str, value: Any) -> None:
        """Note a number."""
        self.data["numbers"][name] = value
        self._say(f"{name}: {value}")

    def progress(self, what: str) -> None:
        """Say where the run is; not written."""
        self._say(what)

    def write(self) -> None:
        """Write the JSON as it is now."""
        self._path.write_text(json.dumps(self.data, indent=1, default=str), encoding="utf-8")

    def _say(self, line: str) -> None:
        print(f"  {time.monotonic() - self._started:6.1f} s {line}", flush=True)
        self.write()


def settle() -> None:
    """Wait for the GPU."""
    if GPU:
        torch.cuda.synchronize()


def tidy() -> None:
    """Give back what nobody refers to any more."""
    gc.collect()
    if GPU:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def free_bytes() -> int:
    """Free memory of the GPU; on a CPU, 0 as a stand-in."""
    return torch.cuda.mem_get_info()[0] if GPU else 0


def make_store(
    sizes: Sizes, *, memory: SharedAllocation | None = None, format: Format = "fp8", wt: Wt = "rebuild"
) -> ExpertStore:
    """A store of all experts, over shared memory if there is some."""
    layout = sizes.layout(format)
    allocator: Allocator | None = None if memory is None else SharedAllocator(memory)
    return ExpertStore(
        layout.layers,
        layout.experts,
        layout.hidden,
        layout.intermediate,
        format=format,
        device=DEVICE,
        allocator=allocator,
        wt=wt,
        measure_change=False,
    )


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


def write_all(store: ExpertStore, generation: int, seed: int, *, recover: bool = False) -> None:
    """Begin a generation and write every matrix of it; it is not sealed."""
    masters, writer = masters_of(store, seed), store.writer()
    store.begin(generation, recover=recover)
    for matrix in store.layout.matrices:
        writer(matrix.name, masters(matrix.name))


def expert_parameters(layout: StoreLayout) -> Iterator[tuple[str, str, tuple[int, ...], torch.dtype]]:
    """FusedMoE's parameters: name, name of the store's buffer, shape, dtype."""
    for layer in layout.layers:
        for name, (shape, dtype) in layout.buffer_shapes().items():
            kind = name.replace("_scale", "") + "_weight" + ("_scale_inv" if name.endswith("_scale") else "")
            yield f"model.layers.{layer}.mlp.experts.{kind}", f"layers.{layer}.{name}", shape, dtype


def expert_shards(layout: StoreLayout) -> Iterator[tuple[Shard, Destination]]:
    """Every canonical tensor of a store, and where FusedMoE keeps it: gate rows over up rows."""
    for entry in layout.entries():
        kind, suffix = dtype_name(entry.dtype), "_scale_inv" if entry.role == "scale" else ""
        numel, expert = entry.shape[0] * entry.shape[1], layout.experts.index(entry.matrix.expert)
        name = "w2" if entry.part == "down_proj" else "w13"
        offset = expert * numel if name == "w2" else (2 * expert + (entry.part == "up_proj")) * numel
        param = f"model.layers.{entry.matrix.layer}.mlp.experts.{name}_weight{suffix}"
        shard = Shard(entry.name, kind, entry.shape, entry.shape, (0, 0), 0)
        yield shard, Destination(shard, ViewSpec(param, offset, entry.shape, (entry.shape[1], 1), kind))


def plan_of(sizes: Sizes, parts: tuple[str, ...], format: Format = "fp8") -> Plan:
    """Everything from sender 0 to receiver 0."""
    pairs: list[tuple[Shard, Destination]] = []
    if "experts" in parts:
        pairs += expert_shards(sizes.layout(format))
    if "rest" in parts:
        for name, shape in sizes.rest().items():
            shard = Shard(name, "bfloat16", shape, shape, (0, 0), 0)
            pairs.append((shard, Destination(shard, ViewSpec(name, 0, shape, (shape[1], 1), "bfloat16"))))
    return make_plan([shard for shard, _ in pairs], [destination for _, destination in pairs])


class EngineRank:
    """An engine rank with parameters of SGLang's names and shapes, and its receiver; lives in a process of its own.

    Args:
        sizes: of the model.
        folder: for sockets and, if `shared`, for the allocation.
        parts: "experts", "rest" or both.
        shared: whether the experts are the trainer's own memory.
        format: of the experts.
        kv_cache: bytes of a cache that is released and brought back with the weights.
    """

    def __init__(
        self,
        sizes: Sizes,
        folder: str,
        parts: tuple[str, ...],
        shared: bool,
        format: Format = "fp8",
        kv_cache: int = 0,
    ) -> None:
        self.parameters: dict[str, torch.Tensor] = {}
        self.serving = self.intact = False
        self.version: int | None = None
        self.memory: SharedAllocation | None = None
        if shared:
            self.memory = SharedAllocation.join(folder, NAME, DEVICE, create=False)
        if "experts" in parts:
            for name, buffer, shape, dtype in expert_parameters(sizes.layout(format)):
                fresh = self.memory is None
                self.parameters[name] = (
                    torch.empty(shape, dtype=dtype, device=DEVICE) if fresh else self.memory.tensor(buffer)  # type: ignore[union-attr]
                )
        if "rest" in parts:
            for name, shape in sizes.rest().items():
                self.parameters[name] = torch.empty(shape, dtype=torch.bfloat16, device=DEVICE)
        self._cache = torch.empty(kv_cache, dtype=torch.uint8, device=DEVICE)
        self._resident = True
        self._graph: Any = None
        side: Any = self if self.memory is None else SharedEngineSide(self, self.memory)
        self.address = unix_address(Path(folder) / "s", f"r{os.getpid()}")
        self._thread = ReceiverThread(Receiver(side, run_id=RUN), self.address)
        self._thread.__enter__()

    # What the experiment asks for.

    def where(self) -> str:
        """The receiver's address."""
        return self.address

    def state(self) -> tuple[bool, int | None]:
        """Whether it serves, and what."""
        return self.serving, self.version

    def bytes_by_kind(self) -> dict[str, int]:
        """Bytes on the device."""
        kinds = dict.fromkeys(("experts", "other weights", "cache"), 0)
        for name, tensor in self._released_with_weights().items():
            kinds["experts" if ".experts." in name else "other weights"] += tensor.untyped_storage().nbytes()
        kinds["cache"] = self._cache.untyped_storage().nbytes()
        return kinds

    def release(self) -> None:
        """Give the memory of weights and cache away, but for what is shared."""
        assert not self.serving
        self._resident = self.intact = False
        for tensor in (*self._released_with_weights().values(), self._cache):
            tensor.untyped_storage().resize_(0)
        tidy()

    def bring_back(self, what: str) -> None:
        """Memory for "weights" or "cache" again, content undefined."""
        for tensor in self._released_with_weights().values() if what == "weights" else (self._cache,):
            tensor.untyped_storage().resize_(tensor.numel() * tensor.element_size())
        self._resident = True

    def capture(self) -> None:
        """Capture a sum over all codes and scales of the experts in a CUDA graph."""
        out = torch.zeros((), dtype=torch.int64, device=DEVICE)
        experts = [tensor for name, tensor in self.parameters.items() if ".experts." in name]

        def compute() -> None:
            out.zero_()
            for tensor in experts:
                out.add_(bits(tensor).to(torch.int64).sum())

        self._graph = capture(compute), out

    def replay(self) -> int:
        """The sum, by the graph."""
        run, out = self._graph
        run()
        settle()
        return int(out)

    def _released_with_weights(self) -> dict[str, torch.Tensor]:
        return {
            name: tensor
            for name, tensor in self.parameters.items()
            if self.memory is None or self.memory.offset_of(tensor) is None
        }

    # EngineSide.

    def describe(self) -> EngineDescription:
        device = gpu_uuid(0) if GPU else "cpu"
        specs = parameter_specs(self.parameters)
        return EngineDescription(engine="engine", rank=0, world_size=1, device=device, parameters=specs)

    def live_tensors(self) -> Mapping[str, torch.Tensor]:
        return self.parameters

    def resident(self) -> bool:
        return self._resident

    def readiness(self) -> Readiness:
        return Readiness("" if self.intact else "no version is committed in its weights", resting=not self.serving)

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


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as integers."""
    return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.element_size()])


def capture(compute: Callable[[], None]) -> Callable[[], None]:
    """A CUDA graph of a function, as what replays it; on a CPU the function itself."""
    if not GPU:
        return compute
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        compute()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        compute()
    return graph.replay


class Process:
    """A process of its own. It starts at once, and is given its object (an `EngineRank`, a `Worker`) when it is due.

    Args:
        imports: a module to import meanwhile.
    """

    def __init__(self, imports: str = "") -> None:
        context = mp.get_context("spawn")
        self._pipe, there = context.Pipe()
        self._process = context.Process(target=_serve, args=(there, imports), daemon=True)
        self._process.start()
        there.close()

    def make(self, what: Callable[..., Any], *args: Any) -> "Process":
        """Build the object there."""
        self.send(what, *args)
        self.take("start")
        return self

    def __call__(self, method: str, *args: Any) -> Any:
        """Call a method of the object; what it raises ends the section."""
        self.send(method, *args)
        return self.take(method)

    def attempt(self, method: str, *args: Any) -> tuple[bool, Any]:
        """Call a method; whether it returned, and its value or its error in words."""
        self.send(method, *args)
        return self.answer(method)

    def send(self, what: Any, *args: Any) -> None:
        """Call without waiting."""
        self._pipe.send((what, args))

    def take(self, method: str, seconds: float = 300) -> Any:
        """The value of what was sent."""
        good, value = self.answer(method, seconds)
        if not good:
            raise SystemExit(f"{method}: {value}")
        return value

    def answer(self, method: str, seconds: float = 300) -> tuple[bool, Any]:
        """Whether what was sent returned, and its value or its error in words; its end is an error, too."""
        if not self._pipe.poll(seconds):
            return False, f"no answer in {seconds} s"
        try:
            return self._pipe.recv()
        except (EOFError, ConnectionResetError):
            self._process.join(30)
            return False, f"the process ended with {self._process.exitcode}"

    def ends_at(self, method: str, *args: Any) -> Any:
        """Call what may end the process; its answer, or its exit code."""
        self.send(method, *args)
        good, value = self.answer(method, 120)
        return self._process.exitcode if not good and self._process.exitcode is not None else value

    def kill(self) -> None:
        """kill -9."""
        self._process.kill()
        self._process.join(30)


def _serve(pipe: Connection, imports: str) -> None:
    torch.set_num_threads(1)
    if imports:
        __import__(imports)
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
        except Exception as error:  # told to the experiment, which decides
            with suppress(BrokenPipeError):
                pipe.send((False, f"{type(error).__name__}: {error}"))
