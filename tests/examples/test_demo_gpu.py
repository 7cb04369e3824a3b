"""The main job on a GPU: Triton kernels, streams, and bytes by CUDA IPC to receivers on the same GPU."""

from pathlib import Path

import pytest
from demo_process import run_demo, still_running

pytestmark = [pytest.mark.gpu, pytest.mark.slow]


@pytest.mark.parametrize(("variant", "optimizer"), [("fp8", "muon"), ("fp8", "adamw"), ("bf16", "muon")])
def test_the_demo_runs_on_the_gpu(tmp_path: Path, variant: str, optimizer: str) -> None:
    done = run_demo(tmp_path, "--variant", variant, "--optimizer", optimizer, "--steps", "5", device="cuda")
    assert done.code == 0, done.out + done.err
    assert done.last_line.startswith("DEMO OK version=5 checks=")
    assert done.report.settings["computes_on"] == "cuda"
    assert {step.transport for step in done.report.steps} == {"cuda_ipc"}
    assert done.report.steps[-1].loss < done.report.steps[0].loss - 1.0
    assert still_running(tmp_path) == []


def test_a_preset_of_a_gpu_only_peer_is_published(tmp_path: Path) -> None:
    done = run_demo(tmp_path, "--preset", "slime", "--steps", "5", device="cuda")
    assert done.code == 0, done.out + done.err
