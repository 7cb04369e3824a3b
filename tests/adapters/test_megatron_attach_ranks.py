"""Two ranks share the experts over gloo: global expert ids, one norm, and an error on one rank that stops both."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

WORKER = Path(__file__).with_name("attach_ranks.py")
DEADLINE_S = 400


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Both ranks' findings; the output of a failed one is the failure's text."""
    directory = tmp_path_factory.mktemp("ranks")
    outputs = [directory / f"{rank}.json" for rank in range(2)]
    processes = [
        subprocess.Popen(
            [sys.executable, str(WORKER), str(rank), "2", str(directory / "rendezvous"), str(outputs[rank])],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        texts = [process.communicate(timeout=DEADLINE_S)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, text in zip(processes, texts, strict=True):
        assert process.returncode == 0, text[-4000:]
    return [json.loads(output.read_text()) for output in outputs]


@pytest.mark.parametrize("optimizer", ["muon", "adam"])
def test_two_ranks_train_and_publish_their_own_experts(ranks: list[dict[str, Any]], optimizer: str) -> None:
    """Ranks that advertised local ids 0 and 1 updated experts 0 and 1 twice, and 2 and 3 never."""
    ranks = [rank[optimizer] for rank in ranks]
    assert [rank["experts"] for rank in ranks] == [["0", "1"], ["2", "3"]]
    assert not set(ranks[0]["sha256"]) & set(ranks[1]["sha256"])
    assert all(rank["storage"] == 0 for rank in ranks)
    for variant in ("None", "bf16", "fp8"):
        assert ranks[0][variant]["steps"] == ranks[1][variant]["steps"]
    plain, staged = ranks[0]["None"]["steps"], ranks[0]["bf16"]["steps"]
    if optimizer == "muon":
        assert staged == plain
    else:
        assert staged[0] == plain[0]
        assert [s for step in staged for s in step] == pytest.approx([s for step in plain for s in step], rel=1e-6)
    losses = [step[0] for step in ranks[0]["fp8"]["steps"]]
    assert losses == sorted(losses, reverse=True)
    assert losses == pytest.approx([step[0] for step in plain], rel=5e-3)
    assert "row 0, column 0" in ranks[1]["nan"]
    assert re.search(r"checking gradients failed on rank 1: .*row 0, column 0.* Nothing was changed", ranks[0]["nan"])
    assert all(rank["after_nan"] for rank in ranks)


@pytest.mark.parametrize("optimizer", ["muon", "adam"])
@pytest.mark.parametrize(
    ("fault", "own", "told", "torn"),
    [
        ("gradient", "StateError", "NonFiniteGradientError", False),
        ("begin", "ArithmeticError", "StateError", False),
        ("quantizer", "ArithmeticError", "TornError", True),
        ("master", "NonFiniteError", "TornError", True),
        ("stall", "ArithmeticError", "TornError", False),
    ],
)
def test_an_error_of_one_rank_is_raised_on_all_with_its_reason(
    ranks: list[dict[str, Any]], optimizer: str, fault: str, own: str, told: str, torn: bool
) -> None:
    """A trainer rank that found NaN in a master raised alone: the others had sealed the step, went on to the publish,
    and said two hours later that a rank had not come. One whose quantizer raised left them in Megatron's exchange of
    the other weights.
    """
    there, here = (rank[optimizer]["faults"][fault] for rank in ranks)
    assert (here["kind"], there["kind"]) == (own, told)
    assert "rank 1: " + own in there["text"]
    assert here["text"] in there["text"]
    for rank in (there, here):
        if torn:
            assert all(rank["torn"])
            assert (rank["state"], rank["generation"]) == ("torn", None)
        else:
            assert not any(rank["torn"])
            assert (rank["state"], rank["generation"]) == ("sealed", 2 if fault == "stall" else 1)
