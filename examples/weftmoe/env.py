"""One environment a role: its block of the settings, set before its process starts.

Variables that code reads at import (allocators, TransformerEngine, NCCL) cannot be set later, and those of one role
harm the other: Megatron wants one hardware queue, SGLang all of them. So the engine's process gets neither the
trainer's block nor what torchrun tells its workers.
"""

import os
from collections.abc import Mapping
from typing import Literal

from weftmoe.checks import unshared_memory
from weftmoe.schema import Settings
from weftpub.errors import ConfigError

__all__ = ["ROLES", "RoleName", "changed", "require_environment", "role_environment"]

RoleName = Literal["trainer", "engine"]
ROLES: tuple[RoleName, ...] = ("trainer", "engine")

# What torchrun sets for its workers; an engine that finds them joins the trainer's process group, or waits for it.
_TORCHRUN = (
    "RANK",
    "LOCAL_RANK",
    "ROLE_RANK",
    "GROUP_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "ROLE_WORLD_SIZE",
    "GROUP_WORLD_SIZE",
    "ROLE_NAME",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_RESTART_COUNT",
    "TORCHELASTIC_MAX_RESTARTS",
    "TORCHELASTIC_USE_AGENT_STORE",
    "TORCHELASTIC_ERROR_FILE",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING",
)

# Read by SGLang as it is imported: log-probs are then of temperature 1, whatever it samples at.
_ORIGINAL_LOGPROB = "SGLANG_RETURN_ORIGINAL_LOGPROB"


def role_environment(settings: Settings, role: RoleName, base: Mapping[str, str] | None = None) -> dict[str, str]:
    """The whole environment of a role's process.

    Args:
        settings: of the run.
        role: "trainer", or "engine".
        base: what to start from; by default this process's environment.

    Raises:
        ConfigError: a variable would have the engine report other log-probabilities than it samples with, or chooses an
            allocator whose memory weftpub's other side cannot map.
    """
    environment = dict(os.environ if base is None else base)
    if role == "engine":
        for name in (*_TORCHRUN, *settings.roles.trainer.env):
            environment.pop(name, None)
    environment.update(_block(settings, role))
    if role == "engine":
        _require_sampled_logprobs(settings, environment)
    _require_shared_memory(settings, role, environment)
    return environment


def changed(settings: Settings, role: RoleName, base: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """Variables that the block of a role sets to something else than the user did: name to (user's, block's)."""
    return {
        name: (base[name], value)
        for name, value in _block(settings, role).items()
        if name in base and base[name] != value
    }


def require_environment(settings: Settings, role: RoleName, environment: Mapping[str, str] | None = None) -> None:
    """Check, inside a role's process, that it was started with its block.

    Raises:
        ConfigError: names the variables that are missing or different.
    """
    found = os.environ if environment is None else environment
    wrong = [
        f"{name}={found.get(name)!r} instead of {value!r}"
        for name, value in _block(settings, role).items()
        if found.get(name) != value
    ]
    if wrong:
        raise ConfigError(
            f"this process was not started with the environment of role {role!r}: {', '.join(wrong)}; start it through "
            "weftmoe.launch, or set them before the process starts"
        )


def _require_sampled_logprobs(settings: Settings, environment: Mapping[str, str]) -> None:
    """The importance ratio compares probabilities at one temperature; a variable of some shell must not part them."""
    temperature, found = settings.rollout.sampling.temperature, environment.get(_ORIGINAL_LOGPROB, "")
    if temperature != 1.0 and found.lower() not in ("", "0", "false"):
        raise ConfigError(
            f"{_ORIGINAL_LOGPROB}={found!r}: SGLang would report log-probs at temperature 1 and sample at "
            f"{temperature:g}, where the trainer's log-probs are, too; unset it"
        )


def _require_shared_memory(settings: Settings, role: RoleName, environment: Mapping[str, str]) -> None:
    """The blocks are checked with the other settings; here it is a variable of some shell."""
    if settings.cluster.gpus == 0 or settings.publish.path != "weftpub":
        return
    for name, value, what in unshared_memory(environment):
        raise ConfigError(
            f"{name}={value!r} of this shell: {what} cannot be shared by CUDA IPC, and the {role} would have it; unset "
            f"it, or set roles.{role}.env.{name}=expandable_segments:False"
        )


def _block(settings: Settings, role: RoleName) -> Mapping[str, str]:
    return settings.roles.trainer.env if role == "trainer" else settings.roles.engine.env
