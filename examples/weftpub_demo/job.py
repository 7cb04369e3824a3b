"""What the variants share: the steps of a job, the record of a publish, and settings that keep losses comparable."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

import torch

from weftpub_adapters.megatron import TrainerProbe
from weftpub_demo.config import DemoConfig, OptimizerName

__all__ = ["CLIP_GRAD", "WEIGHT_DECAY", "Job", "Published", "combined_sha256", "learning_rate"]

WEIGHT_DECAY = 0.01
CLIP_GRAD = 1.0
# One rate for all parameters, as in Megatron's own configuration. Muon's steps are orthogonal matrices: their size is
# the rate itself, whatever the gradient's.
_LEARNING_RATE = MappingProxyType({OptimizerName.MUON: 5e-3, OptimizerName.ADAMW: 2e-3})


@dataclass(frozen=True)
class Published:
    """One version that every receiver has committed.

    Attributes:
        ms: wall time.
        phases_ms: wall time by phase.
        changed: share of the published expert bytes that differ from the version before.
        sha256: digest over the names and digests of all published tensors.
        nbytes: bytes moved.
        transport: what carried them.
    """

    ms: float
    phases_ms: Mapping[str, float]
    changed: float
    sha256: str
    nbytes: int
    transport: str


class Job(Protocol):
    """A trainer, and its way to the receivers."""

    def pause(self) -> None:
        """Stop the receivers serving, before they lose their memory."""
        ...

    def train(self, tokens: torch.Tensor, labels: torch.Tensor) -> float:
        """Forward and backward of one batch, int64 `[batch, sequence]` each; the mean cross entropy."""
        ...

    def update(self) -> None:
        """The optimizer's step."""
        ...

    def publish(self, version: int) -> Published:
        """Bring the trainer's weights to every receiver and commit them as `version`; on an error, on none."""
        ...

    def probe(self, layer: int, tokens: torch.Tensor) -> TrainerProbe:
        """One layer as the trainer computes it, on `tokens` `[tokens, hidden]`."""
        ...


def learning_rate(config: DemoConfig) -> float:
    """The asked rate, or the optimizer's default here."""
    return _LEARNING_RATE[config.optimizer] if config.lr is None else config.lr


def combined_sha256(digests: Mapping[str, str]) -> str:
    """One digest over many: SHA-256 of the sorted lines `name digest`."""
    lines = "".join(f"{name} {digests[name]}\n" for name in sorted(digests))
    return hashlib.sha256(lines.encode()).hexdigest()
