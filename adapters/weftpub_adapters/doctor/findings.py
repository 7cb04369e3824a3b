"""One finding of the doctor: what was looked at, what is there, what was expected, and what to do."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Literal

__all__ = ["Finding", "Level", "worst"]

Level = Literal["ok", "warn", "fail"]
_ORDER: tuple[Level, ...] = ("ok", "warn", "fail")


@dataclass(frozen=True)
class Finding:
    """One line of the doctor.

    Attributes:
        name: what was looked at, such as "gpu 0" or "sglang".
        level: "ok", "warn" (works, or works in part) or "fail" (a run would end with an error, or wrong).
        found: what is there.
        expected: what would be right.
        remedy: what to do; empty where nothing has to be done.
    """

    name: str
    level: Level
    found: str
    expected: str
    remedy: str = ""

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


def worst(findings: Iterable[Finding]) -> Level:
    """The gravest level among findings; "ok" for none."""
    return max((finding.level for finding in findings), key=_ORDER.index, default="ok")
