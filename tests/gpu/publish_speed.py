"""How long a publish takes on one GPU: from 'the store holds v+1, the engine's weights are there, mappings are warm' to
'all ranks verified and committed', with checksums on.

    python tests/gpu/publish_speed.py --out OUT [--tiny] [--cycles 20] [--engine sglang|plain]

Two processes. This one is the trainer: an `ExpertStore` that writes a new generation for every cycle and publishes it.
The other is the engine's side: SGLang's real Qwen3-MoE model with its FusedMoE parameters (or, with --engine plain,
parameters of the same names and shapes), and a receiver. Sizes are those of Qwen3.5-35B-A3B at expert parallel size 8:
32 experts, 40 layers, 2048 x 512, 7680 tensors, 4.03 GB.

The first publish goes into poisoned parameters and compares sha256 of every tensor on both sides; after every section
the engine's bytes are compared with the store's checksums. Beside the publish, in the same run: the device copy of the
same bytes (the floor), `torch._foreach_copy_` of the tensors, and SGLang's own way, `WeightUpdater.
update_weights_from_tensor`, with named tensors and with flattened buckets: its serializer, its IPC, its loaders.

Writes OUT/publish_speed.json (`publish_speed_page.py` makes a page of it) and prints the rows; exits with 1 if a byte
is wrong. `--tiny` checks the script on a CPU, through shared memory.
"""

import argparse
import contextlib
import json
import multiprocessing as mp
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from ran_on import need_gpu, ran_on
from sglang_update import WAYS, apply_update

from weftpub.channel import Deadlines, unix_address
from weftpub.plan import Destination, Plan, Shard, ViewSpec, dtype_name, make_plan
from weftpub.publisher import Peer, Publisher, PublishReport, SourceBuffers
from weftpub.receive import EngineDescription, Readiness, Receiver, parameter_specs, serve
from weftpub.store import ExpertStore
from weftpub.transport import CudaIpcReceive, FlatTensors, RegionTable, open_receive_transports
from weftpub.version import CommitRecord
from weftpub.wire import gpu_uuid
from weftpub_kernels import SpanChecksums

RUN = "publish-speed"
DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


@dataclass(frozen=True)
class Sizes:
    """Of the model's experts."""

    experts: int = 32
    layers: int = 40
    hidden: int = 2048
    intermediate: int = 512


TINY = Sizes(experts=4, layers=2, hidden=256, intermediate=128)


def hf_config(sizes: Sizes) -> dict[str, Any]:
    """A Qwen3-MoE `config.json` of these experts, with as little of the rest as SGLang accepts."""
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": sizes.hidden,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "intermediate_size": 256,
        "moe_intermediate_size": sizes.intermediate,
        "num_experts": sizes.experts,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "vocab_size": 512,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "attention_bias": False,
        "torch_dtype": "bfloat16",
    }


# The engine's process.


