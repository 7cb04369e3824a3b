"""The SGLang adapter on one GPU: a live engine is published to through release and resume, while requests are in
flight, and while things go wrong. One repeatable run.

    python tests/gpu/sglang_adapter.py --out OUT [--only cycles,inflight,faults,worker,eager] [--cycles 50]

Writes OUT/sglang_adapter.json and exits with 1 if any check fails. Sections share one engine, but for the last:

    cycles    drain, release, a training step of the attached Megatron trainer, publish, resume, generate; served bytes
              are the trainer's (sha256), greedy tokens at the first, middle and last cycle are those of a second
              engine that loads the export of that version, memory is flat, and free while it is released
    inflight  16 requests during a publish, in every mode
    faults    publishers killed before, during and after a transfer, a byte flipped on its way, a stale publisher, an
              engine rank that raises; each ends in time, and the next publish works
    worker    an engine worker killed in the middle of a transfer; a new engine joins
    eager     cycles of an engine without CUDA graphs; the other sections' has them

The first forward passes compile for most of a minute: keep TRITON_CACHE_DIR from one run for the next.

`--tiny` checks this script where there is no GPU: the engine is tests/adapters/cpu_engine.py's, the trainer random
tensors, and what needs a GPU is left out.
"""

import argparse
import contextlib
import itertools
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from engine_settings import ENGINE, GRAPHS
from ran_on import need_gpu, ran_on

from weftpub.channel import Deadlines
from weftpub.errors import TornError, WeftpubError
from weftpub.plan import Plan, torch_dtype
from weftpub.publisher import Publisher
from weftpub_adapters.sglang.driver import ColocatedEngine, DriverDeadlines, LocalEngine, free_bytes, note_death

HERE = Path(__file__).resolve().parent
RUN = "sglang-adapter"
GPU = torch.cuda.is_available()
WAITS = Deadlines.all(30.0)
DRIVER = DriverDeadlines(start=60, drain=120, flush=20, memory=20, release=30, resume=30, control=30, shutdown=30)
PROMPTS = [[3, 5, 7, 11, 13], [2, 4, 8, 16], [100, 50, 25], [1]]
MIB = 1 << 20
STARTED = time.monotonic()


class Report:
    """Numbers and checks; a failed check is remembered and the run goes on."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.data: dict[str, Any] = {"checks": {}, "failed": [], "seconds": {}}

    def check(self, name: str, passed: bool, detail: Any = None) -> None:
        self.data["checks"][name] = {"passed": bool(passed), "detail": detail}
        if not passed:
            self.data["failed"].append(name)
        print(f"  {'ok  ' if passed else 'FAIL'} {name}" + ("" if detail is None else f": {detail}"), flush=True)

    def write(self) -> None:
        self.path.write_text(json.dumps(self.data, indent=1), encoding="utf-8")


# The trainer.


class MegatronTrainer:
    """A Megatron model with FP8 experts that are stepped by Muon, attached."""

    def __init__(self, shape: Any) -> None:
        sys.path.insert(0, str(HERE))
        import megatron_adapter

        from weftpub_adapters.megatron import initialize_parallel

        initialize_parallel()
        self._tools = megatron_adapter
        self._shape = shape
        self._trainer = megatron_adapter.build(shape, "muon", "fp8")
        self._steps = 0
        self.hf_config = config_of(shape)
        # While its weights are resident: an offloaded parameter has no memory to be viewed.
        from weftpub_adapters.awex import SourceMapping, trainer_shards

        self._shards = trainer_shards(self._model, self._store, self.hf_config)
        self._mapping = SourceMapping(self._model, self._store, self.hf_config)

    @property
    def _model(self) -> Any:
        return self._trainer.ddp.module.module

    @property
    def _store(self) -> Any:
        return self._trainer.attachment.store

    def step(self) -> None:
        """One training step: the store holds the next generation."""
        self._steps += 1
        self._trainer.train(self._tools.random_batches(self._shape, 1, seed=self._steps))

    def plan(self, descriptions: Any) -> Plan:
        from weftpub_adapters.awex import build_plan, engine_shards

        return build_plan(self._shards, engine_shards(descriptions))

    @contextlib.contextmanager
    def sources(self) -> Iterator[tuple[Any, Any]]:
        """What is published, and the checksums that the quantizer made."""
        with self._trainer.attachment.reading("publish"):
            yield self._mapping.buffers(), dict(self._store.checksums)

    def sha256(self) -> dict[str, str]:
        """Of every expert tensor that the trainer computes with."""
        return self._store.sha256()

    def export(self, directory: Path, version: int) -> None:
        from weftpub.checkpoint import export_hf

        held = {item.name for item in self._store.canonical()}
        others = {name: tensor for name, tensor in self._mapping.tensors().items() if name not in held}
        export_hf(directory, self._store, others, self.hf_config, version=version, overwrite=True)

    def offload(self) -> None:
        """Give the GPU's memory to the engine."""
        self._mapping.release()
        self._trainer.attachment.offload()
        if GPU:
            torch.cuda.empty_cache()

    def reload(self) -> None:
        self._trainer.attachment.reload()


