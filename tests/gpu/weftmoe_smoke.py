"""The smoke run on one GPU or two: variants x seeds, learning rate 0, and a run that is killed and resumed.

    python tests/gpu/weftmoe_smoke.py --out OUT [--only script,train,kl,frozen,resume,shared,two-gpus,two-nodes]
        [--variants baseline,bf16,fp8] [--optimizer muon] [--seeds 1,2,3] [--steps 50] [--side-by-side 3]
        [--seconds 560] [--work DIR] [--cpu] [--tiny]

Writes OUT/weftmoe_smoke.json (a row per run, with the commit; each check is "ok", "FAIL" or "not shown"),
OUT/weftmoe_smoke.tar.gz (log, output and settings of every run) and, where matplotlib is installed,
OUT/weftmoe_smoke.png; all of it is there after every section, and after SIGTERM. Exits with 1 if a check fails; one
that showed nothing either way is no failure. Models, checkpoints and runs lie under DIR. Sections:

    script    `run.sh fp8 --smoke` as the README has it, with the doctor and a model of its own, then `weftpub report`;
              by itself, before anything else is started or made
    train     each variant with each seed; the made model of a seed is shared by its variants. Reward rises from the
              warm-up's level; fp8 ends within the seeds' spread of bf16; log-prob differences stay flat: their mean
              over the last third of the steps is at most 1.25 x that over the first, steps being what is drawn
    kl        each variant at learning rate 1e-6, two steps on the same 4096 prompts with the same random numbers: KL of
              step 2 is at most 1.2 x that of step 1, with two experts a token (4 completions a prompt) and with all
              eight (2). Prompts are what is drawn: completions of one share its first tokens' context and the router's
              decision there. The ratio is known within an interval, by the covariance of both steps over the prompts:
              below the bound it is ok, above it a failure, and around it nothing is shown. That this KL would show
              weights that did not arrive is seen in `train`: after each update, before its publish, it is larger by
              orders of magnitude
    frozen    fp8 with learning rate 0: the same tokens, scored after each publish, give the same bits
    resume    fp8: unbroken; killed at a random step; told to end (SIGUSR1) after one. The same bytes and the same
              float64 statistics, bit for bit, at the same step, and of the one that was told, nothing computed twice
    shared    fp8, experts copied and experts in memory that trainer and engine both map: the same bytes at each step,
              in the second without moving the experts (left out unless asked for)
    two-gpus  fp8 on two GPUs: trainer TP2/EP2 and DP2/EP2, rollout EP2 and MoE-TP2, and once with experts in one memory
              a GPU; the baseline, whose ranks gather whole tensors for SGLang's own update: the same trainers, rollout
              EP2, once with attention data parallel. Nothing compares its bytes there: weights of one version before
              would show in the log-probs (left out unless asked for)
    two-nodes baseline, bf16 and fp8 on two nodes of one GPU each, for which this machine's first two stand: run.sh for
              each, which sees its own GPU alone. One engine a node, receivers of the second on TCP with keys. One
              version on both, all bytes checked; fp8 once more, told to end after a step and resumed: the same bytes at
              each step as without (left out unless asked for)

Runs are processes of their own, `--side-by-side` at a time, those of all sections together. A run that takes longer
than `--limit`, or that is under way when `--seconds` are over, is ended; its steps count, and a check says so. To try
this script: `--cpu` runs the same with the torch sampler, `--tiny` few steps. `--draw` draws the picture from logs that
are there.
"""

import argparse
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ran_on import need_gpu, ran_on
from ratio import FLAT_BOUND, Verdict, kl_checks, thirds

