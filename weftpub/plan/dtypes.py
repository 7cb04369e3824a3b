"""Dtype names as they travel: torch's own name without the ``torch.`` prefix, and the bytes of one element."""

from functools import lru_cache

import torch

from weftpub.errors import PlanError

__all__ = ["dtype_name", "itemsize", "torch_dtype"]


@lru_cache(maxsize=64)
def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype called `name`, such as ``float8_e4m3fn``; PlanError if torch has none of that name."""
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise PlanError(
            f"unknown dtype {name!r}; expected a torch dtype name without the 'torch.' prefix, such as 'float8_e4m3fn'"
        )
    return found


@lru_cache(maxsize=64)
def itemsize(name: str) -> int:
    """Bytes of one element of the dtype called `name`."""
    return torch_dtype(name).itemsize


@lru_cache(maxsize=64)
def dtype_name(dtype: torch.dtype) -> str:
    """The name under which `dtype` travels."""
    return str(dtype).removeprefix("torch.")
