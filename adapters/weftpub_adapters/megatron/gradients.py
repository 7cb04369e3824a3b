"""One global gradient norm over dense and expert parameters of all expert-parallel ranks, and clipping by it."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch

from weftpub.errors import NonFiniteGradientError
from weftpub.optim import gradient_norms

__all__ = ["ClipReport", "clip_global_norm"]


@dataclass(frozen=True)
class ClipReport:
    """What clipping found and did: the norm before, and the factor that every gradient was multiplied by (1 = none)."""

    norm: float
    factor: float


def clip_global_norm(
    gradients: Mapping[str, torch.Tensor],
    experts: Collection[str],
    max_norm: float | None,
    group: torch.distributed.ProcessGroup | None = None,
) -> ClipReport:
    """Scale all gradients in place so that their joint norm over all ranks is at most `max_norm`.

    Dense gradients are equal on all ranks and counted once; expert gradients are summed over the ranks. The factor is
    Megatron's ``max_norm / (norm + 1e-6)``, applied when below one.

    Args:
        gradients: this rank's, by name.
        experts: names that only this rank holds.
        max_norm: None measures and clips nothing.
        group: expert-parallel group; None for a single rank.

    Raises:
        NonFiniteGradientError: on every rank, when any rank has NaN or Inf; nothing was scaled anywhere.
    """
    failure: NonFiniteGradientError | None = None
    squares = torch.zeros(3, dtype=torch.float64)  # dense, expert, ranks that failed
    try:
        for name, norm in gradient_norms(gradients).items():
            squares[1 if name in experts else 0] += norm * norm
    except NonFiniteGradientError as error:
        failure = error
        squares[2] = 1.0
    dense = float(squares[0])
    _sum_over(group, squares, next(iter(gradients.values())).device)
    if failure is not None:
        raise failure
    if squares[2]:
        raise NonFiniteGradientError(
            f"{int(squares[2])} other rank(s) found NaN or Inf in a gradient; their messages name it; "
            "nothing was changed"
        )
    norm = (dense + float(squares[1])) ** 0.5
    factor = 1.0 if max_norm is None else min(1.0, max_norm / (norm + 1e-6))
    if factor < 1.0:
        torch._foreach_mul_([gradient.detach() for gradient in gradients.values()], factor)
    return ClipReport(norm, factor)


def _sum_over(group: torch.distributed.ProcessGroup | None, values: torch.Tensor, device: torch.device) -> None:
    if group is None or group.size() == 1:
        return
    summed = values.to(device)
    torch.distributed.all_reduce(summed, group=group)
    values.copy_(summed)
