"""Builds SGLang's real Qwen3-MoE for any tensor and expert parallel rank in one process, without torch.distributed.

The model is the one that a serving worker would build: `Qwen3MoeForCausalLM` with `FusedMoE` layers. Its
configuration lives in a context of its own, so models of several ranks fit in one process and nothing process-wide
changes. Weights are left as they come: a publish, or SGLang's own `load_weights`, fills them. Choice made: stand-ins
for the process groups; cost: such a model cannot run a forward pass that communicates.
"""

import json
import sys
import tempfile
import types
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import torch

from weftpub.errors import ConfigError, PlanError
from weftpub.plan import require_legal_tp
from weftpub_adapters.sglang.parallel import ParallelSizes, parallel_sizes
from weftpub_adapters.sglang.support import check_backends, require_supported

__all__ = ["ParallelSizes", "ServedModel", "build_model", "quantization_config"]

Format = Literal["fp8", "bf16"]
_BLOCK = 128
_GROUPS = {
    "tp_group": ("tp_size", "tp_rank"),
    "attn_tp_group": ("attn_tp_size", "attn_tp_rank"),
    "moe_ep_group": ("moe_ep_size", "moe_ep_rank"),
    "moe_tp_group": ("moe_tp_size", "moe_tp_rank"),
}


@dataclass(frozen=True)
class ServedModel:
    """One rank's model.

    Attributes:
        model: `Qwen3MoeForCausalLM`.
        parallel: real sizes and ranks.
        hf_config: the `config.json` that it was built from, as plain data.
        format: "fp8" (routed experts only) or "bf16".
        device: where its parameters live.
        backends: runner and data mover of the routed experts.
        context: SGLang's runtime context, needed by whatever runs the model's code.
    """

    model: torch.nn.Module
    parallel: ParallelSizes
    hf_config: Mapping[str, Any]
    format: Format
    device: torch.device
    backends: Mapping[str, str]
    context: Any

    @contextmanager
    def active(self) -> Iterator[None]:
        """Make this model's context SGLang's current one while the block runs."""
        from sglang.srt.runtime_context import use_context

        with use_context(self.context):
            yield


def quantization_config(layers: int) -> dict[str, Any]:
    """A `quantization_config` that makes routed experts block FP8 and leaves every other linear, router and lm_head
    in BF16.
    """
    others = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate")
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [_BLOCK, _BLOCK],
        "modules_to_not_convert": [f"model.layers.{layer}.{name}" for layer in range(layers) for name in others]
        + ["lm_head"],
    }


def build_model(
    hf_config: Mapping[str, Any],
    *,
    tp_size: int = 1,
    ep_size: int = 1,
    rank: int = 0,
    attention_dp: int = 1,
    format: Format = "fp8",
    device: str | torch.device = "cpu",
    moe_runner_backend: str = "triton",
) -> ServedModel:
    """Build one rank's model with uninitialised weights.

    Args:
        hf_config: a Qwen3-MoE `config.json`; its own `quantization_config`, if any, must agree with `format`.
        tp_size, ep_size, rank: as SGLang means them: `tp_size` ranks in all, of which groups of `tp_size / ep_size`
            split each expert.
        attention_dp: data-parallel attention groups (`--enable-dp-attention --dp-size`).
        format: "fp8" for block FP8 routed experts, "bf16" for none.
        device: where the parameters are made.
        moe_runner_backend: must keep weights as they are loaded.

    Raises:
        ConfigError: the version, a backend or a size is not supported. PlanError: the sizes split an expert inside a
            128-block; lists legal ones.
    """
    require_supported()
    check_backends(moe_runner_backend)
    config = dict(hf_config)
    _check_request(config, tp_size, ep_size, rank, attention_dp, format)
    _require_cuda_code_path()
    from sglang.srt.model_loader.utils import set_default_torch_dtype
    from sglang.srt.models.qwen3_moe import Qwen3MoeForCausalLM
    from sglang.srt.runtime_context import SpawnRanks, create_context, use_context

    target = torch.device(device)
    with ExitStack() as stack:
        arguments = _server_args(tp_size, ep_size, attention_dp, target, moe_runner_backend)
        ranks = SpawnRanks(world_rank=rank, gpu_id=target.index or 0 if target.type == "cuda" else None)
        context = create_context(arguments, role="scheduler", ranks=ranks)
        stack.enter_context(use_context(context))
        parallel, backends = _join_world(context, arguments)
        stack.enter_context(_rotary_without_vllm())
        stack.enter_context(set_default_torch_dtype(torch.bfloat16))
        stack.enter_context(target)
        model = Qwen3MoeForCausalLM(
            _transformers_config(config), quant_config=_quant_config(config, format, Qwen3MoeForCausalLM)
        )
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    served = ServedModel(model.eval(), parallel, config, format, target, backends, context)
    _check_formats(served)
    return served


