"""Newton-Schulz orthogonalization and Muon's scale factors, in the arithmetic of emerging-optimizers 0.3.0.

The iteration drives the singular values of a matrix towards one with ``X <- a X + (b A + c A A) X``, ``A = X X^T``, one
coefficient triple (a, b, c) per step. The operators and their order are those of
``emerging_optimizers.orthogonalized_optimizers.muon_utils.newton_schulz`` (what Megatron-core's ``TensorParallelMuon``
calls without tensor parallelism), so that results agree bit for bit on one device.
"""

import itertools
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch

from weftpub.errors import ConfigError

__all__ = ["COEFFICIENTS", "SCALE_MODES", "CoefficientSet", "MatmulPrecision", "newton_schulz", "scale_factor"]

MatmulPrecision = Literal["medium", "high", "highest"]
Triple = tuple[float, float, float]

_EPS = 1e-7


@dataclass(frozen=True)
class CoefficientSet:
    """Triples (a, b, c) in the order of the steps, and what follows when there are more steps than triples.

    Attributes:
        triples: one per step.
        repeat_last: go on with the last triple; otherwise start again from the first.
    """

    triples: tuple[Triple, ...]
    repeat_last: bool = False

    def take(self, steps: int) -> Iterator[Triple]:
        """The triples of ``steps`` steps."""
        endless = (
            itertools.chain(self.triples, itertools.repeat(self.triples[-1]))
            if self.repeat_last
            else itertools.cycle(self.triples)
        )
        return itertools.islice(endless, steps)


# Sources: simple, K. Jordan's Muon. quintic, tuned per step (modded-nanogpt). polar_express, arXiv:2505.16932, with its
# division by 1.01^degree folded in. cans, arXiv:2506.10935. aol, flash-newton-schulz. deepseekv4, DeepSeek-V4's report.
COEFFICIENTS: dict[str, CoefficientSet] = {
    "simple": CoefficientSet(((3.4445, -4.7750, 2.0315),)),
    "quintic": CoefficientSet(
        (
            (4.0848, -6.8946, 2.9270),
            (3.9505, -6.3029, 2.6377),
            (3.7418, -5.5913, 2.3037),
            (2.8769, -3.1427, 1.2046),
            (2.8366, -3.0525, 1.2012),
        )
    ),
    "polar_express": CoefficientSet(
        (
            (8.2051, -22.9019, 16.4607),
            (4.0664, -2.8612, 0.5184),
            (3.9096, -2.8234, 0.5250),
            (3.2856, -2.4153, 0.4853),
            (2.2779, -1.6198, 0.3985),
            (1.8726, -1.2307, 0.3585),
            (1.8564, -1.2132, 0.3568),
            (1.8750, -1.2500, 0.3750),
        ),
        repeat_last=True,
    ),
    "cans": CoefficientSet(
        (
            (8.4703, -25.1081, 18.6293),
            (4.1828, -3.1087, 0.5806),
            (3.9619, -2.9541, 0.5630),
            (3.2866, -2.4647, 0.5074),
            (2.2737, -1.6447, 0.4162),
        ),
        repeat_last=True,
    ),
    "aol": CoefficientSet(
        (
            (4.0098, -7.0585, 2.4635),
            (3.4585, -5.5479, 2.5959),
            (2.7573, -3.2939, 1.4254),
            (2.7215, -3.0494, 1.3169),
        )
    ),
    "deepseekv4": CoefficientSet(((3.4445, -4.7750, 2.0315),) * 8 + ((2.0, -1.5, 0.5),) * 2, repeat_last=True),
}

SCALE_MODES = ("spectral", "shape_scaling", "unit_rms_norm")


def newton_schulz(
    matrix: torch.Tensor, *, steps: int = 5, coefficients: str = "quintic", precision: MatmulPrecision = "medium"
) -> torch.Tensor:
    """An orthogonal-like matrix with the singular vectors of ``matrix`` and singular values near one.

    Args:
        matrix: FP32 ``[M, N]``, any device.
        steps: iterations.
        coefficients: a key of :data:`COEFFICIENTS`.
        precision: "medium" iterates in BF16; "high" and "highest" in FP32 with ``torch.set_float32_matmul_precision``
            set so meanwhile (it is process-wide: no other thread should multiply then).

    Returns:
        FP32 ``[M, N]``; where M > N it is the transposed view of a row-major ``[N, M]``.
    """
    # The shorter side is made the rows, which keeps A = X X^T small.
    tall = matrix.size(0) > matrix.size(1)
    x = matrix.mT if tall else matrix
    # The Frobenius norm bounds the spectral norm, which the iteration needs to be at most one.
    x = x / torch.linalg.vector_norm(x, 2.0, dim=(-2, -1), keepdim=True).clamp_min_(_EPS)
    with _matmul_precision(precision):
        if precision == "medium":
            x = x.to(torch.bfloat16)
        for a, b, c in COEFFICIENTS[coefficients].take(steps):
            gram = torch.mm(x, x.t())
            polynomial = torch.addmm(gram, gram, gram, alpha=c, beta=b)
            x = torch.addmm(x, polynomial, x, alpha=1.0, beta=a)
    x = x.to(torch.float32)
    return x.mT if tall else x


def scale_factor(rows: int, columns: int, mode: str = "spectral") -> float:
    """What the orthogonalized update is multiplied by, from its shape ``[rows, columns]``.

    "spectral": sqrt(max(rows, columns)), arXiv:2502.16982. "shape_scaling": sqrt(max(1, rows / columns)), K. Jordan.
    "unit_rms_norm": sqrt(rows / columns), Scion, arXiv:2502.07529.
    """
    if mode == "spectral":
        return max(rows, columns) ** 0.5
    if mode == "shape_scaling":
        return max(1, rows / columns) ** 0.5
    if mode == "unit_rms_norm":
        return (rows / columns) ** 0.5
    raise ConfigError(f"unknown scale mode {mode!r}; choose one of {', '.join(SCALE_MODES)}")


@contextmanager
def _matmul_precision(precision: MatmulPrecision) -> Generator[None]:
    # BF16 products do not read the process-wide setting, so it is left alone for them.
    if precision == "medium":
        yield
        return
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
