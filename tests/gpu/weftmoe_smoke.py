"""The smoke run on one GPU: variants x seeds, learning rate 0, and a run that is killed and resumed.

    python tests/gpu/weftmoe_smoke.py --out OUT [--only train,frozen,resume] [--variants baseline,bf16,fp8]
        [--seeds 1,2,3] [--steps 50] [--side-by-side 3] [--cpu] [--tiny]

Writes OUT/weftmoe_smoke.json (a row per run, with the checkout's commit), logs and output under OUT/runs, and, where
matplotlib is installed, OUT/weftmoe_smoke.png; exits with 1 if a check fails. Sections:

    train     each variant with each seed; the made model of a seed is shared by its variants. Reward rises from the
              warm-up's level; fp8 ends within the seeds' spread of bf16; log-prob differences stay flat; KL of step 2
              is at most 1.2 x that of step 1
    frozen    fp8 with learning rate 0: the same tokens, scored after each publish, give the same bits
    resume    fp8, unbroken and killed at a random step: the same bytes at the same step

Runs are processes of their own, `--side-by-side` at a time on the one GPU. To try this script: `--cpu` runs the same
with the torch sampler, `--tiny` few steps. `--draw` draws the picture from logs that are there.
"""

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ran_on import ran_on

from weftmoe import settings as composed
from weftmoe.env import role_environment
from weftmoe.report.summary import RunSummary, summarize_run
from weftmoe.schema import Settings
from weftmoe.smoke import make_model
from weftmoe.telemetry import LOG_NAME, read_log

ROOT = Path(__file__).resolve().parents[2]
# Few problems, that come again every few steps: fifty steps show learning above the noise of sampling. On a CPU thirty
# steps of this size raised the reward from 0.35 to 0.66.
TASK = ("smoke.problems=64", "algorithm.prompts=16", "algorithm.completions=16", "optimizer.lr=2e-4")
PLUGIN = "[sglang.srt.plugins]\nweftpub = weftpub_adapters.sglang.plugin:register\n"


@dataclass(frozen=True)
class Run:
    """One process to start."""

    name: str
    settings: Settings
    kill_after_step: int | None = None

    @property
    def out(self) -> Path:
        return self.settings.out


class Report:
    """Rows and checks; a failed check is remembered and the run goes on."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.data: dict[str, Any] = {
            "commit": _commit(),
            "environment": ran_on("megatron-core", "sglang"),
            "rows": [],
            "checks": {},
        }
        self.failed: list[str] = []

    def check(self, name: str, passed: bool, detail: Any) -> None:
        self.data["checks"][name] = {"passed": bool(passed), "detail": detail}
        if not passed:
            self.failed.append(name)
        print(f"  {'ok  ' if passed else 'FAIL'} {name}: {detail}", flush=True)

    def row(self, section: str, row: RunSummary, seconds: float) -> None:
        entry = {"section": section, "commit": self.data["commit"], "wall_s": round(seconds, 1), **row.model_dump()}
        self.data["rows"].append(entry)
        self.write()

    def write(self) -> None:
        self.data["failed"] = self.failed
        self._path.write_text(json.dumps(self.data, indent=1), encoding="utf-8")


class Room:
    """What all runs share: options, one environment with the engine's plugin, models by seed."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.out: Path = options.out.absolute()
        self.place = "cpu" if options.cpu else "gpu"
        self._plugin = self.out / "plugin"
        info = self._plugin / "weftpub_tree-0.dist-info"
        info.mkdir(parents=True, exist_ok=True)
        # The checkout is not installed here: this is how the engine's processes find its plugin.
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: weftpub_tree\nVersion: 0\n", encoding="utf-8")
        (info / "entry_points.txt").write_text(PLUGIN, encoding="utf-8")

    def settings(
        self, name: str, variant: str, seed: int, steps: int, *more: str, deterministic: bool = False
    ) -> Settings:
        overrides = [
            f"out={self.out / 'runs' / name}",
            f"seed={seed}",
            f"steps={steps}",
            f"model.path={self.out / 'models' / f'seed-{seed}'}",
            "telemetry.tensorboard=false",
            "telemetry.progress=true",
            *([] if self.options.cpu else ["rollout.memory_fraction=0.6", "rollout.attention_backend=triton"]),
            # Only the comparison of bytes needs deterministic kernels, which are slower.
            f"train.deterministic={str(deterministic).lower()}",
            *TASK,
            *(["algorithm.prompts=4", "algorithm.completions=4"] if self.options.tiny else []),
            *self.options.set,
            *more,
        ]
        return composed.load(variant, smoke=self.place, overrides=overrides)

    def model(self, seed: int) -> None:
        """Make a seed's model once; its variants start from the same weights."""
        base = composed.load("bf16", smoke=self.place, overrides=[*TASK, *self.options.set])
        limit = 20 if self.options.tiny else max(self.options.warmup, base.smoke.warmup_steps)
        smoke = base.smoke.model_copy(update={"warmup_steps": limit})
        directory = self.out / "models" / f"seed-{seed}"
        made = make_model(
            directory, smoke, seed=seed, tokens=base.length.context, device="cpu" if self.options.cpu else "cuda"
        )
        print(f"model of seed {seed}: {made}", flush=True)

    def run(self, run: Run) -> float:
        """Start it, wait for its end (or kill it after a step), and return its seconds; raises on failure."""
        run.out.mkdir(parents=True, exist_ok=True)
        settings = run.out / "settings.yaml"
        composed.write(run.settings, settings)
        began = time.monotonic()
        with (run.out / "output.txt").open("ab") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "weftmoe.train", str(settings)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=self._environment(run.settings),
                start_new_session=True,
            )
            code = _wait(process, run, began + self.options.limit)
        seconds = time.monotonic() - began
        tail = (run.out / "output.txt").read_text(encoding="utf-8", errors="replace").splitlines()[-25:]
        print(f"  {run.name}: exit {code} after {seconds:.0f} s; {tail[-1] if tail else ''}", flush=True)
        if code != 0 and not (run.kill_after_step is not None and code == -signal.SIGKILL):
            raise RuntimeError(f"{run.name} ended with {code}:\n" + "\n".join(tail))
        return seconds

    def _environment(self, settings: Settings) -> dict[str, str]:
        folders = [self._plugin, *(ROOT / part for part in ("", "kernels", "adapters", "examples"))]
        inherited = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
        path = os.pathsep.join(dict.fromkeys([*map(str, folders), *inherited]))
        cpu = {"CUDA_VISIBLE_DEVICES": ""} if self.options.cpu else {}
        return role_environment(settings, "trainer", {**os.environ, "PYTHONPATH": path, **cpu})


