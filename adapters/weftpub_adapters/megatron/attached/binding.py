"""Joins Megatron's optimizers with staged children when an attachment opens, and parts them when it closes."""

import types
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import torch

from weftpub.errors import ConfigError
from weftpub.staging import StagingPipeline, Writer
from weftpub_adapters.megatron.attached.child import StagedChild
from weftpub_adapters.megatron.attached.float16 import StagedFloat16Optimizer
from weftpub_adapters.megatron.attached.host_state import Unit
from weftpub_adapters.megatron.attached.marks import Mark, mark_of
from weftpub_adapters.megatron.attached.step_adamw import ADAMW_STATES, AdamWCore, StagedHybridDevice
from weftpub_adapters.megatron.attached.step_muon import MUON_STATES, MuonCore, StagedTensorParallelMuon

__all__ = ["Binding", "bind"]


def bind(optimizer: Any) -> list["Binding"]:
    """One binding for each sub-optimizer that has parameters on this rank; nothing is changed yet.

    Raises:
        ConfigError: a sub-optimizer was built before `prepare`, or is of a kind that is not staged.
    """
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    bindings: list[Binding] = []
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        if getattr(part, "is_stub_optimizer", False):
            continue
        if getattr(part.optimizer, "staged", None) is not None:
            raise ConfigError("this optimizer is attached already; close that attachment first")
        if isinstance(part, DistributedOptimizer) and isinstance(part.optimizer, StagedHybridDevice):
            bindings.append(_FlatBinding(part))
        elif isinstance(part, StagedFloat16Optimizer) and part.handles:
            bindings.append(_Float16Binding(part))
        else:
            raise ConfigError(
                f"{type(part).__name__} around {type(part.optimizer).__name__} is not staged: call prepare(model) "
                "before get_megatron_optimizer, "
                "with optimizer='muon', or optimizer='adam' and use_distributed_optimizer, "
                "use_precision_aware_optimizer, "
                "optimizer_cpu_offload and optimizer_offload_fraction=1.0"
            )
    return bindings


class Binding(ABC):
    """One Megatron sub-optimizer, its units, and (between `open` and `close`) its child."""

    states: tuple[str, ...]
    splits: bool
    decoupled: bool

    def __init__(self, part: Any) -> None:
        self.part = part
        self.units = self.find_units()
        self.child: StagedChild | None = None

    @abstractmethod
    def find_units(self) -> list[Unit]:
        """The entries of the inner optimizer's groups."""

    @abstractmethod
    def core(
        self, masters: Any, pipeline: StagingPipeline, writers: Mapping[str, Writer], units: Mapping[str, Unit]
    ) -> Any:
        """The staged optimizer for this child."""

    @abstractmethod
    def hand_back(self, child: StagedChild) -> None:
        """Give Megatron ordinary masters and state, with the child's numbers."""

    def make_child(self, slot_numel: int | None) -> StagedChild:
        """Masters from the present weights; Megatron is not touched."""
        self.child = StagedChild(
            self.units, self.states, slot_numel=slot_numel, splits=self.splits, decoupled=self.decoupled
        )
        return self.child

    def join(self, child: StagedChild) -> None:
        """Let Megatron's inner optimizer be a front for the child."""
        self.part.optimizer.adopt(child)

    def leave(self) -> None:
        """Undo `join` and `make_child`, after an attach that failed."""
        self.child = None
        for unit in self.units:
            unit.masters.clear()
        self.part.optimizer.staged, self.part.optimizer.awaiting = None, True
        self.part.optimizer.state.clear()
        for name in ("offload_to_cpu", "restore_from_cpu"):
            vars(self.part).pop(name, None)

    def close(self) -> None:
        """Part from the child."""
        if self.child is not None:
            self.hand_back(self.child)
            self.child = None


