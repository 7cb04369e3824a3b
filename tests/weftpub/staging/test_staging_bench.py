"""The benchmark's own check of results, which has to pass before it measures."""

import json
from pathlib import Path

import pytest
import torch

from weftpub.optim import StagedMuon
from weftpub.staging import bench


def test_check_only_runs_on_a_cpu_and_writes_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "bench.json"
    command = ["--check-only", "--device", "cpu", "--shape", "64x96", "--slots", "1", "2", "--out", str(out)]
    assert bench.main(command) == 0
    result = json.loads(out.read_text())
    assert result["shape"] == [64, 96]
    assert len(result["checks"]) == 4
    assert "muon, 2 slots, 5 matrices, 3 steps: bytes equal" in capsys.readouterr().out


def test_a_wrong_update_stops_the_benchmark(monkeypatch: pytest.MonkeyPatch) -> None:
    right, calls = StagedMuon.run_one, []

    def wrong_once(self, staged, gradient, settings) -> None:
        right(self, staged, gradient, settings)
        calls.append(staged.name)
        if len(calls) == 2:
            staged.weight.view(torch.int32).flatten()[5] ^= 1 << 22

    monkeypatch.setattr(StagedMuon, "run_one", wrong_once)
    with pytest.raises(RuntimeError, match=r"muon, 1 slots: weight of matrix.1 differs in"):
        bench.check_results(torch.device("cpu"), (16, 16), [1])


def test_measuring_without_a_gpu_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["--device", "cpu"]) == 1
    assert "needs a CUDA GPU" in capsys.readouterr().err


@pytest.mark.gpu
def test_gpu_measurement_fills_every_row(tmp_path: Path) -> None:
    out = tmp_path / "bench.json"
    command = ["--shape", "256x512", "--matrices", "8", "--slots", "2", "--repeat", "1", "--out", str(out)]
    assert bench.main(command) == 0
    result = json.loads(out.read_text())
    assert [(row["load"], row["slots"]) for row in result["steps"]] == [("muon", 2), ("adamw", 2)]
    assert set(result["ceilings_gb_s"]) == {"in", "out", "duplex"}
    assert result["gpu"]
