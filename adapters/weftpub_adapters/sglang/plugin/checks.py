"""What a worker must be like for a publish into its live weights to be right, and what of the plugin is in place.

SGLang swallows what a plugin raises and what hooks raise while they are applied, so the worker looks at itself when it
is asked.
"""

import os
import sys
from typing import Any

import torch

from weftpub.errors import ConfigError
from weftpub_adapters.sglang.describe import live_backends
from weftpub_adapters.sglang.parallel import parallel_sizes
from weftpub_adapters.sglang.support import check_backends, require_supported

__all__ = ["HOOKED", "apart", "faults_of", "refuse_unfit"]

_UPDATER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
# Every method of SGLang that the plugin wraps.
HOOKED = {
    "start": f"{_UPDATER}.init_weights_update_group",
    "stop": f"{_UPDATER}.destroy_weights_update_group",
    "release": f"{_UPDATER}.release_memory_occupation",
    "resume": f"{_UPDATER}.resume_memory_occupation",
    "continue": "sglang.srt.managers.scheduler.Scheduler.continue_generation",
    "load": "sglang.srt.model_executor.model_runner.ModelRunner.load_model",
    "rest": "sglang.srt.managers.scheduler.Scheduler._record_scheduler_state_for_paused_engine",
    "draw": "sglang.srt.managers.scheduler.Scheduler.init_model_worker",
    "flush": "sglang.srt.managers.scheduler_components.flush_wrapper.SchedulerFlushWrapper.handle",
}
_ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


def apart() -> str:
    """Why the workers of this engine do not carry out what they are told at the same step, "" if they do.

    What hooks ask of all workers at once is asked in the middle of a scheduler's turn. Workers that come to it in
    different turns would wait there for each other, or take another exchange of bytes for this one. The answer is the
    same on all of them.
    """
    from sglang.srt.runtime_context import get_exec, get_parallel

    if get_parallel().enable_dp_attention_local_control_broadcast:
        return (
            "SGLang's enable_dp_attention_local_control_broadcast cannot be published to: its groups of workers are "
            "told what to do one by one, and pause at different steps; leave it off"
        )
    if get_exec().moe.elastic_ep_backend is not None:
        return (
            "SGLang's elastic_ep_backend cannot be published to: its workers come and go, and a publish needs all of "
            "them; leave it at its default"
        )
    return ""


def refuse_unfit(scheduler: Any) -> None:
    """ConfigError for a setting of this worker under which its live weights are not, or not only, what is published."""
    require_supported()
    parallel_sizes()
    backends = live_backends()
    check_backends(backends["moe_runner"], a2a=backends["moe_a2a"])
    arguments = scheduler.server_args
    refusals = {
        "speculative_algorithm": (scheduler.draft_worker is not None, "a draft model's weights are not published"),
        "disaggregation_mode": (
            str(getattr(scheduler.disaggregation_mode, "value", "null")) != "null",
            "prefill and decode engines hand caches to each other, of other versions perhaps",
        ),
        "cpu_offload_gb": (
            bool(getattr(arguments, "cpu_offload_gb", 0)),
            "weights that live on the CPU are copied to the GPU as they are needed",
        ),
        "enable_lora": (
            bool(getattr(arguments, "enable_lora", False)),
            "adapters wrap the layers whose weights are published",
        ),
        "tokenizer_worker_num": (
            (getattr(arguments, "tokenizer_worker_num", 1) or 1) > 1,
            "only one of its tokenizer processes hears of a new version, and answers of the others report the old one",
        ),
        "weight_cache_mode": (
            (getattr(arguments, "weight_cache_mode", "off") or "off") != "off",
            "its weights are shared with other engines",
        ),
    }
    for setting, (found, reason) in refusals.items():
        if found:
            raise ConfigError(f"SGLang's {setting} cannot be published to: {reason}; leave it at its default")


def faults_of(scheduler: Any, device: torch.device) -> list[str]:
    """What is wrong in this worker, in words; empty if nothing is."""
    faults: list[str] = []
    absent = [name for name, target in HOOKED.items() if not _is_wrapped(target)]
    if absent:
        faults.append(f"SGLang did not apply the plugin's hooks for {', '.join(absent)}; its log says why")
    if "awex" in sys.modules:
        faults.append("AWEX was imported in the worker; plan in the trainer's process")
    variable = next((name for name in _ALLOCATOR_VARIABLES if _expandable(os.environ.get(name, ""))), "")
    if variable and device.type == "cuda":
        faults.append(f"{variable} sets expandable_segments:True, which the memory saver cannot release; unset it")
    return faults


def _expandable(value: str) -> bool:
    """torch passes over blanks between the parts of this variable, and an error message may have taught them."""
    return "expandable_segments:true" in value.lower().replace(" ", "")


def _is_wrapped(target: str) -> bool:
    """Whether a method is a hook's wrapper; looked up in what is loaded, so a missing method counts as not wrapped."""
    path, _, method = target.rpartition(".")
    module, _, owner = path.rpartition(".")
    found = getattr(getattr(sys.modules.get(module), owner, None), method, None)
    return getattr(found, "__wrapped__", None) is not None
