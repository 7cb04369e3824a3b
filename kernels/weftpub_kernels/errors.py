"""Errors of the quantizers and checksums.

What a caller passed in wrongly is a ``ValueError`` (a wrong dtype also a ``TypeError``), so that callers who know
only the standard library can catch it. Every message names what was expected, what was found and the remedy.
"""

__all__ = [
    "ApproximateOnCpuError",
    "DtypeError",
    "KernelError",
    "KernelSelfTestError",
    "NonFiniteError",
    "ShapeError",
    "UnfitPresetError",
    "UnknownPresetError",
]


class KernelError(ValueError):
    """Base of all errors of this package."""


class UnknownPresetError(KernelError, KeyError):
    """No preset has this name; the message names the nearest ones."""

    __str__ = Exception.__str__  # KeyError would print the repr


class DtypeError(KernelError, TypeError):
    """A tensor has another dtype than the preset or buffer needs; nothing was written."""


class ShapeError(KernelError):
    """A shape, stride, device or overlap of tensors cannot work; nothing was written."""


class ApproximateOnCpuError(KernelError, NotImplementedError):
    """The preset holds an operator that only a GPU computes (Triton's approximate division)."""


class UnfitPresetError(KernelError):
    """The preset loses some blocks (their dequant scale is 0), so its bytes must not be published."""


class NonFiniteError(KernelError):
    """A matrix holds NaN or Inf. ``matrix`` is its name or its number, ``row`` and ``column`` the first bad element."""

    def __init__(self, matrix: str | int, row: int, column: int, value: float) -> None:
        self.matrix, self.row, self.column, self.value = matrix, row, column, value
        where = matrix if isinstance(matrix, str) else f"matrix {matrix}"
        super().__init__(
            f"{where} holds {value} at row {row}, column {column}; the bytes written from this matrix are void. "
            "Recover the master from the last checkpoint, and check the gradients before the step"
        )

    def __reduce__(self) -> tuple[type, tuple[str | int, int, int, float]]:
        return type(self), (self.matrix, self.row, self.column, self.value)


class KernelSelfTestError(KernelError, RuntimeError):
    """The compiled kernel returned wrong bytes on this device; it refuses to run."""
