"""Fills a Megatron model from a Hugging Face checkpoint, for both layer specs and any tensor-parallel rank.

The adapter's loaders read and join tensors in the local spec's names; one table says what TransformerEngine's layers
call them, and one along which dimension tensor parallel ranks split those of Qwen3-MoE (the loader of Qwen3.5-MoE cuts
by itself). Every parameter is filled exactly once.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from weftpub.checkpoint import LazyTensors
from weftpub.errors import CheckpointError
from weftpub_adapters.megatron import Qwen3MoeFields, Qwen35MoeFields, read_hybrid_parameters, read_parameters
from weftpub_adapters.megatron.names import plain_name

__all__ = ["load_hf", "megatron_name", "rank_parameters", "tensor_parallel_part"]

# How TransformerEngine's layers call what the local spec calls otherwise.
_TE_NAMES = {"input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight"}
# Dimension that tensor-parallel ranks split. Query, key and value rows are grouped by key/value head, so a run of rows
# is a run of whole groups. Everything else, routed experts included, is whole on every rank.
_SPLIT = {
    "embedding.word_embeddings.weight": 0,
    "output_layer.weight": 0,
    "self_attention.linear_qkv.weight": 0,
    "self_attention.linear_proj.weight": 1,
}
_DELTA_NORM = "self_attention.in_proj.layer_norm_weight"  # TransformerEngine's name where a gated delta net follows


@torch.no_grad()
def load_hf(model: Any, directory: Path, fields: Qwen3MoeFields, *, grouped: bool) -> None:
    """Copy this rank's part of a checkpoint into the model.

    Args:
        model: of `weftmoe.loop.model.build_model`.
        directory: the checkpoint.
        fields: of its config.json.
        grouped: whether the model is made of TransformerEngine's layers.

    Raises:
        CheckpointError: names or shapes do not match, or a parameter stays unfilled.
    """
    from megatron.core import parallel_state as state

    waiting = {plain_name(name): parameter for name, parameter in model.named_parameters()}
    tensor = state.get_tensor_model_parallel_rank(), state.get_tensor_model_parallel_world_size()
    expert = state.get_expert_model_parallel_rank(), state.get_expert_model_parallel_world_size()
    for local, part in rank_parameters(LazyTensors(directory), fields, tensor=tensor, expert=expert):
        name = megatron_name(local, fields) if grouped else local
        parameter = waiting.pop(name, None)
        if parameter is None:
            raise CheckpointError(f"{name}: the model has no such parameter, or it was filled before")
        if parameter.shape != part.shape:
            raise CheckpointError(
                f"{name}: the model expects {tuple(parameter.shape)}, the checkpoint gives {tuple(part.shape)}"
            )
        parameter.copy_(part)
    if waiting:
        raise CheckpointError(f"{len(waiting)} parameters were not in the checkpoint: {sorted(waiting)[:8]}")


def rank_parameters(
    tensors: Mapping[str, torch.Tensor],
    fields: Qwen3MoeFields,
    *,
    tensor: tuple[int, int] = (0, 1),
    expert: tuple[int, int] = (0, 1),
) -> Iterator[tuple[str, torch.Tensor]]:
    """A rank's parameters by their names in the local spec.

    Args:
        tensors: the checkpoint.
        fields: of its config.json.
        tensor, expert: place among the tensor and the expert parallel ranks, and their number.
    """
    if isinstance(fields, Qwen35MoeFields):
        yield from read_hybrid_parameters(tensors, fields, tensor=tensor, expert=expert)
        return
    for loaded in read_parameters(tensors, fields, rank=expert[0], expert_parallel=expert[1]):
        name = loaded.source.name
        yield name, tensor_parallel_part(name, loaded.tensor, *tensor)


def megatron_name(name: str, fields: Qwen3MoeFields | None = None) -> str:
    """The name of a parameter of the local spec in TransformerEngine's layers; `fields` say which of a Qwen3.5-MoE's
    layers have attention.
    """
    head, found, tail = name.partition(".mlp.experts.local_experts.")
    if found:  # "{e}.linear_fc1.weight" -> "linear_fc1.weight{e}"
        expert, linear, weight = tail.split(".")
        return f"{head}.mlp.experts.{linear}.{weight}{expert}"
    prefix, layer, rest = _parts(name)
    other = _TE_NAMES.get(rest, rest)
    if other != rest and isinstance(fields, Qwen35MoeFields) and not fields.full[int(layer.rstrip("."))]:
        other = _DELTA_NORM
    return f"{prefix}{layer}{other}"


def tensor_parallel_part(name: str, tensor: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    """A rank's rows or columns of a whole tensor, by its name in the local spec."""
    dimension = _SPLIT.get(_parts(name)[2])
    if dimension is None or size == 1:
        return tensor
    if tensor.shape[dimension] % size:
        raise CheckpointError(
            f"{name}: dimension {dimension} of {tuple(tensor.shape)} cannot be split over {size} tensor-parallel ranks"
        )
    return tensor.chunk(size, dim=dimension)[rank]


def _parts(name: str) -> tuple[str, str, str]:
    """("decoder.layers.", "3.", "mlp.router.weight"), or ("", "", name) outside of the layers."""
    prefix = "decoder.layers."
    if not name.startswith(prefix):
        return "", "", name
    layer, _, rest = name.removeprefix(prefix).partition(".")
    return prefix, f"{layer}.", rest
