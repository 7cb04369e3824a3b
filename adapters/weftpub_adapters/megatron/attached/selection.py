"""Finds the routed experts of a Megatron model: which parameter is which matrix, and which module computes with it.

Both of Megatron-core's expert modules are known, TEGroupedMLP (``linear_fc1.weight{i}``) and SequentialMLP
(``local_experts.{i}.linear_fc1.weight``). Shared experts are ordinary dense layers and are left alone.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch

from weftpub.errors import ConfigError
from weftpub.masters import ExpertMatrix
from weftpub_adapters.megatron.names import plain_name

__all__ = ["ExpertLayer", "ExpertParameter", "chunks_of", "find_expert_layers"]

_PROJECTIONS: tuple[Literal["fc1", "fc2"], ...] = ("fc1", "fc2")


@dataclass(frozen=True)
class ExpertParameter:
    """One expert matrix of this rank.

    Attributes:
        matrix: its global identity.
        linear: the module that holds the parameter: a ``TEGroupedLinear`` with one parameter an expert, or one
            expert's linear.
        slot: number of the expert inside `linear`; 0 for SequentialMLP.
        parameter: BF16 ``[M, N]``.
    """

    matrix: ExpertMatrix
    linear: Any
    slot: int
    parameter: torch.nn.Parameter


@dataclass(frozen=True)
class ExpertLayer:
    """The routed experts of one layer on this rank.

    Attributes:
        layer: global layer index.
        module: Megatron's TEGroupedMLP or SequentialMLP.
        grouped: whether it is a TEGroupedMLP.
        experts: global ids, in the module's order.
        parameters: every matrix, fc1 before fc2, expert by expert.
    """

    layer: int
    module: Any
    grouped: bool
    experts: tuple[int, ...]
    parameters: tuple[ExpertParameter, ...]


def chunks_of(model: Any) -> tuple[Any, ...]:
    """A model, or a list of model chunks, as a tuple of chunks."""
    return tuple(model) if isinstance(model, list | tuple) else (model,)


def find_expert_layers(model: Any) -> tuple[ExpertLayer, ...]:
    """The expert layers of a model or of a list of chunks, with or without their wrappers, in layer order.

    Raises:
        ConfigError: no routed experts, an expert module of an unknown kind, biases, or several layers of one number.
    """
    layers = [layer for chunk in chunks_of(model) for layer in _layers(chunk)]
    if not layers:
        raise ConfigError("the model has no routed experts (no MoELayer); there is nothing to attach")
    numbers = [layer.layer for layer in layers]
    if len(set(numbers)) != len(numbers):
        raise ConfigError(f"expert layers are numbered {numbers}; every layer needs a number of its own")
    if len({layer.experts for layer in layers}) != 1:
        raise ConfigError("the layers hold different experts on this rank; every layer must hold the same ones")
    return tuple(sorted(layers, key=lambda layer: layer.layer))


def _layers(chunk: torch.nn.Module) -> Iterator[ExpertLayer]:
    from megatron.core.transformer.moe.experts import SequentialMLP, TEGroupedMLP
    from megatron.core.transformer.moe.moe_layer import MoELayer

    for name, module in chunk.named_modules():
        if not isinstance(module, MoELayer):
            continue
        name = plain_name(name)
        if "mtp" in name.split("."):
            raise ConfigError(
                f"{name}: experts of multi-token-prediction layers are not supported; set mtp_num_layers=None"
            )
        layer = int(module.layer_number) - 1
        experts = tuple(int(expert) for expert in module.local_expert_indices)
        if isinstance(module.experts, TEGroupedMLP):
            yield ExpertLayer(
                layer, module.experts, True, experts, tuple(_grouped(name, module.experts, layer, experts))
            )
        elif isinstance(module.experts, SequentialMLP):
            yield ExpertLayer(
                layer, module.experts, False, experts, tuple(_sequential(name, module.experts, layer, experts))
            )
        else:
            kind = type(module.experts).__name__
            raise ConfigError(f"{name}.experts is a {kind}; TEGroupedMLP and SequentialMLP are supported")


def _grouped(name: str, module: Any, layer: int, experts: tuple[int, ...]) -> Iterator[ExpertParameter]:
    for slot, expert in enumerate(experts):
        for projection in _PROJECTIONS:
            linear = getattr(module, f"linear_{projection}")
            parameter = getattr(linear, f"weight{slot}", None)
            if getattr(linear, "single_grouped_weight", False) or parameter is None:
                raise ConfigError(
                    f"{name}.experts.linear_{projection} keeps all experts in one grouped weight; set "
                    "moe_single_grouped_weight=False"
                )
            _refuse_bias(f"{name}.experts.linear_{projection}", linear.use_bias)
            yield ExpertParameter(ExpertMatrix(layer, expert, projection), linear, slot, parameter)


def _sequential(name: str, module: Any, layer: int, experts: tuple[int, ...]) -> Iterator[ExpertParameter]:
    for local, expert in zip(module.local_experts, experts, strict=True):
        for projection in _PROJECTIONS:
            linear = getattr(local, f"linear_{projection}")
            _refuse_bias(f"{name}.experts.linear_{projection}", getattr(linear, "bias", None) is not None)
            yield ExpertParameter(ExpertMatrix(layer, expert, projection), linear, 0, linear.weight)


def _refuse_bias(name: str, has_bias: bool) -> None:
    if has_bias:
        raise ConfigError(f"{name} has biases, which are not published; set add_bias_linear=False")