@dataclass(frozen=True)
class Small:
    """Sizes of a model and its batch, as `megatron_adapter.Shape` has them."""

    hidden: int = 512
    intermediate: int = 256
    experts: int = 16
    top_k: int = 4
    layers: int = 2
    heads: int = 8
    batch: int = 2
    length: int = 128
    recompute: bool = False
    vocab: int = 8192


@dataclass(frozen=True)
class Tiny(Small):
    """A first check."""

    experts: int = 8
    top_k: int = 2
    vocab: int = 1024


class PlainTrainer:
    """Random tensors in the place of a trainer, where there is no GPU."""

    def __init__(self) -> None:
        from layouts import BASE

        self.hf_config: dict[str, Any] = {**BASE, "rms_norm_eps": 1e-5}
        self._steps = 0

    def step(self) -> None:
        self._steps += 1

    def plan(self, descriptions: Any) -> Plan:
        data = [one.model_dump(mode="json") for one in descriptions]
        for one in data:
            one["settings"]["hf_config"] = self.hf_config
        worker = HERE.parent / "adapters" / "plan_worker.py"
        made = subprocess.run(
            [sys.executable, str(worker)], input=json.dumps({"plan": data}), capture_output=True, text=True, check=True
        )
        return Plan.from_json(json.loads(made.stdout)["plan"])

    @contextlib.contextmanager
    def sources(self) -> Iterator[tuple[Any, Any]]:
        yield self._tensors(), None

    def sha256(self) -> dict[str, str]:
        import hashlib

        return {
            name: hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
            for name, tensor in self._tensors().items()
            if ".experts." in name
        }

    def offload(self) -> None: ...
    def reload(self) -> None: ...

    def _tensors(self) -> dict[str, torch.Tensor]:
        from checkpoints import fp8_tensors

        tensors = fp8_tensors(self.hf_config, seed=self._steps)
        tensors["model.norm.weight"][0] = 1 + self._steps % 50
        return tensors


def config_of(shape: Any) -> dict[str, Any]:
    """config.json of the model that `megatron_adapter.make_model` builds."""
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "attention_bias": False,
        "decoder_sparse_step": 1,
        "head_dim": shape.hidden // shape.heads,
        "hidden_act": "silu",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "max_position_embeddings": 2048,
        "mlp_only_layers": [],
        "model_type": "qwen3_moe",
        "moe_intermediate_size": shape.intermediate,
        "norm_topk_prob": True,
        "num_attention_heads": shape.heads,
        "num_experts": shape.experts,
        "num_experts_per_tok": shape.top_k,
        "num_hidden_layers": shape.layers,
        "num_key_value_heads": shape.heads // 2,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "use_sliding_window": False,
        "vocab_size": shape.vocab,
    }


# The engine.


def engine_arguments(model: Path, *, graphs: bool) -> dict[str, Any]:
    """Settings of an engine on this machine."""
    if not GPU:
        from cpu_engine import ENGINE as CPU_ENGINE

        return {**CPU_ENGINE, "model_path": str(model), "max_running_requests": 16, "max_total_tokens": 2048}
    return {**ENGINE, "model_path": str(model), **(GRAPHS if graphs else {"disable_cuda_graph": True})}


def install_plugin(folder: Path) -> None:
    """Entry points as an installed package would have them, and one that makes an engine rank raise on demand."""
    if not GPU:
        from cpu_engine import install_plugins

        install_plugins(folder)
    info = folder / "weftpub_gpu_script-0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: weftpub_gpu_script\nVersion: 0\n", encoding="utf-8")
    (info / "entry_points.txt").write_text(
        "[sglang.srt.plugins]\nweftpub = weftpub_adapters.sglang.plugin:register\n"
        "weftpub_faults = engine_faults:register\n",
        encoding="utf-8",
    )
    sys.path[:0] = [str(folder), str(HERE)]


