"""Muon as Megatron-core applies it to attention: query, key and value rows of `linear_qkv` are orthogonalized apart.

Decay and momentum act on single elements, so updating gathered copies of the three row sets gives the bytes that
Megatron's split gives; only Newton-Schulz and the scale factor see the parts' shapes.
"""

from collections.abc import Mapping
from typing import Any

import torch

from weftpub.errors import ConfigError
from weftpub.optim import MasterStep, MuonHyperparameters, StagedMuon, muon_update_
from weftpub.staging import StagedMaster

__all__ = ["QkvSplitMuon"]


class QkvSplitMuon(StagedMuon):
    """A StagedMuon that knows which masters interleave query, key and value rows.

    Args:
        qkv: master name to the rows of (query, key, value) in one key/value group. The matrix repeats the group.
        Others: as for `StagedMuon`.

    Raises:
        ConfigError: a matrix does not consist of whole groups.
    """

    def __init__(self, *args: Any, qkv: Mapping[str, tuple[int, int, int]], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for name, rows in qkv.items():
            if self.masters[name].weight.shape[0] % sum(rows):
                shape = list(self.masters[name].weight.shape)
                raise ConfigError(f"{name} {shape} does not consist of groups of {rows} query, key and value rows")
        self._qkv = dict(qkv)

    def run_one(self, staged: StagedMaster, gradient: torch.Tensor, settings: MasterStep) -> None:
        rows = self._qkv.get(staged.name)
        if rows is None:
            super().run_one(staged, gradient, settings)
            return
        momentum = staged.state["momentum_buffer"]
        first = 0
        for count in rows:
            _update_rows(staged.weight, momentum, gradient, (sum(rows), first, count), self.hyperparameters, settings)
            first += count


def _update_rows(
    weight: torch.Tensor,
    momentum: torch.Tensor,
    gradient: torch.Tensor,
    place: tuple[int, int, int],
    hyperparameters: MuonHyperparameters,
    settings: MasterStep,
) -> None:
    """Update `count` rows from `first` of every group of `group` rows; `place` is (group, first, count)."""
    group, first, count = place
    parts = [
        tensor.view(-1, group, tensor.shape[1])[:, first : first + count] for tensor in (weight, momentum, gradient)
    ]
    gathered = [part.reshape(-1, weight.shape[1]) for part in parts]
    muon_update_(*gathered, hyperparameters, lr=settings.lr, weight_decay=settings.weight_decay)
    for part, new in zip(parts[:2], gathered[:2], strict=True):
        part.copy_(new.view_as(part))
