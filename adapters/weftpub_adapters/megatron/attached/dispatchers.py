"""Token dispatchers: passed through as configured, checked for what this machine can run.

alltoall and allgather are Megatron's own and always work. A flex dispatcher (`moe_token_dispatcher_type="flex"`)
needs a library:
DeepEP, HybridEP or NCCL EP. `moe_flex_dispatcher_backend` says "deepep" even when it is not used, so the type alone
decides.
"""

from collections.abc import Mapping
from importlib.util import find_spec
from types import MappingProxyType
from typing import Any

from weftpub.errors import ConfigError

__all__ = ["DISPATCHERS", "check_dispatcher"]

DISPATCHERS = ("alltoall", "allgather", "flex")

# backend -> (module it imports, how to get it)
_BACKENDS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "deepep": ("deep_ep", "install the optional extra weftpub[deepep], in a build for this torch and CUDA"),
        "hybridep": ("deep_ep", "install DeepEP's hybrid-ep branch for this torch and CUDA"),
        "ncclep": ("transformer_engine", "install TransformerEngine with NCCL EP"),
    }
)


def check_dispatcher(config: Any) -> str:
    """Name of the configured dispatcher; its settings are not changed.

    Raises:
        ConfigError: an unknown type, a flex backend whose library is missing or does not import, or DeepEP without
            parallel experts.
    """
    kind = config.moe_token_dispatcher_type
    if kind not in DISPATCHERS:
        raise ConfigError(f"moe_token_dispatcher_type={kind!r} is unknown; choose one of {', '.join(DISPATCHERS)}")
    if kind != "flex":
        return kind
    backend = config.moe_flex_dispatcher_backend
    if backend not in _BACKENDS:
        raise ConfigError(f"moe_flex_dispatcher_backend={backend!r} is unknown; choose one of {', '.join(_BACKENDS)}")
    module, remedy = _BACKENDS[backend]
    if find_spec(module) is None:
        raise ConfigError(
            f"moe_token_dispatcher_type='flex' with moe_flex_dispatcher_backend={backend!r} needs the module "
            f"{module!r}, which is not "
            f"installed: {remedy}, or set moe_token_dispatcher_type='alltoall'"
        )
    try:
        __import__(module)
    except (ImportError, OSError) as error:
        raise ConfigError(
            f"moe_flex_dispatcher_backend={backend!r}: {module!r} is installed but does not import ({error}): "
            f"{remedy}, "
            "or set moe_token_dispatcher_type='alltoall'"
        ) from error
    if backend == "deepep" and config.tensor_model_parallel_size * config.expert_model_parallel_size <= 1:
        raise ConfigError(
            "DeepEP needs tensor_model_parallel_size * expert_model_parallel_size > 1; "
            "set expert_model_parallel_size, or moe_token_dispatcher_type='alltoall'"
        )
    return f"flex/{backend}"