def _wait(process: subprocess.Popen[bytes], run: Run, until: float) -> int:
    """The exit code; the process and all of its children are ended at the step to kill at, or at the limit."""
    while True:
        try:
            return process.wait(timeout=0.2)
        except subprocess.TimeoutExpired:
            pass
        late = time.monotonic() > until
        if late or (run.kill_after_step is not None and _steps(run.out) >= run.kill_after_step):
            os.killpg(process.pid, signal.SIGKILL)
            code = process.wait()
            if late:
                raise RuntimeError(f"{run.name} took too long and was ended; see {run.out / 'output.txt'}")
            return code


def _steps(out: Path) -> int:
    log = out / LOG_NAME
    return log.read_text(encoding="utf-8").count('"kind":"step"') if log.is_file() else 0


# Sections.


def section_train(room: Room, report: Report) -> None:
    options = room.options
    runs = [
        Run(f"{variant}-seed-{seed}", room.settings(f"{variant}-seed-{seed}", variant, seed, options.steps))
        for seed in options.seeds
        for variant in options.variants
    ]
    rows: dict[str, RunSummary] = {}
    with ThreadPoolExecutor(options.side_by_side) as pool:
        for run, seconds in zip(runs, pool.map(room.run, runs), strict=True):
            rows[run.name] = summarize_run(read_log(run.out))
            report.row("train", rows[run.name], seconds)
    for name, row in rows.items():
        _check_curve(report, name, row, rising=not options.tiny)
    _check_spread(report, rows, options.seeds)


def _check_curve(report: Report, name: str, row: RunSummary, *, rising: bool) -> None:
    first, last = row.first_reward, row.last_reward
    assert first is not None, f"{name} has no steps"
    assert last is not None, f"{name} has no steps"
    report.check(f"train/{name}: reward rises", last > first or not rising, f"{first:.3f} -> {last:.3f}")
    report.check(f"train/{name}: versions in order", row.versions_in_order, row.steps)
    if row.variant != "baseline":
        report.check(f"train/{name}: bytes checked at every step", row.bytes_checked == row.steps, row.bytes_checked)
    if row.kl_1 is not None and row.kl_2 is not None:
        ratio = row.kl_2 / row.kl_1
        detail = f"{row.kl_1:.3e}, {row.kl_2:.3e}: x {ratio:.2f}"
        report.check(f"train/{name}: KL of step 2 at most 1.2 x step 1", ratio <= 1.2, detail)
    before, after = row.difference_first, row.difference_last
    if before is not None and after is not None:
        report.check(f"train/{name}: log-prob difference flat", after <= 2 * before, f"{before:.4f} -> {after:.4f}")


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
    report.check("train: fp8 within the seed spread of bf16", apart <= spread, {**means, "spread": spread})


