"""Which Megatron-core this adapter was written for, and the settings it refuses."""

from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from types import MappingProxyType
from typing import Any

from weftpub.errors import ConfigError
from weftpub.packages import release

__all__ = ["REFUSED_SETTINGS", "SUPPORTED_VERSIONS", "check_settings", "require_supported"]

SUPPORTED_VERSIONS = "0.19.2 to 0.19.x"
_OLDEST, _BEYOND = (0, 19, 2), (0, 20, 0)

# TransformerConfig field -> (the only values that work, why). Anything else is refused before a model is built.
REFUSED_SETTINGS: Mapping[str, tuple[tuple[Any, ...], str]] = MappingProxyType(
    {
        "tensor_model_parallel_size": ((1,), "expert matrices must be whole for one update and one block grid"),
        "expert_tensor_parallel_size": ((1, None), "expert matrices must be whole for one update and one block grid"),
        "pipeline_model_parallel_size": ((1,), "layer numbers are taken as global"),
        "context_parallel_size": ((1,), "attention masks are built for whole sequences"),
        "moe_grouped_gemm": ((False,), "this adapter drives SequentialMLP experts, one module an expert"),
        "moe_mlp_glu_interleave_size": ((None,), "fc1 must hold gate rows over up rows"),
        "fp8": ((None,), "autocast would also cover attention; only routed experts are FP8"),
        "fp8_param": ((False,), "the store owns the FP8 bytes"),
        "fp4": ((None,), "only block FP8 is published"),
        "add_bias_linear": ((False,), "Qwen3-MoE has no biases"),
        "gated_linear_unit": ((True,), "Qwen3-MoE experts are gated"),
        "moe_shared_expert_intermediate_size": ((None,), "Qwen3-MoE has no shared experts"),
        "moe_latent_size": ((None,), "experts must be as wide as the hidden state"),
    }
)


def require_supported() -> str:
    """Installed Megatron-core version; ConfigError when it is missing or outside `SUPPORTED_VERSIONS`."""
    try:
        found = version("megatron-core")
    except PackageNotFoundError:
        raise ConfigError(f"megatron-core is not installed; install megatron-core {SUPPORTED_VERSIONS}") from None
    if not _OLDEST <= release(found) < _BEYOND:
        raise ConfigError(f"megatron-core {found} is not supported; this adapter works with {SUPPORTED_VERSIONS}")
    return found


def check_settings(config: Any) -> None:
    """Refuse by name what would make published bytes differ from the bytes trained with.

    Args:
        config: a TransformerConfig.

    Raises:
        ConfigError: names the field, its value and the value that works.
    """
    for name, (allowed, reason) in REFUSED_SETTINGS.items():
        value = getattr(config, name, allowed[0])
        if value not in allowed:
            raise ConfigError(
                f"TransformerConfig.{name}={value!r} is not supported: {reason}; set it to {allowed[0]!r}"
            )