@dataclass
class World:
    """What the sections share."""

    out: Path
    report: Report
    trainer: Any
    model: Path
    graphs: bool = True  # whether the engine captures CUDA graphs
    engine: LocalEngine | None = None
    publisher: Publisher | None = None
    step: ColocatedEngine | None = None
    version: int = 0
    starts: int = 0
    quiet: bool = True  # whether nobody else uses the GPU
    ready: bool = False  # whether the trainer has made the next version already
    reference: "Reference | None" = None

    def up(self) -> None:
        """An engine, its receivers, and a plan."""
        self.down()
        self.boot()
        self.connect()

    def boot(self) -> None:
        """Start an engine."""
        self.starts += 1
        began = time.monotonic()
        try:
            self.engine = LocalEngine.start(deadlines=DRIVER, **engine_arguments(self.model, graphs=self.graphs))
        except RuntimeError as error:
            if not self.graphs:
                raise
            self.report.check("an engine with CUDA graphs starts", False, str(error))
            self.graphs = False
            self.engine = LocalEngine.start(deadlines=DRIVER, **engine_arguments(self.model, graphs=False))
        progress(f"engine up after {time.monotonic() - began:.1f} s")

    def connect(self) -> None:
        """A publisher and a driver for the engine that is there."""
        assert self.engine is not None
        run = f"{RUN}-{self.starts}"
        peers = self.engine.start_receivers(run, sockets(self.out, self.starts))
        commit = self.out / "commit.json"
        commit.unlink(missing_ok=True)
        self.publisher = Publisher(run, None, peers, commit_path=commit, deadlines=WAITS)
        plan = self.trainer.plan(self.publisher.describe())
        self.publisher.set_plan(plan)
        (self.out / "plan.json").write_text(plan.to_json(), encoding="utf-8")
        (self.out / "peers.json").write_text(json.dumps([[p.rank, p.address, p.engine] for p in peers]))
        self.step = ColocatedEngine(self.engine, self.publisher, deadlines=DRIVER, measure=self.measure)

    def measure(self, device: str) -> int | None:
        """Free bytes, unless another engine comes and goes on this GPU: then they say nothing about this one."""
        return free_bytes(device) if self.quiet else None

    def first_version(self) -> None:
        """The trainer's first step and its export, so that the second engine starts while the first does."""
        self.trainer.step()
        self.ready = True
        export = self.export(self.version + 1)
        self.trainer.export(export, self.version + 1)
        self.reference = Reference(export, self.out / "reference.log", graphs=self.graphs)

    def export(self, version: int) -> Path:
        """Where a version is exported to."""
        return self.out / f"export-{version}"

    def next_version(self) -> None:
        """Have the trainer make the next version."""
        if not self.ready:
            self.trainer.step()
        self.ready = False
        self.version += 1

    def down(self) -> None:
        """End the engine."""
        if self.publisher is not None:
            self.publisher.close()
        if self.engine is not None:
            self.engine.shutdown()
        self.engine = self.publisher = self.step = None

    @property
    def run(self) -> str:
        return f"{RUN}-{self.starts}"

    def weight_bytes(self) -> int:
        """Bytes of the engine's parameters."""
        assert self.publisher is not None
        described = self.publisher.describe()[0]
        kept = described.settings["kept"]
        assert isinstance(kept, list)
        return sum(
            torch.Size(spec.shape).numel() * torch_dtype(spec.dtype).itemsize
            for spec in described.parameters
            if spec.name not in kept
        )

    def generate(self, tokens: int = 12) -> list[list[int]]:
        """Greedy answers, one after the other: a batch of another size may choose other kernels."""
        assert self.engine is not None
        sampling = {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}
        return [list(self.engine.generate([prompt], sampling, seconds=240)[0].tokens) for prompt in PROMPTS]


def write_model(out: Path, hf_config: dict[str, Any]) -> "subprocess.Popen[bytes]":
    """Write the engine's model directory, in a process of its own."""
    (out / "config.json").write_text(json.dumps(hf_config), encoding="utf-8")
    module = "weftpub_adapters.sglang.driver.model_directory"
    command = [sys.executable, "-m", module, str(out / "config.json"), str(out / "model"), "--overwrite"]
    return subprocess.Popen(command)


def sockets(out: Path, start: int) -> Path:
    """A short path: a socket's has 107 bytes."""
    return Path("/tmp") / f"wp-{os.getuid()}-{abs(hash(str(out))) % 10**6}-{start}"


