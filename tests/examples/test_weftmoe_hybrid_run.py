"""Whole runs of Qwen3.5-MoE on a CPU: the smoke makes one in the form of the published checkpoints, Megatron-core
trains its delta nets, gated attention and experts, and SGLang's real layers get the bytes.
"""

from pathlib import Path

import pytest
from test_weftmoe_loop_run import SMALL, train

from weftmoe import settings as composed
from weftmoe.telemetry import read_log

STEPS = 2

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The FP8 run, whose trainer and sampler map one memory for the experts, and whose made model the other takes."""
    return run(tmp_path_factory.mktemp("fp8"), "fp8", "muon", "publish.experts=shared")


def run(directory: Path, variant: str, optimizer: str, *overrides: str) -> Path:
    sizes = [setting for setting in SMALL if not setting.startswith("smoke.layers")]
    chosen = [f"out={directory}", f"steps={STEPS}", "checkpoint.save=off", *sizes, "smoke.layers=2", "smoke.shared=64"]
    settings = composed.load(
        variant, model="qwen3.5-35b-a3b-base", optimizer=optimizer, smoke="cpu", overrides=[*chosen, *overrides]
    )
    assert settings.model.architecture == "Qwen3_5MoeForConditionalGeneration"
    assert train(settings).startswith(f"WEFTMOE OK steps={STEPS} version={STEPS}")
    return directory


def check(directory: Path) -> None:
    records = read_log(directory).steps
    assert [(record.served_version, record.published_version) for record in records] == [(0, 1), (1, 2)]
    assert all(record.byte_check.matched and record.byte_check.method == "sha256" for record in records)
    assert len({record.byte_check.sha256 for record in records}) == STEPS, "each step serves other bytes"
    # What the engine samples from is what was trained; the rest is BF16 on one side and FP32 on the other, and a token
    # or two whose router was undecided.
    assert all(record.before["kl"] < min(1e-2, record.after["kl"]) for record in records)


def test_fp8_with_muon(out: Path) -> None:
    check(out)
    # Two layers of four experts: three matrices of 128 x 128 codes, and an FP32 scale each.
    assert {step.byte_check.in_place for step in read_log(out).steps} == {2 * 4 * 3 * (128 * 128 + 4)}


def test_bf16_with_adamw(out: Path, tmp_path: Path) -> None:
    check(run(tmp_path, "bf16", "adamw", f"model.path={out / 'model'}"))