def section_frozen(room: Room, report: Report) -> None:
    steps = 3 if room.options.tiny else 30
    settings = room.settings("frozen", "fp8", room.options.seeds[0], steps, "optimizer.lr=0", "checkpoint.save=off")
    seconds = room.run(Run("frozen", settings))
    row = summarize_run(read_log(settings.out))
    report.row("frozen", row, seconds)
    report.check("frozen: fixed tokens have one result", row.fixed_tokens == 1, f"{row.fixed_tokens} after {row.steps}")


def section_resume(room: Room, report: Report) -> None:
    options = room.options
    steps, save = (4, 2) if options.tiny else (12, 4)
    at = random.SystemRandom().randint(save + 1, steps - 1)
    seed, fixed = options.seeds[0], f"checkpoint.save={save}"
    unbroken = Run("unbroken", room.settings("unbroken", "fp8", seed, steps, fixed, deterministic=True))
    again = room.settings("broken", "fp8", seed, steps, fixed, deterministic=True)
    broken = Run("broken", again, kill_after_step=at)
    seconds = [room.run(unbroken), room.run(broken), room.run(Run("broken", broken.settings))]
    for run, spent in ((unbroken, seconds[0]), (broken, seconds[1] + seconds[2])):
        report.row("resume", summarize_run(read_log(run.out)), spent)
    one, other = ({s.step: s.byte_check.sha256 for s in read_log(run.out).steps} for run in (unbroken, broken))
    differing = [step for step in one if one[step] != other.get(step)]
    detail = f"killed after step {at}; steps with other bytes: {differing}"
    report.check("resume: the same bytes at every step", not differing and len(one) == steps, detail)


def draw(out: Path) -> None:
    """All runs of the train section in one picture."""
    try:
        from weftmoe.report import draw_runs

        logs = [read_log(path.parent) for path in sorted((out / "runs").glob(f"*-seed-*/{LOG_NAME}"))]
        if logs:
            draw_runs(logs, out / "weftmoe_smoke.png")
    except ModuleNotFoundError as error:
        print(f"no picture: {error}; draw it elsewhere with --draw", flush=True)


def _commit() -> str:
    found = subprocess.run(["git", "-C", str(ROOT), "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    return found.stdout.strip() if found.returncode == 0 else "no git here"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", default="train,frozen,resume")
    parser.add_argument("--variants", type=lambda text: text.split(","), default=["baseline", "bf16", "fp8"])
    parser.add_argument("--seeds", type=lambda text: [int(seed) for seed in text.split(",")], default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--warmup", type=int, default=400, help="most supervised steps of a made model")
    parser.add_argument("--side-by-side", type=int, default=3)
    parser.add_argument("--limit", type=float, default=540.0, help="most seconds of one run")
    parser.add_argument("--set", action="append", default=[], help="an override of every run, block.key=value")
    parser.add_argument("--cpu", action="store_true", help="the CPU parts, to try this script")
    parser.add_argument("--tiny", action="store_true", help="few steps of small batches, to try this script")
    parser.add_argument("--draw", action="store_true", help="only draw, from logs that are there")
    options = parser.parse_args()
    if options.tiny:
        options.steps, options.seeds = min(options.steps, 3), options.seeds[:1]
    if options.draw:
        draw(options.out)
        return 0
    options.out.mkdir(parents=True, exist_ok=True)
    room, report = Room(options), Report(options.out / "weftmoe_smoke.json")
    for seed in options.seeds:
        room.model(seed)
    sections = {"train": section_train, "frozen": section_frozen, "resume": section_resume}
    for name in options.only.split(","):
        print(f"== {name}", flush=True)
        try:
            sections[name](room, report)
        except RuntimeError as error:
            report.check(f"{name}: ran", False, str(error))
        report.write()
    draw(options.out)
    print(json.dumps({"failed": report.failed}))
    return 1 if report.failed else 0


if __name__ == "__main__":
    sys.exit(main())
