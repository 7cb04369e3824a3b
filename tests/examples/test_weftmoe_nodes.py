"""Several nodes on one machine, each with its ranks and a sampler of its own: one version on all of them, or on none;
the bytes of a run on one node; a node's fault is everybody's error.
"""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from node_ranks import CASES

from weftmoe.telemetry import read_log
from weftmoe.telemetry.log import LoggedRun

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
WORKER = Path(__file__).with_name("node_ranks.py")
# One layer of four experts: embedding and head, q, k, v and o, three matrices an expert, router, four norms of the
# layer and one at the end.
TENSORS = 2 + 4 + 4 * 3 + 1 + 4 + 1
ELEMENTS = 2 * 512 * 128 + 2 * 128 * 128 + 2 * 64 * 128 + 4 * 3 * 128 * 128 + 4 * 128 + 2 * 128 + 2 * 32 + 128


@dataclass(frozen=True)
class Runs:
    """What all cases left."""

    folder: Path

    def ranks(self, name: str) -> list[dict[str, Any]]:
        """What each rank returned or raised."""
        paths = [self.folder / f"{name}.{rank}.json" for rank in range(CASES[name].world)]
        return [json.loads(path.read_text(encoding="utf-8")) for path in paths]

    def log(self, name: str) -> LoggedRun:
        return read_log(self.folder / name)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    folder = tmp_path_factory.mktemp("nodes")
    folders = [str(ROOT / part) for part in ("", "kernels", "adapters", "examples")]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(folders)
    command, said = [sys.executable, str(WORKER), str(folder)], folder / "output.txt"
    with said.open("wb") as output:  # a pipe would be open for as long as anything that was started there lives
        done = subprocess.run(command, env=environment, stdout=output, stderr=output, timeout=300, check=False)
    assert done.returncode == 0, said.read_text(encoding="utf-8", errors="replace")[-6000:]
    return Runs(folder)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.fails is None and case.dies is None])
def test_all_ranks_end_with_one_version(runs: Runs, name: str) -> None:
    steps = CASES[name].steps
    assert runs.ranks(name) == [{"steps": steps, "version": steps}] * CASES[name].world


def test_two_nodes_serve_the_bytes_of_one(runs: Runs) -> None:
    """The same two ranks, all experts on each: on one node with one engine, and on two with an engine each, where the
    run was ended after its first step and resumed, with experts in memory that trainer and engine of a node both map.
    Each engine received and verified all bytes.
    """
    one, two = runs.log("one-node").steps, runs.log("two-nodes").steps
    assert [step.step for step in two] == [step.step for step in one] == [1, 2]
    assert [header.resumed_from for header in runs.log("two-nodes").headers] == [None, 1]
    for here, there in zip(one, two, strict=True):
        assert there.byte_check.sha256 == here.byte_check.sha256 is not None
        assert there.byte_check.pieces == 2 * here.byte_check.pieces
        assert (there.reward, there.grad_norm, there.counters) == (here.reward, here.grad_norm, here.counters)
        assert here.grad_norm > 0
        assert (there.served_version, there.published_version) == (here.step - 1, here.step)
    assert len({step.byte_check.sha256 for step in two}) == 2, "each step serves other bytes"
    # Three matrices of 128 x 128 codes an expert, and an FP32 scale each; on each node.
    assert [step.byte_check.in_place for step in two] == [0, 2 * 4 * 3 * (128 * 128 + 4)]


def test_experts_of_all_nodes_learn_from_the_tokens_of_all(runs: Runs) -> None:
    """Sum and mean over the replicas of an expert are not what a publish compares: the norm of the gradients is that of
    unattached Megatron, with experts dealt out over two ranks of a node, and near that of whole experts on each rank.
    """
    by_two = runs.log("two-by-two").steps[0]
    assert by_two.grad_norm == pytest.approx(runs.log("baseline").steps[0].grad_norm, rel=1e-6)
    assert by_two.grad_norm == pytest.approx(runs.log("one-node").steps[0].grad_norm, rel=2e-3)
    assert runs.log("adamw").steps[0].grad_norm == pytest.approx(by_two.grad_norm, rel=2e-3)


@pytest.mark.parametrize("name", ["two-nodes", "adamw", "two-by-two", "baseline"])
def test_engines_sample_what_the_trainer_computes(runs: Runs, name: str) -> None:
    for step in runs.log(name).steps:
        assert step.counters.completions == 16
        assert 0 < step.before["difference_abs_mean"] < 0.02


def test_a_baselines_nodes_gather_and_load_the_same_whole_tensors(runs: Runs) -> None:
    """All bytes were compared: each rank's own with what it gathered, the buckets of a node's ranks and of all nodes,
    and SGLang's parameters with what was loaded.
    """
    steps = runs.log("baseline").steps
    for step in steps:
        check = step.byte_check
        assert (check.method, check.matched, check.pieces) == ("checksum", True, 2 * TENSORS)
        assert check.bytes == 2 * 2 * ELEMENTS
        assert step.after is not None
        assert step.after["difference_abs_mean"] > 5 * step.before["difference_abs_mean"]
    assert [path.name for path in (runs.folder / "baseline" / "checkpoints").iterdir()] == ["step-000002"]


def test_no_node_serves_what_one_could_not_verify(runs: Runs) -> None:
    first, second = runs.ranks("fails")
    for rank in (first, second):
        assert "sampler-node-1 receiver rank 1" in rank["error"]
        assert "this node's engine has no memory for it" in rank["error"]
    standing = " ".join(first["notes"])
    assert "engine sampler-node-0 is torn" in standing
    assert "engine sampler-node-1 is torn" in standing
    (record,) = (runs.folder / "fails" / "engine-node-0").glob("committed-*.json")
    assert json.loads(record.read_text(encoding="utf-8"))["version"] == 0
    assert not runs.log("fails").steps


def test_an_engine_that_dies_in_a_rollout_is_everybodys_error(runs: Runs) -> None:
    first, second = runs.ranks("dies")
    assert first["error"].startswith("ChannelError: sender rank 1: PeerError: ")
    assert second["error"].startswith("PeerError: ")
    for rank in (first, second):
        assert "the torch sampler-node-1" in rank["error"]
        assert "during 'generate'" in rank["error"]


def test_each_node_has_a_folder_of_its_own(runs: Runs) -> None:
    found = sorted(path.name for path in (runs.folder / "two-nodes").glob("engine*"))
    assert found == ["engine-node-0", "engine-node-1"]
    assert sorted(path.name for path in (runs.folder / "one-node").glob("engine*")) == ["engine"]
