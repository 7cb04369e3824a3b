"""The main job end to end, as separate processes: every variant and both optimizers, with all their checks."""

import json
from pathlib import Path

import pytest
from demo_process import run_demo, still_running

from weftpub_demo.checkpoint import write_checkpoint
from weftpub_demo.checks import MEANINGS
from weftpub_demo.config import ModelShape

pytestmark = pytest.mark.slow

STEPS = 5
LAYERS, EXPERTS, RECEIVERS = 2, 8, 2
# Three matrices an expert (gate, up, down), each with its scale in FP8.
EXPERT_TENSORS = LAYERS * EXPERTS * 3
# Four norms and a router a layer, and the last norm, are whole on both receivers; of query, key, value and output
# projections, of the embedding and of the output layer each has its own part.
OTHER_TENSORS = LAYERS * (5 + 4 * RECEIVERS) + 1 + 2 * RECEIVERS


def test_fp8_with_muon(tmp_path: Path) -> None:
    done = run_demo(tmp_path, "--steps", str(STEPS))
    report = done.report
    assert done.code == 0, done.out + done.err
    assert done.last_line == report.result
    assert done.last_line.startswith(f"DEMO OK version={STEPS} checks=")
    assert (report.ok, report.committed_version, len(report.steps)) == (True, STEPS, STEPS)
    assert [step.version for step in report.steps] == list(range(1, STEPS + 1))
    assert report.steps[-1].loss < report.steps[0].loss - 1.0
    assert all(0.05 < step.changed <= 1.0 for step in report.steps)
    assert {step.transport for step in report.steps} == {"shared_memory"}
    assert len({step.sha256 for step in report.steps}) == STEPS
    passed = {check.name: check.passed for check in report.checks}
    assert set(passed) == set(MEANINGS)
    assert passed["sha256"] == STEPS * (2 * EXPERT_TENSORS + OTHER_TENSORS)
    assert passed["committed"] == passed["coverage"] == passed["poisoned"] == passed["rebound"] == STEPS * RECEIVERS
    assert passed["outputs"] == STEPS
    assert (tmp_path / "report.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert "version 5 committed" in done.err
    # A newcomer takes other people's warnings for the demo's trouble.
    assert [line for line in done.err.splitlines() if "Apex" in line or "DEPRECATED" in line] == []
    assert still_running(tmp_path) == []


def test_fp8_with_adamw_from_a_given_model_and_text_as_json(tmp_path: Path) -> None:
    shape = ModelShape(layers=3, experts=8, hidden=128, expert_intermediate=128, heads=4, kv_heads=4, head_dim=32)
    model = write_checkpoint(tmp_path / "given", shape, seed=7)
    text = tmp_path / "text.txt"
    text.write_text("It was a bright cold day in April, and the clocks were striking. " * 20)
    done = run_demo(
        *(tmp_path, "--optimizer", "adamw", "--steps", str(STEPS), "--json", "--preset", "te_pow2"),
        *("--model", str(model), "--text", str(text)),
    )
    assert done.code == 0, done.out + done.err
    assert json.loads(done.out) == json.loads((tmp_path / "report.json").read_text())
    assert done.err.rstrip().endswith(done.report.result)
    assert done.report.model["layers"] == 3
    assert done.report.settings["preset"] == "te_pow2"
    assert done.report.steps[-1].loss < done.report.steps[0].loss
    assert still_running(tmp_path) == []


def test_bf16_takes_the_same_way(tmp_path: Path) -> None:
    done = run_demo(tmp_path, "--variant", "bf16", "--steps", str(STEPS))
    assert done.code == 0, done.out + done.err
    passed = {check.name: check.passed for check in done.report.checks}
    assert set(passed) == set(MEANINGS)
    assert passed["sha256"] == STEPS * (EXPERT_TENSORS + OTHER_TENSORS)
    assert still_running(tmp_path) == []


def test_the_baseline_does_without_weftpub(tmp_path: Path) -> None:
    watch = (
        "import atexit, sys\n"
        "atexit.register(lambda: print('PUBLISHER', 'weftpub.publisher' in sys.modules, 'awex' in sys.modules))"
    )
    done = run_demo(tmp_path, "--variant", "baseline", "--steps", str(STEPS), prelude=watch)
    assert done.code == 0, done.out + done.err
    assert done.last_line == "PUBLISHER False False"
    assert done.report.ok
    assert set(done.report.steps[0].phases_ms) == {"export", "load"}
    assert done.report.steps[-1].loss < done.report.steps[0].loss - 1.0
    assert still_running(tmp_path) == []
