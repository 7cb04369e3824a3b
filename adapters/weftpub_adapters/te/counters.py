"""Counts what happens to weights and in which precision GEMMs run, to prove that nothing is requantized and only
experts are FP8."""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

__all__ = ["Count", "count_fp8_gemms", "count_weight_quantizations"]


class Count:
    """A number that grows inside a block.

    Attributes:
        total: calls counted.
    """

    def __init__(self) -> None:
        self.total = 0


@contextmanager
def count_weight_quantizations() -> Generator[Count]:
    """Count calls that quantize a tensor in 128x128 blocks, which is how weights alone are quantized."""
    from transformer_engine.pytorch.tensor.float8_blockwise_tensor import Float8BlockQuantizer

    count = Count()
    names = ("quantize_impl", "update_quantized")
    before = {name: getattr(Float8BlockQuantizer, name) for name in names}
    for name in names:
        setattr(Float8BlockQuantizer, name, _counted_quantize(before[name], count))
    try:
        yield count
    finally:
        for name in names:
            setattr(Float8BlockQuantizer, name, before[name])


@contextmanager
def count_fp8_gemms() -> Generator[dict[str, Count]]:
    """Count GEMM calls of TransformerEngine's modules: "fp8" and "other" of plain linears, "grouped_fp8" and
    "grouped_other"."""
    from transformer_engine.pytorch.module import grouped_linear, layernorm_linear, layernorm_mlp, linear

    counts = {name: Count() for name in ("fp8", "other", "grouped_fp8", "grouped_other")}
    places: list[tuple[Any, str, str]] = [
        (module, "general_gemm", "")
        for module in (linear, layernorm_linear, layernorm_mlp)
        if hasattr(module, "general_gemm")
    ]
    places.append((grouped_linear, "general_grouped_gemm", "grouped_"))
    before = [getattr(module, name) for module, name, _ in places]
    for (module, name, prefix), function in zip(places, before, strict=True):
        setattr(module, name, _counted_gemm(function, counts[f"{prefix}fp8"], counts[f"{prefix}other"]))
    try:
        yield counts
    finally:
        for (module, name, _), function in zip(places, before, strict=True):
            setattr(module, name, function)


def _counted_quantize(function: Callable[..., Any], count: Count) -> Callable[..., Any]:
    def quantize(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.block_scaling_dim == 2:
            count.total += 1
        return function(self, *args, **kwargs)

    return quantize


def _counted_gemm(function: Callable[..., Any], quantized: Count, other: Count) -> Callable[..., Any]:
    from transformer_engine.pytorch.quantized_tensor import QuantizedTensorStorage

    def gemm(first: Any, *args: Any, **kwargs: Any) -> Any:
        operand = first[0] if isinstance(first, list | tuple) else first
        (quantized if isinstance(operand, QuantizedTensorStorage) else other).total += 1
        return function(first, *args, **kwargs)

    return gemm
