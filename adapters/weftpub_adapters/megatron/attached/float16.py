"""Megatron's wrapper of an inner optimizer over BF16 parameters, without its FP32 copies on the GPU.

`Float16OptimizerWithFloat16Params` clones an FP32 main parameter beside every BF16 parameter. For a prepared model
this subclass gives
it handles instead, which own no memory; once attached, the masters behind them answer for checkpoints, and gradients
pass as ever.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.optimizer.emerging_optimizers import TensorParallelMuon
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params

from weftpub.errors import ConfigError
from weftpub_adapters.megatron.attached.child import StagedChild
from weftpub_adapters.megatron.attached.host_state import make_handle
from weftpub_adapters.megatron.attached.marks import mark_of
from weftpub_adapters.megatron.attached.step_adamw import StagedTorchAdamW
from weftpub_adapters.megatron.attached.step_muon import StagedTensorParallelMuon

__all__ = ["StagedFloat16Optimizer"]


class StagedFloat16Optimizer(Float16OptimizerWithFloat16Params):
    """Stock for unprepared models; see the module's docstring for the others."""

    def __init__(self, optimizer: Any, config: Any, grad_scaler: Any, init_state_fn: Any) -> None:
        self.handles = False
        if optimizer is None or not _is_prepared(optimizer):
            super().__init__(optimizer, config, grad_scaler, init_state_fn)
            return
        optimizer = _staged_version(optimizer)
        originals = [list(group["params"]) for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["params"] = [make_handle(p) if p.dtype == torch.bfloat16 else p for p in group["params"]]
        replaced = [list(group["params"]) for group in optimizer.param_groups]
        # FP32 tensors are taken as they are, not cloned; the lists are put right below.
        super().__init__(optimizer, config, grad_scaler, init_state_fn)
        self.handles = True
        optimizer.awaiting = True
        for index, (before, after) in enumerate(zip(originals, replaced, strict=True)):
            pairs = [(p, h) for p, h in zip(before, after, strict=True) if p is not h]
            self.float16_groups[index] = [p for p, _ in pairs]
            self.fp32_from_float16_groups[index] = [h for _, h in pairs]
            self.fp32_from_fp32_groups[index] = [p for p, h in zip(before, after, strict=True) if p is h]
            for parameter, handle in pairs:
                parameter.main_param = handle

    @property
    def child(self) -> StagedChild | None:
        """The adopted child, or None when stock or closed."""
        return getattr(self.optimizer, "staged", None)

    def state_dict(self, is_loading: bool = False) -> dict[str, Any]:
        with self._masters_for_handles():
            return super().state_dict(is_loading)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        child = self.child
        if child is None:
            super().load_state_dict(state_dict)
            return
        with child.masters.changing("loading an optimizer checkpoint"), self._masters_for_handles(live=True):
            super().load_state_dict(state_dict)

    def offload_to_cpu(self) -> None:
        """Masters and state are in host memory: nothing to move."""
        if self.child is None:
            super().offload_to_cpu()

    def restore_from_cpu(self) -> None:
        """Megatron would carry every host tensor to the GPU; staged ones stay."""
        if self.child is None:
            super().restore_from_cpu()

    def _copy_main_params_to_model_params(self) -> None:
        if self.child is None:
            super()._copy_main_params_to_model_params()  # else the writers did, from the slots

    def _copy_model_params_to_main_params(self, state_dict: Any = None) -> None:
        with self._masters_for_handles(live=True):
            super()._copy_model_params_to_main_params(state_dict)

    @contextmanager
    def _masters_for_handles(self, *, live: bool = False) -> Iterator[None]:
        """Inside, the FP32 lists hold host tensors instead of handles: views of the masters, or copies where a
        snapshot is due."""
        child = self.child
        if child is None:
            yield
            return
        units = {id(unit.key): unit for unit in child.units}
        handles = self.fp32_from_float16_groups
        hosts = [[units[id(handle)].read("weight") for handle in group] for group in handles]
        if not live and child.snapshot():
            hosts = [[host.clone() for host in group] for group in hosts]
        self.fp32_from_float16_groups = hosts
        try:
            yield
            if live:
                for group, host_group in zip(handles, hosts, strict=True):
                    for handle, host in zip(group, host_group, strict=True):
                        if len(units[id(handle)].masters) > 1:  # read() joined copies of row blocks
                            units[id(handle)].write("weight", host)
        finally:
            self.fp32_from_float16_groups = handles


def _is_prepared(optimizer: Any) -> bool:
    return any(mark_of(p) is not None for group in optimizer.param_groups for p in group["params"])


def _staged_version(optimizer: Any) -> Any:
    """The inner optimizer itself if it can be staged as it is, or its staged stand-in."""
    if isinstance(optimizer, StagedTensorParallelMuon):
        return optimizer
    if isinstance(optimizer, TensorParallelMuon):
        raise ConfigError(f"{type(optimizer).__name__} is not staged; use OptimizerConfig(optimizer='muon')")
    if not all(key in optimizer.defaults for key in ("betas", "eps", "weight_decay")):
        raise ConfigError(f"{type(optimizer).__name__} is not staged; use OptimizerConfig(optimizer='muon') or 'adam'")
    return StagedTorchAdamW(optimizer, step_in_group=not isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW))
