"""The `engine` section of zero_copy.py: a real SGLang engine whose experts are the trainer's memory.

The trainer here is a store of random masters, and the other weights are published under the engine's own names: what is
shown is memory, addresses, versions and tokens, not training.
"""

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from weftpub.channel import Deadlines
from weftpub.errors import TornError, WeftpubError
from weftpub.memory import SharedAllocation, SharedAllocator
from weftpub.plan import Destination, Plan, Shard, ViewSpec, dtype_name, make_plan, torch_dtype
from weftpub.publisher import Publisher
from weftpub.store import ExpertStore
from weftpub.store.shared import layout_of
from weftpub.wire.description import EngineDescription

__all__ = ["engine_section"]

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda", 0) if GPU else torch.device("cpu")
HERE = Path(__file__).resolve().parent
PROMPTS = [[3, 5, 7, 11, 13], [2, 4, 8, 16], [100, 50, 25], [1]]
RUN = "zero-copy-engine"

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "intermediate_size": 1024,
    "max_position_embeddings": 2048,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 512,
    "norm_topk_prob": True,
    "num_attention_heads": 8,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 8,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 1024,
}
SMALL = {
    "hidden_size": 256,
    "head_dim": 32,
    "moe_intermediate_size": 128,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 2,
    "vocab_size": 500,
}


def install(folder: Path) -> None:
    """Entry points as an installed package would have them."""
    info = folder / "weftpub_zero_copy-0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: weftpub_zero_copy\nVersion: 0\n", encoding="utf-8")
    points = ["weftpub = weftpub_adapters.sglang.plugin:register"]
    if not GPU:
        points.append("cpu_engine = cpu_engine:register")
    text = "[sglang.srt.plugins]\n" + "\n".join(points) + "\n"
    (info / "entry_points.txt").write_text(text, encoding="utf-8")
    sys.path[:0] = [str(folder), str(HERE), str(HERE.parent / "adapters")]


