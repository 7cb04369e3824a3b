"""The demo's own checks: they count what held, and end the run on what did not."""

from typing import Any

import pytest
import torch
from rich.console import Console

from weftpub_adapters.megatron import TrainerProbe
from weftpub_demo.checks import MEANINGS, CheckBook, CheckError
from weftpub_demo.job import combined_sha256
from weftpub_demo.probe import BOUND, compare, probe_request, probe_tokens
from weftpub_demo.progress import Progress
from weftpub_demo.report import StepRecord

MATRICES = {f"layers.0.experts.{expert}.{fc}": f"{expert}{fc}" for expert in range(4) for fc in ("fc1", "fc2")}


def trainer() -> TrainerProbe:
    output = torch.linspace(-2.0, 2.0, 24).view(3, 8)
    return TrainerProbe(dict(MATRICES), output, torch.tensor([[0, 1]] * 3), torch.tensor([[0.5, 0.5]] * 3))


def answers(probe: TrainerProbe) -> list[dict[str, Any]]:
    """Two receivers with half of the experts and a part of the output each."""
    halves = [dict(list(MATRICES.items())[:4]), dict(list(MATRICES.items())[4:])]
    return [
        {"sha256": half, "output": (probe.output * share).tolist()}
        for half, share in zip(halves, (0.25, 0.75), strict=True)
    ]


def test_equal_layers_count_every_matrix_and_one_output() -> None:
    book = CheckBook()
    compare(0, trainer(), answers(trainer()), book)
    assert {check.name: check.passed for check in book.listing()} == {"weights": len(MATRICES) + 2, "outputs": 1}


def test_the_bound_is_on_the_sum_of_the_receivers() -> None:
    probe, book = trainer(), CheckBook()
    close, far = answers(probe), answers(probe)
    close[0]["output"][1][3] += 0.99 * BOUND * 2.0
    far[0]["output"][1][3] += 1.01 * BOUND * 2.0
    compare(0, probe, close, book)
    with pytest.raises(CheckError, match=r"'outputs' failed .* layer 0 differs by 3.156e-02, allowed is 3.125e-02"):
        compare(0, probe, far, book)


def test_an_output_that_is_no_number_is_out_of_bounds() -> None:
    found = answers(trainer())
    found[1]["output"][0][0] = float("nan")
    with pytest.raises(CheckError, match="'outputs' failed"):
        compare(0, trainer(), found, CheckBook())


@pytest.mark.parametrize("fault", ["differs", "missing", "unknown"])
def test_a_matrix_that_is_not_the_trainers_is_named(fault: str) -> None:
    found = answers(trainer())
    held = found[1]["sha256"]
    match fault:
        case "differs":
            held["layers.0.experts.3.fc1"] = "other"
        case "missing":
            del held["layers.0.experts.3.fc1"]
        case "unknown":
            held["layers.0.experts.9.fc1"] = "9fc1"
    name = r"layers\.0\.experts\.9\.fc1" if fault == "unknown" else r"layers\.0\.experts\.3\.fc1"
    with pytest.raises(CheckError, match=rf"1 of \d+ matrices of layer 0 differ: \['{name}'\]"):
        compare(0, trainer(), found, CheckBook())


def test_an_expert_on_both_receivers_is_refused() -> None:
    found = answers(trainer())
    found[1]["sha256"] |= found[0]["sha256"]
    with pytest.raises(CheckError, match="two receivers hold"):
        compare(0, trainer(), found, CheckBook())


def test_receivers_get_the_tokens_and_the_routing_of_the_trainer() -> None:
    tokens = probe_tokens(8, seed=3)
    assert torch.equal(tokens, probe_tokens(8, seed=3))
    assert torch.equal(tokens, tokens.bfloat16().float())
    request = probe_request(1, tokens, trainer())
    assert torch.equal(torch.tensor(request["hidden"]), tokens)
    assert (request["layer"], request["expert_ids"]) == (1, [[0, 1]] * 3)


def test_a_failed_check_says_what_it_would_have_shown() -> None:
    book = CheckBook()
    book.require("coverage", True, "")
    with pytest.raises(CheckError, match=r"'coverage' failed \(every element .*\): 3 elements are still NaN"):
        book.require("coverage", False, "3 elements are still NaN")
    assert book.total == 1


def test_checks_are_listed_in_the_order_of_their_meanings() -> None:
    book = CheckBook()
    for name in reversed(MEANINGS):
        book.passed(name, 2)
    assert [(check.name, check.passed) for check in book.listing()] == [(name, 2) for name in MEANINGS]


def test_the_combined_digest_depends_on_names_and_digests_not_on_order() -> None:
    first = combined_sha256({"a": "1", "b": "2"})
    assert first == combined_sha256({"b": "2", "a": "1"})
    assert len({first, combined_sha256({"a": "2", "b": "1"}), combined_sha256({"a": "1"})}) == 3


@pytest.mark.parametrize("terminal", [True, False])
def test_progress_shows_phases_and_steps(terminal: bool) -> None:
    console = Console(force_terminal=terminal, record=True, width=100, file=open("/dev/null", "w"))  # noqa: SIM115
    record = StepRecord(
        step=1,
        loss=5.5,
        changed=0.5,
        publish_ms=9.5,
        version=1,
        sha256="0" * 64,
        train_ms=1,
        update_ms=1,
        phases_ms={},
        bytes=1,
        transport="files",
    )
    with Progress("fp8, muon", 8, console) as progress:
        progress.phase("planning")
        progress.step(record)
        if terminal:
            console.print(progress._render())
    shown = console.export_text()
    assert "planning" in shown
    assert "5.5" in shown
    assert "1/8" in shown
