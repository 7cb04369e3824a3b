"""The smoke script's own checks can fail."""

import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import weftmoe_smoke as smoke

from weftmoe.grpo import PromptSums, kl_covariance
from weftmoe.telemetry import KlByPrompt


class Noted:
    """Stands for the script's report."""

    def __init__(self) -> None:
        self.verdicts: dict[str, str] = {}
        self.details: dict[str, Any] = {}

    def check(self, name: str, passed: bool, detail: Any) -> None:
        self.judge(name, "ok" if passed else "FAIL", detail)

    def judge(self, name: str, verdict: str, detail: Any) -> None:
        self.verdicts[name], self.details[name] = verdict, detail


def ended(*steps: Any) -> Any:
    return SimpleNamespace(log=SimpleNamespace(steps=steps))


def step(number: int, **changes: Any) -> Any:
    fields: dict[str, Any] = {
        "before": {"kl": 0.1 + 0.2, "loss": math.nan},
        "after": None,
        "by_prompt": KlByPrompt(kl=(0.25, 0.5), tokens=(3, 4)),
        "grad_norm": 1.5,
        "reward": 0.5,
        "learning_rate": 1e-4,
    }
    return SimpleNamespace(step=number, **fields | changes)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({}, None),
        ({"before": {"kl": math.nextafter(0.1 + 0.2, 1), "loss": math.nan}}, "step 2: before kl"),
        ({"by_prompt": KlByPrompt(kl=(0.25, math.nextafter(0.5, 1)), tokens=(3, 4))}, "step 2: kl by prompt"),
        ({"grad_norm": math.nextafter(1.5, 2)}, "step 2: grad_norm"),
    ],
)
def test_one_bit_of_a_resumed_step_is_enough(changes: dict[str, Any], named: str | None) -> None:
    """Only the weights' sha256 was compared: a statistic that replays otherwise was never looked at on a GPU."""
    report: Any = Noted()
    unbroken, resumed = ended(step(1), step(2)), ended(step(1), step(2, **changes))
    smoke._check_same_numbers(report, "x", unbroken, resumed, 2)
    assert report.verdicts == {"x": "ok" if named is None else "FAIL"}
    assert (named or "none") in report.details["x"]
    smoke._check_same_numbers(report, "short", unbroken, ended(step(1)), 2)
    assert report.verdicts["short"] == "FAIL"


def test_two_steps_vary_together_over_their_prompts() -> None:
    first, second = KlByPrompt(kl=(0.0, 4.0), tokens=(1, 3)), KlByPrompt(kl=(1.0, 7.0), tokens=(2, 2))
    found = smoke._both_steps(ended(step(1, by_prompt=first), step(2, by_prompt=second)))
    sums = [[PromptSums(*pair) for pair in zip(one.kl, one.tokens, strict=True)] for one in (first, second)]
    assert found == {"prompts": 2, "kl_covariance": kl_covariance(*sums)}
    assert smoke._both_steps(ended(step(1, by_prompt=first)))["kl_covariance"] is None


def test_as_many_prompts_as_the_arithmetic_has() -> None:
    from weftmoe.data import arithmetic_rows

    rows = list(arithmetic_rows(smoke.KL_PROMPTS, seed=1))
    assert len({row["prompt"][0]["content"] for row in rows}) == smoke.KL_PROMPTS
    assert min(smoke.KL_COMPLETIONS.values()) >= 2, "a group needs two"
