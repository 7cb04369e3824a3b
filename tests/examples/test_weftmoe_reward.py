"""Rewards: the exact rule, the verifier's rule, and worker processes that hang, die or cannot start."""

import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from weftmoe.reward import Rewarder, RewardJob, RewardPool, exact_reward
from weftmoe.reward.math import LateAnswer, math_reward, stated_answer
from weftpub.errors import ConfigError


@pytest.mark.parametrize(
    ("completion", "truth", "reward"),
    [
        ("34", "34", 1.0),
        (" 34 ", "34", 1.0),
        ("035", "35", 0.0),
        ("3", "34", 0.0),
        ("", "34", 0.0),
        ("34 34", "34", 0.0),
    ],
)
def test_exact_rule(completion: str, truth: str, reward: float) -> None:
    assert exact_reward(completion, truth) == reward


def test_the_stated_answer_is_what_counts() -> None:
    assert stated_answer("Answer: 3\nNo.\nAnswer: 4\nDone: 5") == "$4$"
    assert stated_answer("Answer: see below. Answer: 4") == "$4$"
    assert stated_answer("the answer : x") == "$x$"
    assert stated_answer("**Answer:** so $4$ it is.") == "$4$"
    assert stated_answer("**Answer: 4.5.**") == "$4.5$"
    assert stated_answer("Answer: $a=1$, $b=2$") == "$a=1, b=2$"
    assert stated_answer("Answer: \n") == ""
    assert stated_answer("a" * 400 + "7") == "a" * 299 + "7"


# A worker for the pool's own behaviour: it understands a few words instead of mathematics.
WORKER = """
    import json, sys, time
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        word = job["completion"]
        if word == "hang":
            time.sleep(1000)
        if word == "die":
            sys.exit(3)
        answer = {"error": "ValueError: odd"} if word == "raise" else {"reward": float(word == job["ground_truth"])}
        if word == "late":
            answer = {"late": "not read within 1 s"}
        print(json.dumps(answer), flush=True)
"""


@pytest.fixture
def worker(tmp_path: Path) -> list[str]:
    path = tmp_path / "worker.py"
    path.write_text(textwrap.dedent(WORKER), encoding="utf-8")
    return [sys.executable, "-S", str(path)]


def test_a_hanging_expression_costs_one_zero(worker: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A completion of nested exponents kept a verifier busy for good, and the whole step with it."""
    monkeypatch.setattr("weftmoe.reward.pool._GRACE_S", -2.5)
    words = ["1", "hang", "1", "die", "raise", "1", "0", "hang", "1"]
    with RewardPool(2, seconds=1, command=worker) as pool:
        verdicts = pool.judge([(word, "1") for word in words])
        again = pool.judge([("1", "1")] * 4)
    outcomes = ["judged", "timeout", "judged", "died", "error", "judged", "judged", "timeout", "judged"]
    assert [verdict.outcome for verdict in verdicts] == outcomes
    assert [verdict.reward for verdict in verdicts] == [1.0, 0.0, 1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 1.0]
    assert all(verdict.reward == 1.0 for verdict in again), "workers that died were replaced"


def test_a_worker_that_says_it_was_late_is_a_timeout_and_goes_on(worker: list[str]) -> None:
    with RewardPool(1, seconds=1, command=worker) as pool:
        verdicts = pool.judge([("late", "1"), ("1", "1")])
    assert [(v.reward, v.outcome) for v in verdicts] == [(0.0, "timeout"), (1.0, "judged")]
    assert verdicts[0].detail == "not read within 1 s"


def test_a_worker_that_cannot_start_is_an_error(tmp_path: Path) -> None:
    missing = "import json; print(json.dumps({'missing': 'install math-verify'}))"
    with (
        RewardPool(1, command=[sys.executable, "-c", missing]) as pool,
        pytest.raises(ConfigError, match="math-verify"),
    ):
        pool.judge([("1", "1")])
    with (
        RewardPool(1, command=[sys.executable, "-c", ""]) as pool,
        pytest.raises(ConfigError, match="ended at its start"),
    ):
        pool.judge([("1", "1")])


def test_no_worker_outlives_the_pool(worker: list[str]) -> None:
    pool = RewardPool(1, seconds=1, command=worker)
    pool.judge([("1", "1")])
    held = pool._idle.get_nowait()
    assert held is not None
    pool._idle.put(held)
    pool.close()
    assert held._process.poll() is not None


def test_the_exact_rule_needs_no_process() -> None:
    with Rewarder(workers=1) as rewarder:
        rewards, outcomes = rewarder.judge([RewardJob("2", "2", "exact"), RewardJob("3", "2", "exact")])
        assert (rewards, outcomes) == ([1.0, 0.0], {"judged": 2})
        assert rewarder._pool is None


def test_the_verifier_judges_mathematics() -> None:
    pytest.importorskip("math_verify")
    cases = [
        ("so\nAnswer: 34", "34", 1.0),
        ("Answer: \\frac{1}{2}", "0.5", 1.0),
        ("Answer: $\\frac{2}{4}$", "\\frac{1}{2}", 1.0),
        ("thus \\boxed{35}", "34", 0.0),
        ("Answer: 1,000", "1000", 1.0),
        ("Answer: \\boxed{9^{9^{9^{9}}}}", "1", 0.0),
        ("", "1", 0.0),
        ("Answer:\n$34$", "34", 1.0),
        ("Answer: $34$\n\nI checked that $2+2=4$.", "34", 1.0),
        ("Answer: 34.\nThe problem asked for n with 3 digits", "34", 1.0),
        ("Answer: the number is $34$.", "34", 1.0),
        ("Answer: (1, 2)", "$(1, 2)$", 1.0),
        ("Answer: 1 2 3 4 5 6 7 8 9", "9", 0.0),  # a list of guesses
        ("Answer: $7$ or $9$", "9", 0.0),
        ("it is 35 or 34", "34", 1.0),
        ("Answer:", "1", 0.0),
    ]
    with Rewarder(workers=1, seconds=1) as rewarder:
        rewards, outcomes = rewarder.judge([RewardJob(completion, truth, "math") for completion, truth, _ in cases])
    assert rewards == [reward for _, _, reward in cases]
    assert sum(outcomes.values()) == len(cases)


@pytest.mark.parametrize("slow", ["parse", "verify"])
def test_a_limit_that_passes_inside_of_the_verifier_is_a_timeout(slow: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """math-verify takes an answer that it has not read, or not compared, in time for a wrong one. On a busy machine
    right answers got no reward, and the log counted them as judged.
    """
    verifier = pytest.importorskip("math_verify")
    late = pytest.importorskip("math_verify.errors").TimeoutException
    parse, verify = verifier.parse, verifier.verify

    def sleepy(*arguments: Any, raise_on_error: bool = False, **options: Any) -> Any:
        if slow == "parse" and "7" not in arguments[0]:
            return parse(*arguments, **options)
        if raise_on_error:
            raise late("Operation timed out!")
        return [] if slow == "parse" else False

    monkeypatch.setattr(
        "weftmoe.reward.math.load_verifier", lambda: (sleepy, verify) if slow == "parse" else (parse, sleepy)
    )
    with pytest.raises(LateAnswer, match="within 5 s"):
        math_reward("Answer: 7", "3", seconds=5)
    with pytest.raises(LateAnswer, match="within 5 s"):
        math_reward("Answer: 3", "7", seconds=5)