class Reference:
    """A second engine on the same GPU, in a process of its own, that loads exports from disk by SGLang's own loader."""

    def __init__(self, directory: Path, log: Path, *, graphs: bool) -> None:
        arguments = json.dumps(engine_arguments(directory, graphs=graphs))
        with log.open("w") as errors:
            self._process = subprocess.Popen(
                [sys.executable, str(HERE / "reference_engine.py"), arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        self._answers: queue.Queue[list[list[int]]] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def tokens(self, directory: Path, prompts: list[list[int]], count: int) -> list[list[int]] | str:
        """Its answers, or what went wrong."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"load": str(directory), "prompts": prompts, "tokens": count}) + "\n")
            self._process.stdin.flush()
            return self._answers.get(timeout=120.0)
        except (OSError, queue.Empty) as error:
            return f"the reference engine gave no answer: {type(error).__name__} {error}, status {self._process.poll()}"

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith('{"tokens"'):
                self._answers.put(json.loads(line)["tokens"])

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()


# Sections.


def progress(what: str) -> None:
    """A line with the time, so that a run that is cut short tells where it was."""
    print(f"    {time.monotonic() - STARTED:6.1f} s {what}", flush=True)


def free_gib() -> float | None:
    if not GPU:
        return None
    found = free_bytes(f"GPU-{torch.cuda.get_device_properties(0).uuid}")
    return None if found is None else round(found / (1 << 30), 4)


def section_cycles(world: World, count: int, *, name: str, compared: set[int]) -> None:
    """`count` colocated steps; at the cycles in `compared` tokens are held against a second engine."""
    report, trainer = world.report, world.trainer
    if world.reference is not None and world.ready:
        began = time.monotonic()
        world.reference.tokens(world.export(world.version + 1), PROMPTS[:1], 1)  # it is up, and takes no more memory
        print(f"  waited {time.monotonic() - began:.1f} s for the second engine", flush=True)
    rows: list[dict[str, Any]] = report.data.setdefault(name, [])
    addresses: set[Any] = set()
    for cycle in range(1, count + 1):
        step, publisher, engine = world.step, world.publisher, world.engine
        assert step is not None
        assert publisher is not None
        assert engine is not None
        say = progress if cycle == 1 else lambda _: None  # kernels are compiled then, which takes most of a minute
        row: dict[str, Any] = {"cycle": cycle, "serving": free_gib()}
        step.drain("drain" if cycle % 2 else "retract")
        say("drained")
        step.release(["kv_cache"])
        row["without_kv"] = free_gib()
        step.release(["weights"])
        row["released"] = free_gib()
        say("released")
        trainer.reload()
        world.next_version()
        say("the trainer holds the version")
        row["trained"] = free_gib()
        with trainer.sources() as (sources, checksums):
            published = step.publish(world.version, sources, checksums, verify_sha256=True)
            own = trainer.sha256()
        say("published")
        row["publish_ms"] = {phase: round(ms, 2) for phase, ms in published.ms.items()}
        if cycle in compared and world.reference is not None and not world.export(world.version).exists():
            trainer.export(world.export(world.version), world.version)
        addresses.add(publisher.describe()[0].settings["plugin"]["addresses"])
        trainer.offload()
        step.resume()
        step.continue_()
        say("serving")
        answers = world.generate()
        say("answered")
        row["allocated"] = torch.cuda.memory_allocated() if GPU else 0
        row["ms"] = {phase: round(ms, 1) for phase, ms in step.ms.items()}
        rows.append(row)
        whole = {key: value for key, value in published.sha256.items() if key in own}
        if len(whole) != len(own) or any(own[key] != value for key, value in whole.items()):
            report.check(f"{name}/cycle {cycle}: served sha256 is the trainer's", False, f"{len(whole)} of {len(own)}")
        if engine.weight_version() != str(world.version):
            report.check(f"{name}/cycle {cycle}: answers report the version", False, engine.weight_version())
        if cycle in compared and world.reference is not None:
            expected = world.reference.tokens(world.export(world.version), PROMPTS, 12)
            detail = None if expected == answers else {"engine": answers, "reference": expected}
            report.check(
                f"{name}/cycle {cycle}: tokens are those of an engine that loads the export", not detail, detail
            )
        progress(f"cycle {cycle}: {sum(row['ms'].values()):.0f} ms")
        if cycle in (1, 2, count) or cycle % 10 == 0:
            print(f"  {row}", flush=True)
            report.write()
    report.check(f"{name}: {count} cycles, sha256 of {len(own)} expert tensors each", len(rows) == count)
    report.check(f"{name}: the weights' addresses stay through release and resume", len(addresses) == 1)
    if GPU and name == "cycles":  # beside other work on this GPU the numbers mean nothing
        # Later the second engine loads from disk, and its memory shows in what is free.
        quiet = [row for row in rows if min(5, count // 4) < row["cycle"] <= max(2, count // 2)]
        settled = [row for row in rows if row["cycle"] > min(5, count // 4)]
        for place in ("serving", "released", "allocated"):
            values = [row[place] for row in (settled if place == "allocated" else quiet)]
            spread = max(values) - min(values)
            limit = 16 * MIB if place == "allocated" else 0.0625
            report.check(f"{name}: memory while {place} is flat", spread <= limit, [min(values), max(values)])
        freed = min(row["released"] - row["without_kv"] for row in settled)
        weights = world.weight_bytes() / (1 << 30)
        report.check(
            f"{name}: the weights' memory is really free while released",
            freed >= 0.95 * weights - 0.004,
            f"{freed:.3f} GiB freed, parameters are {weights:.3f} GiB",
        )


def section_inflight(world: World) -> None:
    """16 requests during a publish, in every mode."""
    for mode in ("drain", "retract", "restart", "abort"):
        step, engine, trainer = world.step, world.engine, world.trainer
        assert step is not None
        assert engine is not None
        old, length = world.version, 256 if GPU else 40
        sampling = {"max_new_tokens": length, "temperature": 0, "ignore_eos": True}
        with ThreadPoolExecutor(16) as pool:
            asked = [pool.submit(engine.generate, [[5, 6, first + 1]], sampling, seconds=240) for first in range(16)]
            until = time.monotonic() + 20
            while engine.in_flight < 16 and time.monotonic() < until:
                time.sleep(0.005)
            time.sleep(0.3)
            began = time.monotonic()
            step.drain(mode)  # type: ignore[arg-type]
            step.release()
            trainer.reload()
            world.next_version()
            with trainer.sources() as (sources, checksums):
                step.publish(world.version, sources, checksums)
            trainer.offload()
            step.resume()
            step.continue_()
            took = time.monotonic() - began
            found = [future.result(240)[0] for future in asked]
        spans = [tuple((s.version, s.start, s.end) for s in answer.versions) for answer in found]
        whole = all(
            s[0][1] == 0 and s[-1][2] == len(a.tokens) and all(p[2] == q[1] for p, q in itertools.pairwise(s))
            for s, a in zip(spans, found, strict=True)
        )
        names = {tuple(version for version, _, _ in s) for s in spans}
        new = str(world.version)
        fits = {
            "drain": names == {(str(old),)},
            "retract": names <= {(str(old), new), (str(old),), (new,)} and (str(old), new) in names,
            "restart": names <= {(new,), (str(old),)} and (new,) in names,
            "abort": {a.finish for a in found} <= {"abort", "length"} and "abort" in {a.finish for a in found},
        }[mode]
        complete = mode == "abort" or all(len(a.tokens) == length and a.finish == "length" for a in found)
        detail = {
            "step_s": round(took, 2),
            "versions": sorted(map(list, names)),
            "tokens": sorted({len(a.tokens) for a in found}),
            "attempts": sorted({a.attempts for a in found}),
        }
        world.report.check(
            f"inflight/{mode}: 16 requests, none lost, versions as promised",
            len(found) == 16 and whole and fits and complete,
            detail,
        )
        world.report.data.setdefault("inflight", {})[mode] = {**detail, "spans": [list(map(list, s)) for s in spans]}


class FaultPublisher:
    """A publisher in another process, ready to go wrong when it is told to.

    Args:
        version: it publishes; fixed at the start, so that its tensors are ready.
    """

    def __init__(self, world: World, fault: str, version: int) -> None:
        self._account, self._go = world.out / f"child-{fault}.json", world.out / f"{fault}.go"
        self._ready = self._go.with_suffix(".ready")
        for path in (self._account, self._go, self._ready):
            path.unlink(missing_ok=True)
        self._log = (world.out / f"child-{fault}.log").open("w")
        words = {"--out": world.out, "--run": world.run, "--fault": fault, "--version": version}
        words |= {"--account": self._account, "--go": self._go}
        command = [sys.executable, str(HERE / "fault_publisher.py"), *(str(w) for pair in words.items() for w in pair)]
        self._process = subprocess.Popen(command, stdout=self._log, stderr=subprocess.STDOUT)

    def publish(self, seconds: float) -> tuple[int, dict[str, Any], float]:
        """Exit status, its account, seconds."""
        until = time.monotonic() + 120
        while not self._ready.exists() and self._process.poll() is None and time.monotonic() < until:
            time.sleep(0.02)
        began = time.monotonic()
        self._go.touch()
        try:
            status = self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
            status = self._process.wait()
        self._log.close()
        said = json.loads(self._account.read_text()) if self._account.is_file() else {}
        return status, said, time.monotonic() - began


# What each fault must end in: exit status of the publisher, state of the engine, and words of its error.
FAULTS: dict[str, tuple[int, str, str]] = {
    "killed-before": (-signal.SIGKILL, "paused", ""),
    "killed-during": (-signal.SIGKILL, "torn", ""),
    "killed-after": (-signal.SIGKILL, "verified", ""),
    "killed-committed": (-signal.SIGKILL, "verified", ""),
    "flipped-byte": (1, "torn", "ChecksumError"),
    "stale": (1, "", "StaleError"),
    "engine-raises": (1, "torn", "asked to raise"),
}


def section_faults(world: World) -> None:
    """Each fault, from a publisher in a process of its own; then a whole version from this one."""
    first = world.version + 1
    children = {fault: FaultPublisher(world, fault, first + 2 * number) for number, fault in enumerate(FAULTS)}
    rows: dict[str, Any] = world.report.data.setdefault("faults", {})
    for fault, (status, state, words) in FAULTS.items():
        rows[fault] = run_fault(world, fault, children[fault], status, state, words)
        world.report.write()


def section_worker(world: World) -> None:
    """The engine's worker dies in the middle of a transfer; a new engine joins and waits for a whole version."""
    child = FaultPublisher(world, "slow", world.version + 1)
    world.report.data["worker"] = run_worker_killed(world, child)


def run_fault(world: World, fault: str, child: FaultPublisher, status: int, state: str, words: str) -> dict[str, Any]:
    engine = world.engine
    assert engine is not None
    raising = world.out / "raise-in-engine"
    engine.pause("retract")
    flushed = engine.flush()
    if fault == "engine-raises":
        raising.touch()
    found, said, took = child.publish(60.0)
    raising.unlink(missing_ok=True)
    held, reason, _ = standing(world, wait_for=state)
    refused = ""
    if state == "torn":
        engine.continue_()  # the worker itself must not go on
        refused = "answered" if answered(world, 1.5) else "held"
        engine.pause("retract")
    began = time.monotonic()
    error = recover(world)
    again = time.monotonic() - began
    after, _, version = standing(world)
    works = answered(world)
    row = {
        "exit": found,
        "said": said,
        "seconds": round(took, 2),
        "state": held,
        "reason": reason,
        "requests": refused,
        "next": {"error": error, "seconds": round(again, 2), "state": after, "version": version, "answers": works},
    }
    passed = (
        flushed
        and found == status
        and (not state or held == state)
        and words in json.dumps(said)
        and refused != "answered"
        and (after, version) == ("serving", world.version)
        and works
    )
    world.report.check(f"faults/{fault}: ends in time as it should, and the next publish works", passed, row)
    return row


def recover(world: World) -> str:
    """A whole version from a new publisher of this process, and the engine goes on; the error, if there is one."""
    engine, trainer = world.engine, world.trainer
    assert engine is not None
    world.version += 2
    trainer.reload()
    trainer.step()
    try:
        with fresh_publisher(world) as publisher, trainer.sources() as (sources, checksums):
            publisher.set_plan(Plan.from_json((world.out / "plan.json").read_text(encoding="utf-8")))
            publisher.publish(world.version, sources, checksums)
    except WeftpubError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        trainer.offload()
    engine.set_weight_version(str(world.version))
    engine.continue_()
    return ""


def run_worker_killed(world: World, child: FaultPublisher) -> dict[str, Any]:
    engine = world.engine
    assert engine is not None
    engine.pause("retract")
    pid = world_pid(world)
    began = time.monotonic()
    marker = world.out / "chunk-sent"
    marker.unlink(missing_ok=True)

    def kill() -> None:
        until = time.monotonic() + 60
        while not marker.exists() and time.monotonic() < until:
            time.sleep(0.002)
        os.kill(pid, signal.SIGKILL)

    killer = threading.Thread(target=kill, daemon=True)
    killer.start()
    status, said, took = child.publish(90.0)
    killer.join(5)
    try:
        engine.server_info()
        driver = "nothing was noticed"
    except WeftpubError as error:
        driver = str(error)
    world.up()
    publisher, step = world.publisher, world.step
    assert publisher is not None
    assert step is not None
    fresh = {str(report.state) for report in publisher.status().values()}
    step.drain()
    try:
        step.continue_()
        out = "served without a version"
    except TornError as error:
        out = str(error)
    world.version += 2
    world.trainer.reload()
    world.trainer.step()
    with world.trainer.sources() as (sources, checksums):
        step.publish(world.version, sources, checksums)
    world.trainer.offload()
    step.continue_()
    works = answered(world)
    row = {
        "exit": status,
        "said": said,
        "seconds": round(took, 2),
        "driver": driver,
        "fresh": sorted(fresh),
        "out": out,
        "answers": works,
        "all_s": round(time.monotonic() - began, 1),
    }
    passed = (
        status == 1
        and "process ended" in json.dumps(said)
        and "have ended" in driver
        and fresh == {"torn"}
        and "no version" in out
        and works
    )
    world.report.check("worker: its death is named in time; a new engine waits for a version", passed, row)
    return row


def world_pid(world: World) -> int:
    """The worker's process."""
    with fresh_publisher(world) as asking:
        return int(asking.describe()[0].settings["plugin"]["pid"])  # type: ignore[index,call-overload,arg-type]


def fresh_publisher(world: World) -> Publisher:
    """One that starts now, and so takes over."""
    from weftpub.publisher import Peer

    peers = [Peer(*entry) for entry in json.loads((world.out / "peers.json").read_text())]
    return Publisher(world.run, None, peers, commit_path=world.out / "commit.json", deadlines=WAITS)


def standing(world: World, wait_for: str = "") -> tuple[str, str, int | None]:
    """State, reason and version of the engine's rank; a new publisher ends what an old one left."""
    with fresh_publisher(world) as asking:
        report = asking.status()[0]
        until = time.monotonic() + 10
        while wait_for and str(report.state) != wait_for and time.monotonic() < until:
            time.sleep(0.2)
            report = asking.status()[0]
    return str(report.state), report.reason, report.version


def answered(world: World, seconds: float = 20.0) -> bool:
    """Whether a request is answered in time."""
    engine = world.engine
    assert engine is not None
    try:
        engine.generate([[1, 2, 3]], {"max_new_tokens": 2, "temperature": 0, "ignore_eos": True}, seconds=seconds)
    except TimeoutError:
        return False
    return True


class Beside:
    """Cycles without CUDA graphs in a process of its own, beside the sections whose numbers do not mind."""

    def __init__(self, out: Path, arguments: list[str]) -> None:
        self._out = out / "eager"
        self._out.mkdir(exist_ok=True)
        self._log = (self._out / "log.txt").open("w")
        command = [
            sys.executable,
            str(Path(__file__)),
            "--out",
            str(self._out),
            "--only",
            "eager",
            "--beside",
            *arguments,
        ]
        self._process = subprocess.Popen(command, stdout=self._log, stderr=subprocess.STDOUT)

    def join(self, report: Report, seconds: float) -> None:
        """Wait for it and take its checks over."""
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
        self._log.close()
        path = self._out / "sglang_adapter.json"
        found = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {"checks": {}}
        for name, check in found["checks"].items():
            report.check(name, check["passed"], check["detail"])
        report.data["eager"] = found.get("eager")
        report.check("eager: the section ran to its end", self._process.poll() in (0, 1) and "eager" in found)


def import_everything() -> None:
    """One after the other: threads that import the same packages at once may find them half made."""
    from sglang.srt.entrypoints.engine import Engine

    del Engine
    if GPU:
        sys.path.insert(0, str(HERE))
        import megatron_adapter

        from weftpub_adapters.awex.seams import entered

        with entered():
            del megatron_adapter


def boot_and_stay(world: World, booting: "Future[None]") -> None:
    """Start the engine, say how it went, and wait for ever."""
    try:
        world.boot()
        booting.set_result(None)
    except BaseException as error:  # raised again where it is waited for
        booting.set_exception(error)
    threading.Event().wait()


def make_trainer(world: World, tiny: bool, *, compare: bool) -> None:
    """Build the trainer, its first version and, to compare with, a second engine; then it is offloaded."""
    began = time.monotonic()
    world.trainer = MegatronTrainer(Tiny() if tiny else Small()) if GPU else PlainTrainer()
    if compare:
        world.first_version()
    world.trainer.offload()
    progress(f"trainer ready after {time.monotonic() - began:.1f} s")


def run_section(world: World, name: str, section: Callable[[], None]) -> None:
    """One section; what it raises is a failed check, and the next one is tried."""
    began = time.monotonic()
    progress(f"== {name}")
    try:
        if name in ("inflight", "faults", "worker") and world.version == 0:
            section_cycles(world, 1, name=f"{name}-first", compared=set())
        section()
    except Exception:
        world.report.check(f"{name}: ran to its end", False, traceback.format_exc()[-3000:])
    world.report.data["seconds"][name] = round(time.monotonic() - began, 1)
    world.report.write()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", default="cycles,inflight,faults,worker,eager")
    parser.add_argument("--cycles", type=int, default=50)
    parser.add_argument("--eager-cycles", type=int, default=10)
    parser.add_argument("--no-reference", action="store_true", help="no second engine to compare tokens with")
    parser.add_argument("--no-graphs", action="store_true", help="an engine without CUDA graphs everywhere")
    parser.add_argument("--beside", action="store_true", help="others use the GPU: free memory says nothing")
    parser.add_argument("--commit", default="", help="what runs, for the page")
    parser.add_argument("--tiny", action="store_true", help="small sizes, and no trainer where there is no GPU")
    given = parser.parse_args()
    need_gpu(given.tiny)
    given.out.mkdir(parents=True, exist_ok=True)
    out = given.out.resolve()
    sys.path.insert(0, str(HERE.parent / "adapters"))
    if not GPU:
        from cpu_engine import environment as cpu_environment

        os.environ.update(cpu_environment(1))
    os.environ.setdefault("SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK", "1")
    os.environ.setdefault("SGLANG_ENABLE_JIT_DEEPGEMM", "0")
    os.environ.setdefault("SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND", "python")  # the Rust one is built for another torch
    os.environ["WEFTPUB_TEST_RAISE"] = str(out / "raise-in-engine")
    install_plugin(out / "site")
    report = Report(out / "sglang_adapter.json")
    report.data["commit"] = given.commit
    report.data["environment"] = ran_on(
        "sglang", "megatron-core", "transformer-engine", "awex", "torch-memory-saver", "triton"
    )
    signal.signal(signal.SIGQUIT, note_death)  # the engine starts in another thread, which cannot
    chosen = given.only.split(",")
    began = time.monotonic()
    world = World(out, report, None, out / "model", graphs=not (given.no_graphs or chosen == ["eager"]))
    world.quiet = not given.beside
    model = write_model(out, config_of(Tiny() if given.tiny else Small()) if GPU else PlainTrainer().hf_config)
    import_everything()
    if model.wait(120):
        raise RuntimeError("the engine's model directory could not be written")
    # The engine starts beside the trainer. Its workers end with the thread that started them, so that thread stays.
    booting: Future[None] = Future()
    threading.Thread(target=boot_and_stay, args=(world, booting), daemon=True).start()
    make_trainer(world, given.tiny, compare=GPU and not given.no_reference)
    booting.result(600)
    world.connect()
    report.data["seconds"]["start"] = round(time.monotonic() - began, 1)
    middle = {1, max(1, given.cycles // 2), given.cycles}
    passed_on = ["--eager-cycles", str(given.eager_cycles), *(["--tiny"] if given.tiny else [])]
    beside: Beside | None = None
    sections: dict[str, Callable[[], None]] = {
        "cycles": lambda: section_cycles(world, given.cycles, name="cycles", compared=middle),
        "inflight": lambda: section_inflight(world),
        "faults": lambda: section_faults(world),
        "worker": lambda: section_worker(world),
        "eager": lambda: section_cycles(world, given.eager_cycles, name="eager", compared={1, given.eager_cycles}),
    }
    try:
        for name in chosen:
            if name == "eager" and len(chosen) > 1:
                continue
            run_section(world, name, sections[name])
            if beside is None and "eager" in chosen and len(chosen) > 1:
                world.quiet = False
                beside = Beside(out, passed_on)
        if beside is not None:
            beside.join(report, 150.0)
    finally:
        world.down()
        if world.reference is not None:
            world.reference.close()
        report.write()
    print(json.dumps({"failed": report.data["failed"], "seconds": report.data["seconds"]}))
    return 1 if report.data["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
