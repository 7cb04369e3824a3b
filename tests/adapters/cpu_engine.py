"""A whole SGLang engine on a CPU: what its control plane needs where there is no GPU.

SGLang's own CPU backend repacks weights for its kernels, so it stays off; then two CUDA-only corners are in the way of
a CPU device, and an engine's processes replace them through a plugin of their own (`register`).

A test steers an engine's workers by files in the folder that `SWITCHES` names: none of its steps has to be quick.

    refuse, busy, lag    rank 1 finds itself unfit; finds requests in its cache; moves memory later than rank 0
    slow                 a forward pass takes `SLOW_S`: requests stay under way while the test does something
    compiling            grammars compile until it is gone
    progress             written by rank 0: how many requests its last decoding pass had
"""

import os
import sys
import time
import types
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from weftpub.errors import ConfigError

__all__ = ["ENGINE", "LAG_S", "SWITCHES", "environment", "install_plugins", "register"]

STEP_S = 0.02  # of one forward pass
SLOW_S = 0.2
LAG_S = 0.5
SWITCHES = "WEFTPUB_TEST_SWITCHES"
_COMPILES_S = 60.0  # at most

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


def environment(ranks: int) -> dict[str, str]:
    """Environment of an engine with so many workers; SGLang binds each to cores of its own."""
    cores = sorted(os.sched_getaffinity(0))
    return {
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "SGLANG_CPU_OMP_THREADS_BIND": "|".join(str(cores[rank % len(cores)]) for rank in range(ranks)),
        "SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK": "1",
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
    if "sglang.srt.managers.scheduler" not in sys.modules:
        return
    import sglang.srt.distributed.device_communicators.pynccl as pynccl
    from sglang.srt.models.qwen3_moe import Qwen3MoeForCausalLM

    _rank_one_on_demand()
    _compile_slowly()
    pynccl.PyNcclCommunicator = lambda *_, **__: SimpleNamespace(disabled=True, available=False, world_size=1)
    Qwen3MoeForCausalLM.forward = _count


def _switched(name: str, rank: int | None = None) -> bool:
    """Whether a switch is on in this worker."""
    from sglang.srt.runtime_context import get_parallel

    folder = os.environ.get(SWITCHES)
    if folder is None or not Path(folder, name).exists():
        return False
    return rank is None or get_parallel().tp_rank == rank


def _rank_one_on_demand() -> None:
    """Rank 1 finds itself unfit, or at work, or moves memory later than rank 0."""
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager as Updater

    import weftpub_adapters.sglang.plugin.worker as worker

    fit, idle = worker.refuse_unfit, Scheduler.is_fully_idle

    def refuse_unfit(scheduler: Any) -> None:
        if _switched("refuse", 1):
            raise ConfigError("rank 1 cannot be published to")
        fit(scheduler)

    def is_fully_idle(scheduler: Any, *arguments: Any, **named: Any) -> bool:
        return not _switched("busy", 1) and bool(idle(scheduler, *arguments, **named))

    def late(original: Any) -> Any:
        def moved(updater: Any, request: Any) -> Any:
            if _switched("lag", 1):
                time.sleep(LAG_S)
            return original(updater, request)

        return moved

    worker.refuse_unfit = refuse_unfit
    Scheduler.is_fully_idle = is_fully_idle
    Updater.release_memory_occupation = late(Updater.release_memory_occupation)
    Updater.resume_memory_occupation = late(Updater.resume_memory_occupation)


def _compile_slowly() -> None:
    """Grammars that take their time, and then allow everything; SGLang makes none for an engine without tokenizer."""
    from sglang.srt.constrained.base_grammar_backend import BaseGrammarBackend, BaseGrammarObject
    from sglang.srt.constrained.grammar_manager import GrammarManager

    class Anything(BaseGrammarObject):
        def accept_token(self, token: int) -> None: ...

        def allocate_vocab_mask(self, vocab_size: int, batch_size: int, device: Any) -> torch.Tensor:
            return torch.zeros(batch_size, 1)

        def fill_vocab_mask(self, vocab_mask: torch.Tensor, idx: int) -> None: ...

        @staticmethod
        def move_vocab_mask(vocab_mask: torch.Tensor, device: Any) -> torch.Tensor:
            return vocab_mask

        @staticmethod
        def apply_vocab_mask(logits: torch.Tensor, vocab_mask: torch.Tensor) -> None: ...

    class Slow(BaseGrammarBackend):
        def dispatch_json(self, key_string: str) -> BaseGrammarObject:
            until = time.monotonic() + _COMPILES_S
            while _switched("compiling") and time.monotonic() < until:
                time.sleep(0.01)
            return Anything()

    original = GrammarManager.__init__

    def init(self: Any, scheduler: Any) -> None:
        original(self, scheduler)
        self.grammar_backend = Slow()

    GrammarManager.__init__ = init


@torch.no_grad()
def _count(model: Any, input_ids: torch.Tensor, positions: torch.Tensor, forward_batch: Any, *_: Any, **__: Any) -> Any:
    """A forward pass that a CPU can run, in place of FP8 kernels: the next token is the last one plus the first element
    of the final norm's weight, which a test sets to the version. So tokens show which weights made them."""
    from sglang.srt.layers.logits_processor import LogitsProcessorOutput

    time.sleep(SLOW_S if _switched("slow") else STEP_S)
    last = input_ids
    if forward_batch.forward_mode.is_extend():
        last = input_ids[forward_batch.extend_seq_lens.cumsum(0) - 1]
    elif _switched("", 0):
        Path(os.environ[SWITCHES], "progress").write_text(str(len(last)), encoding="ascii")
    vocabulary = model.config.vocab_size
    chosen = (last + int(model.model.norm.weight[0])) % vocabulary
    logits = torch.zeros(len(chosen), vocabulary)
    logits[torch.arange(len(chosen)), chosen] = 1.0
    return LogitsProcessorOutput(next_token_logits=logits)
