"""The rule of mathematical answers: math-verify decides whether two expressions are equal.

Used inside worker processes only (`weftmoe.reward.worker`): comparing what a model wrote may take forever, or all
memory.
"""

import re
from typing import Any

from weftpub.errors import ConfigError

__all__ = ["LateAnswer", "answer_part", "load_verifier", "math_reward"]

# DAPO's prompt asks for a last line "Answer: ...", and its own reward looks at the last 300 characters.
_TAIL = 300
_ANSWER = re.compile(r"(?i)answer\s*:")


class LateAnswer(Exception):
    """Reading an answer, or comparing it, took longer than it may: nobody knows whether it is right."""


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
        seconds: math-verify's own limit for reading and for each comparison.

    Raises:
        LateAnswer: a limit passed before the answer was found to be right. math-verify itself takes it for a wrong one,
            and says so in its log only.
    """
    gold = _read(f"${ground_truth.strip().strip('$')}$", seconds)
    stated = answer_part(completion)
    answer = _read(stated, seconds)
    if not answer and stated:  # bare LaTeX, as after "Answer: \frac{1}{2}"
        answer = _read(f"${stated.strip().strip('$')}$", seconds)
    return float(_equal(gold, answer, seconds))


def _read(text: str, seconds: int) -> list[Any]:
    from math_verify.errors import TimeoutException

    parse, _ = load_verifier()
    try:
        found: list[Any] = parse(text, parsing_timeout=seconds, raise_on_error=True)
    except TimeoutException:
        raise LateAnswer(f"{text[:100]!r} was not read within {seconds} s") from None
    except Exception:  # what a model wrote may raise anything in a parser: it states no answer
        return []
    return found


def _equal(gold: list[Any], answer: list[Any], seconds: int) -> bool:
    """Whether any reading of the one equals any of the other."""
    from math_verify.errors import TimeoutException

    _, verify = load_verifier()
    late = False
    for one in gold:
        for other in answer:
            try:
                if verify(one, other, timeout_seconds=seconds, raise_on_error=True):
                    return True
            except TimeoutException:
                late = True
            except Exception:  # as above: not equal
                continue
    if late:
        raise LateAnswer(f"{str(answer[-1])[:100]!r} was not compared within {seconds} s")
    return False
