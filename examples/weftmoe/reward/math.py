"""The rule of mathematical answers: math-verify decides whether two expressions are equal.

Used inside worker processes only (`weftmoe.reward.worker`): comparing what a model wrote may take forever, or all
memory.
"""

import re
from typing import Any

from weftpub.errors import ConfigError

__all__ = ["LateAnswer", "load_verifier", "math_reward", "stated_answer"]

# DAPO's prompt asks for a last line "Answer: ...". Its own reward (verl, math_dapo.py) looks at the last 300 characters
# and takes the line that follows the last "Answer:".
_TAIL = 300
_ANSWER = re.compile(r"(?i)answer\s*:")
_DOLLARS = re.compile(r"\$+([^$]+)\$+")


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


def stated_answer(completion: str) -> str:
    """What a completion states as its answer, in the form that math-verify reads.

    The line after the last "Answer:" is one expression: its only formula, or all of it. Read as text it would be the
    last number on it, and a list of all numbers right for the last. Without "Answer:" it is the last number or formula
    in the last 300 characters.
    """
    found = list(_ANSWER.finditer(completion))
    if not found:
        return completion[-_TAIL:]
    line = completion[found[-1].end() :].lstrip(" \t\r\n*").partition("\n")[0]
    formulas = _DOLLARS.findall(line)
    expression = formulas[0] if len(formulas) == 1 else line.replace("$", "")
    expression = expression.strip(" \t\r*.")
    return f"${expression}$" if expression else ""


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
    return float(_equal(gold, _read(stated_answer(completion), seconds), seconds))


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
