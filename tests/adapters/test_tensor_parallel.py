"""Tensor and expert parallel trainers over gloo, by the script that does the same on the GPUs of a host: two ranks that
split attention and experts, attached, beside unattached Megatron on the same gradients."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parents[1] / "gpu" / "eight_gpus.py"
DEADLINE_S = 300


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What both ranks wrote of Muon FP8 and of AdamW FP8."""
    out = tmp_path_factory.mktemp("ranks")
    configurations = "muon-fp8,adamw-fp8"
    command = [sys.executable, str(SCRIPT), "--out", str(out), "--tiny", "--only", "train"]
    run = subprocess.run(
        [*command, "--configurations", configurations],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        env={**os.environ, "PYTHONWARNINGS": "ignore"},
    )
    results = out / "eight_gpus.json"
    assert results.is_file(), run.stderr[-3000:]
    data: dict[str, Any] = json.loads(results.read_text(encoding="utf-8"))
    assert run.returncode == bool(data["failed"]), run.stderr[-3000:]
    return data


def test_split_attention_and_experts_train_as_unattached_megatron_does(found: dict[str, Any]) -> None:
    """Every check of both ranks: bytes, masters, norms, replicas, offload, and the update after close."""
    assert found["failed"] == []
    rows = found["sections"]["train"]["rows"]
    assert [(row["rank"], row["finished"]) for row in rows] == [(0, True), (1, True)]
    names = {name for row in rows for name in row["checks"]}
    assert all(row["checks"][name]["passed"] is True for row in rows for name in names)
    for needed in (
        "muon-fp8/zero BF16 expert storage",
        "muon-fp8/step 2/published bytes are those of the masters",
        "muon-fp8/step 2/Muon's masters equal stock Megatron's bit for bit",
        "muon-fp8/the update after close is the ordinary one",
        "adamw-fp8/step 2/AdamW's masters equal stock Megatron's within 2e-06",
        "adamw-fp8/replicated parameters are equal on all ranks",
    ):
        assert needed in names


def test_every_rank_speaks_of_its_own_experts(found: dict[str, Any]) -> None:
    """A check that looked at the first rank's experts everywhere would miss the others'."""
    check = "muon-fp8/step 2/published bytes are those of the masters"
    details = [row["checks"][check]["detail"] for row in found["sections"]["train"]["rows"]]
    assert ["experts 0 to 3" in details[0], "experts 4 to 7" in details[1]] == [True, True]
