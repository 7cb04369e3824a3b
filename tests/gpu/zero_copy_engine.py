"""The `engine` section of zero_copy.py: SGLang itself, with CUDA graphs and its memory saver, serves from memory that a
trainer's process writes. Cycles of release, step, publish and resume; both sides are killed at random points.
"""

import json
import os
import queue
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from engine_settings import ENGINE, GRAPHS
from zero_copy_base import GPU, Process, Report, free_bytes
from zero_copy_trainer import EngineTrainer

from weftpub.errors import WeftpubError

__all__ = ["engine_section"]

HERE = Path(__file__).resolve().parent
PROMPTS = [[3, 5, 7, 11, 13], [2, 4, 8, 16], [100, 50, 25], [1]]
TOKENS = 12
MIB = 1 << 20

CONFIG: Mapping[str, Any] = {
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
    "num_hidden_layers": 4,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 1024,
}
SMALL: Mapping[str, Any] = {
    "hidden_size": 256,
    "head_dim": 32,
    "moe_intermediate_size": 128,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 2,
    "vocab_size": 512,
}


def engine_section(report: Report, out: Path, cycles: int, seed: int, *, tiny: bool, apart: bool = True) -> None:
    """The whole section.

    Args:
        cycles: colocated steps.
        seed: of the cycles and points where processes are killed.
        apart: whether the engine makes its experts beside the memory saver's pool.
    """
    if not GPU:
        sys.path.insert(0, str(HERE.parent / "adapters"))
        from cpu_engine import environment

        os.environ.update(environment(1))
    os.environ.setdefault("SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK", "1")
    os.environ.setdefault("SGLANG_ENABLE_JIT_DEEPGEMM", "0")
    # Its radix tree in Rust is built for another torch.
    os.environ.setdefault("SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND", "python")
    install(out / "site")
    trial = Trial(report, out, {**CONFIG, **(SMALL if tiny else {})}, cycles, seed, apart)
    try:
        trial.prepare()
        trial.boot()
        trial.first_checks()
        for cycle in range(1, cycles + 1):
            trial.cycle(cycle)
        trial.conclude()
    finally:
        trial.close()


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


def engine_arguments(model: Path, **more: Any) -> dict[str, Any]:
    """Settings of an engine on this machine."""
    if not GPU:
        from cpu_engine import ENGINE as CPU_ENGINE

        return {**CPU_ENGINE, "model_path": str(model), **more}
    return {**ENGINE, **GRAPHS, "model_path": str(model), **more}


