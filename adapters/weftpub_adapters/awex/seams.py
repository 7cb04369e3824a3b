"""Where this adapter enters AWEX, and how it leaves no trace there.

AWEX finds converters and sharding rules by architecture name in one process-wide registry. Inside `entered()` the
registry has one more entry, under a name of our own, whose converters subclass AWEX's; outside it is as AWEX made
it. Two more things are held still meanwhile: AWEX prints its log to standard output, and divides by the number of
GPUs, which a machine may not have.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version

from weftpub.errors import ConfigError

__all__ = ["ARCHITECTURE", "BASE_ARCHITECTURE", "SUPPORTED_VERSIONS", "entered", "require_supported"]

BASE_ARCHITECTURE = "Qwen3MoeForCausalLM"
ARCHITECTURE = "WeftpubQwen3MoeForCausalLM"
SUPPORTED_VERSIONS = "0.9.0"
_LOCK = threading.RLock()


def require_supported() -> str:
    """Installed AWEX version; ConfigError when it is missing or is not `SUPPORTED_VERSIONS`."""
    try:
        found = version("awex")
    except PackageNotFoundError:
        raise ConfigError(f"awex is not installed; install awex {SUPPORTED_VERSIONS} where the plan is made") from None
    if found.split("+")[0] != SUPPORTED_VERSIONS:
        raise ConfigError(f"awex {found} is not supported; this adapter works with {SUPPORTED_VERSIONS}")
    return found


@contextmanager
def entered() -> Iterator[None]:
    """Let AWEX know our architecture while the block runs; other threads that enter wait."""
    require_supported()
    from awex.models.registry import ModelRegistry

    from weftpub_adapters.awex.converters import engine_converter, trainer_converter
    from weftpub_adapters.awex.sharding import sharding_strategy

    with _LOCK, _quiet(), _at_least_one_device():
        if ARCHITECTURE in ModelRegistry.models:  # entered again by the same thread
            yield
            return
        ModelRegistry.models[ARCHITECTURE] = {
            "model_name": ARCHITECTURE,
            "sharding_strategy": sharding_strategy(),
            "mcore_converter": trainer_converter,
            "sglang_converter": engine_converter,
        }
        try:
            yield
        finally:
            del ModelRegistry.models[ARCHITECTURE]


@contextmanager
def _quiet() -> Iterator[None]:
    """AWEX's loggers print to standard output, where reports go; what matters is raised."""
    from awex import logging

    levels = {name: logger.level for name, logger in logging._loggers.items()}
    default = logging._default_level
    logging.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logging._default_level = default
        for name, logger in logging._loggers.items():
            logger.setLevel(levels.get(name, default))


@contextmanager
def _at_least_one_device() -> Iterator[None]:
    """Ranks are numbered on their host modulo the number of devices, which is zero on a machine without GPUs."""
    from awex.util import device

    counted = device.device_count
    device.device_count = lambda: max(1, counted())
    try:
        yield
    finally:
        device.device_count = counted
