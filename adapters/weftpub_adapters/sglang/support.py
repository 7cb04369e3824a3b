"""Which SGLang this adapter was written for, and which of its backends can be published to.

A backend is fit when its live weights are the checkpoint's bytes in the checkpoint's layout before and after
post-processing: then a publish may write them in place. The others move, requantize, permute or copy weights;
publishing to them would leave derived copies stale.
"""

from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from types import MappingProxyType

from weftpub.errors import ConfigError
from weftpub.packages import release

__all__ = [
    "FIT_BACKENDS",
    "REFUSED_BACKENDS",
    "SUPPORTED_VERSIONS",
    "check_backends",
    "require_supported",
    "require_version",
]

SUPPORTED_VERSIONS = "0.5.21 to 0.5.23"
_OLDEST, _BEYOND = (0, 5, 21), (0, 5, 24)
# Why older releases are refused, the newest reason that applies first.
_TOO_OLD: Mapping[tuple[int, int, int], str] = MappingProxyType(
    {
        (0, 5, 11): "it refuses to flush its cache and to release memory after a pause that retracts requests, so "
        "requests in flight would be lost",
        (0, 0, 0): "it has no plugin entry points to bring a receiver into its workers, and no pause that keeps "
        "requests in flight through a release of memory",
    }
)

FIT_BACKENDS = ("triton",)
# Why each other runner of routed experts is refused. What stands in neither table is refused as unknown.
REFUSED_BACKENDS: Mapping[str, str] = MappingProxyType(
    {
        "auto": "SGLang would choose by hardware, and may choose one that moves weights",
        "deep_gemm": "on SM100 it requantizes weights into new storage with packed power-of-two scales",
        "hpc_ops": "it computes from copies of the scales that it derives once, at load",
        "megamoe": "it rebuilds the expert weights into its own layout",
        "flashinfer_megamoe": "it rebuilds the expert weights into its own layout",
        "flashinfer_trtllm": "it loads up rows before gate rows, and pads and shuffles them",
        "flashinfer_trtllm_routed": "it loads up rows before gate rows, and pads and shuffles them",
        "experimental_sgl_trtllm": "it loads up rows before gate rows, and pads and shuffles them",
        "triton_kernel": "it stores expert weights transposed",
        "cutlass": "it keeps stride and scale buffers derived from the weights",
        "marlin": "it repacks the weights",
        "aiter": "it shuffles the weights",
    }
)
# Data movers between expert-parallel ranks that rebuild weights for themselves.
_REFUSED_A2A = MappingProxyType({"megamoe": REFUSED_BACKENDS["megamoe"]})


def require_supported() -> str:
    """Installed SGLang version; ConfigError when it is missing or is none of `SUPPORTED_VERSIONS`."""
    try:
        found = version("sglang")
    except PackageNotFoundError:
        raise ConfigError(f"sglang is not installed; install sglang {SUPPORTED_VERSIONS}") from None
    require_version(found)
    return found


def require_version(found: str) -> None:
    """ConfigError unless a version, of an engine on the other side of a connection perhaps, is supported.

    0.5.10.post1, which AReaL pins, is refused like every other release before 0.5.21, with the reason.
    """
    numbers = release(found)
    if _OLDEST <= numbers < _BEYOND:
        return
    reason = next((f": {text}" for since, text in _TOO_OLD.items() if since <= numbers < _OLDEST), "")
    raise ConfigError(
        f"sglang {found or 'of an unknown version'} is not supported{reason}; this adapter works with "
        f"{SUPPORTED_VERSIONS}"
    )


def check_backends(moe_runner: str, *, a2a: str = "none") -> None:
    """Refuse by name every backend whose live weights are not the published bytes.

    Args:
        moe_runner: SGLang's resolved runner of routed experts (`--moe-runner-backend`).
        a2a: its all-to-all backend (`--moe-a2a-backend`).

    Raises:
        ConfigError: names the backend, the reason and the setting that works.
    """
    if moe_runner not in FIT_BACKENDS:
        reason = REFUSED_BACKENDS.get(moe_runner, "nobody has checked what it does to weights after loading")
        raise ConfigError(
            f"SGLang's moe_runner_backend={moe_runner!r} cannot be published to: {reason}; set it to "
            f"{FIT_BACKENDS[0]!r}"
        )
    if a2a in _REFUSED_A2A:
        raise ConfigError(
            f"SGLang's moe_a2a_backend={a2a!r} cannot be published to: {_REFUSED_A2A[a2a]}; set it to 'none'"
        )
