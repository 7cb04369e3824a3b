"""Where this adapter enters AWEX, and how it leaves no trace there.

AWEX finds converters and sharding rules by architecture name in one process-wide registry. Inside `entered()` the
registry has one more entry for each model family, under a name of our own, whose converters subclass AWEX's; outside it
is as AWEX made it. Two more things are held still meanwhile: AWEX prints its log to standard output, and divides by the
number of GPUs, which a machine may not have.
"""

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from types import MappingProxyType

from weftpub.errors import ConfigError

__all__ = ["BASES", "SUPPORTED_VERSIONS", "Base", "base_of", "entered", "require_supported"]

SUPPORTED_VERSIONS = "0.9.0"
_LOCK = threading.RLock()


@dataclass(frozen=True)
class Base:
    """One of AWEX's model families, as this adapter extends it.

    Attributes:
        architecture: ``architectures[0]`` of the Hugging Face config, and AWEX's name for the family.
        name: ours, under which the extended converters are registered.
        hybrid: whether gated attention and gated delta nets take turns in its layers.
    """

    architecture: str
    hybrid: bool = False

    @property
    def name(self) -> str:
        return f"Weftpub{self.architecture}"


BASES: Mapping[str, Base] = MappingProxyType(
    {
        base.architecture: base
        for base in (
            Base("Qwen3MoeForCausalLM"),
            Base("Qwen3_5MoeForCausalLM", hybrid=True),
            Base("Qwen3_5MoeForConditionalGeneration", hybrid=True),
        )
    }
)


def base_of(architecture: object) -> Base:
    """The family of an architecture; ConfigError lists the supported ones."""
    base = BASES.get(str(architecture))
    if base is None:
        raise ConfigError(f"architectures[0] is {architecture!r}; this adapter plans for {', '.join(map(repr, BASES))}")
    return base


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
    """Let AWEX know our families while the block runs; other threads that enter wait."""
    require_supported()
    from awex.models.registry import ModelRegistry

    from weftpub_adapters.awex.converters import engine_converter, trainer_converter
    from weftpub_adapters.awex.sharding import sharding_strategy

    with _LOCK, _quiet(), _at_least_one_device():
        if any(base.name in ModelRegistry.models for base in BASES.values()):  # entered again by the same thread
            yield
            return
        for base in BASES.values():
            ModelRegistry.models[base.name] = {
                "model_name": base.name,
                "sharding_strategy": sharding_strategy(),
                "mcore_converter": partial(trainer_converter, base),
                "sglang_converter": partial(engine_converter, base),
            }
        try:
            yield
        finally:
            for base in BASES.values():
                del ModelRegistry.models[base.name]


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
