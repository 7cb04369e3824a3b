"""Reads a Hugging Face Qwen3-MoE checkpoint into Megatron-core parameters and FP32 masters.

Nothing is dropped and nothing is guessed: every tensor of the checkpoint is consumed by exactly one parameter of one
rank, every parameter of the model is filled exactly once, and both are checked by name before the first element is
written.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from weftpub.errors import CheckpointError, ConfigError
from weftpub_adapters.megatron.fields import Qwen3MoeFields
from weftpub_adapters.megatron.names import ParameterSource, parameter_sources, plain_name

__all__ = ["LoadedParameter", "check_names", "fill_parameters", "read_parameters"]

_FLOAT_DTYPES = (torch.bfloat16, torch.float32, torch.float16)


@dataclass(frozen=True)
class LoadedParameter:
    """One parameter of this rank, in Megatron's layout and the checkpoint's dtype."""

    source: ParameterSource
    tensor: torch.Tensor


def check_names(names: Iterable[str], fields: Qwen3MoeFields) -> None:
    """Compare a checkpoint's tensor names with those that the model needs.

    Raises:
        CheckpointError: lists the missing and the unknown names.
    """
    found = set(names)
    needed: set[str] = set()
    for source in parameter_sources(fields):
        needed.update(source.tensors)
    if fields.tied:
        found.discard(
            "lm_head.weight"
        )  # some releases repeat the tied embedding under this name; its bytes are compared later
    missing, unknown = sorted(needed - found), sorted(found - needed)
    if missing or unknown:
        raise CheckpointError(
            f"the checkpoint does not match its config.json: {len(missing)} tensors missing {missing[:8]}, "
            f"{len(unknown)} unknown {unknown[:8]}"
        )


def read_parameters(
    tensors: Mapping[str, torch.Tensor], fields: Qwen3MoeFields, *, rank: int = 0, expert_parallel: int = 1
) -> Iterator[LoadedParameter]:
    """Yield this rank's parameters one at a time; a tensor is read when its parameter is due.

    Args:
        tensors: the checkpoint by Hugging Face name, read lazily (`weftpub.checkpoint.LazyTensors`) or a plain dict.
        rank, expert_parallel: which block of experts this rank holds; dense parameters are yielded on every rank.

    Raises:
        CheckpointError: names do not match, a tensor is no floating-point tensor of the right size, or a tied output
            layer differs from the embedding.
    """
    if fields.experts % expert_parallel or not 0 <= rank < expert_parallel:
        raise ConfigError(f"rank {rank} of {expert_parallel} cannot hold an equal block of {fields.experts} experts")
    check_names(tensors, fields)
    if (
        fields.tied
        and "lm_head.weight" in tensors
        and not torch.equal(tensors["lm_head.weight"], tensors["model.embed_tokens.weight"])
    ):
        raise CheckpointError(
            "lm_head.weight differs from model.embed_tokens.weight although tie_word_embeddings is true"
        )
    for source in parameter_sources(fields, expert_parallel):
        if source.owner not in (None, rank):
            continue
        parts = [tensors[name] for name in source.tensors]
        for name, part in zip(source.tensors, parts, strict=True):
            if part.dtype not in _FLOAT_DTYPES:
                raise CheckpointError(
                    f"{name} is {part.dtype}; expected one of {[str(dtype) for dtype in _FLOAT_DTYPES]}"
                )
        try:
            joined = source.build(parts, fields)
        except RuntimeError as error:
            shapes = {name: tuple(part.shape) for name, part in zip(source.tensors, parts, strict=True)}
            raise CheckpointError(f"{source.name}: tensors of shapes {shapes} cannot be joined: {error}") from error
        yield LoadedParameter(source, joined)


@torch.no_grad()
def fill_parameters(model: Any, parameters: Iterable[LoadedParameter]) -> None:
    """Copy loaded parameters into a model, each model parameter exactly once.

    Args:
        model: a Megatron model, with or without its wrappers.
        parameters: what `read_parameters` yields.

    Raises:
        CheckpointError: a name or shape differs, or a parameter of the model stays unfilled; the message lists names.
    """
    waiting = {plain_name(name): parameter for name, parameter in model.named_parameters()}
    for loaded in parameters:
        name = loaded.source.name
        parameter = waiting.pop(name, None)
        if parameter is None:
            raise CheckpointError(f"{name}: the model has no such parameter, or it was filled before")
        if parameter.shape != loaded.tensor.shape:
            raise CheckpointError(
                f"{name}: the model expects {tuple(parameter.shape)}, the checkpoint gives {tuple(loaded.tensor.shape)}"
            )
        parameter.copy_(loaded.tensor)
    if waiting:
        raise CheckpointError(
            f"{len(waiting)} parameters of the model were not in the checkpoint: {sorted(waiting)[:8]}"
        )
