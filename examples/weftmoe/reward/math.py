"""The rule of mathematical answers: math-verify decides whether two expressions are equal.

Used inside worker processes only (`weftmoe.reward.worker`): comparing what a model wrote may take forever, or all
memory.
"""

import re
from typing import Any

from weftpub.errors import ConfigError

__all__ = ["answer_part", "load_verifier", "math_reward"]

# DAPO's prompt asks for a last line "Answer: ...", and its own reward looks at the last 300 characters.
_TAIL = 300
_ANSWER = re.compile(r"(?i)answer\s*:")


def load_verifier() -> tuple[Any, Any]:
    """math-verify's `parse` and `verify`.

    Raises:
        ConfigError: it is not installed, or its LaTeX parser is not.
    """
    try:
        from math_verify import parse, verify
    except ImportError as error:
        raise ConfigError(
            f"judging mathematical answers needs math-verify ({error}); install 'math-verify[antlr4_13_2]'"
        ) from None
    return parse, verify


def answer_part(completion: str) -> str:
    """The part of a completion that states its answer: after the last "Answer:", else its last 300 characters."""
    found = list(_ANSWER.finditer(completion))
    if found:
        return completion[found[-1].end() :].strip()
    return completion[-_TAIL:]


def math_reward(completion: str, ground_truth: str, *, seconds: int) -> float:
    """1.0 if the stated answer equals the ground truth, else 0.0.

    Args:
        completion: the model's text.
        ground_truth: an expression or number, with or without dollar signs.
        seconds: math-verify's own limit for reading and for comparing.
    """
    parse, verify = load_verifier()
    gold = parse(f"${ground_truth.strip().strip('$')}$", parsing_timeout=seconds)
    stated = answer_part(completion)
    answer = parse(stated, parsing_timeout=seconds)
    if not answer and stated:  # bare LaTeX, as after "Answer: \frac{1}{2}"
        answer = parse(f"${stated.strip().strip('$')}$", parsing_timeout=seconds)
    return float(bool(gold) and bool(answer) and verify(gold, answer, timeout_seconds=seconds))