def _check_request(config: Mapping[str, Any], tp: int, ep: int, rank: int, attention_dp: int, format: str) -> None:
    if format not in ("fp8", "bf16"):
        raise ConfigError(f"format: expected 'fp8' or 'bf16', found {format!r}")
    architectures = config.get("architectures") or [None]
    if architectures[0] != "Qwen3MoeForCausalLM":
        raise ConfigError(f"architectures[0] is {architectures[0]!r}; this adapter serves 'Qwen3MoeForCausalLM'")
    if bool(config.get("quantization_config")) and format != "fp8":
        raise ConfigError(
            "config.json holds a quantization_config, but format='bf16' was asked for; drop one of the two"
        )
    if tp < 1 or ep < 1 or tp % ep or not 0 <= rank < tp:
        raise ConfigError(
            f"tp_size={tp}, ep_size={ep}, rank={rank}: ep_size must divide tp_size, and rank lies in 0 to tp_size - 1"
        )
    if attention_dp < 1 or tp % attention_dp:
        raise ConfigError(f"attention_dp={attention_dp} does not divide tp_size={tp}")
    experts = config.get("num_experts") or config.get("num_local_experts") or 0
    if not experts or experts % ep:
        raise ConfigError(f"{experts} experts cannot be dealt to ep_size={ep} ranks equally; choose a divisor")
    if config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1:
        raise ConfigError("dense layers among the sparse ones are not supported (mlp_only_layers, decoder_sparse_step)")
    if format == "fp8":
        _check_quantization(config)
        require_legal_tp(config["moe_intermediate_size"], tp // ep, experts=experts, name="moe_intermediate_size")
    elif config["moe_intermediate_size"] % (tp // ep):
        raise PlanError(
            f"moe_intermediate_size {config['moe_intermediate_size']} is not a multiple of expert tensor "
            f"parallel size {tp // ep}"
        )
    heads, attention_tp = config.get("num_attention_heads") or 0, tp // attention_dp
    if not heads or heads % attention_tp:
        raise ConfigError(
            f"num_attention_heads {heads} cannot be split over {attention_tp} ranks (tp_size {tp} / attention_dp "
            f"{attention_dp}); choose a divisor, or more attention_dp"
        )


def _check_quantization(config: Mapping[str, Any]) -> None:
    """ConfigError for what SGLang itself refuses later, with less to go by."""
    if config["moe_intermediate_size"] % _BLOCK:
        raise ConfigError(
            f"moe_intermediate_size {config['moe_intermediate_size']} is not a multiple of {_BLOCK}: SGLang takes no "
            "ragged block of gate and up; pad the model's experts, or use format='bf16'"
        )
    found = config.get("quantization_config") or quantization_config(0)
    for key in ("quant_method", "activation_scheme", "weight_block_size"):
        expected = quantization_config(0)[key]
        if not isinstance(found, Mapping) or found.get(key) != expected:
            value = found.get(key) if isinstance(found, Mapping) else found
            raise ConfigError(
                f"quantization_config: expected {key} {expected!r}, found {value!r}; export the model anew"
            )


def _require_cuda_code_path() -> None:
    from sglang.srt.utils import is_cpu

    if is_cpu():
        raise ConfigError(
            "SGLang's CPU engine repacks weights for its own kernels; unset SGLANG_USE_CPU_ENGINE in this process"
        )


def _server_args(tp: int, ep: int, attention_dp: int, device: torch.device, moe_runner: str) -> Any:
    from sglang.srt.server_args import ServerArgs

    attention = {"enable_dp_attention": True, "dp_size": attention_dp} if attention_dp > 1 else {}
    return ServerArgs(
        model_path="dummy",
        device=device.type,
        tp_size=tp,
        ep_size=ep,
        moe_runner_backend=moe_runner,
        fp8_gemm_runner_backend="triton",
        attention_backend="triton",
        **attention,
    )


def _join_world(context: Any, arguments: Any) -> tuple[ParallelSizes, dict[str, str]]:
    """Give the context its groups and MoE flags, as a worker's start-up would, and read back what SGLang made of the
    request.
    """
    from sglang.srt.layers.dp_attention import initialize_dp_attention_flags
    from sglang.srt.layers.moe.utils import get_moe_a2a_backend, get_moe_runner_backend, initialize_moe_config

    parallel = context.parallel
    groups = {name: _group(getattr(parallel, size), getattr(parallel, rank)) for name, (size, rank) in _GROUPS.items()}
    parallel.override_permanently(
        **groups, pp_group=_group(1, 0), world_group=_group(parallel.tp_size, parallel.tp_rank)
    )
    initialize_moe_config()
    initialize_dp_attention_flags(arguments)
    backends = {"moe_runner": str(get_moe_runner_backend().value), "moe_a2a": str(get_moe_a2a_backend().value)}
    check_backends(backends["moe_runner"], a2a=backends["moe_a2a"])
    return parallel_sizes(), backends


def _group(size: int, rank: int) -> SimpleNamespace:
    """What module constructors read of a process group."""
    return SimpleNamespace(
        world_size=size,
        rank_in_group=rank,
        rank=rank,
        local_rank=rank,
        is_first_rank=rank == 0,
        is_last_rank=rank == size - 1,
        device_group=None,
        cpu_group=None,
    )


@contextmanager
def _rotary_without_vllm() -> Iterator[None]:
    """Off CUDA, SGLang's rotary embedding takes a kernel from vllm that only a forward pass would call."""
    if torch.cuda.is_available() or "vllm" in sys.modules:
        yield
        return
    package, ops = types.ModuleType("vllm"), types.ModuleType("vllm._custom_ops")
    ops.rotary_embedding = None  # type: ignore[attr-defined]
    stand_ins = {"vllm": package, "vllm._custom_ops": ops}
    sys.modules.update(stand_ins)
    try:
        yield
    finally:
        for name in stand_ins:
            sys.modules.pop(name, None)


def _transformers_config(config: Mapping[str, Any]) -> Any:
    """The configuration object as SGLang itself would read it from a checkpoint directory."""
    from sglang.srt.utils.hf_transformers.config import get_config

    with tempfile.TemporaryDirectory(prefix="weftpub-config-") as directory:
        (Path(directory) / "config.json").write_text(json.dumps(dict(config)), encoding="utf-8")
        return get_config(directory, trust_remote_code=False)


def _quant_config(config: Mapping[str, Any], format: Format, model_class: Any) -> Any:
    if format == "bf16":
        return None
    from sglang.srt.layers.quantization.fp8 import Fp8Config

    scheme = config.get("quantization_config") or quantization_config(config["num_hidden_layers"])
    return Fp8Config.from_config({**scheme, "packed_modules_mapping": model_class.packed_modules_mapping})


def _check_formats(served: ServedModel) -> None:
    """Routed experts have exactly the asked format; nothing else is FP8."""
    expert_dtype = torch.float8_e4m3fn if served.format == "fp8" else torch.bfloat16
    for name, parameter in served.model.named_parameters():
        routed = ".mlp.experts." in name
        scale = name.endswith("_scale_inv")
        expected = torch.float32 if scale else expert_dtype if routed else torch.bfloat16
        if parameter.dtype != expected or (scale and not routed):
            raise ConfigError(
                f"{name} is {parameter.dtype}, expected {expected}: FP8 covers routed experts only; list "
                "every other linear in "
                "quantization_config.modules_to_not_convert"
            )
