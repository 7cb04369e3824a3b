"""Muon: Megatron's own `TensorParallelMuon`, its masters and momentum in pinned memory, its arithmetic in the slots.

The subclass enters through emerging-optimizers' registry. What is a matrix for Muon, how QKV is split, over which
group a tensor-parallel
matrix is orthogonalized and how the update is scaled are asked of Megatron's own methods, for each matrix while it is
in its slot.
"""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from megatron.core.optimizer.emerging_optimizers import TensorParallelMuon

from weftpub.masters import MasterSet
from weftpub.optim import MasterStep, MuonHyperparameters, StagedMuon
from weftpub.staging import StagedMaster, StagingPipeline, Writer
from weftpub_adapters.megatron.attached.child import StagedInner
from weftpub_adapters.megatron.attached.host_state import Unit

__all__ = ["MUON_STATES", "MuonCore", "StagedTensorParallelMuon"]

MUON_STATES: tuple[str, ...] = StagedMuon.STATES


class StagedTensorParallelMuon(StagedInner, TensorParallelMuon):
    """`TensorParallelMuon` that steps through a child once it has adopted one."""

    state_keys: ClassVar[Mapping[str, str]] = {"momentum_buffer": "momentum_buffer"}

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        self.require_attached()
        if self.staged is None:
            return super().step(closure)
        self.staged.step()
        return None

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self.staged is None:
            super().load_state_dict(state_dict)
        else:
            self.load_staged(state_dict)

    def _init_group(self, group: dict[str, Any], skip_non_grad_params: bool = True) -> None:
        if self.staged is None:
            super()._init_group(group, skip_non_grad_params)


class MuonCore(StagedMuon):
    """Runs one matrix through Megatron's arithmetic: the operators of `OrthogonalizedOptimizer.step`, in its order."""

    def __init__(
        self,
        optimizer: StagedTensorParallelMuon,
        masters: MasterSet,
        pipeline: StagingPipeline,
        writers: Mapping[str, Writer],
        units: Mapping[str, Unit],
    ) -> None:
        self._optimizer = optimizer
        self._units = units
        super().__init__(masters, pipeline, writers, MuonHyperparameters(lr=0.0, nesterov=optimizer.nesterov))

    def check_masters(self, masters: MasterSet) -> None:
        """Megatron decided what is a matrix; nothing to add."""

    def run_one(self, staged: StagedMaster, gradient: torch.Tensor, settings: MasterStep) -> None:
        from emerging_optimizers import utils

        muon, unit = self._optimizer, self._units[staged.name]
        group = {key: value for key, value in unit.group.items() if key != "params"}
        momentum = staged.state["momentum_buffer"]
        if muon.weight_decay_method == "l2" and settings.weight_decay != 0.0:
            gradient = gradient.clone()  # the decay is added to it in place, and it is the DDP's own
        muon._apply_weight_decay_inplace(staged.weight, gradient, settings.lr, settings.weight_decay)
        momentum.lerp_(gradient, 1 - group["momentum"])
        direction = gradient.lerp(momentum, group["momentum"]) if muon.nesterov else momentum
        with utils.fp32_matmul_precision(muon.fp32_matmul_prec):
            update = muon.orthogonalize(unit.key, direction, **group)
        muon.pre_weight_update_fn_inplace(staged.weight, update)
        staged.weight.add_(update, alpha=-settings.lr)
        muon.post_weight_update_fn_inplace(staged.weight)
