"""Which TransformerEngine and which GPU the FP8 expert GEMMs run on."""

from importlib.metadata import PackageNotFoundError, version

import torch

from weftpub.errors import ConfigError
from weftpub.packages import release

__all__ = ["SUPPORTED_VERSIONS", "require_supported"]

SUPPORTED_VERSIONS = "2.20.2 to 2.20.x"
_OLDEST, _BEYOND = (2, 20, 2), (2, 21, 0)


def require_supported() -> str:
    """Installed TransformerEngine version.

    Raises:
        ConfigError: it is missing or outside `SUPPORTED_VERSIONS`, or this GPU has no block-scaled FP8 GEMMs of its
            own.
    """
    try:
        found = version("transformer-engine")
    except PackageNotFoundError:
        raise ConfigError(
            f"TEGroupedMLP experts need transformer-engine {SUPPORTED_VERSIONS}; install it, or set "
            "moe_grouped_gemm=False"
        ) from None
    if not _OLDEST <= release(found) < _BEYOND:
        raise ConfigError(f"transformer-engine {found} is not supported; this adapter works with {SUPPORTED_VERSIONS}")
    if not torch.cuda.is_available():
        raise ConfigError("TransformerEngine needs a CUDA GPU; set moe_grouped_gemm=False to train on a CPU")
    capability = torch.cuda.get_device_capability()
    if capability[0] != 9:
        raise ConfigError(
            f"this GPU has compute capability {capability[0]}.{capability[1]}; block-scaled FP8 GEMMs on the "
            "store's bytes "
            "need 9.0 (Hopper), others convert the weights first. Use variant='bf16'"
        )
    return found
