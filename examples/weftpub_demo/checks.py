"""The demo's checks: each has a name and a meaning, is counted when it holds, and ends the run when it does not."""

from types import MappingProxyType

from weftpub.errors import WeftpubError
from weftpub_demo.report import Check

__all__ = ["MEANINGS", "CheckBook", "CheckError"]

# Name -> what has been shown every time it is counted.
MEANINGS = MappingProxyType(
    {
        "plain": "a receiver got the plan as plain data: neither AWEX nor Megatron is among its modules",
        "updated": "an optimizer's step changed the bytes of its masters",
        "poisoned": "a receiver dropped its weight memory, made it anew and filled it with NaN before a publish",
        "rebound": "a receiver's views pointed into its live parameters, which had moved since the last publish",
        "coverage": "every element of a receiver's live weights was rewritten: no poison is left",
        "checksum": "an entry of the manifest arrived with the 64-bit checksum that its sender computed",
        "sha256": "a tensor has the same sha256 where the trainer computes with it and where the engine serves it",
        "transpose": "a W^T in the store is exactly the transpose of its W, and its scales those of W",
        "masters": "the FP32 masters were not touched by a publish",
        "weights": "an expert matrix, dequantized by the engine's own code, is bit-equal to the trainer's",
        "outputs": "a layer computed from the engine's live weights is within the stated bound of the trainer's",
        "committed": "a receiver serves the version that was published, and both serve the same",
    }
)


class CheckError(WeftpubError):
    """A check of the demo did not hold."""


class CheckBook:
    """Counts the checks that held."""

    def __init__(self) -> None:
        self._passed: dict[str, int] = {}

    def passed(self, name: str, count: int = 1) -> None:
        """Count `count` checks of one kind as held; the kind must be listed in MEANINGS."""
        assert name in MEANINGS, name
        self._passed[name] = self._passed.get(name, 0) + count

    def require(self, name: str, holds: bool, found: str) -> None:
        """Count one check, or raise CheckError with what was found instead."""
        if not holds:
            raise CheckError(f"check {name!r} failed ({MEANINGS[name]}): {found}")
        self.passed(name)

    @property
    def total(self) -> int:
        """Checks that held so far."""
        return sum(self._passed.values())

    def listing(self) -> tuple[Check, ...]:
        """Every kind of check that was made, in the order of MEANINGS."""
        return tuple(
            Check(name=name, meaning=meaning, passed=self._passed[name])
            for name, meaning in MEANINGS.items()
            if name in self._passed
        )
