"""Let Megatron-core run on a machine without CUDA: for the demo and the tests only, never for an adapter.

Megatron-core asks `torch.cuda` for devices, streams and random states even where its arithmetic would run anywhere.
Without a GPU `install()` answers those questions with their CPU equivalents, process-wide and for good; with a GPU
it changes nothing. Choice made: a table of replacements instead of a fork of Megatron; cost: `torch.cuda` lies in
this process, so a process that uses it must do nothing else with CUDA. Call it before the first import of `megatron`.
"""

import contextlib
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.overrides

__all__ = ["install", "installed"]

_CPU = torch.device("cpu")
_state = {"installed": False}


class _NoStream:
    """A CUDA stream or event that does nothing: CPU work is already in order when a call returns."""

    cuda_stream = 0

    def __init__(self, *args: object, **kwargs: object) -> None:
        pass

    def __enter__(self) -> "_NoStream":
        return self

    def __exit__(self, *exc: object) -> None:
        return None

    def wait_stream(self, other: object) -> None:
        pass

    def wait_event(self, event: object) -> None:
        pass

    def wait(self, *args: object) -> None:
        pass

    def record(self, *args: object) -> None:
        pass

    def record_event(self, *args: object) -> "_NoStream":
        return self

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: object) -> float:
        return 0.0


_STREAM = _NoStream()


def _returning(value: object) -> Callable[..., Any]:
    """A new function that answers `value` to any call. New each time: torch.compile's tables refuse one function
    under two names.
    """

    def answer(*args: object, **kwargs: object) -> object:
        return value

    return answer


def _same_tensor(self: Any, *args: object, **kwargs: object) -> Any:
    return self


class _CudaMeansCpu(torch.overrides.TorchFunctionMode):
    """Calls that name a CUDA device, or ask for pinned memory, get the CPU and pageable memory."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if kwargs:
            if "device" in kwargs:
                kwargs = {**kwargs, "device": _as_cpu(kwargs["device"])}
            if kwargs.get("pin_memory"):
                kwargs = {**kwargs, "pin_memory": False}
        if func is torch.Tensor.to:
            args = (args[0], *(_as_cpu(argument) for argument in args[1:]))
        return func(*args, **(kwargs or {}))


def _as_cpu(device: Any) -> Any:
    is_cuda = (isinstance(device, str) and device.startswith("cuda")) or (
        isinstance(device, torch.device) and device.type == "cuda"
    )
    return _CPU if is_cuda else device


_mode = _CudaMeansCpu()
_plain_type = torch.Tensor.type


def _cuda_type_name(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """Megatron's optimizers sort parameters by type names and know only the CUDA ones."""
    result = _plain_type(self, *args, **kwargs)
    return result.replace("torch.", "torch.cuda.", 1) if isinstance(result, str) and ".cuda." not in result else result


def _cpu_rng_state(*args: object, **kwargs: object) -> torch.Tensor:
    return torch.get_rng_state()


def _set_cpu_rng_state(state: torch.Tensor, *args: object, **kwargs: object) -> None:
    torch.set_rng_state(state)


def _pinned_copy(self: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
    """`pin_memory` makes new memory; a caller that frees the original afterwards relies on that."""
    return self.clone()


_TORCH_CUDA: dict[str, object] = {
    "current_device": _returning(_CPU),
    "set_device": _returning(None),
    "current_stream": _returning(_STREAM),
    "default_stream": _returning(_STREAM),
    "stream": lambda *args, **kwargs: contextlib.nullcontext(),
    "Stream": _NoStream,
    "Event": _NoStream,
    "synchronize": _returning(None),
    "empty_cache": _returning(None),
    "is_current_stream_capturing": _returning(False),
    "memory_allocated": _returning(0),
    "max_memory_allocated": _returning(0),
    "get_device_capability": _returning((9, 0)),
    "manual_seed": lambda seed: torch.manual_seed(seed),
    "get_rng_state": lambda *args, **kwargs: torch.get_rng_state(),
    "set_rng_state": lambda state, *args, **kwargs: torch.set_rng_state(state),
}


def installed() -> bool:
    """Whether `install()` changed this process."""
    return _state["installed"]


def install() -> bool:
    """Make Megatron-core importable and runnable on this CPU-only machine; returns whether anything was changed.

    A second call, or a call on a machine with CUDA, changes nothing. Raises RuntimeError when Megatron was imported
    first: its modules have then already kept references to the real functions.
    """
    if _state["installed"]:
        return True
    if torch.cuda.is_available():
        return False
    if any(name == "megatron" or name.startswith("megatron.") for name in sys.modules):
        raise RuntimeError("call cpu_megatron.install() before the first import of megatron")
    for name, replacement in _TORCH_CUDA.items():
        setattr(torch.cuda, name, replacement)
    torch.cuda.random.get_rng_state = torch.cuda.get_rng_state
    torch.cuda.random.set_rng_state = torch.cuda.set_rng_state
    torch.cuda.nvtx.range_push = _returning(None)
    torch.cuda.nvtx.range_pop = _returning(None)
    torch.Tensor.cuda = _same_tensor
    torch.Tensor.pin_memory = _pinned_copy
    torch.Tensor.record_stream = _returning(None)
    torch.Tensor.type = _cuda_type_name
    torch.nn.Module.cuda = _same_tensor
    torch.compiler.set_stance("force_eager")  # what Megatron fuses is soon computed at these sizes, and late compiled
    _mode.__enter__()
    _patch_megatron()
    _state["installed"] = True
    return True


def _patch_megatron() -> None:
    """The places where Megatron reaches below `torch.cuda`, or where CUDA's behaviour differs from the CPU's."""
    from megatron.core.tensor_parallel import random as mcore_random
    from megatron.core.transformer.moe import token_dispatcher

    mcore_random._get_cuda_rng_state = _cpu_rng_state
    mcore_random._set_cuda_rng_state = _set_cpu_rng_state
    token_dispatcher.maybe_move_tensor_to_cpu = _as_host_value
    # Gated delta nets are computed in plain torch where the model is deterministic, but for one norm.
    from megatron.core.ssm.gated_delta_net import common as delta_net

    if not delta_net.HAVE_FLA:
        delta_net.HAVE_FLA, delta_net.l2norm = True, _l2norm


def _l2norm(x: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """Rows of length one, as flash-linear-attention makes them."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + eps)).to(x.dtype)


def _as_host_value(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Host integers for the split sizes of an all-to-all; Megatron's own version returns CPU tensors untouched."""
    return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor
