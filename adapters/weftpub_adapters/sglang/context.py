"""A runtime context of SGLang for any rank, in one process and without torch.distributed.

It is what a worker's start-up would publish, kept apart from the process's own: models of several ranks fit in one
process, and nothing process-wide changes. Choice made: stand-ins for the process groups; cost: a model in such a
context cannot run a forward pass that communicates.
"""

import sys
import types
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from weftpub.errors import ConfigError
from weftpub_adapters.sglang.parallel import ParallelSizes, parallel_sizes
from weftpub_adapters.sglang.support import check_backends

__all__ = ["WorkerContext", "worker_context"]

_GROUPS = {
    "tp_group": ("tp_size", "tp_rank"),
    "attn_tp_group": ("attn_tp_size", "attn_tp_rank"),
    "moe_ep_group": ("moe_ep_size", "moe_ep_rank"),
    "moe_tp_group": ("moe_tp_size", "moe_tp_rank"),
}


@dataclass(frozen=True)
class WorkerContext:
    """One rank's context, and what SGLang made of the request.

    Attributes:
        context: SGLang's RuntimeContext.
        parallel: real sizes and ranks.
        backends: runner and data mover of the routed experts.
    """

    context: Any
    parallel: ParallelSizes
    backends: dict[str, str]


@contextmanager
def worker_context(
    *,
    tp_size: int,
    ep_size: int,
    rank: int,
    attention_dp: int,
    device: torch.device,
    moe_runner_backend: str,
    redundant_experts: int = 0,
) -> Iterator[WorkerContext]:
    """Make a context and build models in it while the block runs: BF16 by default, on `device`.

    Raises:
        ConfigError: SGLang's CPU engine is on, or a backend cannot be published to.
    """
    _require_cuda_code_path()
    from sglang.srt.model_loader.utils import set_default_torch_dtype
    from sglang.srt.runtime_context import SpawnRanks, create_context, use_context
    from sglang.srt.server_args import ServerArgs

    attention = {"enable_dp_attention": True, "dp_size": attention_dp} if attention_dp > 1 else {}
    arguments = ServerArgs(
        model_path="dummy",
        device="cpu" if device.type == "meta" else device.type,
        tp_size=tp_size,
        ep_size=ep_size,
        ep_num_redundant_experts=redundant_experts,
        moe_runner_backend=moe_runner_backend,
        fp8_gemm_runner_backend="triton",
        attention_backend="triton",
        disable_shared_experts_fusion=True,
        **attention,
    )
    with ExitStack() as stack:
        ranks = SpawnRanks(world_rank=rank, gpu_id=device.index or 0 if device.type == "cuda" else None)
        context = create_context(arguments, role="scheduler", ranks=ranks)
        stack.enter_context(use_context(context))
        _join_world(context, arguments)
        backends = _backends()
        stack.enter_context(_rotary_without_vllm())
        stack.enter_context(set_default_torch_dtype(torch.bfloat16))
        stack.enter_context(device)
        yield WorkerContext(context, parallel_sizes(), backends)


def _require_cuda_code_path() -> None:
    from sglang.srt.utils import is_cpu

    if is_cpu():
        raise ConfigError(
            "SGLang's CPU engine repacks weights for its own kernels; unset SGLANG_USE_CPU_ENGINE in this process"
        )


def _join_world(context: Any, arguments: Any) -> None:
    """Give the context its groups and MoE flags, as a worker's start-up would."""
    from sglang.srt.layers.dp_attention import initialize_dp_attention_flags
    from sglang.srt.layers.moe.utils import initialize_moe_config

    parallel = context.parallel
    groups = {name: _group(getattr(parallel, size), getattr(parallel, rank)) for name, (size, rank) in _GROUPS.items()}
    parallel.override_permanently(
        **groups, pp_group=_group(1, 0), world_group=_group(parallel.tp_size, parallel.tp_rank)
    )
    initialize_moe_config()
    initialize_dp_attention_flags(arguments)


def _backends() -> dict[str, str]:
    from sglang.srt.layers.moe.utils import get_moe_a2a_backend, get_moe_runner_backend

    backends = {"moe_runner": str(get_moe_runner_backend().value), "moe_a2a": str(get_moe_a2a_backend().value)}
    check_backends(backends["moe_runner"], a2a=backends["moe_a2a"])
    return backends


def _group(size: int, rank: int) -> SimpleNamespace:
    """What module constructors read of a process group."""
    return SimpleNamespace(
        world_size=size,
        rank_in_group=rank,
        rank=rank,
        local_rank=rank,
        is_first_rank=rank == 0,
        is_last_rank=rank == size - 1,
        device_group=None,
        cpu_group=None,
    )


@contextmanager
def _rotary_without_vllm() -> Iterator[None]:
    """Off CUDA, SGLang's rotary embedding takes a kernel from vllm that only a forward pass would call."""
    if torch.cuda.is_available() or "vllm" in sys.modules:
        yield
        return
    package, ops = types.ModuleType("vllm"), types.ModuleType("vllm._custom_ops")
    ops.rotary_embedding = None  # type: ignore[attr-defined]
    stand_ins = {"vllm": package, "vllm._custom_ops": ops}
    sys.modules.update(stand_ins)
    try:
        yield
    finally:
        for name in stand_ins:
            sys.modules.pop(name, None)
