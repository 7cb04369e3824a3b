"""A whole run on a CPU, with real parts: Megatron-core trains, weftpub publishes into SGLang's real layers, and the
torch sampler draws from what arrived there. One short run serves all tests; a resumed one is compared with it.
"""

import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from weftmoe import settings as composed
from weftmoe.env import role_environment
from weftmoe.report import summarize_run
from weftmoe.schema import Settings
from weftmoe.telemetry import StepRecord, read_log
from weftmoe.telemetry.log import LoggedRun

STEPS, SAVED = 3, 2
ROOT = Path(__file__).parents[2]
# The smallest model that block scales allow.
SMALL = [
    "smoke.layers=1",
    "smoke.hidden=128",
    "smoke.intermediate=128",
    "smoke.experts=4",
    "smoke.heads=4",
    "smoke.kv_heads=2",
    "smoke.head_dim=32",
    "smoke.problems=64",
    "smoke.warmup_steps=40",
    "algorithm.prompts=4",
    "algorithm.completions=4",
    "telemetry.tensorboard=false",
]


def small(out: Path, *overrides: str) -> Settings:
    every = [f"out={out}", f"steps={STEPS}", f"checkpoint.save={SAVED}", *SMALL, *overrides]
    return composed.load("fp8", smoke="cpu", overrides=every)


# The rollout of step 2 never ends: the signal comes in its middle, and the run has to cut it short.
TOLD = """
import os, signal, sys
from weftmoe import train
from weftmoe.rollout.torch_sampler import TorchRollout
generate, calls = TorchRollout.generate, []
def endless(self, requests):
    calls.append(1)
    while len(calls) == 2:
        generate(self, requests)
        os.kill(os.getpid(), signal.SIGUSR1)
    return generate(self, requests)
TorchRollout.generate = endless
sys.exit(train._command())
"""