class Trial:
    """An engine, the trainer's store over its memory, and a publisher between them."""

    def __init__(self, report: Any, out: Path, tiny: bool) -> None:
        self.report = report
        self.out = out
        self.config = {**CONFIG, **(SMALL if tiny else {})}
        self.version = 0
        self.starts = 0
        self.meeting = f"/tmp/zc-{os.getuid()}-{os.getpid()}"
        self.engine: Any = None
        self.publisher: Any = None
        self.store: Any = None
        self.memory: Any = None
        self.model = out / "model"
        (out / "config.json").write_text(json.dumps(self.config), encoding="utf-8")
        maker = "weftpub_adapters.sglang.driver.model_directory"
        command = [sys.executable, "-m", maker, str(out / "config.json"), str(self.model), "--overwrite"]
        subprocess.run(command, check=True)

    def arguments(self) -> dict[str, Any]:
        """Of the engine."""
        setting = json.dumps({"weftpub_shared_experts": {"folder": self.meeting}})
        if not GPU:
            from cpu_engine import ENGINE

            return {**ENGINE, "model_path": str(self.model), "json_model_override_args": setting}
        return {
            "attention_backend": "triton",
            "context_length": 2048,
            "cuda_graph_max_bs_decode": 4,
            "disable_prefill_cuda_graph": True,
            "disable_radix_cache": True,
            "enable_memory_saver": True,
            "fp8_gemm_runner_backend": "triton",
            "grammar_backend": "none",
            "json_model_override_args": setting,
            "load_format": "dummy",
            "log_level": "info",
            "max_running_requests": 16,
            "max_total_tokens": 32768,
            "mem_fraction_static": 0.3,
            "model_path": str(self.model),
            "moe_runner_backend": "triton",
            "random_seed": 1,
            "sampling_backend": "pytorch",
            "skip_tokenizer_init": True,
        }

    def up(self) -> EngineDescription:
        """Start an engine and its receivers; what it says of itself."""
        from weftpub_adapters.sglang.driver import DriverDeadlines, LocalEngine

        self.starts += 1
        waits = DriverDeadlines(start=90, drain=60, flush=20, memory=20, release=30, resume=30, control=30, shutdown=30)
        began = time.monotonic()
        self.engine = LocalEngine.start(deadlines=waits, **self.arguments())
        self.report.number(f"engine_up_s_{self.starts}", time.monotonic() - began)
        run = f"{RUN}-{self.starts}"
        peers = self.engine.start_receivers(run, f"{self.meeting}-{self.starts}")
        commit = self.out / f"commit-{self.starts}.json"
        self.publisher = Publisher(run, None, peers, commit_path=commit, deadlines=Deadlines.all(60))
        (described,) = self.publisher.describe()
        return described

    def down(self) -> None:
        """End the engine."""
        if self.publisher is not None:
            self.publisher.close()
        if self.engine is not None:
            self.engine.shutdown()
        self.publisher = self.engine = None

    def plan(self, described: EngineDescription) -> None:
        """Experts from the store, everything else under the engine's own names."""
        sources: list[Shard] = []
        destinations: list[Destination] = []
        held = set(described.settings["shared_memory"])  # type: ignore[arg-type]
        for entry in self.store.layout.entries():
            kind, suffix = dtype_name(entry.dtype), "_scale_inv" if entry.role == "scale" else ""
            numel, expert = entry.shape[0] * entry.shape[1], self.store.layout.experts.index(entry.matrix.expert)
            name = "w2" if entry.part == "down_proj" else "w13"
            offset = expert * numel if name == "w2" else (2 * expert + (entry.part == "up_proj")) * numel
            param = f"model.layers.{entry.matrix.layer}.mlp.experts.{name}_weight{suffix}"
            shard = Shard(entry.name, kind, entry.shape, entry.shape, (0, 0), 0)
            sources.append(shard)
            destinations.append(Destination(shard, ViewSpec(param, offset, entry.shape, (entry.shape[1], 1), kind)))
        self.rest: dict[str, Any] = {}
        self.vocabulary: Any = described.settings["vocabulary"]
        kept = set(described.settings["kept"])  # type: ignore[arg-type]
        for spec in described.parameters:
            if spec.name in kept or spec.name in held:
                continue
            shard = Shard(spec.name, spec.dtype, spec.shape, spec.shape, (0,) * len(spec.shape), 0)
            sources.append(shard)
            destinations.append(Destination(shard, ViewSpec(spec.name, 0, spec.shape, spec.stride, spec.dtype)))
            self.rest[spec.name] = (spec.shape, torch_dtype(spec.dtype))
        made: Plan = make_plan(sources, destinations)
        self.publisher.set_plan(made)

    def others(self, seed: int) -> dict[str, torch.Tensor]:
        """The other weights of a version."""
        generator = torch.Generator().manual_seed(seed)
        found: dict[str, torch.Tensor] = {}
        for name, (shape, dtype) in self.rest.items():
            if "norm" in name:
                value = torch.full(shape, 1.0 + seed % 5)
            else:
                value = torch.randn(shape, generator=generator) * 0.05
            if name in self.vocabulary:  # rows of no token stay zero in the engine
                value[self.vocabulary[name]["end"] - self.vocabulary[name]["start"] :] = 0
            found[name] = value.to(dtype).to(DEVICE)
        return found

    def write(self, seed: int, *, half: bool = False) -> None:
        """Quantize a generation into the shared memory."""
        generator = torch.Generator(DEVICE).manual_seed(seed)
        matrices = self.store.layout.matrices
        self.version += 1
        self.store.begin(self.version, recover=self.store.state == "torn")
        for matrix in matrices[: len(matrices) // 2] if half else matrices:
            shape = self.store.layout.shape(matrix.projection)
            self.store.writer()(matrix.name, torch.randn(shape, generator=generator, device=DEVICE) * 0.05)
        if not half:
            self.store.seal()

    def publish(self, seed: int) -> Any:
        """Publish the sealed generation with the other weights."""
        sources = {item.name: item.tensor for item in self.store.canonical()} | self.others(seed)
        done = self.publisher.publish(self.version, sources, self.store.checksums, verify_sha256=True, resume=False)
        expected = self.store.sha256()
        good = all(done.sha256[name] == digest for name, digest in expected.items())
        self.report.check(f"engine: version {self.version}: served bytes are the trainer's", good)
        return done

    def generate(self) -> list[list[int]]:
        """Greedy tokens, one prompt after the other."""
        sampling = {"max_new_tokens": 12, "temperature": 0, "ignore_eos": True}
        return [list(self.engine.generate([prompt], sampling, seconds=240)[0].tokens) for prompt in PROMPTS]

    def cycle(self, seed: int) -> tuple[list[list[int]], dict[str, Any]]:
        """One colocated step; the tokens, and what was measured."""
        row: dict[str, Any] = {"seed": seed, "free_serving": free()}
        self.engine.pause("retract")
        self.engine.flush()
        self.publisher.pause()
        if GPU:
            self.engine.release(["kv_cache"])
            row["free_without_kv"] = free()
            self.engine.release(["weights"])
        row["free_released"] = free()
        if self.store.state == "sealed":
            self.store.verify()  # a release touches nothing that is shared
        self.write(seed)
        if GPU:
            self.engine.resume(["weights"])
        began = time.perf_counter()
        done = self.publish(seed)
        row["publish_with_sha256_ms"] = (time.perf_counter() - began) * 1e3
        row["moved"], row["shared"], row["ms"] = done.nbytes, done.shared_nbytes, done.ms
        if GPU:
            self.engine.resume(["kv_cache"])
        self.publisher.resume()
        self.engine.set_weight_version(str(self.version))
        self.engine.continue_()
        return self.generate(), row


def free() -> int:
    """Free bytes of the GPU."""
    return torch.cuda.mem_get_info()[0] if GPU else 0


def engine_section(report: Any, out: Path, tiny: bool) -> None:
    """The whole section."""
    if not GPU:
        sys.path.insert(0, str(HERE.parent / "adapters"))
        from cpu_engine import environment

        os.environ.update(environment(1))
    os.environ.setdefault("SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK", "1")
    os.environ.setdefault("SGLANG_ENABLE_JIT_DEEPGEMM", "0")
    # Its radix tree in Rust is built for another torch.
    os.environ.setdefault("SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND", "python")
    install(out / "site")
    trial = Trial(report, out, tiny)
    try:
        with _left(trial):
            _first(trial)
            _torn(trial)
            _restarted(trial)
    finally:
        trial.down()


@contextlib.contextmanager
def _left(trial: Trial) -> Iterator[None]:
    try:
        yield
    finally:
        if trial.memory is not None:
            trial.memory.leave()


def _first(trial: Trial) -> None:
    report = trial.report
    described = trial.up()
    shared: Any = described.settings.get("shared_experts", {})
    report.check("engine: experts lie in shared memory", bool(described.settings.get("shared_memory")), shared)
    if GPU:
        back, held = shared.get("given_back") or 0, shared.get("nbytes", 1)
        report.check("engine: the memory reserved at first is given back", back >= 0.9 * held, f"{back} of {held}")
    trial.memory = SharedAllocation.join(trial.meeting, "experts", DEVICE, create=False)
    layout, allocator = layout_of(trial.memory.catalogue), SharedAllocator(trial.memory)
    trial.store = ExpertStore(
        layout.layers,
        layout.experts,
        layout.hidden,
        layout.intermediate,
        device=DEVICE,
        allocator=allocator,
        wt="rebuild",
        measure_change=False,
    )
    trial.plan(described)
    expert_bytes = sum(entry.nbytes for entry in trial.memory.catalogue.entries)
    tokens: dict[int, list[list[int]]] = {}
    for seed in (1, 2, 1, 2):
        found, row = trial.cycle(seed)
        report.number(f"engine_cycle_{trial.version}", row)
        report.check(
            f"engine: cycle {trial.version}: no expert byte moved", row["shared"] == expert_bytes, row["moved"]
        )
        known = tokens.setdefault(seed, found)
        report.check(f"engine: cycle {trial.version}: tokens are those of its weights", known == found, found[0])
    report.check("engine: other weights, other tokens", tokens[1] != tokens[2])


def _torn(trial: Trial) -> None:
    report = trial.report
    try:
        trial.store.begin(trial.version + 1)
        report.check("engine: a step is refused while it serves", False)
        trial.store.cancel()
    except WeftpubError as error:
        report.check("engine: a step is refused while it serves", "pause the engine first" in str(error), str(error))
    trial.engine.pause("retract")
    trial.engine.flush()
    trial.publisher.pause()
    trial.write(3, half=True)
    try:
        trial.publisher.resume()
        report.check("engine: half a generation is not served", False)
    except TornError as error:
        report.check("engine: half a generation is not served", True, str(error)[:200])
    trial.store.mark_torn("the experiment stopped in the middle of a step")
    found, _ = trial.cycle(1)
    report.check("engine: a full publish opens it", len(found) == len(PROMPTS), found[0])
    trial.tokens = found  # type: ignore[attr-defined]


def _restarted(trial: Trial) -> None:
    """The engine ends; another one finds the memory that the trainer kept, and its bytes."""
    report = trial.report
    trial.down()
    described = trial.up()
    standing = trial.memory.standing()
    report.check("engine: a new engine maps the same memory", bool(described.settings.get("shared_memory")))
    report.check("engine: which still holds the committed version", standing.committed.version == trial.version)
    trial.store.verify()
    trial.plan(described)
    trial.publisher.pause()
    done = trial.publish(1)
    report.number("engine_restart", {"moved": done.nbytes, "shared": done.shared_nbytes, "ms": done.ms})
    trial.publisher.resume()
    trial.engine.continue_()
    found = trial.generate()
    report.check("engine: it answers as the one before", found == trial.tokens, found[0])  # type: ignore[attr-defined]
