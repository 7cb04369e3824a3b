"""Where the first NaN or Inf of a run of matrices lies: noted on the device by the quantizer, read by the host when
it likes.

The record is one int64 on the device, the smallest key seen: ``4 * (base + row * N + column) + kind``. Each noted
launch gets a base that no later launch shares, so a key names the launch, the matrix and the element, and noting
costs the host no wait.
"""

import bisect
import math
from collections.abc import Sequence

import torch

from .errors import NonFiniteError, ShapeError

__all__ = ["CLEAN", "NonFiniteMonitor", "kind_of"]

CLEAN = 2**63 - 1
_KINDS = (math.nan, math.inf, -math.inf)


def kind_of(value: float) -> int:
    """0 NaN, 1 +Inf, 2 -Inf: the low bits of a key."""
    return 0 if math.isnan(value) else 1 if value > 0 else 2


class NonFiniteMonitor:
    """Notes the first non-finite element of every matrix quantized under it; ``raise_if_set`` tells.

    ``names`` name the matrices in the order in which they are noted; a name given to ``note`` (or to quantize_into)
    goes before them, and a matrix with neither is known by its number.
    """

    def __init__(self, device: torch.device | str, names: Sequence[str] | None = None) -> None:
        self.record = torch.full((1,), CLEAN, dtype=torch.int64, device=device)
        self.index = self.record.get_device()
        self._names = list(names or ())
        self._launches: list[
            tuple[int, int, int, int, str | Sequence[str] | None]
        ] = []  # first matrix, count, M, N, name(s)
        self._elements = self._matrices = 0

    @property
    def device(self) -> torch.device:
        return self.record.device

    def note(self, shape: torch.Size | tuple[int, ...], name: str | Sequence[str] | None = None) -> int:
        """Announce a launch over matrices ``[..., M, N]``; returns its base for keys. ``name``: one, or one per
        matrix."""
        return self.add(math.prod(shape[:-2]), shape[-2], shape[-1], name)

    def add(self, count: int, rows: int, columns: int, name: str | Sequence[str] | None) -> int:
        """``note`` for ``count`` matrices [rows, columns]."""
        if name is not None and type(name) is not str and len(name) != count:
            raise ShapeError(f"{len(name)} names for {count} matrices [{rows}, {columns}]")
        base = self._elements
        self._launches.append((base, self._matrices, rows, columns, count, name))
        self._elements = base + count * rows * columns
        self._matrices += count
        return base

    def note_host(self, base: int, matrices: torch.Tensor) -> None:
        """Look for non-finite elements in ``[..., M, N]`` with torch, and record the first one under this base."""
        bad = ~torch.isfinite(matrices).reshape(-1)
        if bad.any():
            index = int(bad.to(torch.uint8).argmax())
            key = 4 * (base + index) + kind_of(matrices.reshape(-1)[index].item())
            self.record.clamp_(max=key)

    def raise_if_set(self) -> None:
        """Raise NonFiniteError for the first non-finite element noted so far; on a GPU this waits for the current
        stream."""
        key = int(self.record.item())
        if key == CLEAN:
            return
        index, kind = divmod(key, 4)
        place = bisect.bisect_right(self._launches, index, key=lambda launch: launch[0]) - 1
        base, first, rows, columns, count, name = self._launches[place]
        matrix, element = divmod(index - base, rows * columns)
        number = first + matrix
        if name is not None:
            known: str | int = (
                name[matrix] if not isinstance(name, str) else name if count == 1 else f"{name}[{matrix}]"
            )
        else:
            known = self._names[number] if number < len(self._names) else number
        raise NonFiniteError(known, element // columns, element % columns, _KINDS[kind])

    def reset(self) -> None:
        """Forget everything noted; on a GPU in the order of the current stream."""
        self.record.fill_(CLEAN)
        self.forget()

    def forget(self) -> None:
        """Drop the host's notes while the record is known to be clean, so that keys start again at 0."""
        self._launches.clear()
        self._elements = self._matrices = 0