def train(settings: Settings, *, program: tuple[str, ...] = ("-m", "weftmoe.train"), code: int = 0) -> str:
    """Run the trainer in a process of its own, as torchrun would; its last line."""
    settings.out.mkdir(parents=True, exist_ok=True)
    path = settings.out / "settings.yaml"
    composed.write(settings, path)
    folders = [str(ROOT / part) for part in ("", "kernels", "adapters", "examples")]
    base = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join(folders)}
    done = subprocess.run(
        [sys.executable, *program, str(path)],
        env=role_environment(settings, "trainer", base),
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == code, done.stderr[-4000:]
    return done.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("run")
    assert train(small(directory)).startswith(f"WEFTMOE OK steps={STEPS} version={STEPS} reward=")
    return directory


@pytest.fixture(scope="module")
def run(out: Path) -> LoggedRun:
    return read_log(out)


@pytest.fixture(params=range(STEPS), ids=lambda index: f"step {index + 1}")
def step(request: pytest.FixtureRequest, run: LoggedRun) -> StepRecord:
    return run.steps[request.param]


def test_every_step_serves_the_next_version(step: StepRecord) -> None:
    assert (step.served_version, step.published_version, step.generation) == (step.step - 1, step.step, step.step)


def test_every_publish_was_checked_byte_by_byte(run: LoggedRun) -> None:
    checks = [step.byte_check for step in run.steps]
    assert all(check.method == "sha256" and check.matched and check.pieces > 10 for check in checks)
    assert len({check.sha256 for check in checks}) == STEPS, "each step serves other bytes"
    assert all(step.changed_share is not None and 0 < step.changed_share < 1 for step in run.steps)


def test_the_rollout_samples_what_the_trainer_computes(step: StepRecord) -> None:
    """Trainer and sampler share no code and no memory; only rounding sets their log-probs apart. A stale or half
    published version would show as differences of the size of an update."""
    before = step.before
    assert before["tokens"] == step.counters.trained
    assert 0 < before["difference_abs_mean"] < 0.02
    assert 0 <= before["kl"] < 1e-3
    assert (before["rejected_tokens"], before["clip_low_fraction"], before["clip_high_fraction"]) == (0, 0.0, 0.0)


def test_an_update_moves_the_log_probs(run: LoggedRun) -> None:
    moved = [step.after["difference_abs_mean"] / step.before["difference_abs_mean"] for step in run.steps if step.after]
    assert len(moved) == STEPS
    assert max(moved) > 1.5


def test_counters_add_up(run: LoggedRun) -> None:
    for name in ("prompt", "completion", "trained", "completions"):
        totals = [getattr(step.total, name) for step in run.steps]
        each = [getattr(step.counters, name) for step in run.steps]
        assert totals == [sum(each[: count + 1]) for count in range(STEPS)]
    assert all(step.counters.completions == 16 for step in run.steps)


def test_a_record_holds_what_a_person_watches(step: StepRecord) -> None:
    assert {"rollout", "reward", "drain", "reload", "train", "publish", "offload", "resume", "total"} <= set(
        step.seconds
    )
    assert step.seconds["total"] >= step.seconds["rollout"] + step.seconds["train"] + step.seconds["publish"]
    assert step.flops_per_s > 0
    assert math.isfinite(step.grad_norm)
    assert step.prompt_lengths[0].turn == 1
    assert 3 <= step.prompt_lengths[0].mean <= 6
    assert step.verdicts == {"judged": 16}
    assert 0.0 <= step.reward <= 1.0
    assert step.fixed_logp_sha256 is None, "only a run with learning rate 0 scores fixed tokens"


def test_the_log_says_how_it_sampled(run: LoggedRun) -> None:
    (header,) = run.headers
    assert header.resumed_from is None
    assert header.rollout == "torch sampler over SGLang's real layers, fp8 experts"
    assert any("never from the trainer's" in note for note in header.notes)
    assert any("64 prompts from 64 rows" in note for note in header.notes)
    assert header.settings["variant"] == "fp8"
    row = summarize_run(run)
    assert row.versions_in_order
    assert row.bytes_checked == STEPS


def test_the_sampler_knows_no_planner_and_no_trainer(out: Path) -> None:
    log = (out / "engine" / "sampler.log").read_text(encoding="utf-8", errors="replace")
    assert "Traceback" not in log


def test_checkpoints_lie_where_a_resume_looks(out: Path) -> None:
    whole = sorted(path.name for path in (out / "checkpoints").iterdir())
    assert whole == ["step-000002", "step-000003"], "every second step, and the last"
    state = json.loads((out / "checkpoints" / "step-000002" / "loop.json").read_text(encoding="utf-8"))
    assert (state["step"], state["data"]["drawn"]) == (2, 8)


@pytest.mark.slow
def test_a_run_that_was_told_to_end_and_resumed_serves_the_same_bytes(
    out: Path, run: LoggedRun, tmp_path: Path
) -> None:
    """A run that was told to end in the middle of a rollout saves the step before, which no checkpoint was due after,
    and has to end where the unbroken one ended: masters, moments, data position and the seeds of its completions all
    have to come back. It lost up to `checkpoint.save` steps. Here trainer and sampler also map one memory for the
    experts, at both starts another one, where the unbroken run copies them."""
    shutil.copytree(out / "model", tmp_path / "model")
    rarely = ("checkpoint.save=100", "publish.experts=shared")
    last_line = train(small(tmp_path, *rarely, "checkpoint.grace=1"), program=("-c", TOLD), code=75)
    assert last_line.startswith("WEFTMOE STOPPED steps=1 version=1 ")
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-000001"]
    assert json.loads((tmp_path / "stopped.json").read_text(encoding="utf-8")) == {"step": 1}
    (first,) = read_log(tmp_path).steps
    assert train(small(tmp_path, *rarely)).startswith(f"WEFTMOE OK steps={STEPS} version={STEPS} ")
    resumed = read_log(tmp_path)
    assert [header.resumed_from for header in resumed.headers] == [None, 1]
    assert resumed.steps[0] == first
    assert len(resumed.steps) == STEPS
    for found, unbroken in zip(resumed.steps, run.steps, strict=True):
        assert found.byte_check.sha256 == unbroken.byte_check.sha256
        assert (found.before, found.after, found.grad_norm) == (unbroken.before, unbroken.after, unbroken.grad_norm)
        assert (found.total, found.reward, found.served_version) == (unbroken.total, unbroken.reward, found.step - 1)
        # One layer of four experts: three matrices of 128 x 128 codes, and an FP32 scale each.
        assert (found.byte_check.in_place, unbroken.byte_check.in_place) == (4 * 3 * (128 * 128 + 4), 0)
