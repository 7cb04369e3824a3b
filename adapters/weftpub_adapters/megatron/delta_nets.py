"""What a gated delta net needs on a GPU: Megatron-core computes it with flash-linear-attention and has nothing else.

With `deterministic_mode` it keeps that package's norm and computes the rule in plain torch, one sequence a row.
"""

import importlib.util

import torch

from weftpub.errors import ConfigError
from weftpub.packages import installed, release

__all__ = ["require_delta_net_kernels", "wrong_gradient"]

# flash-linear-attention 0.6.0 refuses its gated chunk_bwd_dqkwg on Hopper with these releases of Triton (its #640).
_WRONG_FROM, _RIGHT_AGAIN = (3, 4, 0), (3, 7, 1)
_HOPPER = 9


def wrong_gradient(capability: tuple[int, int], triton: str | None, tilelang: str | None) -> str | None:
    """Why the backward pass cannot be computed by flash-linear-attention here, with the remedy; None where it can.

    Args:
        capability: of the GPU.
        triton, tilelang: their versions; None where missing.
    """
    if capability[0] != _HOPPER or triton is None or tilelang is not None:
        return None
    if not _WRONG_FROM <= release(triton) < _RIGHT_AGAIN:
        return None
    return (
        f"Triton {triton} computes wrong gradients of gated delta nets on Hopper, and flash-linear-attention refuses "
        f"them; install tilelang, whose kernel it takes instead (torch 2.11 is tied to this Triton; 3.7.1 is right "
        "again), or train deterministically"
    )


def require_delta_net_kernels(*, deterministic: bool) -> None:
    """Refuse a model with gated delta nets that this machine's GPUs cannot train.

    Args:
        deterministic: whether Megatron's `deterministic_mode` is set.

    Raises:
        ConfigError: a package is missing, or one that gives wrong gradients would be used.
    """
    if importlib.util.find_spec("fla") is None:
        raise ConfigError(
            "Qwen3.5's gated delta nets need flash-linear-attention on a GPU: Megatron-core has no other kernels for "
            "them; install flash-linear-attention"
        )
    if deterministic or not torch.cuda.is_available():
        return
    found = wrong_gradient(torch.cuda.get_device_capability(), installed("triton"), installed("tilelang"))
    if found is not None:
        raise ConfigError(found)