class Trial:
    """An engine, a trainer's process, and what is killed when.

    Args:
        cycles: there will be.
        seed: of the kills: three trainers and one engine, at cycles and points drawn from it.
        apart: whether the engine makes its experts beside the memory saver's pool.
    """

    def __init__(self, report: Report, out: Path, config: dict[str, Any], cycles: int, seed: int, apart: bool) -> None:
        self.report = report
        self.apart = apart
        self.out = out
        self.config = config
        self.meeting = f"/tmp/zc-{os.getuid()}-{os.getpid()}"
        self.model = out / "model"
        self.version = 0  # also the generation, and the seed of the weights
        self.starts = 0
        self.engine: Any = None
        self.peers: Any = None
        self.pid = 0
        self.away: list[str] = []  # memory tags that are released
        self.took = {"write": 0.5, "publish": 0.5}  # seconds, last time
        self.rows: list[dict[str, Any]] = []
        self.expected: dict[int, list[list[int]]] = {}  # version to the engine's tokens, where they are compared
        self.compared = {1, max(1, cycles // 2), cycles}
        self.random = random.Random(seed)
        middle = [n for n in range(2, cycles) if n not in self.compared]
        drawn = self.random.sample(middle, min(4, len(middle)))
        self.victims = dict.fromkeys(drawn[1:], "trainer") | dict.fromkeys(drawn[:1], "engine")
        self.spares = [Process() for _ in range(1 + len(drawn[1:]))]
        self.trainer = self.spares.pop(0)
        self.reference: Reference | None = None
        report.number("engine_kills", {"seed": seed, "cycles": {str(n): who for n, who in self.victims.items()}})

    # Starting.

    def prepare(self) -> None:
        """The trainer's first version and its export; the model directory; a second engine that loads exports."""
        (self.out / "config.json").write_text(json.dumps(self.config), encoding="utf-8")
        maker = "weftpub_adapters.sglang.driver.model_directory"
        command = [sys.executable, "-m", maker, str(self.out / "config.json"), str(self.model), "--overwrite"]
        making = subprocess.Popen(command)
        self.trainer.make(EngineTrainer, self.meeting, self.config)
        self.version = 1
        self.trainer("write", 1, 1)
        self.trainer("export", str(self.export(1)), 1)
        self.report.progress("the trainer made the memory and wrote version 1")
        if GPU:
            self.reference = Reference(engine_arguments(self.export(1)), self.out / "reference.log")
        from sglang.srt.entrypoints.engine import Engine  # ten seconds that the directory takes anyway

        del Engine
        if making.wait(120):
            raise SystemExit("the engine's model directory could not be written")

    def boot(self) -> None:
        """Start an engine and its receivers, and connect the trainer."""
        from weftpub_adapters.sglang.driver import DriverDeadlines, LocalEngine

        self.starts += 1
        waits = DriverDeadlines(start=90, drain=60, flush=20, memory=20, release=30, resume=30, control=30, shutdown=30)
        began = time.monotonic()
        setting = json.dumps({"weftpub_shared_experts": {"folder": self.meeting, "apart": self.apart}})
        arguments = engine_arguments(self.model, json_model_override_args=setting)
        self.engine = LocalEngine.start(deadlines=waits, **arguments)
        self.away = []
        self.report.number(f"engine_up_s_{self.starts}", round(time.monotonic() - began, 1))
        self.peers = self.engine.start_receivers(self.run, f"{self.meeting}-{self.starts}")
        self.connect()

    def connect(self) -> dict[str, Any]:
        """Connect the trainer's process to the engine."""
        said = self.trainer("connect", self.run, self.peers, str(self.out / f"commit-{self.starts}.json"))
        self.pid = said["plugin"]["pid"]
        self.said = said
        return said

    @property
    def run(self) -> str:
        return f"zero-copy-engine-{self.starts}"

    @property
    def alone(self) -> bool:
        """Whether the second engine neither starts nor loads at this moment."""
        return self.reference is None or self.reference.idle

    def export(self, version: int) -> Path:
        """Where a version is exported to."""
        return self.out / f"export-{version}"

    def first_checks(self) -> None:
        """What a started engine must be."""
        report, shared = self.report, self.said.get("shared_experts") or {}
        if not report.check("engine: experts lie in shared memory", bool(self.said.get("shared_memory")), shared):
            raise SystemExit("nothing is shared; the worker's log says why")
        report.number("engine_plan", self.said["plan"])
        if not GPU:
            return
        back, held = shared.get("given_back") or 0, shared.get("nbytes", 1)
        detail = f"{back} of {held} bytes"
        if self.apart:
            report.check("engine: the memory reserved at first is given back", back >= 0.9 * held, detail, memory=True)
        info = self.engine.server_info()
        report.check(
            "engine: CUDA graphs are on",
            info["disable_cuda_graph"] is False and not info.get("disable_decode_cuda_graph"),
        )
        if self.reference is not None:
            self.reference.ask(self.export(1), PROMPTS[:1], 1)  # until it answers, its start shows in what is free

    # A cycle.

    def cycle(self, number: int) -> None:
        """One colocated step, and whoever is due to die in it."""
        victim = self.victims.get(number)
        row: dict[str, Any] = {"cycle": number, "serving": free_bytes(), "alone": self.alone}
        began = time.monotonic()
        if victim == "engine":
            self.engine_dies(number)
        # A trainer may die while the engine's other weights are intact: then the header alone keeps it from serving.
        self.drain(row, release=victim != "trainer" or self.random.random() < 0.3)
        if number > 1:
            self.version += 1
        if victim == "trainer":
            self.trainer_dies(number)
        else:
            self.took["write"] = self.trainer("write", self.version, self.version, number == 1) / 1e3
        self.bring_back("weights")
        done = self.trainer("publish", self.version, self.version)
        self.took["publish"] = done["with_sha256_ms"] / 1e3
        self.serve()
        tokens = self.generate(PROMPTS if number in self.compared else PROMPTS[:1])
        row |= {key: done[key] for key in ("moved", "shared", "with_sha256_ms", "ms")}
        row["s"] = round(time.monotonic() - began, 3)
        row["alone"] = row["alone"] and self.alone
        self.rows.append(row)
        if not done["same"]:
            self.report.check(f"engine: cycle {number}: served bytes are the trainer's", False)
        if done["shared"] != self.trainer("expert_bytes"):
            self.report.check(f"engine: cycle {number}: no expert byte moved", False, done["moved"])
        if self.engine.weight_version() != str(self.version):
            self.report.check(f"engine: cycle {number}: answers report the version", False)
        if number in self.compared:
            self.compare(tokens)
        if number in self.compared or victim or number <= 2 or number % 10 == 0:
            self.report.data["cycles"] = self.rows
            self.report.progress(f"cycle {number}: {row['s']} s, tokens {tokens[0]}")
        if number == 1:
            refused = self.trainer("begin", self.version + 1)
            self.report.check("engine: a step is refused while it serves", "pause the engine first" in refused, refused)

    def drain(self, row: dict[str, Any], *, release: bool = True) -> None:
        """Bring the engine to rest and release its memory."""
        self.engine.pause("retract")
        self.engine.flush()
        self.trainer("pause")
        row["resting"] = free_bytes()
        for tag in ("kv_cache", "weights") if GPU and release else ():
            self.engine.release([tag])
            self.away.append(tag)
            time.sleep(0.02)  # it answers before the memory is free
            row[f"without_{tag}"] = free_bytes()

    def bring_back(self, tag: str) -> None:
        """Resume one tag, if it is away."""
        if tag in self.away:
            self.engine.resume([tag])
            self.away.remove(tag)

    def serve(self) -> None:
        """Let the engine go on with the version that was published."""
        self.bring_back("kv_cache")
        self.trainer("resume")
        self.engine.set_weight_version(str(self.version))
        self.engine.continue_()

    def generate(self, prompts: list[list[int]]) -> list[list[int]]:
        """Greedy tokens, one prompt after the other."""
        sampling = {"max_new_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
        return [list(self.engine.generate([prompt], sampling, seconds=240)[0].tokens) for prompt in prompts]

    def compare(self, tokens: list[list[int]]) -> None:
        """Remember tokens, and have the second engine load the export of their version."""
        self.expected[self.version] = tokens
        directory = self.export(self.version)
        if not directory.exists():
            self.trainer("export", str(directory), self.version)
        if self.reference is not None:
            self.reference.ask(directory, PROMPTS, TOKENS)

    # Deaths.

    def trainer_dies(self, number: int) -> None:
        """Kill the trainer at a random point of its step or its publish; another one starts from the checkpoint."""
        report, method = self.report, self.random.choice(["write", "write", "publish"])
        if method == "publish":
            self.trainer("write", self.version, self.version)
            self.bring_back("weights")
        delay = self.random.random() * self.took[method]
        self.trainer.send(method, self.version, self.version)
        time.sleep(delay)
        self.trainer.kill()
        name = f"engine: cycle {number}: trainer killed {delay * 1e3:.0f} ms into its {method}"
        self.trainer = self.spares.pop(0).make(EngineTrainer, self.meeting, self.config)
        self.connect_resident()
        standing = self.trainer("standing")
        resumed, said = self.trainer.attempt("resume")
        safe = standing["obstacle"] is None or not resumed
        if not resumed:
            with suppress(WeftpubError):
                self.engine.continue_()
            safe = safe and not self.answers(1.0)
            self.engine.pause("retract")
        report.check(f"{name}: only a whole version would be served", safe, {**standing, "resume": said})
        self.engine.pause("retract")
        self.engine.flush()
        self.trainer("pause")
        self.version += 1
        self.trainer("write", self.version, self.version, True)

    def connect_resident(self) -> None:
        """Connect a new trainer; an engine describes itself only while its memory is there."""
        self.bring_back("weights")
        self.connect()

    def engine_dies(self, number: int) -> None:
        """Kill the engine's worker at a random point; another engine starts and maps the same memory."""
        report, point = self.report, self.random.choice(["request", "write", "publish"])
        version = self.version
        if point == "request":
            with ThreadPoolExecutor(1) as pool:
                sampling = {"max_new_tokens": 256, "temperature": 0, "ignore_eos": True}
                asked = pool.submit(self.engine.generate, [PROMPTS[0]], sampling, seconds=60)
                time.sleep(self.random.random() * 0.5)
                os.kill(self.pid, signal.SIGKILL)
                with suppress(WeftpubError, TimeoutError):
                    asked.result(90)
        else:
            self.drain({}, release=False)
            self.version += 1
            if point == "publish":
                self.trainer("write", self.version, self.version)
                self.bring_back("weights")
            self.trainer.send(point, self.version, self.version)
            time.sleep(self.random.random() * self.took[point])
            os.kill(self.pid, signal.SIGKILL)
            good, said = self.trainer.answer(point, 90)
            report.check(
                f"engine: cycle {number}: the trainer outlives the engine's death", good or point == "publish", said
            )
        began = time.monotonic()
        self.engine.shutdown()
        standing = self.trainer("standing")
        report.check(
            f"engine: cycle {number}: engine killed in its {point}: the memory and its bytes are there",
            standing["serving"] == 0 or point == "request",
            {**standing, "generation": self.trainer("verify")},
        )
        if point == "request":
            report.check(
                f"engine: cycle {number}: version {version} is still committed", standing["committed"] == version
            )
        self.boot()
        report.number("engine_restart_s", round(time.monotonic() - began, 1))
        report.check("engine: a new engine maps the same memory", bool(self.said.get("shared_memory")))
        self.engine.pause("retract")
        self.trainer("pause")
        done = self.trainer("publish", self.version, self.version)
        self.serve()
        report.check(
            f"engine: cycle {number}: it serves version {self.version} without an expert byte moved",
            done["shared"] == self.trainer("expert_bytes") and done["same"],
            {key: done[key] for key in ("moved", "shared", "ms")},
        )
        self.generate(PROMPTS[:1])

    def answers(self, seconds: float) -> bool:
        """Whether a request is answered in time."""
        try:
            self.engine.generate([PROMPTS[0]], {"max_new_tokens": 2, "temperature": 0}, seconds=seconds)
        except (TimeoutError, WeftpubError):
            return False
        return True

    # The end.

    def conclude(self) -> None:
        """What the cycles showed."""
        report, rows = self.report, self.rows
        report.data["cycles"] = rows
        failed = [name for name in report.data["failed"] if name.startswith("engine: cycle")]
        report.check(
            f"engine: {len(rows)} cycles, served bytes the trainer's by sha256, no expert byte moved", not failed
        )
        if self.reference is not None:
            self.reference.answer()  # that it is up
            for version, tokens in self.expected.items():
                found = self.reference.answer()
                report.check(
                    f"engine: version {version}: tokens are those of an engine that loads its export",
                    found == tokens,
                    None if found == tokens else {"engine": tokens, "reference": found},
                )
        if len(self.expected) > 1:
            report.check("engine: other versions, other tokens", len({str(t) for t in self.expected.values()}) > 1)
        quiet = [row for row in rows if row["alone"] and row["cycle"] > 2 and row["cycle"] not in self.victims]
        if GPU and quiet:
            report.number("engine_quiet_cycles", len(quiet))
            spread = max(r["without_weights"] for r in quiet) - min(r["without_weights"] for r in quiet)
            report.check("engine: memory while released is flat", spread <= 64 * MIB, f"{spread} bytes", memory=True)
            freed = [r["without_weights"] - r["without_kv_cache"] for r in quiet]
            report.number("engine_released_bytes", {"least": min(freed), "most": max(freed)})

    def close(self) -> None:
        """End everything."""
        for process in (self.trainer, *self.spares):
            process.kill()
        if self.engine is not None:
            self.engine.shutdown()
        if self.reference is not None:
            self.reference.close()


class Reference:
    """A second engine on the same GPU, in a process of its own, that loads exports from disk by SGLang's own loader."""

    def __init__(self, arguments: dict[str, Any], log: Path) -> None:
        with log.open("w") as errors:
            self._process = subprocess.Popen(
                [sys.executable, str(HERE / "reference_engine.py"), json.dumps(arguments)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        self._answers: queue.Queue[list[list[int]]] = queue.Queue()
        self._asked = self._answered = 0
        threading.Thread(target=self._read, daemon=True).start()

    def ask(self, directory: Path, prompts: list[list[int]], count: int) -> None:
        """Load a directory and answer prompts, in the order of these calls."""
        assert self._process.stdin is not None
        self._asked += 1
        with suppress(OSError):  # it has ended: the answer says so
            self._process.stdin.write(json.dumps({"load": str(directory), "prompts": prompts, "tokens": count}) + "\n")
            self._process.stdin.flush()

    @property
    def idle(self) -> bool:
        """Whether it has answered all that it was asked."""
        return self._answered == self._asked

    def answer(self) -> list[list[int]] | str:
        """The next answer, or what went wrong."""
        until = time.monotonic() + 120
        while time.monotonic() < until:
            with suppress(queue.Empty):
                return self._answers.get(timeout=0.5)
            if self._process.poll() is not None and self._answers.empty():
                break
        return f"the reference engine gave no answer, status {self._process.poll()}; its log is reference.log"

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.wait(30)

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith('{"tokens"'):
                self._answered += 1
                self._answers.put(json.loads(line)["tokens"])
