"""Fills a Megatron model from a Hugging Face checkpoint, for both layer specs and any tensor-parallel rank.

The adapter's loader reads and joins tensors in the local spec's names; one table each says what TransformerEngine's
layers call them, and along which dimension tensor parallel ranks split them. Every parameter is filled exactly once.
"""

from pathlib import Path
from typing import Any

import torch

from weftpub.checkpoint import LazyTensors
from weftpub.errors import CheckpointError
from weftpub_adapters.megatron import Qwen3MoeFields, read_parameters
from weftpub_adapters.megatron.names import plain_name

__all__ = ["load_hf", "megatron_name", "tensor_parallel_part"]

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

    rank, size = state.get_tensor_model_parallel_rank(), state.get_tensor_model_parallel_world_size()
    waiting = {plain_name(name): parameter for name, parameter in model.named_parameters()}
    parameters = read_parameters(
        LazyTensors(directory),
        fields,
        rank=state.get_expert_model_parallel_rank(),
        expert_parallel=state.get_expert_model_parallel_world_size(),
    )
    for loaded in parameters:
        name = megatron_name(loaded.source.name) if grouped else loaded.source.name
        parameter = waiting.pop(name, None)
        if parameter is None:
            raise CheckpointError(f"{name}: the model has no such parameter, or it was filled before")
        part = tensor_parallel_part(loaded.source.name, loaded.tensor, rank, size)
        if parameter.shape != part.shape:
            raise CheckpointError(
                f"{name}: the model expects {tuple(parameter.shape)}, the checkpoint gives {tuple(part.shape)}"
            )
        parameter.copy_(part)
    if waiting:
        raise CheckpointError(f"{len(waiting)} parameters were not in the checkpoint: {sorted(waiting)[:8]}")


def megatron_name(name: str) -> str:
    """The name of a parameter of the local spec in TransformerEngine's layers."""
    head, found, tail = name.partition(".mlp.experts.local_experts.")
    if found:  # "{e}.linear_fc1.weight" -> "linear_fc1.weight{e}"
        expert, linear, weight = tail.split(".")
        return f"{head}.mlp.experts.{linear}.{weight}{expert}"
    prefix, layer, rest = _parts(name)
    return f"{prefix}{layer}{_TE_NAMES.get(rest, rest)}"


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
