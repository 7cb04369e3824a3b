"""What Megatron's optimizers hold instead of masters: parameters that own no memory, and state that lies in host
memory.

A *handle* stands where Megatron keeps an FP32 main parameter. It has the shape, the dtype, the device and the
parallel attributes
of one, and its storage has zero bytes: gradient norms, clipping and zero counts read its `grad`, which is the DDP's
main gradient, and
nobody reads its values. A *unit* joins a handle (or a flat shard) with the masters behind it.
"""

from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass, field
from typing import Any

import torch

from weftpub.errors import ConfigError
from weftpub.masters import ExpertMatrix, Master

__all__ = ["HostState", "Unit", "make_handle"]


def make_handle(parameter: torch.Tensor) -> torch.Tensor:
    """An FP32 tensor of the parameter's shape and attributes, on its device, whose storage has zero bytes."""
    from megatron.core import tensor_parallel
    from megatron.core.optimizer.optimizer import copy_optimizer_param_metadata

    handle = torch.empty(parameter.shape, dtype=torch.float32, device=parameter.device)
    handle.untyped_storage().resize_(0)
    handle.requires_grad_()
    tensor_parallel.copy_tensor_model_parallel_attributes(handle, parameter)
    tensor_parallel.copy_gtp_attributes(handle, parameter)
    copy_optimizer_param_metadata(handle, parameter)
    return handle


@dataclass
class Unit:
    """One entry of a torch optimizer's `param_groups`, and where its numbers really are.

    Attributes:
        name: the expert matrix's name, or the parameter's own.
        key: the tensor in `param_groups`: a handle, a flat shard, or an FP32 parameter.
        target: what the forward pass reads, of the key's element count; for fp8 experts it has zero bytes and is not
            written.
        group: the parameter group, read at every step, so that schedules act.
        expert: the matrix, for a routed expert.
        shape: shape of the whole master; 1-D for a shard that is only a part of its parameter.
        masters: one master, or consecutive row blocks of it where the whole fits no slot (AdamW's dense parameters).
        replaced: the weight and state tensors that were wholly replaced since this was emptied.
    """

    name: str
    key: torch.Tensor
    target: torch.Tensor
    group: dict[str, Any]
    expert: ExpertMatrix | None
    shape: tuple[int, ...]
    masters: list[Master] = field(default_factory=list)
    replaced: set[str] = field(default_factory=set)

    def pieces(self, slot_numel: int | None) -> list[tuple[str, slice]]:
        """(master name, flat range) of each master: one, or row blocks of at most `slot_numel` elements."""
        numel = self.key.numel()
        if slot_numel is None or numel <= slot_numel or self.expert is not None:
            return [(self.name, slice(0, numel))]
        row = 1 if len(self.shape) < 2 else numel // self.shape[0]
        if row > slot_numel:
            raise ConfigError(f"{self.name} {list(self.shape)}: one row fits no slot; set slot_numel={row} at least")
        step = slot_numel // row * row
        return [
            (f"{self.name}[{start}:{min(start + step, numel)}]", slice(start, min(start + step, numel)))
            for start in range(0, numel, step)
        ]

    def piece_shape(self, flat: slice) -> tuple[int, ...]:
        """Shape of the master that holds a flat range: a vector, or rows of the first dimension. The channels of a
        convolution ``[channels, 1, kernel]`` are rows, too.
        """
        count = flat.stop - flat.start
        if len(self.shape) < 2:
            return (count,) if count < self.key.numel() else self.shape
        row = self.key.numel() // self.shape[0]
        return (count // row, row)

    def read(self, key: str, shape: torch.Size | tuple[int, ...] | None = None) -> torch.Tensor:
        """The weight ("weight") or a state tensor in host memory: a view of the one master, or a copy of several
        joined."""
        tensors = [master.tensors()[key] for master in self.masters]
        whole = tensors[0] if len(tensors) == 1 else torch.cat([tensor.reshape(-1) for tensor in tensors])
        return whole.view(self.key.shape if shape is None else shape)

    def write(self, key: str, value: torch.Tensor) -> None:
        """Replace a weight or state tensor of the masters; `value` on any device, of the unit's element count."""
        if value.numel() != self.key.numel():
            raise ConfigError(f"{self.name}: {key} needs {self.key.numel()} elements, found {value.numel()}")
        start = 0
        for master in self.masters:
            tensor = master.tensors()[key]
            tensor.copy_(value.reshape(-1)[start : start + tensor.numel()].view(tensor.shape))
            start += tensor.numel()
        self.replaced.add(key)


class HostState(MutableMapping[str, torch.Tensor]):
    """A torch optimizer's state of one unit; reading gives host tensors, assigning copies into them.

    Assigning copies because Megatron's checkpoint loaders replace entries, and the tensors here are views of pinned
    memory.

    Args:
        unit: whose state.
        keys: torch's key to the master's key, such as ``{"master_param": "weight", "exp_avg": "exp_avg"}``.
        step: whether a "step" tensor belongs to the state, as in torch's AdamW.
        snapshot: asked at every read; if true, copies are given, which later steps do not change.
    """

    def __init__(self, unit: Unit, keys: dict[str, str], *, step: bool, snapshot: Any) -> None:
        self.unit = unit
        self._keys = keys
        self._step = step
        self._snapshot = snapshot

    def __getitem__(self, key: str) -> torch.Tensor:
        if key == "step" and self._step:
            return torch.tensor(float(self.unit.masters[0].step), dtype=torch.float32)
        value = self.unit.read(self._keys[key])
        return value.clone() if self._snapshot() and len(self.unit.masters) == 1 else value

    def __setitem__(self, key: str, value: torch.Tensor) -> None:
        if key == "step" and self._step:
            for master in self.unit.masters:
                master.step = int(value)
        else:
            self.unit.write(self._keys[key], value)

    def __delitem__(self, key: str) -> None:
        raise KeyError(f"{self.unit.name}: {key!r} cannot be removed; it lies in the masters' memory")

    def __iter__(self) -> Iterator[str]:
        yield from self._keys
        if self._step:
            yield "step"

    def __len__(self) -> int:
        return len(self._keys) + self._step