from weftmoe import settings as composed
from weftmoe.env import role_environment
from weftmoe.grpo import PromptSums, kl_covariance
from weftmoe.report.summary import RunSummary, summarize_run
from weftmoe.rundir import EXIT_AGAIN
from weftmoe.schema import Settings
from weftmoe.smoke.model import make_model
from weftmoe.telemetry import LOG_NAME, StepRecord, read_log
from weftmoe.telemetry.log import LoggedRun
from weftpub.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
# Few problems, that come again every few steps: fifty steps show learning above the noise of sampling. On a CPU thirty
# steps of this size raised the reward from 0.35 to 0.66.
TASK = ("smoke.problems=64", "algorithm.prompts=16", "algorithm.completions=16", "optimizer.lr=2e-4")
ENTRY_POINTS = """[sglang.srt.plugins]
weftpub = weftpub_adapters.sglang.plugin:register
[weftpub.commands]
report = weftmoe.report.command:report
"""
WEFTPUB = "import sys; from weftpub import cli; sys.exit(cli.run())"  # the command, where it is not installed
KEPT = (LOG_NAME, "output.txt", "settings.yaml")
ALL_EXPERTS = "smoke.top_k=8"  # of eight
# Many prompts, as few completions of each as a group may have: prompts are what an error is made of.
KL_PROMPTS, KL_COMPLETIONS = 4096, {"two": 4, "all": 2}
ALONE = ("script",)  # its engine has the memory that a user's would find
TWO_GPUS = {
    "tp2-to-ep2": ("train.tensor=2", "train.sequence_parallel=true", "rollout.expert=2"),
    "dp2-to-ep2": ("rollout.expert=2",),
    "tp2-to-tp2": ("train.tensor=2", "train.sequence_parallel=true"),
    "dp2-to-tp2": (),
    "dp2-to-ep2-shared": ("rollout.expert=2", "publish.experts=shared"),
}
# Several buckets: the made model has some eight megabytes.
BUCKETS = "publish.bucket_mib=2"
BASELINE_TWO_GPUS = {
    "baseline-tp2-to-ep2": ("train.tensor=2", "train.sequence_parallel=true", "rollout.expert=2", BUCKETS),
    "baseline-dp2-to-ep2": ("rollout.expert=2", BUCKETS),
    "baseline-dp2-to-ep2-dp2": ("rollout.expert=2", "rollout.data=2", "rollout.dp_attention=true", BUCKETS),
}


@dataclass(frozen=True)
class Run:
    """One run to start; `script` are the arguments of run.sh, for one that is started through it. With `nodes` that is
    done once for each, which this machine's GPUs are.
    """

    name: str
    settings: Settings
    script: tuple[str, ...] | None = None
    kill_after_step: int | None = None
    tell_after_step: int | None = None
    ranks: int = 1
    nodes: int = 1


@dataclass(frozen=True)
class Ended:
    """How a run went.

    Attributes:
        code: exit code; None for one that was ended for lack of time.
        seconds: wall time.
        ready: seconds until it could make its first step; None if it never could.
        log: its records; None if there are none.
        tail: its last lines.
    """

    run: Run
    code: int | None
    seconds: float
    ready: float | None
    log: LoggedRun | None
    tail: list[str]

    @property
    def whole(self) -> bool:
        """Whether it ended as it should."""
        wanted = 0 if self.run.kill_after_step is None else -signal.SIGKILL
        if self.run.tell_after_step is not None:
            wanted = EXIT_AGAIN
        return self.code == wanted and self.log is not None


class Report:
    """Rows and checks; a failed check is remembered and the run goes on. Sections share it."""

    def __init__(self, path: Path, commit: str) -> None:
        self._path = path
        self._lock = threading.Lock()
        self.data: dict[str, Any] = {
            "commit": commit,
            "environment": ran_on("megatron-core", "sglang"),
            "rows": [],
            "checks": {},
            "failed": [],
            "not_shown": [],
        }

    @property
    def failed(self) -> list[str]:
        return self.data["failed"]

    def check(self, name: str, passed: bool, detail: Any) -> None:
        self.judge(name, "ok" if passed else "FAIL", detail)

    def judge(self, name: str, verdict: Verdict, detail: Any) -> None:
        """Note a check that may also have shown nothing either way."""
        with self._lock:
            self.data["checks"][name] = {"verdict": verdict, "detail": detail}
            if verdict == "FAIL":
                self.failed.append(name)
            elif verdict == "not shown":
                self.data["not_shown"].append(name)
            print(f"  {verdict:9} {name}: {detail}", flush=True)

    def measured(self, name: str, found: dict[str, Any]) -> None:
        """Note numbers that nothing is expected of."""
        with self._lock:
            self.data.setdefault("measured", {})[name] = found
            print(f"  {name}: {found}", flush=True)

    def rows(self, section: str) -> list[dict[str, Any]]:
        """What was noted of a section's runs."""
        with self._lock:
            return [row for row in self.data["rows"] if row["section"] == section]

    def row(self, section: str, ended: Ended, **more: Any) -> RunSummary | None:
        """Note a run, and what else is known of it; its summary, if it came far enough to have one."""
        name, step_s = ended.run.name, ""
        row = None if ended.log is None else summarize_run(ended.log)
        if row is not None and row.seconds:
            step_s = ", ".join(f"{phase} {spent:.2f}" for phase, spent in row.seconds.items())
        how = f"exit {ended.code}" if ended.code is not None else "ended for lack of time"
        steps = 0 if row is None else row.steps
        print(
            f"  {name}: {how} after {ended.seconds:.0f} s, ready after {ended.ready or 0:.0f} s, {steps} steps"
            + (f"; medians in s: {step_s}" if step_s else ""),
            flush=True,
        )
        self.check(f"{section}/{name}: ran to its end", ended.whole, how if ended.whole else "\n".join(ended.tail))
        if row is None:
            return None
        entry = {"section": section, "commit": self.data["commit"], "code": ended.code}
        entry |= {"wall_s": round(ended.seconds, 1), "ready_s": ended.ready, "run": name, **row.model_dump(), **more}
        with self._lock:
            self.data["rows"].append(entry)
        self.write()
        return row

    def write(self) -> None:
        with self._lock:
            self._path.write_text(json.dumps(self.data, indent=1), encoding="utf-8")


