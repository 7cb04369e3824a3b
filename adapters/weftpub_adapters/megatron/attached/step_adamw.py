"""AdamW: what takes the place of Megatron's inner Adam, its masters and moments in pinned memory, updated in slots.

* `StagedHybridDevice` stands for `HybridDeviceOptimizer` inside the DistributedOptimizer (precision-aware, CPU
  offload). Its parameters are
  flat shards of the DDP's buffer; where a shard is a whole parameter, its master has the matrix's shape again.
* `StagedTorchAdamW` stands for the Adam that keeps vectors, scalars and embeddings when Muon has the matrices.

The arithmetic is torch's single-tensor AdamW. Moments of a reduced dtype (`exp_avg_dtype`) are rounded to it after
every update, so
numbers are those of that dtype; host memory holds them in FP32.
"""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from megatron.core.optimizer.cpu_offloading.hybrid_optimizer import HybridDeviceOptimizer

from weftpub.errors import StateError
from weftpub.masters import MasterSet
from weftpub.optim import AdamWHyperparameters, MasterStep, StagedAdamW, adamw_update_
from weftpub.staging import StagedMaster, StagingPipeline, Writer
from weftpub_adapters.megatron.attached.child import StagedInner
from weftpub_adapters.megatron.attached.host_state import Unit
from weftpub_adapters.megatron.attached.marks import mark_of

__all__ = ["ADAMW_STATES", "AdamWCore", "StagedHybridDevice", "StagedTorchAdamW"]

ADAMW_STATES: tuple[str, ...] = StagedAdamW.STATES
_MARKED = (
    "weftpub_prepared"  # passes from the first construction to the DistributedOptimizer's second through `defaults`
)


class StagedHybridDevice(StagedInner, HybridDeviceOptimizer):
    """`HybridDeviceOptimizer` for prepared models: holds parameters until it adopts a child; stock for every other
    model."""

    state_keys: ClassVar[Mapping[str, str]] = {
        "master_param": "weight",
        "exp_avg": "exp_avg",
        "exp_avg_sq": "exp_avg_sq",
    }
    step_in_state = True

    def __init__(
        self,
        params: Any,
        offload_fraction: float = 0.5,
        cpu_optimizer_cls: Any = None,
        gpu_optimizer_cls: Any = None,
        param_update_in_fp32: bool = False,
        pin_cpu_grads: bool = True,
        pin_cpu_params: bool = True,
        overlap_cpu_optimizer_d2h_h2d: bool = True,
        **kwargs: Any,
    ) -> None:
        own = {
            "offload_fraction": offload_fraction,
            "cpu_optimizer_cls": cpu_optimizer_cls,
            "gpu_optimizer_cls": gpu_optimizer_cls,
            "param_update_in_fp32": param_update_in_fp32,
            "pin_cpu_grads": pin_cpu_grads,
            "pin_cpu_params": pin_cpu_params,
            "overlap_cpu_optimizer_d2h_h2d": overlap_cpu_optimizer_d2h_h2d,
        }
        marked = kwargs.pop(_MARKED, False) or _any_marked(params)
        if not marked:
            super().__init__(params, **own, **kwargs)
            return
        # The stock constructor copies every parameter to the host and builds one CPU optimizer each.
        torch.optim.Optimizer.__init__(self, params, {**own, **kwargs})
        self.defaults = {**self.defaults, _MARKED: True}
        for name, value in own.items():
            setattr(self, name, value)
        self.sub_optimizer_kwargs = kwargs
        self.cpu_optimizers, self.gpu_optimizer = [], None
        self._clock = torch.optim.AdamW([torch.zeros(1)])
        self.awaiting = True

    @property
    def sub_optimizers(self) -> list[Any]:
        """Megatron asks the sub-optimizers for their step count; a staged one shows a clock."""
        if self.staged is None:
            return [] if self.awaiting else super().sub_optimizers
        first = next(iter(self.state.values()), None)
        self._clock.state = {} if first is None else {torch.zeros(0): {"step": first["step"]}}
        return [self._clock]

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        self.require_attached()
        if self.staged is None:
            super().step(closure)
        else:
            self.staged.step()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self.staged is None:
            super().load_state_dict(state_dict)
        else:
            self.load_staged(state_dict)

    def dummy_step(self) -> None:
        """Megatron calls this to make state exist; staged state does."""
        if self.staged is None:
            self.require_attached()
            super().dummy_step()

    def update_fp32_param_by_new_param(self) -> None:
        """Masters from the present parameters, after a load of weights alone."""
        if self.staged is None:
            super().update_fp32_param_by_new_param()
            return
        for unit in self.staged.units:
            if unit.target.untyped_storage().nbytes() == 0:
                raise StateError(
                    f"{unit.name} owns no memory; reload model parameters inside `loading(masters_from='model')`"
                )
            unit.write("weight", unit.target.detach())

    def _sync_hdo_state_to_sub_optimizers(self) -> None:
        if self.staged is None:
            super()._sync_hdo_state_to_sub_optimizers()


class StagedTorchAdamW(StagedInner, torch.optim.Optimizer):
    """Takes the groups of a stock Adam, whichever library it is from, and waits for a child.

    Args:
        stock: the optimizer that Megatron built; it is kept, and gets the numbers back when the attachment closes.
        step_in_group: where the stock one keeps its step count: TransformerEngine's and Apex's in the group, torch's
            in the state.
    """

    state_keys: ClassVar[Mapping[str, str]] = {"exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}

    def __init__(self, stock: torch.optim.Optimizer, *, step_in_group: bool) -> None:
        self.stock = stock
        self.step_in_group = step_in_group
        self.step_in_state = not step_in_group
        super().__init__(stock.param_groups, dict(stock.defaults))
        self.awaiting = True

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        self.require_attached()
        if self.staged is None:
            raise StateError("the attachment of this optimizer is closed; Megatron steps the stock one")
        self.staged.step()
        if self.step_in_group:
            for unit in self.staged.units:
                unit.group["step"] = unit.masters[0].step

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.load_staged(state_dict)


class AdamWCore(StagedAdamW):
    """AdamW whose betas and epsilon come from the parameter group, like its learning rate and decay.

    Args:
        rounding: state name to the dtype that it is rounded to after each update; FP32 for none.
    """

    def __init__(
        self,
        rounding: Mapping[str, torch.dtype],
        masters: MasterSet,
        pipeline: StagingPipeline,
        writers: Mapping[str, Writer],
        units: Mapping[str, Unit],
    ) -> None:
        self._units = units
        self._rounding = {name: dtype for name, dtype in rounding.items() if dtype != torch.float32}
        super().__init__(masters, pipeline, writers, AdamWHyperparameters(lr=0.0))

    def run_one(self, staged: StagedMaster, gradient: torch.Tensor, settings: MasterStep) -> None:
        group = self._units[staged.name].group
        beta1, beta2 = group["betas"]
        adamw_update_(
            staged.weight,
            staged.state["exp_avg"],
            staged.state["exp_avg_sq"],
            gradient,
            AdamWHyperparameters(lr=settings.lr, beta1=beta1, beta2=beta2, eps=group["eps"]),
            lr=settings.lr,
            weight_decay=settings.weight_decay,
            step=settings.step,
        )
        for name, dtype in self._rounding.items():
            staged.state[name].copy_(staged.state[name].to(dtype))


def _any_marked(params: Any) -> bool:
    groups = params if params and isinstance(params[0], dict) else [{"params": params}]
    return any(mark_of(parameter) is not None for group in groups for parameter in group["params"])
