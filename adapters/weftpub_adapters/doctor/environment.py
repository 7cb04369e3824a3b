"""Environment variables that change numbers, memory or transports behind a run's back.

A run's own settings belong into its configuration (`roles.*.env`), where they are recorded and set for one role only.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from weftpub_adapters.doctor.findings import Finding, Level

__all__ = ["environment_findings"]


def _is(value: str) -> Callable[[str], bool]:
    return lambda found: found == value


def _not(value: str) -> Callable[[str], bool]:
    return lambda found: found != value


def _unshared(found: str) -> bool:
    words = found.lower().replace(" ", "")
    return "expandable_segments:true" in words or "backend:cudamallocasync" in words


def _on(found: str) -> bool:
    return found.lower() not in ("", "0", "false")


def _mig(found: str) -> bool:
    return "MIG-" in found


def _always(found: str) -> bool:
    return True


@dataclass(frozen=True)
class _Row:
    """One variable: which values are trouble, how grave (per variant), and why."""

    name: str
    bad: Callable[[str], bool]
    level: Level
    expected: str
    remedy: str
    fp8: Level | None = None


_NATIVE = "torch's native allocator without expandable segments"
_ALLOCATOR = "unset it: other memory cannot be exported to another process by CUDA IPC"
_ROWS = (
    _Row("PYTORCH_CUDA_ALLOC_CONF", _unshared, "warn", _NATIVE, _ALLOCATOR),
    _Row("PYTORCH_ALLOC_CONF", _unshared, "warn", _NATIVE, _ALLOCATOR),
    _Row("PYTORCH_NO_CUDA_MEMORY_CACHING", _always, "warn", "unset", "unset it: every allocation waits for the GPU"),
    _Row("CUDA_VISIBLE_DEVICES", _mig, "fail", "whole GPUs", "name GPUs, not MIG instances"),
    _Row(
        "NVTE_FP8_BLOCK_SCALING_FP32_SCALES",
        _not("1"),
        "warn",
        "unset, or 1",
        "unset it: TransformerEngine would scale activations by powers of two, the engine by plain FP32",
        fp8="fail",
    ),
    _Row("TRITON_INTERPRET", _not("0"), "fail", "unset", "unset it: the interpreter rounds FP8 otherwise than GPUs"),
    _Row("SGLANG_USE_CPU_ENGINE", _not("0"), "fail", "unset", "unset it: SGLang would take other kernels"),
    _Row(
        "SGLANG_RETURN_ORIGINAL_LOGPROB",
        _on,
        "warn",
        "unset",
        "unset it: SGLang would report log-probs at temperature 1, whatever it samples at",
    ),
    _Row("CUDA_LAUNCH_BLOCKING", _is("1"), "warn", "unset", "unset it: copies and kernels would not overlap"),
    _Row("NCCL_P2P_DISABLE", _is("1"), "warn", "unset", "unset it: GPUs of one host would talk through its memory"),
    _Row("NCCL_SHM_DISABLE", _is("1"), "warn", "unset", "unset it, unless /dev/shm is too small"),
    _Row("NCCL_NVLS_ENABLE", _is("1"), "warn", "unset, or 0", "set it to 0 where NVLink multicast is not available"),
)
# torchrun sets these for its workers; outside of it they come from an old shell.
_LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def environment_findings(environment: Mapping[str, str], variant: str | None, *, gpu: bool) -> Iterator[Finding]:
    """Findings about variables; one "ok" if none is in the way.

    Args:
        environment: of the run.
        variant: as in `Wanted`.
        gpu: whether there is a GPU; what concerns only GPUs is left out without one.
    """
    found_any = False
    for finding in (*_rows(environment, variant, gpu), *_others(environment)):
        found_any = True
        yield finding
    if not found_any:
        yield Finding("environment", "ok", "nothing in the way", "no variable that changes numbers or memory")


def _rows(environment: Mapping[str, str], variant: str | None, gpu: bool) -> Iterator[Finding]:
    for row in _ROWS:
        value = environment.get(row.name)
        if value is None or not row.bad(value) or (not gpu and row.name.startswith(("NCCL_", "CUDA_", "PYTORCH_"))):
            continue
        level = row.fp8 if variant == "fp8" and row.fp8 is not None else row.level
        yield Finding(f"${row.name}", level, value, row.expected, row.remedy)


def _others(environment: Mapping[str, str]) -> Iterator[Finding]:
    known = {row.name for row in _ROWS}
    engine = sorted(name for name in environment if name.startswith("NVTE_") and name not in known)
    if engine:
        found = ", ".join(f"{name}={environment[name]}" for name in engine)
        remedy = "unset them, or move them into roles.trainer.env, where they are recorded"
        yield Finding("$NVTE_*", "warn", found, "unset", remedy)
    if "PYTORCH_CUDA_ALLOC_CONF" in environment and "PYTORCH_ALLOC_CONF" in environment:
        remedy = "keep one: torch reads the newer name and ignores the other"
        yield Finding("$PYTORCH_*_ALLOC_CONF", "warn", "both are set", "one", remedy)
    stale = sorted(name for name in _LAUNCHER if name in environment)
    if stale:
        remedy = "unset them: torchrun sets them for its workers"
        yield Finding("$RANK ...", "warn", ", ".join(stale), "unset", remedy)