class Room:
    """What all runs share: options, one environment with the engine's plugin, models by seed, time."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.out: Path = options.out.absolute()
        self.work: Path = (options.work or options.out / "work").absolute()
        self.place: composed.SmokePlace = "cpu" if options.cpu else "gpu"
        self.stopped = threading.Event()
        self._until = time.monotonic() + options.seconds
        self._places = threading.BoundedSemaphore(options.side_by_side)
        self._plugin = self.work / "plugin"
        info = self._plugin / "weftpub_tree-0.dist-info"
        info.mkdir(parents=True, exist_ok=True)
        # The checkout is not installed here: this is how the engine's processes find its plugin, and `weftpub` its
        # commands.
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: weftpub_tree\nVersion: 0\n", encoding="utf-8")
        (info / "entry_points.txt").write_text(ENTRY_POINTS, encoding="utf-8")

    def settings(
        self, name: str, variant: str, seed: int, steps: int, *more: str, deterministic: bool = False
    ) -> Settings:
        # Neighbours come and go while an engine measures what is free; its cache has a size of its own.
        gpu = ["rollout.memory_fraction=0.6"]
        # The smoke's own settings are deterministic. Curves are drawn with what real runs use.
        fast = [
            "train.deterministic=false",
            "train.attention=auto",
            "roles.trainer.env.NVTE_ALLOW_NONDETERMINISTIC_ALGO=1",
        ]
        overrides = [
            f"out={self.work / 'runs' / name}",
            f"seed={seed}",
            f"steps={steps}",
            f"model.path={self.model_path(seed)}",
            "telemetry.tensorboard=false",
            "checkpoint.save=off",
            *([] if self.options.cpu else gpu),
            *([] if deterministic or self.options.deterministic else fast),
            *TASK,
            *(["algorithm.prompts=4", "algorithm.completions=4"] if self.options.tiny else []),
            *more,
            *self.options.set,
        ]
        return composed.load(variant, optimizer=self.options.optimizer, smoke=self.place, overrides=overrides)

    def model_path(self, seed: int, name: str = "") -> Path:
        return self.work / "models" / f"seed-{seed}{name}"

    def make_model(self, seed: int, name: str = "", *overrides: str) -> None:
        """Make a seed's model once; its variants start from the same weights. One of another shape has a name."""
        base = composed.load("bf16", smoke=self.place, overrides=[*TASK, *self.options.set, *overrides])
        limit = 20 if self.options.tiny else max(self.options.warmup, base.smoke.warmup_steps)
        smoke = base.smoke.model_copy(update={"warmup_steps": limit})
        device = "cpu" if self.options.cpu else "cuda"
        path = self.model_path(seed, name)
        made = make_model(
            path, smoke, seed=seed, tokens=base.length.context, device=device, architecture=base.model.architecture
        )
        print(f"model {path.name}: {made}", flush=True)

    def run_all(self, runs: Sequence[Run]) -> list[Ended]:
        """Run them, as many at once as there is room for."""
        with ThreadPoolExecutor(len(runs)) as pool:
            return list(pool.map(self.run, runs))

    def run(self, run: Run) -> Ended:
        """Start a run, and wait for its end (or kill it after a step, or tell it to end)."""
        with self._places:
            out = run.settings.out
            out.mkdir(parents=True, exist_ok=True)
            command, environment = self._command(run)
            if run.nodes > 1:
                command = [sys.executable, str(Path(__file__).with_name("weftmoe_nodes.py")), str(run.nodes), *command]
            began = time.monotonic()
            with (out / "output.txt").open("ab") as output:
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env=environment,
                    start_new_session=True,
                )
                code, ready = self._wait(process, run, began)
            seconds = time.monotonic() - began
        tail = (out / "output.txt").read_text(encoding="utf-8", errors="replace").splitlines()[-40:]
        try:
            log = read_log(out)
        except ConfigError as error:
            log, tail = None, [*tail, str(error)]
        return Ended(run, code, seconds, ready, log, tail)

    def _wait(self, process: subprocess.Popen[bytes], run: Run, began: float) -> tuple[int | None, float | None]:
        """Exit code, and seconds until the first step could begin. The process and all of its children are ended at the
        step to kill at, and when there is no more time."""
        ready, told = None, False
        starts = _count(run.settings.out, "run")
        while True:
            try:
                return process.wait(timeout=0.2), ready
            except subprocess.TimeoutExpired:
                now = time.monotonic()
            if ready is None and _count(run.settings.out, "run") > starts:
                ready = round(now - began, 1)
            late = self.stopped.is_set() or now > min(began + self.options.limit, self._until)
            due = run.kill_after_step is not None and _count(run.settings.out, "step") >= run.kill_after_step
            if not told and run.tell_after_step is not None and _count(run.settings.out, "step") >= run.tell_after_step:
                told = True
                process.send_signal(signal.SIGUSR1)
            if late or due:
                if run.script is not None:  # its run has a process group of its own, which it ends
                    process.terminate()
                    with suppress(subprocess.TimeoutExpired):
                        process.wait(90)
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                code = process.wait()
                return None if late else code, ready

    def _command(self, run: Run) -> tuple[list[str], dict[str, str]]:
        """What starts a run, and its environment."""
        if run.script is not None:
            return [str(ROOT / "examples" / "weftmoe" / "run.sh"), *run.script], self.environment()
        settings = run.settings.out / "settings.yaml"
        composed.write(run.settings, settings)
        base = {"OMP_NUM_THREADS": "2", **self.environment()}  # neighbours want processors, too
        return [*_command(run.ranks), str(settings)], role_environment(run.settings, "trainer", base)

    def environment(self) -> dict[str, str]:
        """This process's, and this checkout as if it were installed."""
        folders = [self._plugin, *(ROOT / part for part in ("", "kernels", "adapters", "examples"))]
        inherited = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
        path = os.pathsep.join(dict.fromkeys([*map(str, folders), *inherited]))
        cpu = {"CUDA_VISIBLE_DEVICES": ""} if self.options.cpu else {}
        return {**os.environ, "PYTHONPATH": path, "PYTHON": sys.executable, **cpu}

    def pack(self) -> None:
        """What is worth keeping of all runs, in one file."""
        part = self.out / "weftmoe_smoke.part"
        with tarfile.open(part, "w:gz") as archive:
            for name in KEPT:
                for path in sorted((self.work / "runs").glob(f"*/{name}")):
                    archive.add(path, f"runs/{path.parent.name}/{name}")
            for path in sorted((self.work / "models").glob("*/warmup.json")):
                archive.add(path, f"models/{path.parent.name}/{path.name}")
        part.rename(self.out / "weftmoe_smoke.tar.gz")


