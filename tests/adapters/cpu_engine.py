"""A whole SGLang engine on a CPU: what its control plane needs where there is no GPU.

SGLang's own CPU backend repacks weights for its kernels, so it stays off; then two CUDA-only corners are in the way of
a CPU device, and an engine's processes replace them through a plugin of their own (`register`).
"""

import sys
import types
from pathlib import Path
from types import SimpleNamespace
from typing import Any

__all__ = ["ENGINE", "install_plugins", "register"]

# Settings with which an engine of a tiny model starts in half a minute.
ENGINE: dict[str, Any] = {
    "attention_backend": "torch_native",
    "device": "cpu",
    "disable_cuda_graph": True,
    "disable_overlap_schedule": True,
    "disable_radix_cache": True,
    "fp8_gemm_runner_backend": "triton",
    "grammar_backend": "none",
    "load_format": "dummy",
    "log_level": "error",
    "max_running_requests": 4,
    "max_total_tokens": 1024,
    "mem_fraction_static": 0.2,
    "moe_runner_backend": "triton",
    "sampling_backend": "pytorch",
    "skip_tokenizer_init": True,
}


def install_plugins(folder: Path) -> None:
    """Make the project's plugin and this one known to every process of an engine, as an installed package would."""
    info = folder / "weftpub_cpu_engine-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: weftpub_cpu_engine\nVersion: 0\n", encoding="utf-8")
    (info / "entry_points.txt").write_text(
        "[sglang.srt.plugins]\nweftpub = weftpub_adapters.sglang.plugin:register\ncpu_engine = cpu_engine:register\n",
        encoding="utf-8",
    )
    sys.path.insert(0, str(folder))


def register() -> None:
    """Plugin entry point, in every process of the engine."""
    if "vllm" not in sys.modules:  # the rotary embedding's kernel, which this attention backend never calls
        package, ops = types.ModuleType("vllm"), types.ModuleType("vllm._custom_ops")
        ops.rotary_embedding = None  # type: ignore[attr-defined]
        sys.modules.update({"vllm": package, "vllm._custom_ops": ops})
    import sglang.srt.distributed.device_communicators.pynccl as pynccl

    pynccl.PyNcclCommunicator = lambda *_, **__: SimpleNamespace(disabled=True, available=False, world_size=1)
