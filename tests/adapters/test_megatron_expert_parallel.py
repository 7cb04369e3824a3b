"""Two expert-parallel trainer ranks over gloo against one rank that holds everything."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from checkpoints import write_checkpoint
from layouts import BASE
from safetensors.torch import load_file

from weftpub.plan import Plan, check_plan

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("expert-parallel")
    write_checkpoint(root / "checkpoint", BASE)
    worker = Path(__file__).with_name("expert_parallel_worker.py")
    run = subprocess.run(
        [sys.executable, str(worker), str(root / "checkpoint"), str(root)],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert run.returncode == 0, run.stderr[-6000:]
    return root


def report(results: Path, name: str) -> dict[str, Any]:
    return json.loads((results / name / "report.json").read_text())


def test_ranks_hold_their_own_global_experts(results: Path) -> None:
    assert report(results, "rank0")["experts"] == [0, 1, 2, 3]
    assert report(results, "rank1")["experts"] == [4, 5, 6, 7]
    assert report(results, "rank1")["probe"][0] == "layers.0.experts.4.fc1"


def test_gradients_are_those_of_one_rank(results: Path) -> None:
    single = load_file(results / "single" / "gradients.safetensors")
    ranks = [load_file(results / name / "gradients.safetensors") for name in ("rank0", "rank1")]
    losses = [report(results, name)["loss"] for name in ("rank0", "rank1")]
    assert sum(losses) / 2 == pytest.approx(report(results, "single")["loss"], rel=1e-3)
    assert ranks[0].keys() | ranks[1].keys() == single.keys()
    for rank in ranks:
        for name, gradient in rank.items():
            expected = single[name]
            assert (gradient - expected).norm() <= 0.03 * expected.norm() + 1e-6, name


def test_one_global_norm_counts_dense_parameters_once(results: Path) -> None:
    norms = {name: report(results, name)["norm"] for name in ("rank0", "rank1", "single")}
    assert norms["rank0"] == norms["rank1"]
    assert norms["rank0"] == pytest.approx(norms["single"], rel=0.01)
    assert [report(results, name)["generation"] for name in norms] == [1, 1, 1]


def test_a_bad_gradient_on_one_rank_stops_both(results: Path) -> None:
    """One rank raised and the other went on into its collective, where it waited for hours."""
    assert "at row 0, column 0" in report(results, "rank1")["refusal"]
    assert "1 other rank(s) found NaN or Inf" in report(results, "rank0")["refusal"]
    assert report(results, "rank0")["generation after refusal"] == 0


def test_both_ranks_plan_alike_and_each_sends_what_it_holds(results: Path) -> None:
    plans = [Plan.from_json(report(results, name)["plan"]) for name in ("rank0", "rank1")]
    assert plans[0].digest == plans[1].digest
    plan = plans[0]
    check_plan(plan)
    assert plan.senders == (0, 1)
    for move in plan.moves:
        if ".experts." in move.name:
            assert move.send_rank == int(move.name.split(".experts.")[1].split(".")[0]) // 4
    written = sum(move.nbytes for move in plan.moves)
    assert written == sum(destination.shard.nbytes for destination in plan.destinations)
    dense = {move.send_rank for move in plan.moves if move.name == "model.layers.0.self_attn.q_norm.weight"}
    assert dense == {0, 1}, "replicas share the work"
    for rank, name in enumerate(("rank0", "rank1")):
        sources = report(results, name)["sources"]
        held = {shard.name: list(shard.shape) for shard in plan.sources if shard.rank == rank}
        assert sources == held


def test_the_single_rank_plans_the_same_destinations(results: Path) -> None:
    single = Plan.from_json(report(results, "single")["plan"])
    double = Plan.from_json(report(results, "rank0")["plan"])
    assert single.destinations == double.destinations
    assert len(single.moves) == len(double.moves)