class _Float16Binding(Binding):
    """Muon, or the Adam beside it, inside `StagedFloat16Optimizer`."""

    decoupled = False

    def __init__(self, part: StagedFloat16Optimizer) -> None:
        self.muon = isinstance(part.optimizer, StagedTensorParallelMuon)
        self.states = MUON_STATES if self.muon else ADAMW_STATES
        self.splits = not self.muon
        super().__init__(part)

    def find_units(self) -> list[Unit]:
        parameters: dict[int, torch.nn.Parameter] = {}
        for models, handles in zip(self.part.float16_groups, self.part.fp32_from_float16_groups, strict=True):
            parameters.update({id(handle): model for model, handle in zip(models, handles, strict=True)})
        units: list[Unit] = []
        for group in self.part.optimizer.param_groups:
            for key in group["params"]:
                parameter = parameters.get(id(key), key)
                mark = _mark(parameter)
                name = mark.name if mark.expert is None else mark.expert.name
                units.append(Unit(name, key, parameter, group, mark.expert, tuple(parameter.shape)))
        return units

    def core(
        self, masters: Any, pipeline: StagingPipeline, writers: Mapping[str, Writer], units: Mapping[str, Unit]
    ) -> Any:
        if self.muon:
            return MuonCore(self.part.optimizer, masters, pipeline, writers, units)
        return AdamWCore({}, masters, pipeline, writers, units)

    def hand_back(self, child: StagedChild) -> None:
        inner = self.part.optimizer
        inner.abandon()
        for unit in child.units:
            if unit.key is not unit.target:
                unit.key.untyped_storage().resize_(unit.key.numel() * unit.key.element_size())
            unit.key.detach().copy_(unit.read("weight"))
        stock = inner if self.muon else inner.stock
        for unit in child.units:
            if unit.masters[0].step == 0:
                continue
            stock.state[unit.key] = {name: unit.read(name).to(unit.key.device, copy=True) for name in self.states}
            if not self.muon and not inner.step_in_group:
                stock.state[unit.key]["step"] = torch.tensor(float(unit.masters[0].step))
        if not self.muon:
            stock.param_groups = inner.param_groups
            self.part.optimizer = stock


class _FlatBinding(Binding):
    """`StagedHybridDevice` inside a DistributedOptimizer: flat shards, whole parameters where one rank owns them."""

    states = ADAMW_STATES
    splits = True
    decoupled = True

    def find_units(self) -> list[Unit]:
        sources: dict[int, torch.nn.Parameter] = {}
        for models, shards in (
            (self.part.model_float16_groups, self.part.shard_float16_groups),
            (self.part.model_fp32_groups, self.part.shard_fp32_groups),
        ):
            for model_group, shard_group in zip(models, shards, strict=True):
                sources.update({id(shard): model for model, shard in zip(model_group, shard_group, strict=True)})
        return [
            self._unit(key, sources[id(key)], group)
            for group in self.part.optimizer.param_groups
            for key in group["params"]
        ]

    def _unit(self, key: torch.Tensor, parameter: torch.nn.Parameter, group: dict[str, Any]) -> Unit:
        mark = _mark(parameter)
        name = mark.name if mark.expert is None else mark.expert.name
        part = self.part._get_model_param_range_map(parameter)["param"]
        if part.size == parameter.numel():
            return Unit(name, key, key.detach(), group, mark.expert, tuple(parameter.shape))
        return Unit(f"{name}@{part.start}:{part.end}", key, key.detach(), group, None, (part.size,))

    def join(self, child: StagedChild) -> None:
        super().join(child)
        # Megatron's own would move every host tensor to the GPU, and every shard off its buffer.
        self.part.offload_to_cpu = types.MethodType(_nothing_to_move, self.part)
        self.part.restore_from_cpu = types.MethodType(_nothing_to_move, self.part)

    def core(
        self, masters: Any, pipeline: StagingPipeline, writers: Mapping[str, Writer], units: Mapping[str, Unit]
    ) -> Any:
        config = self.part.config
        rounding = {"exp_avg": config.exp_avg_dtype, "exp_avg_sq": config.exp_avg_sq_dtype}
        return AdamWCore(rounding, masters, pipeline, writers, units)

    def hand_back(self, child: StagedChild) -> None:
        inner = self.part.optimizer
        inner.abandon()
        stock = StagedHybridDevice(
            inner.param_groups, **{k: v for k, v in inner.defaults.items() if k != "weftpub_prepared"}
        )
        by_parameter = {
            id(p): sub for sub in stock.sub_optimizers for group in sub.param_groups for p in group["params"]
        }
        for unit in child.units:
            own = stock.param_to_inner_param[unit.key]
            own.data.copy_(unit.read("weight"))
            if unit.masters[0].step == 0:
                continue
            state: dict[str, Any] = {name: unit.read(name).to(own.device, copy=True) for name in self.states}
            by_parameter[id(own)].state[own] = {"step": torch.tensor(float(unit.masters[0].step)), **state}
        stock._sync_sub_optimizers_state_to_hdo()
        self.part.optimizer = stock
        del self.part.offload_to_cpu, self.part.restore_from_cpu


def _mark(parameter: torch.Tensor) -> Mark:
    mark = mark_of(parameter)
    if mark is None:
        raise ConfigError(
            "a parameter of the optimizer belongs to no prepared model; build model, prepare, wrap and optimizer "
            "in this order"
        )
    return mark


def _nothing_to_move(self: Any) -> None:
    """Masters and state are in host memory, and shards are views of the DDP's buffers."""
