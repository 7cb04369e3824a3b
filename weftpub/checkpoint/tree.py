"""Nested state of tensors and scalars, taken apart into named tensors and plain JSON, and put together again. Nothing
is pickled.

A leaf tensor becomes ``{"$tensor": "path"}``; JSON's own types stay as they are; what JSON cannot say exactly (tuples,
keys that are not strings, non-finite floats) is written as an object with one ``$`` key. Finite floats round-trip
exactly: Python prints the shortest decimal that reads back to the same bits.
"""

import math
from collections.abc import Mapping
from typing import Any, cast

import torch

from weftpub.errors import CheckpointError, ConfigError

__all__ = ["flatten", "unflatten"]


def flatten(tree: object, root: str) -> tuple[Any, dict[str, torch.Tensor]]:
    """Split `tree` into JSON data and tensors named ``root/key/key``.

    Returns:
        The JSON data, and the tensors themselves, not copies.

    Raises:
        ConfigError: a leaf is neither tensor nor scalar; names its place.
    """
    tensors: dict[str, torch.Tensor] = {}
    return _flatten(tree, root, tensors), tensors


def _flatten(node: object, path: str, tensors: dict[str, torch.Tensor]) -> Any:
    if isinstance(node, torch.Tensor):
        name = path
        while name in tensors:  # keys may hold slashes, so two places can spell one path
            name += "~"
        tensors[name] = node
        return {"$tensor": name}
    if node is None or isinstance(node, bool | int | str):
        return node
    if isinstance(node, float):
        return node if math.isfinite(node) else {"$float": repr(node)}
    if isinstance(node, tuple):
        return {
            "$tuple": [
                _flatten(item, f"{path}/{i}", tensors) for i, item in enumerate(cast("tuple[object, ...]", node))
            ]
        }
    if isinstance(node, list):
        return [_flatten(item, f"{path}/{i}", tensors) for i, item in enumerate(cast("list[object]", node))]
    if isinstance(node, Mapping):
        return _flatten_mapping(cast("Mapping[object, object]", node), path, tensors)
    raise ConfigError(
        f"{path}: a checkpoint holds tensors, numbers, strings, lists, tuples and mappings, found {type(node).__name__}"
    )


def _flatten_mapping(node: Mapping[object, object], path: str, tensors: dict[str, torch.Tensor]) -> Any:
    if all(isinstance(key, str) and not key.startswith("$") for key in node):
        return {key: _flatten(value, f"{path}/{key}", tensors) for key, value in node.items()}
    keys = [key for key in node if not isinstance(key, str | int) or isinstance(key, bool)]
    if keys:
        raise ConfigError(f"{path}: keys are strings or integers, found {type(keys[0]).__name__} {keys[0]!r}")
    return {"$items": [[key, _flatten(value, f"{path}/{key}", tensors)] for key, value in node.items()]}


def unflatten(node: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """Rebuild what `flatten` took apart; tensors are taken from `tensors` as they are.

    Raises:
        CheckpointError: a tensor is missing, or the data was not made by `flatten`.
    """
    if isinstance(node, list):
        return [unflatten(item, tensors) for item in cast("list[Any]", node)]
    if not isinstance(node, dict):
        return node
    mapping = cast("dict[str, Any]", node)
    tag = next((key for key in mapping if key.startswith("$")), None)
    if tag is None:
        return {key: unflatten(value, tensors) for key, value in mapping.items()}
    value = mapping[tag]
    if tag == "$tensor":
        if value not in tensors:
            raise CheckpointError(f"{value}: the state names this tensor, but no file of the checkpoint holds it")
        return tensors[value]
    if tag == "$float":
        return float(value)
    if tag == "$tuple":
        return tuple(unflatten(item, tensors) for item in value)
    if tag == "$items":
        return {key: unflatten(item, tensors) for key, item in value}
    raise CheckpointError(f"unknown mark {tag!r} in the state; it was written by a newer release")
