"""The note in a made model's directory: what was asked for, and how the warm-up went. A model that has the right note
is not made again.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from weftmoe.schema import Smoke

__all__ = ["Warmup", "read_note", "write_note"]

_NAME = "warmup.json"
_PLAIN = "Qwen3MoeForCausalLM"


@dataclass(frozen=True)
class Warmup:
    """What the warm-up did.

    Attributes:
        steps: supervised steps.
        probability: of a right answer, mean over problems, after them.
        loss: of the last step, mean per answer token.
        seconds: wall time.
    """

    steps: int
    probability: float
    loss: float
    seconds: float


def read_note(directory: Path, smoke: Smoke, *, seed: int, tokens: int, architecture: str = _PLAIN) -> Warmup | None:
    """The warm-up of the model there; None if there is none, or one that was made otherwise."""
    note = directory / _NAME
    if not note.is_file():
        return None
    try:
        found = json.loads(note.read_text(encoding="utf-8"))
    except json.JSONDecodeError:  # the disk was full
        return None
    return Warmup(**found["warmup"]) if found["wanted"] == _wanted(smoke, seed, tokens, architecture) else None


def write_note(
    directory: Path, smoke: Smoke, warmup: Warmup, *, seed: int, tokens: int, architecture: str = _PLAIN
) -> None:
    """Say that the model there is whole."""
    text = json.dumps({"wanted": _wanted(smoke, seed, tokens, architecture), "warmup": asdict(warmup)}, indent=1)
    (directory / _NAME).write_text(text, encoding="utf-8")


def _wanted(smoke: Smoke, seed: int, tokens: int, architecture: str) -> dict[str, object]:
    return {"smoke": smoke.model_dump(mode="json"), "seed": seed, "tokens": tokens, "architecture": architecture}
