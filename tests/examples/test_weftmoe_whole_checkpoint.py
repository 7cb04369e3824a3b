"""A checkpoint goes through Megatron's ranks and comes out of the gather as it was: what the baseline's engine gets,
from real shards of tensor and expert parallel ranks. And a baseline's own checkpoints.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from whole_checkpoint_ranks import CASES, RESUMED

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    script = Path(__file__).with_name("whole_checkpoint_ranks.py")
    done = subprocess.run([sys.executable, str(script), str(folder)], capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-6000:]
    return folder


@pytest.mark.parametrize("name", [name for name in CASES if name != RESUMED])
def test_every_rank_gathers_the_checkpoint(results: Path, name: str) -> None:
    """Rows and columns of tensor-parallel ranks, experts of expert-parallel ones, each from one of its holders; a
    tied head travels too, because SGLang's Qwen3-MoE has one of its own."""
    case = CASES[name]
    expected: dict[str, str] = json.loads((results / f"{name}.json").read_text(encoding="utf-8"))
    if case.tied:
        expected["lm_head.weight"] = expected["model.embed_tokens.weight"]
    assert len(set(expected.values())) >= 40, "tensors can be told from each other"
    for rank in range(case.world):
        found: dict[str, str] = json.loads((results / f"{name}.{rank}.json").read_text(encoding="utf-8"))
        del found["memory"]
        assert found.keys() == expected.keys()
        assert [key for key in expected if found[key] != expected[key]] == []


def test_a_rank_never_holds_more_than_a_bucket_and_a_matrix_on_top(results: Path) -> None:
    """Query, key and value of all layers were made before the first bucket was filled, and stayed until the last one: a
    GPU that had room for the bucket lacked a gigabyte."""
    for rank in range(CASES["dp2-ep2"].world):
        memory = json.loads(json.loads((results / f"dp2-ep2.{rank}.json").read_text(encoding="utf-8"))["memory"])
        assert len(memory["made"]) >= 4
        assert memory["peak"] <= memory["bucket"] + max(memory["made"])


def test_a_trainer_makes_the_tensors_of_a_native_update_one_by_one(results: Path) -> None:
    memory = json.loads(json.loads((results / f"{RESUMED}.0.json").read_text(encoding="utf-8"))["memory"])
    assert memory["peak"] <= 2 * memory["largest"] < memory["all"] / 4


def test_torchs_own_adamw_goes_on_from_a_checkpoint(results: Path) -> None:
    """Where there is no TransformerEngine, Megatron keeps torch's AdamW in its DistributedOptimizer: it could be saved,
    and no start could read what was saved, `assert len(steps) == 1`."""
    for rank in range(CASES[RESUMED].world):
        differing = json.loads((results / f"{RESUMED}.{rank}.json").read_text(encoding="utf-8"))
        del differing["memory"]
        assert differing == {}
