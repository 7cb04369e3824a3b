"""The mark that `prepare` leaves on a parameter, by which the optimizer seams know a prepared model from any other."""

from dataclasses import dataclass
from typing import Any

import torch

from weftpub.masters import ExpertMatrix

__all__ = ["Mark", "mark_of", "set_mark"]

_ATTRIBUTE = "weftpub_mark"


@dataclass(frozen=True)
class Mark:
    """What a parameter is.

    Attributes:
        prepared: the `Prepared` that it belongs to.
        name: its name in the model, without wrapper prefixes.
        expert: the matrix, for a routed expert.
    """

    prepared: Any
    name: str
    expert: ExpertMatrix | None


def mark_of(parameter: torch.Tensor) -> Mark | None:
    """The mark of a parameter of a staged, not yet closed model."""
    mark: Mark | None = getattr(parameter, _ATTRIBUTE, None)
    return mark


def set_mark(parameter: torch.Tensor, mark: Mark | None) -> None:
    """Leave a mark, or take it away."""
    if mark is not None:
        setattr(parameter, _ATTRIBUTE, mark)
    elif hasattr(parameter, _ATTRIBUTE):
        delattr(parameter, _ATTRIBUTE)