def plain_parameters(sizes: Sizes) -> dict[str, torch.nn.Parameter]:
    """Parameters with the names and shapes of SGLang's FusedMoE layers."""
    e, h, i = sizes.experts, sizes.hidden, sizes.intermediate
    found: dict[str, torch.nn.Parameter] = {}
    for layer in range(sizes.layers):
        for name, rows, columns in (("w13", 2 * i, h), ("w2", h, i)):
            prefix = f"model.layers.{layer}.mlp.experts.{name}_weight"
            weight = torch.empty(e, rows, columns, dtype=torch.float8_e4m3fn, device=DEVICE)
            scale = torch.empty(e, rows // 128, columns // 128, dtype=torch.float32, device=DEVICE)
            found[prefix] = torch.nn.Parameter(weight, requires_grad=False)
            found[prefix + "_scale_inv"] = torch.nn.Parameter(scale, requires_grad=False)
    return found


class TimedIpc(CudaIpcReceive):
    """Remembers how long new mappings took."""

    opened = 0
    ms = 0.0

    def open(self, offer: Any) -> torch.Tensor:
        known = len(self._open)
        start = time.perf_counter()
        tensor = super().open(offer)
        if len(self._open) > known:
            self.opened += 1
            self.ms += (time.perf_counter() - start) * 1e3
        return tensor


class EngineUnderTest:
    """An engine rank of nothing but routed experts: an `EngineSide`, and what the trainer asks of it beside publishes.

    Args:
        sizes: of the experts.
        kind: "sglang" or "plain".
    """

    def __init__(self, sizes: Sizes, kind: str) -> None:
        self.served: Any = None
        if kind == "sglang":
            from weftpub_adapters.sglang import build_model

            self.served = build_model(hf_config(sizes), device=DEVICE)
            named = self.served.model.named_parameters()
            self.parameters = {name: p for name, p in named if ".mlp.experts." in name}
        else:
            self.parameters = plain_parameters(sizes)
        self.regions: RegionTable | None = None
        self.ipc: TimedIpc | None = None
        self.poison()

    def describe(self) -> EngineDescription:
        device = gpu_uuid(0) if DEVICE.type == "cuda" else "cpu"
        specs = parameter_specs(self.live_tensors())
        return EngineDescription(engine="engine", rank=0, world_size=1, device=device, parameters=specs)

    def live_tensors(self) -> Mapping[str, torch.Tensor]:
        return {name: parameter.data for name, parameter in self.parameters.items()}

    def resident(self) -> bool:
        return True

    def readiness(self) -> Readiness:
        return Readiness()

    def weights_intact(self) -> bool:
        return True

    def pause(self) -> None:
        pass

    def resume(self) -> None:
        pass

    def post_process(self) -> None:
        pass

    def commit(self, version: int) -> None:
        pass

    def fence(self, reason: str) -> None:
        pass

    def poison(self) -> None:
        """NaN bytes everywhere."""
        for parameter in self.parameters.values():
            parameter.data.view(torch.uint8).fill_(0xFF)
        self.settle()

    def move(self) -> None:
        """Give every parameter new memory, poisoned."""
        for parameter in self.parameters.values():
            parameter.data = torch.empty_like(parameter.data)
        self.poison()

    def settle(self) -> None:
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()

    def checksums(self, views: list[ViewSpec] | None) -> bytes:
        """Checksums of the canonical tensors as they lie in the parameters; views are given once."""
        if views is not None:
            self.regions = RegionTable(views)
        assert self.regions is not None
        live = self.live_tensors()
        return self.regions.checksums(FlatTensors(live, live), 1 << 26).tobytes()

    def openings(self) -> tuple[int, float]:
        """New mappings since the last call, and the milliseconds that they took."""
        if self.ipc is None:
            return 0, 0.0
        found = self.ipc.opened, self.ipc.ms
        self.ipc.opened, self.ipc.ms = 0, 0.0
        return found

    def update_from_tensor(self, payload: bytes, load_format: str | None) -> str:
        """SGLang's own update."""
        return apply_update(self.served, payload, load_format, DEVICE)


def engine_main(pipe: Any, address: str, sizes: Sizes, kind: str) -> None:
    """The engine's process: the receiver in the main thread, the trainer's other wishes in a second one."""
    torch.set_num_threads(1)
    engine = EngineUnderTest(sizes, kind)
    transports = dict(open_receive_transports(engine.describe().device))
    if "cuda_ipc" in transports:
        engine.ipc = transports["cuda_ipc"] = TimedIpc()
    stop = threading.Event()

    def command() -> None:
        while True:
            try:
                method, arguments = pipe.recv()
            except EOFError:
                os._exit(3)  # the trainer is gone
            if method == "stop":
                stop.set()
                return
            try:
                pipe.send((True, getattr(engine, method)(*arguments)))
            except Exception as error:  # told to the trainer, which ends the run
                pipe.send((False, f"{type(error).__name__}: {error}"))

    receiver = Receiver(engine, run_id=RUN, transports=transports)
    threading.Thread(target=command, daemon=True).start()
    serve(receiver, address, stop, ready=lambda _: pipe.send((True, "ready")))


class Engine:
    """The engine's process, seen from the trainer's."""

    def __init__(self, folder: Path, sizes: Sizes, kind: str) -> None:
        context = mp.get_context("spawn")
        self._pipe, there = context.Pipe()
        address = unix_address(folder / "sockets", "r0")
        self._process = context.Process(target=engine_main, args=(there, address, sizes, kind), daemon=True)
        self._process.start()
        there.close()
        self.peer = Peer(0, address, "engine")
        self._take(300)

    def call(self, method: str, *arguments: object) -> Any:
        """Call a method of `EngineUnderTest` there."""
        self._pipe.send((method, arguments))
        return self._take(300)

    def _take(self, seconds: float) -> Any:
        if not self._pipe.poll(seconds):
            raise SystemExit("the engine's process does not answer")
        try:
            ok, value = self._pipe.recv()
        except EOFError:
            raise SystemExit("the engine's process ended; its output says why") from None
        if not ok:
            raise SystemExit(f"the engine's process: {value}")
        return value

    def stop(self) -> None:
        """End it."""
        self._pipe.send(("stop", ()))
        self._process.join(30)
        if self._process.is_alive():
            self._process.kill()


# The trainer's process.


class Trainer:
    """The store, its generations and its plan with the engine."""

    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes
        self.store = ExpertStore(
            range(sizes.layers),
            range(sizes.experts),
            sizes.hidden,
            sizes.intermediate,
            device=DEVICE,
            wt="rebuild",
            measure_change=False,
        )
        self._generator = torch.Generator(DEVICE).manual_seed(1)
        self._number = -1
        self.step()
        self.tensors = {item.name: item.tensor for item in self.store.canonical()}
        self.nbytes = sum(tensor.nbytes for tensor in self.tensors.values())
        self.plan = self._plan()
        self.views = [self._views[name] for name in self.tensors]

    def step(self) -> int:
        """Write the next generation; its number."""
        self._number += 1
        writer = self.store.writer()
        with self.store.writing(self._number):
            for matrix in self.store.layout.matrices:
                shape = self.store.layout.shape(matrix.projection)
                writer(matrix.name, torch.randn(shape, generator=self._generator, device=DEVICE))
        settle()
        return self._number

    def checksums(self) -> np.ndarray:
        """Of all canonical tensors, in their order."""
        known = self.store.checksums
        return np.array([known[name] for name in self.tensors], dtype=np.int64)

    def sources(self, *, in_place: bool, keep: bool) -> SourceBuffers:
        """The store's buffers."""
        return SourceBuffers.of_tensors(self.tensors, in_place=in_place, keep=keep)

    def _plan(self) -> Plan:
        """All of it to receiver rank 0, laid out as FusedMoE keeps it: gate rows first."""
        s = self.sizes
        sources: list[Shard] = []
        destinations: list[Destination] = []
        self._views: dict[str, ViewSpec] = {}
        for entry in self.store.layout.entries():
            kind, scale = dtype_name(entry.dtype), "_scale_inv" if entry.role == "scale" else ""
            rows, columns = entry.shape
            expert, numel = entry.matrix.expert, rows * columns
            name = "w2" if entry.part == "down_proj" else "w13"
            offset = expert * numel if name == "w2" else (2 * expert + (entry.part == "up_proj")) * numel
            param = f"model.layers.{entry.matrix.layer}.mlp.experts.{name}_weight{scale}"
            view = ViewSpec(param, offset, entry.shape, (columns, 1), kind)
            shard = Shard(entry.name, kind, entry.shape, entry.shape, (0, 0), 0)
            sources.append(shard)
            destinations.append(Destination(shard, view))
            self._views[entry.name] = view
        plan = make_plan(sources, destinations)
        assert len(plan.moves) == s.layers * s.experts * 6
        return plan


def settle() -> None:
    """Wait for the GPU."""
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def timed(action: Callable[[], object], repeats: int) -> list[float]:
    """Milliseconds of each repetition, the GPU's work included; the first call is not counted."""
    action()
    found: list[float] = []
    for _ in range(repeats):
        settle()
        start = time.perf_counter()
        action()
        settle()
        found.append((time.perf_counter() - start) * 1e3)
    return found


class Report:
    """The rows."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self.failures: list[str] = []

    def add(self, name: str, ms: list[float], **more: Any) -> None:
        """A row of times in milliseconds."""
        row = {"name": name, "median_ms": statistics.median(ms), "min_ms": min(ms), "max_ms": max(ms), "n": len(ms)}
        self.rows.append(row | more)
        notes = "  ".join(f"{key} {_shown(value)}" for key, value in more.items())
        print(
            f"{name:44s} {row['median_ms']:9.3f} ms  [{row['min_ms']:.3f} .. {row['max_ms']:.3f}] x{len(ms)}  {notes}"
        )
        sys.stdout.flush()

    def require(self, ok: bool, what: str) -> None:
        """A check of bytes."""
        print(f"{'ok   ' if ok else 'WRONG'} {what}", flush=True)
        if not ok:
            self.failures.append(what)


def _shown(value: Any) -> str:
    if isinstance(value, Mapping):
        return " ".join(f"{key}={item:.2f}" for key, item in value.items())
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def device_copies(nbytes: int, repeats: int) -> list[float]:
    """Milliseconds of torch's copy of so many bytes."""
    source = torch.zeros(nbytes, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    return timed(lambda: target.copy_(source), repeats)


def floors(report: Report, trainer: Trainer, repeats: int) -> float:
    """What the same bytes cost at least: one copy on the device, one read by the checksum kernel. Also torch's batched
    copy of the tensors. The copy's median, in ms."""
    copies = device_copies(trainer.nbytes, repeats)
    floor = statistics.median(copies)
    report.add("device copy of the bytes", copies, gb=trainer.nbytes / 1e9, tb_s=2 * trainer.nbytes / floor / 1e9)
    tensors = list(trainer.tensors.values())
    sums = SpanChecksums(DEVICE)
    addresses = np.array([tensor.data_ptr() for tensor in tensors], dtype=np.int64)
    counts = np.array([tensor.nbytes for tensor in tensors], dtype=np.int64)
    found = sums.compute(addresses, counts).cpu().numpy()
    report.require(np.array_equal(found, trainer.checksums()), "checksum kernel gives the quantizer's checksums")
    reads = timed(lambda: sums.compute(addresses, counts), repeats)
    report.add("checksums of all tensors", reads, tb_s=trainer.nbytes / statistics.median(reads) / 1e9)
    bits = [tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor for tensor in tensors]
    clones = [torch.empty_like(tensor) for tensor in bits]
    foreach = getattr(torch, "_foreach_copy_")  # noqa: B009 - not in torch's stubs
    report.add("torch._foreach_copy_ of the tensors", timed(lambda: foreach(clones, bits), max(3, repeats // 4)))
    return floor


def same_bytes(report: Report, trainer: Trainer, engine: Engine, what: str) -> None:
    """The engine's parameters hold the store's present generation."""
    found = np.frombuffer(engine.call("checksums", None), dtype=np.int64)
    report.require(np.array_equal(found, trainer.checksums()), f"{what}: the engine holds the store's bytes")


def cycles(
    report: Report,
    name: str,
    trainer: Trainer,
    engine: Engine,
    publish: Callable[[int], PublishReport],
    repeats: int,
    floor: float,
    before: Callable[[], object] = lambda: None,
) -> None:
    """Publish a new generation `repeats` times and report the wall clock and the phases."""
    wall: list[float] = []
    phases: list[dict[str, float]] = []
    engine.call("openings")
    for _ in range(repeats):
        version = trainer.step()
        before()
        start = time.perf_counter()
        done = publish(version)
        wall.append((time.perf_counter() - start) * 1e3)
        phases.append(done.ms)
        last = done
    opened, opening = engine.call("openings")
    medians = {phase: statistics.median([p.get(phase, 0.0) for p in phases]) for phase in phases[-1]}
    report.add(
        name,
        wall,
        of_floor=statistics.median(wall) / floor,
        limit_ms=1.5 * floor + 10,
        chunks=last.chunks,
        staging_mib=last.staging_bytes / 2**20,
        mappings_opened=opened / repeats,
        opening_ms=opening / repeats,
        transport=",".join(last.transports.values()),
        phases=medians,
        every_ms=[round(ms, 3) for ms in wall],
    )
    same_bytes(report, trainer, engine, name)


@contextlib.contextmanager
def publisher_to(engine: Engine, trainer: Trainer, folder: Path) -> Iterator[Publisher]:
    """A publisher with one peer."""
    options: dict[str, Any] = {"commit_path": folder / "commit.json", "deadlines": Deadlines.all(120)}
    with Publisher(RUN, trainer.plan, [engine.peer], **options) as publisher:
        yield publisher


def record_floor(report: Report, folder: Path, repeats: int) -> None:
    """What the disk takes for a commit record, alone."""
    record = CommitRecord(run_id=RUN, version=0, digest="0" * 64, engines=["engine"])
    report.add("commit record on disk, alone", timed(lambda: record.write(folder / "floor.json"), repeats))


def publish_sections(
    report: Report, trainer: Trainer, engine: Engine, folder: Path, repeats: int, floor: float
) -> None:
    """Publishes in every way."""
    sources = trainer.sources(in_place=True, keep=True)
    few = max(3, repeats // 4)

    def through(publisher: Publisher, sources: SourceBuffers) -> Callable[[int], PublishReport]:
        return lambda version: publisher.publish(version, sources, trainer.store.checksums, resume=False)

    with publisher_to(engine, trainer, folder) as publisher:
        engine.call("checksums", trainer.views)
        start = time.perf_counter()
        first = publisher.publish(0, sources, trainer.store.checksums, resume=False)
        cold = (time.perf_counter() - start) * 1e3
        opened, opening = engine.call("openings")
        report.add("publish, cold: plan, mappings, first launches", [cold], phases=first.ms)
        if opened:
            report.add("first open of the mappings", [opening], mappings=opened)
        engine.call("poison")
        proof = publisher.publish(trainer.step(), sources, trainer.store.checksums, resume=False, verify_sha256=True)
        report.require(proof.sha256 == trainer.store.sha256(), "sha256 of every tensor, trainer's and engine's")
        cycles(report, "publish, warm", trainer, engine, through(publisher, sources), repeats, floor)
        cycles(
            report,
            "publish, warm, engine's memory moved",
            trainer,
            engine,
            through(publisher, sources),
            few,
            floor,
            lambda: engine.call("move"),
        )
        once = trainer.sources(in_place=True, keep=False)
        cycles(report, "publish, mappings opened each time", trainer, engine, through(publisher, once), few, floor)
        packed = trainer.sources(in_place=False, keep=False)
        cycles(report, "publish, packed", trainer, engine, through(publisher, packed), few, floor)


def sglang_sections(report: Report, trainer: Trainer, engine: Engine, repeats: int) -> None:
    """SGLang's own way into the same parameters."""
    for name, (pack, load_format) in WAYS.items():

        def update(pack: Any = pack, load_format: str | None = load_format) -> None:
            payload, alive = pack(trainer.tensors)
            problem = engine.call("update_from_tensor", payload, load_format)
            del alive
            if problem:
                raise SystemExit(problem)

        trainer.step()
        engine.call("poison")
        report.add(f"SGLang update_weights_from_tensor, {name}", timed(update, repeats))
        same_bytes(report, trainer, engine, f"SGLang, {name}")


def main() -> int:
    """Run all sections."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tiny", action="store_true", help="small sizes, to check this script")
    parser.add_argument("--cycles", type=int, default=20)
    parser.add_argument("--commit", default="", help="what is measured, for the page")
    parser.add_argument("--engine", choices=("sglang", "plain"), default="sglang")
    options = parser.parse_args()
    need_gpu(options.tiny)
    options.out.mkdir(parents=True, exist_ok=True)
    sizes = TINY if options.tiny else Sizes()
    report = Report()
    torch.set_num_threads(1)
    trainer = Trainer(sizes)
    print(
        f"{len(trainer.tensors)} tensors, {trainer.nbytes / 1e9:.3f} GB, {DEVICE}, engine {options.engine}", flush=True
    )
    floor = floors(report, trainer, options.cycles)
    record_floor(report, options.out, options.cycles)
    if DEVICE.type == "cuda":
        torch.cuda.empty_cache()
    with tempfile.TemporaryDirectory(prefix="weft-") as folder:
        engine = Engine(Path(folder), sizes, options.engine)
        try:
            publish_sections(report, trainer, engine, options.out, options.cycles, floor)
            if options.engine == "sglang":
                sglang_sections(report, trainer, engine, max(3, options.cycles // 5))
        finally:
            engine.stop()
            where = ran_on("triton", "sglang") | {"commit": options.commit, "engine": options.engine}
            data = {"environment": where, "sizes": asdict(sizes), "bytes": trainer.nbytes, "rows": report.rows}
            data["failures"] = report.failures
            (options.out / "publish_speed.json").write_text(json.dumps(data, indent=1))
    return 1 if report.failures else 0


if __name__ == "__main__":
    sys.exit(main())
