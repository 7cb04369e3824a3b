"""Which generation each part of each matrix carries.

A trainer once stepped, quantized W, and went on computing gradients with the previous step's W^T: nothing knew that the
two belonged together. Here every part is booked when its bytes are written, and reading asks the book.
"""

from collections.abc import Sequence

import numpy as np

from weftpub.errors import GenerationError
from weftpub.masters import ExpertMatrix

__all__ = ["PARTS", "Ledger"]

PARTS = ("w", "scale", "wt", "scale_t")
_NOTHING = -1


class Ledger:
    """Book of ``[parts, matrices]`` generations; -1 where no known bytes are."""

    def __init__(self, matrices: Sequence[ExpertMatrix]) -> None:
        self._matrices = matrices
        self._book = np.full((len(PARTS), len(matrices)), _NOTHING, dtype=np.int64)

    def book(self, parts: Sequence[str], matrices: slice, generation: int) -> None:
        """The bytes of `parts` of `matrices` are of `generation` now."""
        self._book[[PARTS.index(part) for part in parts], matrices] = generation

    def forget(self, parts: Sequence[str], matrices: slice) -> None:
        """The bytes of `parts` of `matrices` are undefined now."""
        self.book(parts, matrices, _NOTHING)

    def require(self, parts: Sequence[str], matrices: slice, generation: int, remedy: str) -> None:
        """GenerationError, naming the first part that does not carry `generation`."""
        rows = [PARTS.index(part) for part in parts]
        behind = self._book[rows, matrices] != generation
        if not behind.any():
            return
        index = int(behind.any(axis=0).argmax())
        row = int(behind[:, index].argmax())
        found = int(self._book[rows, matrices][row, index])
        name = self._matrices[range(len(self._matrices))[matrices][index]].name
        held = "undefined bytes" if found == _NOTHING else f"generation {found}"
        raise GenerationError(
            f"{name}: {parts[row]} holds {held}, expected generation {generation} like the rest of the store "
            f"({int(behind.any(axis=0).sum())} matrices are behind); {remedy}"
        )

    def behind(self, parts: Sequence[str], generation: int) -> list[ExpertMatrix]:
        """Matrices of which some part does not carry `generation`."""
        rows = [PARTS.index(part) for part in parts]
        return [self._matrices[int(i)] for i in np.flatnonzero((self._book[rows] != generation).any(axis=0))]

    def generation(self, part: str, index: int) -> int | None:
        """What one part of one matrix carries; None for undefined bytes."""
        found = int(self._book[PARTS.index(part), index])
        return None if found == _NOTHING else found
