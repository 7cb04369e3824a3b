"""Puts a store's bytes behind a model's expert layers, and takes them away again.

While attached, an expert's weight parameter stays registered with its shape, its hooks and its main gradient, and
owns no memory: its storage has zero bytes. Forward and backward read the store. `detach` gives the parameters memory
again and fills it from the masters, which leaves an ordinary Megatron model.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from weftpub.errors import ConfigError, StateError
from weftpub.masters import ExpertMatrix
from weftpub_adapters.megatron.linear import StoreLinear, StoreMatrix, StoreReader
from weftpub_adapters.megatron.names import expert_of, plain_name

__all__ = ["ExpertAttachment", "StoreProduct", "expert_parameters", "first_expert"]


def first_expert(model: Any) -> int:
    """Global id of the first expert that this rank holds."""
    from megatron.core import parallel_state

    for name, module in model.named_modules():
        if plain_name(name).endswith("mlp.experts"):
            return parallel_state.get_expert_model_parallel_rank() * len(module.local_experts)
    raise ConfigError("the model has no routed experts")


def expert_parameters(model: Any, first: int) -> Iterator[tuple[ExpertMatrix, torch.nn.Parameter]]:
    """The weight parameter of every expert matrix of this rank, with the matrix's global identity."""
    for name, parameter in model.named_parameters():
        matrix = expert_of(name, first)
        if matrix is not None:
            yield matrix, parameter


class StoreProduct:
    """Stands for a parallel linear's `_forward_impl`: same call, the store's bytes instead of `weight`."""

    def __init__(self, weight: StoreMatrix) -> None:
        self._weight = weight

    def __call__(
        self, input: torch.Tensor, weight: torch.nn.Parameter, bias: torch.Tensor | None = None, **_: Any
    ) -> torch.Tensor:
        if bias is not None:
            raise ConfigError(f"{self._weight.matrix.name}: expert biases are not supported; set add_bias_linear=False")
        return StoreLinear.apply(input, weight, self._weight)


@dataclass(frozen=True)
class _Attached:
    matrix: ExpertMatrix
    linear: Any
    parameter: torch.nn.Parameter
    nbytes: int


class ExpertAttachment:
    """The bond between a model's expert layers and a store.

    Args:
        model: a Megatron model with SequentialMLP experts, with or without wrappers. If DistributedDataParallel is to
            wrap it, that comes first: its hooks are made from views of parameters that have memory.
        store: holds every expert matrix of this rank.
        first: global id of this rank's first expert; by default from Megatron's expert-parallel group.

    Raises:
        ConfigError: an expert parameter shares its storage with others, is attached already, or has another shape than
            the store's matrix. Nothing is changed then.
    """

    def __init__(self, model: Any, store: StoreReader, *, first: int | None = None) -> None:
        self.store = store
        self._first = first_expert(model) if first is None else first
        self._attached = [self._prepare(name, module, store) for name, module in self._linears(model)]
        if not self._attached:
            raise ConfigError("the model has no SequentialMLP expert weights to attach; set moe_grouped_gemm=False")
        for item in self._attached:
            item.linear._forward_impl = StoreProduct(StoreMatrix(store, item.matrix))
            item.parameter.untyped_storage().resize_(0)
        self._open = True

    @property
    def attached(self) -> bool:
        """Whether forward and backward read the store."""
        return self._open

    @property
    def placeholders(self) -> dict[str, torch.nn.Parameter]:
        """Matrix name to its zero-storage parameter."""
        return {item.matrix.name: item.parameter for item in self._attached}

    @property
    def storage_bytes(self) -> int:
        """Bytes that the expert parameters own: zero while attached."""
        return sum(item.parameter.untyped_storage().nbytes() for item in self._attached)

    @torch.no_grad()
    def detach(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Give every placeholder its memory back, filled from `weights`, and let it compute for itself.

        Args:
            weights: matrix name to a tensor of the parameter's shape; the FP32 masters, so that no FP8 rounding
                survives.

        Raises:
            StateError: detached before. ConfigError: a weight is missing or has another shape; nothing is changed then.
        """
        if not self._open:
            raise StateError("these experts are detached already")
        for item in self._attached:
            found = weights.get(item.matrix.name)
            if found is None or found.shape != item.parameter.shape:
                shape = None if found is None else tuple(found.shape)
                raise ConfigError(
                    f"{item.matrix.name}: expected a weight of shape {tuple(item.parameter.shape)} to "
                    f"detach with, found {shape}"
                )
        for item in self._attached:
            item.parameter.untyped_storage().resize_(item.nbytes)
            item.parameter.copy_(weights[item.matrix.name])
            del item.linear._forward_impl
        self._open = False

    @staticmethod
    def _linears(model: Any) -> Iterator[tuple[str, Any]]:
        for name, module in model.named_modules():
            plain = plain_name(name)
            if ".mlp.experts." in plain and plain.rsplit(".", 1)[-1] in ("linear_fc1", "linear_fc2"):
                yield plain, module

    def _prepare(self, name: str, linear: Any, store: StoreReader) -> _Attached:
        matrix = expert_of(f"{name}.weight", self._first)
        assert matrix is not None, f"{name}: selected as an expert linear"
        parameter = linear.weight
        if "_forward_impl" in vars(linear):
            raise ConfigError(f"{matrix.name}: already attached to a store; detach it first")
        nbytes = parameter.numel() * parameter.element_size()
        if parameter.untyped_storage().nbytes() != nbytes:
            raise ConfigError(
                f"{matrix.name}: the parameter's storage has {parameter.untyped_storage().nbytes()} bytes, "
                f"expected its own {nbytes}; "
                "set use_distributed_optimizer=False, which leaves parameters out of flat buffers"
            )
        held = matrix in store.layout.matrices
        expected = store.layout.shape(matrix.projection)
        if not held or tuple(parameter.shape) != expected:
            raise ConfigError(
                f"{matrix.name} {list(parameter.shape)}: the store holds "
                + (f"{list(expected)}" if held else f"experts {list(store.layout.experts)} only")
                + "; build it from this model's sizes and this rank's global experts"
            )
        return _Attached(matrix, linear, parameter, nbytes)