def _command(ranks: int) -> list[str]:
    if ranks == 1:
        return [sys.executable, "-m", "weftmoe.train"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    return [*torchrun, "--max-restarts=0", "-m", "weftmoe.worker"]


def _count(out: Path, kind: str) -> int:
    log = out / LOG_NAME
    return log.read_text(encoding="utf-8").count(f'{{"kind":"{kind}"') if log.is_file() else 0


# Sections.


def section_script(room: Room, report: Report) -> None:
    """What a user types first. A run whose model is made elsewhere says nothing about it: rank 0 had warmed the model
    up in its own process, and could not load TransformerEngine afterwards."""
    out, steps = room.work / "runs" / "script", 5
    shutil.rmtree(out, ignore_errors=True)  # it would go on from a checkpoint there
    few = ["algorithm.prompts=4", "algorithm.completions=4", "smoke.warmup_steps=20"] if room.options.tiny else []
    settings = composed.load("fp8", smoke=room.place, overrides=[f"out={out}", f"steps={steps}", *few])
    script = ("fp8", "--smoke", "--steps", str(steps), "--out", str(out), *few)
    ended = room.run(Run("script", settings, script=script))
    said = (out / "output.txt").read_text(encoding="utf-8", errors="replace").splitlines()
    marked = [line.partition(":")[0] for line in said if line.startswith(("warn ", "fail "))]
    verdict = [line for line in said if line.startswith("doctor: ")]
    report.check("script: the doctor was asked", len(verdict) == 1, "; ".join([*marked, *verdict]))
    row = report.row("script", ended)
    if row is None:
        return
    report.check("script: every step is recorded", row.steps == steps, row.steps)
    _check_versions(report, "script", row)
    drawn = subprocess.run(
        [sys.executable, "-c", WEFTPUB, "report", str(out)],
        env=room.environment(),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    picture = out / "report.png"
    whole = drawn.returncode == 0 and picture.is_file() and picture.read_bytes().startswith(b"\x89PNG")
    said = [picture.name] if whole else drawn.stderr.splitlines()[-1:]
    report.check("script: weftpub report draws it", whole, f"exit {drawn.returncode}: {' '.join(said)}")


def section_train(room: Room, report: Report) -> None:
    options = room.options
    runs = [
        Run(f"{variant}-seed-{seed}", room.settings(f"{variant}-seed-{seed}", variant, seed, options.steps))
        for seed in options.seeds
        for variant in options.variants
    ]
    rows = {ended.run.name: report.row("train", ended) for ended in room.run_all(runs)}
    made = {name: row for name, row in rows.items() if row is not None and row.steps > 1}
    for name, row in made.items():
        _check_curve(report, f"train/{name}", row, rising=not options.tiny)
        _check_flat(report, f"train/{name}", room.work / "runs" / name)
        if not options.tiny:  # whose rewards are all equal, and move no weight
            _check_control(report, f"train/{name}", room.work / "runs" / name)
    _check_spread(report, made, options.seeds)


def _check_curve(report: Report, name: str, row: RunSummary, *, rising: bool) -> None:
    first, last = row.first_reward, row.last_reward
    assert first is not None, f"{name} has no steps"
    assert last is not None, f"{name} has no steps"
    report.check(f"{name}: reward rises", last > first or not rising, f"{first:.3f} -> {last:.3f}")
    _check_versions(report, name, row)


def _check_flat(report: Report, name: str, directory: Path) -> None:
    """The difference does not grow: a drift, as of weights that arrive changed, would add up over steps. That it falls
    is no fault: a policy that is surer of its tokens leaves less to differ about.
    """
    pair = thirds([step.before["difference_abs_mean"] for step in read_log(directory).steps])
    what = f"{name}: log-prob difference, last third of steps at most {FLAT_BOUND} x first"
    if pair is None:
        report.judge(what, "not shown", "too few steps")
    else:
        report.judge(what, pair.verdict(FLAT_BOUND), f"{pair}: {pair.first:.4f} -> {pair.second:.4f}")


def _check_control(report: Report, name: str, directory: Path) -> None:
    """After an update the rollout's weights are one version behind: what a lost publish would look like."""
    steps = read_log(directory).steps
    fresh = statistics.median(step.before["kl"] for step in steps)
    stale = statistics.median(step.after["kl"] for step in steps if step.after is not None)
    report.check(f"{name}: stale weights would show in the KL", stale > 10 * fresh, f"{fresh:.1e} -> {stale:.1e}")


def _check_versions(report: Report, name: str, row: RunSummary) -> None:
    report.check(f"{name}: versions in order", row.versions_in_order, row.steps)
    if row.variant != "baseline":
        report.check(f"{name}: bytes checked at every step", row.bytes_checked == row.steps, row.bytes_checked)


def _check_spread(report: Report, rows: dict[str, RunSummary], seeds: list[int]) -> None:
    ends = {
        variant: [row.last_reward for row in rows.values() if row.variant == variant and row.last_reward is not None]
        for variant in ("bf16", "fp8")
    }
    if len(seeds) < 2 or any(len(values) != len(seeds) for values in ends.values()):
        return
    means = {variant: statistics.mean(values) for variant, values in ends.items()}
    spread = max(ends["bf16"]) - min(ends["bf16"])
    apart = abs(means["fp8"] - means["bf16"])
    detail = ", ".join(f"{variant} {mean:.3f}" for variant, mean in means.items()) + f", spread {spread:.3f}"
    report.check("train: fp8 within the seed spread of bf16", apart <= spread, detail)


def section_kl(room: Room, report: Report) -> None:
    options = room.options
    paired = ("optimizer.lr=1e-6", "data.shuffle=false", "rollout.sampling.repeat=true")
    prompts = 16 if options.tiny else KL_PROMPTS
    runs: list[Run] = []
    for seed in options.seeds:
        for kind, shape in (("two", ()), ("all", (ALL_EXPERTS,))):
            # A step draws all of them: the next one draws the same.
            data = (f"smoke.problems={prompts}", f"algorithm.prompts={prompts}", *shape)
            room.make_model(seed, f"-kl-{kind}", *data)
            own = (*data, f"algorithm.completions={KL_COMPLETIONS[kind]}")
            model = f"model.path={room.model_path(seed, f'-kl-{kind}')}"
            for variant in options.variants:
                name = f"kl-{variant}-{kind}" + (f"-seed-{seed}" if len(options.seeds) > 1 else "")
                settings = room.settings(name, variant, seed, 2, *paired, *own, model, deterministic=True)
                runs.append(Run(name, settings))
    for ended in room.run_all(runs):
        report.row("kl", ended, **_both_steps(ended))
    for name, found in kl_checks(report.rows("kl")).items():
        report.judge(name, found["verdict"], found["detail"])


def _both_steps(ended: Ended) -> dict[str, Any]:
    """How the KL of steps 1 and 2 vary together over their prompts, and how many these are."""
    steps = () if ended.log is None else ended.log.steps[:2]
    sums = [
        [PromptSums(kl, tokens) for kl, tokens in zip(step.by_prompt.kl, step.by_prompt.tokens, strict=True)]
        for step in steps
    ]
    covariance = kl_covariance(*sums) if len(sums) == 2 else None
    return {"prompts": len(sums[0]) if sums else 0, "kl_covariance": covariance}


def section_frozen(room: Room, report: Report) -> None:
    steps = 3 if room.options.tiny else 30
    settings = room.settings("frozen", "fp8", room.options.seeds[0], steps, "optimizer.lr=0")
    row = report.row("frozen", room.run(Run("frozen", settings)))
    found = (0, None) if row is None else (row.steps, row.fixed_tokens)
    report.check("frozen: fixed tokens have one result", found == (steps, 1), f"{found[1]} after {found[0]} publishes")


def section_resume(room: Room, report: Report) -> None:
    options = room.options
    steps, save = (4, 2) if options.tiny else (12, 4)
    at = random.SystemRandom().randint(save + 1, steps - 1)
    seed, fixed = options.seeds[0], f"checkpoint.save={save}"
    unbroken = Run("unbroken", room.settings("unbroken", "fp8", seed, steps, fixed, deterministic=True))
    broken = Run("broken", room.settings("broken", "fp8", seed, steps, fixed, deterministic=True), kill_after_step=at)
    # Nothing is due before the end: what is there when it is resumed was saved because it was told.
    rarely = ("checkpoint.save=100", "checkpoint.grace=120")
    tell = save - 1  # early: a run that is told in its last step just ends
    told = Run("told", room.settings("told", "fp8", seed, steps, *rarely, deterministic=True), tell_after_step=tell)
    first, killed, ended = room.run_all([unbroken, broken, told])
    for one in (first, killed, ended):
        report.row("resume", one)
    left = max((s.step for s in ended.log.steps), default=0) if ended.log is not None else 0
    again, later = room.run_all([Run("resumed", broken.settings), Run("resumed-told", told.settings)])
    for one in (again, later):
        report.row("resume", one)
    _check_same_bytes(report, "resume: the same bytes at every step", first, again, steps, f"killed after step {at}")
    detail = f"told after step {tell}, ended after {left}"
    _check_same_bytes(report, "resume: the same bytes after it was told", first, later, steps, detail)
    _check_same_numbers(report, "resume: the same statistics at every step", first, again, steps)
    _check_same_numbers(report, "resume: the same statistics after it was told", first, later, steps)
    begins = [header.resumed_from for header in later.log.headers] if later.log is not None else []
    report.check("resume: nothing is computed twice", begins == [None, left], f"{detail}; starts from {begins}")


def _check_same_bytes(report: Report, name: str, one: Ended, other: Ended, steps: int, detail: str) -> None:
    """All published tensors of each step, by their sha256."""
    logs = [ended.log.steps if ended.log is not None else () for ended in (one, other)]
    here, there = ({s.step: s.byte_check.sha256 for s in log} for log in logs)
    differing = [step for step in here if here[step] != there.get(step)]
    passed = not differing and len(here) == steps and None not in here.values()
    report.check(name, passed, f"{detail}; steps with other bytes: {differing}")


def _check_same_numbers(report: Report, name: str, one: Ended, other: Ended, steps: int) -> None:
    """What was computed on the way to those bytes: float64 statistics before and after each update, the loss among
    them, sums by prompt, the norm of the gradients and the reward, all of them bit for bit."""

    def numbers(step: StepRecord) -> dict[str, Any]:
        kinds = {"before": step.before, "after": step.after or {}}
        found: dict[str, Any] = {f"{when} {key}": v for when, kind in kinds.items() for key, v in kind.items()}
        found |= {"kl by prompt": step.by_prompt.kl, "tokens by prompt": step.by_prompt.tokens}
        return found | {"grad_norm": step.grad_norm, "reward": step.reward, "learning_rate": step.learning_rate}

    logs = [ended.log.steps if ended.log is not None else () for ended in (one, other)]
    here, there = ({s.step: numbers(s) for s in log} for log in logs)
    differing = [
        f"step {step}: {key}"
        for step, found in here.items()
        for key in found
        if step not in there or repr(found[key]) != repr(there[step].get(key))  # by repr: bits, and NaN is NaN
    ]
    compared = sum(len(found) for found in here.values())
    shown = ", ".join(differing[:4]) + (f" and {len(differing) - 4} more" if len(differing) > 4 else "")
    passed = not differing and len(here) == len(there) == steps
    report.check(name, passed, f"{compared} numbers of {len(here)} steps; other bits: {shown or 'none'}")


def section_shared(room: Room, report: Report) -> None:
    options = room.options
    steps = 3 if options.tiny else 8
    copied, shared = room.run_all(
        [
            Run(
                f"experts-{how}",
                room.settings(
                    f"experts-{how}", "fp8", options.seeds[0], steps, f"publish.experts={how}", deterministic=True
                ),
            )
            for how in ("copy", "shared")
        ]
    )
    for ended in (copied, shared):
        row = report.row("shared", ended)
        if row is not None:
            _check_versions(report, f"shared/{ended.run.name}", row)
    _check_same_bytes(report, "shared: the same bytes at every step as with copies", copied, shared, steps, "")
    moved = [
        [(s.byte_check.bytes - s.byte_check.in_place, s.byte_check.in_place) for s in ended.log.steps]
        for ended in (copied, shared)
        if ended.log is not None
    ]
    sizes = [sorted(set(one)) for one in moved]
    smoke = shared.run.settings.smoke
    experts = smoke.layers * smoke.experts * 3 * smoke.hidden * smoke.intermediate
    experts += experts // 128**2 * 4  # a scale for each block
    passed = len(sizes) == 2 and all(len(one) == 1 for one in sizes) and sizes[0][0][1] == 0
    passed = passed and sizes[1][0][1] == experts
    detail = f"(copied, in place) bytes a step: {sizes}; experts {experts}"
    report.check("shared: experts are not moved", passed, detail)
    for ended in (copied, shared):
        if ended.log is not None and ended.log.steps:
            last = ended.log.steps[-1]
            spent = {phase: round(ms, 2) for phase, ms in last.publish_ms.items()}
            report.measured(f"{ended.run.name}, step {last.step}", {"memory": last.memory, "publish_ms": spent})


def section_two_gpus(room: Room, report: Report) -> None:
    options = room.options
    two: tuple[str, ...] = ("cluster.gpus=2", "train.expert=2", "rollout.tensor=2")
    layouts = {"fp8": TWO_GPUS, "baseline": BASELINE_TWO_GPUS}
    if options.cpu:  # the sampler holds a whole model; tensor parallel needs TE
        two = ("cluster.cpu_ranks=2", "train.expert=2")
        layouts = {"fp8": {"dp2": ()}, "baseline": {"baseline-dp2": (BUCKETS,)}}
    steps = min(options.steps, 10)
    runs = [
        Run(name, room.settings(name, variant, options.seeds[0], steps, *two, *layout), ranks=2)
        for variant, named in layouts.items()
        if variant in options.variants
        for name, layout in named.items()
    ]
    for ended in room.run_all(runs):
        _check_layout(room, report, "two-gpus", ended, "trainer and engine")


def section_two_nodes(room: Room, report: Report) -> None:
    options = room.options
    steps, seed = min(options.steps, 10), options.seeds[0]

    def named(name: str, variant: str, *more: str, deterministic: bool = False, tell: int | None = None) -> Run:
        two = ("cluster.nodes=2", "rollout.engines=2", BUCKETS, *more)
        settings = room.settings(name, variant, seed, steps, *two, deterministic=deterministic)
        return Run(name, settings, script=_script(settings, 2), tell_after_step=tell, nodes=2)

    runs = [named(f"two-nodes-{variant}", variant) for variant in options.variants]
    rarely = ("checkpoint.save=100", "checkpoint.grace=120")
    again = "fp8" in options.variants
    if again:
        told = named("two-nodes-told", "fp8", *rarely, deterministic=True, tell=1)
        runs += [named("two-nodes-unbroken", "fp8", *rarely, deterministic=True), told]
    found = room.run_all(runs)
    for ended in found:
        if _check_layout(room, report, "two-nodes", ended, "trainer and engines"):
            header = ended.log.headers[0].rollout if ended.log is not None and ended.log.headers else ""
            name = f"two-nodes/{ended.run.name}"
            report.check(f"{name}: an engine on each node", header.startswith("2 nodes: "), header)
    if again:
        unbroken, ended = found[-2:]
        left = max((s.step for s in ended.log.steps), default=0) if ended.log is not None else 0
        later = room.run(Run("two-nodes-resumed", ended.run.settings, script=ended.run.script, nodes=2))
        report.row("two-nodes", later)
        detail = f"told after step 1, ended after {left}"
        _check_same_bytes(report, "two-nodes: the same bytes after it was told", unbroken, later, steps, detail)


def _check_layout(room: Room, report: Report, section: str, ended: Ended, whom: str) -> bool:
    """Versions, bytes, and that the log-probs agree; of a baseline also that stale weights would show. False for a run
    without steps.
    """
    row = report.row(section, ended)
    if row is None:
        return False
    name, apart = f"{section}/{ended.run.name}", row.difference_last
    _check_versions(report, name, row)
    report.check(f"{name}: {whom} agree", apart is not None and apart < 0.02, f"{apart} nats a token")
    if row.variant == "baseline" and not room.options.tiny:  # whose rewards are all equal, and move no weight
        _check_control(report, name, room.work / "runs" / ended.run.name)
    return True


def _script(settings: Settings, nodes: int) -> tuple[str, ...]:
    """Arguments of run.sh for resolved settings, whatever they are: all of them, as overrides. The place of each node
    is added where it is started.
    """
    plain = settings.model_dump(mode="json")
    kept = {name: value for name, value in plain.items() if name not in ("variant", "cluster")}
    overrides = [f"{key}={json.dumps(value)}" for key, value in _leaves(kept)]
    place = ("--nodes", str(nodes), "--gpus", str(settings.cluster.gpus), "--optimizer", settings.optimizer.name)
    return (settings.variant, "--smoke", "--no-doctor", *place, *overrides)


def _leaves(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        elif not isinstance(value, dict):
            yield prefix + key, value


SECTIONS = {
    "script": section_script,
    "train": section_train,
    "kl": section_kl,
    "frozen": section_frozen,
    "resume": section_resume,
    "shared": section_shared,
    "two-gpus": section_two_gpus,
    "two-nodes": section_two_nodes,
}


def draw(work: Path, out: Path) -> None:
    """All runs of the train section in one picture."""
    try:
        from weftmoe.report import draw_runs

        logs = [read_log(path.parent) for path in sorted((work / "runs").glob(f"*-seed-*/{LOG_NAME}"))]
        if logs:
            draw_runs(logs, out / "weftmoe_smoke.png")
    except (ModuleNotFoundError, ConfigError) as error:
        print(f"no picture: {error}; draw it elsewhere with --draw", flush=True)


def _commit() -> str:
    found = subprocess.run(["git", "-C", str(ROOT), "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    return found.stdout.strip() if found.returncode == 0 else "no git here"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--work", type=Path, help="models, checkpoints and runs; OUT/work if not given")
    parser.add_argument(
        "--only", type=lambda text: text.split(","), default=["script", "train", "kl", "frozen", "resume"]
    )
    parser.add_argument("--variants", type=lambda text: text.split(","), default=["baseline", "bf16", "fp8"])
    parser.add_argument("--optimizer", choices=composed.OPTIMIZERS, default="muon")
    parser.add_argument("--seeds", type=lambda text: [int(seed) for seed in text.split(",")], default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--warmup", type=int, default=400, help="most supervised steps of a made model")
    parser.add_argument("--side-by-side", type=int, default=3)
    parser.add_argument("--deterministic", action="store_true", help="train with the smoke's own settings, everywhere")
    parser.add_argument("--limit", type=float, default=540.0, help="most seconds of one run")
    parser.add_argument("--seconds", type=float, default=86400.0, help="seconds after which everything is ended")
    parser.add_argument("--commit", default="", help="of the code, where it is no checkout")
    parser.add_argument("--set", action="append", default=[], help="an override of every run, block.key=value")
    parser.add_argument("--cpu", action="store_true", help="the CPU parts, to try this script")
    parser.add_argument("--tiny", action="store_true", help="few steps of small batches, to try this script")
    parser.add_argument("--draw", action="store_true", help="only draw, from logs that are there")
    options = parser.parse_args()
    need_gpu(options.cpu or options.draw, "--cpu")
    if options.tiny:
        options.steps, options.seeds = min(options.steps, 3), options.seeds[:1]
    return options


def main() -> int:
    options = _options()
    options.out.mkdir(parents=True, exist_ok=True)
    room = Room(options)
    if options.draw:
        draw(room.work, room.out)
        return 0
    report = Report(room.out / "weftmoe_smoke.json", options.commit or _commit())
    signal.signal(signal.SIGTERM, lambda *_: room.stopped.set())

    def run_sections(names: Sequence[str]) -> None:
        """Side by side."""
        with ThreadPoolExecutor(max(1, len(names))) as pool:
            sections = {name: pool.submit(run_section, name) for name in names}
            for name, done in sections.items():
                error = done.exception()
                if error is not None:
                    report.check(f"{name}: the section itself", False, f"{type(error).__name__}: {error}")

    def run_section(name: str) -> None:
        SECTIONS[name](room, report)
        report.write()
        room.pack()

    others = [name for name in options.only if name not in ALONE]
    run_sections([name for name in options.only if name in ALONE])
    if set(others) - {"kl"}:  # which makes its own
        for seed in options.seeds:
            room.make_model(seed)
    run_sections(others)
    report.write()
    draw(room.work, room.out)
    room.pack()
    print(json.dumps({"failed": report.failed, "not_shown": report.data["not_shown"]}), flush=True)
    return 1 if report.failed else 0


if __name__ == "__main__":
    sys.exit(main())
