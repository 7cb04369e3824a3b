"""Builds SGLang's real model for any tensor and expert parallel rank in one process, without torch.distributed.

The model is the one that a serving worker would build, with its `FusedMoE` layers, in a runtime context of its own
(`context.py`). Weights are left as they come: a publish, or SGLang's own `load_weights`, fills them.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch

from weftpub.errors import ConfigError, PlanError
from weftpub.plan import require_legal_tp
from weftpub_adapters.sglang.context import worker_context
from weftpub_adapters.sglang.draft import DRAFT, with_draft
from weftpub_adapters.sglang.parallel import ParallelSizes
from weftpub_adapters.sglang.placement import place_experts
from weftpub_adapters.sglang.quantized import MODELS, check_scheme, make_draft, make_model, quant_config
from weftpub_adapters.sglang.support import check_backends, require_supported

__all__ = ["ServedModel", "build_model"]

Format = Literal["fp8", "bf16"]
_BLOCK = 128


@dataclass(frozen=True)
class ServedModel:
    """One rank's model.

    Attributes:
        model: SGLang's own class of the architecture, with its draft if one was asked for.
        parallel: real sizes and ranks.
        hf_config: the `config.json` that it was built from, as plain data.
        format: "fp8" (routed experts only) or "bf16".
        device: where its parameters live.
        backends: runner and data mover of the routed experts.
        context: SGLang's runtime context, needed by whatever runs the model's code.
        target: the model without its draft.
    """

    model: torch.nn.Module
    parallel: ParallelSizes
    hf_config: Mapping[str, Any]
    format: Format
    device: torch.device
    backends: Mapping[str, str]
    context: Any
    target: torch.nn.Module

    @contextmanager
    def active(self) -> Iterator[None]:
        """Make this model's context SGLang's current one while the block runs."""
        from sglang.srt.runtime_context import use_context

        with use_context(self.context):
            yield

    def place_experts(self, physical_to_logical: Sequence[Sequence[int]] | None) -> None:
        """Say which expert every slot of all ranks holds from now on, as SGLang's load balancing does when it moves
        experts. The bytes are not moved.

        Args:
            physical_to_logical: a row for each layer; None deals the experts in their order, again from the first.
        """
        with self.active():
            place_experts(self.model, physical_to_logical, self.parallel)


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
    redundant_experts: int = 0,
    physical_to_logical: Sequence[Sequence[int]] | None = None,
    draft: bool = False,
) -> ServedModel:
    """Build one rank's model with uninitialised weights.

    Args:
        hf_config: `config.json` of one of `quantized.MODELS`; its own `quantization_config`, if any, must agree with
            `format`.
        tp_size, ep_size, rank: as SGLang means them: `tp_size` ranks in all, of which groups of `tp_size / ep_size`
            split each expert.
        attention_dp: data-parallel attention groups (`--enable-dp-attention --dp-size`).
        format: "fp8" for block FP8 routed experts, "bf16" for none.
        device: where the parameters are made; "meta" for none.
        moe_runner_backend: must keep weights as they are loaded.
        redundant_experts: slots beyond the model's experts in each layer (`--ep-num-redundant-experts`).
        physical_to_logical: for each layer the expert of every slot of all ranks, as SGLang's expert load balancing
            would have placed them. By default slot i holds expert i modulo their number.
        draft: also build the draft model of multi-token prediction, in BF16, as `model.draft`.

    Raises:
        ConfigError: the version, a backend or a size is not supported. PlanError: the sizes split an expert inside a
            128-block; lists legal ones.
    """
    require_supported()
    check_backends(moe_runner_backend)
    config = dict(hf_config)
    _check_request(config, tp_size, ep_size, rank, attention_dp, format, redundant_experts)
    place = torch.device(device)
    scheme = quant_config(config, format)
    with worker_context(
        tp_size=tp_size,
        ep_size=ep_size,
        rank=rank,
        attention_dp=attention_dp,
        device=place,
        moe_runner_backend=moe_runner_backend,
        redundant_experts=redundant_experts,
    ) as worker:
        target = make_model(config, scheme)
        model = with_draft(target, make_draft(config, scheme, target) if draft else None)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    served = ServedModel(model.eval(), worker.parallel, config, format, place, worker.backends, worker.context, target)
    _check_formats(served)
    if redundant_experts or physical_to_logical is not None:
        served.place_experts(physical_to_logical)
    return served


def _check_request(
    config: Mapping[str, Any], tp: int, ep: int, rank: int, attention_dp: int, format: str, redundant: int
) -> None:
    if format not in ("fp8", "bf16"):
        raise ConfigError(f"format: expected 'fp8' or 'bf16', found {format!r}")
    architectures = config.get("architectures") or [None]
    if architectures[0] not in MODELS:
        raise ConfigError(
            f"architectures[0] is {architectures[0]!r}; this adapter serves {', '.join(map(repr, MODELS))}"
        )
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
    text = {**config, **(config.get("text_config") or {})}
    experts = text.get("num_experts") or text.get("num_local_experts") or 0
    if not experts or (experts + redundant) % ep or redundant < 0:
        slots = f"{experts} experts" + (f" and {redundant} redundant slots" if redundant else "")
        raise ConfigError(f"{slots} cannot be dealt to ep_size={ep} ranks equally; choose a divisor")
    if text.get("mlp_only_layers") or text.get("decoder_sparse_step", 1) != 1:
        raise ConfigError(
            "dense layers among the sparse ones (mlp_only_layers, decoder_sparse_step) are not supported: SGLang "
            "builds experts in every layer of this model, whatever its config says"
        )
    if format == "fp8":
        _check_experts(text, tp // ep, experts)
        check_scheme(config)
    elif text["moe_intermediate_size"] % (tp // ep):
        raise PlanError(
            f"moe_intermediate_size {text['moe_intermediate_size']} is not a multiple of expert tensor "
            f"parallel size {tp // ep}"
        )
    _check_heads(text, tp // attention_dp, f"tp_size {tp} / attention_dp {attention_dp}")


def _check_experts(text: Mapping[str, Any], expert_tp: int, experts: int) -> None:
    size = text["moe_intermediate_size"]
    if size % _BLOCK:
        raise ConfigError(
            f"moe_intermediate_size {size} is not a multiple of {_BLOCK}: SGLang takes no ragged block of gate and up; "
            "pad the model's experts, or use format='bf16'"
        )
    require_legal_tp(size, expert_tp, experts=experts, name="moe_intermediate_size")


def _check_heads(text: Mapping[str, Any], attention_tp: int, made_of: str) -> None:
    for field in ("num_attention_heads", "linear_num_key_heads", "linear_num_value_heads"):
        heads = text.get(field) or 0
        if (field in text or field == "num_attention_heads") and (not heads or heads % attention_tp):
            raise ConfigError(
                f"{field} {heads} cannot be split over {attention_tp} ranks ({made_of}); choose a divisor, or more "
                "attention_dp"
            )


def _check_formats(served: ServedModel) -> None:
    """Routed experts have exactly the asked format; nothing else is FP8."""
    expert_dtype = torch.float8_e4m3fn if served.format == "fp8" else torch.bfloat16
    for name, parameter in served.model.named_parameters():
        scale = name.endswith("_scale_inv")
        if ".mlp.experts." in name and not name.startswith(f"{DRAFT}."):
            fit = (torch.float32 if scale else expert_dtype,)
        else:  # SGLang keeps a few vectors in FP32
            fit = () if scale else (torch.bfloat16, torch.float32)
        if parameter.dtype not in fit:
            raise ConfigError(
                f"{name} is {parameter.dtype}, expected {' or '.join(map(str, fit)) or 'none'}: FP8 covers routed "
                "experts only; list every other linear in quantization_config.modules_to_not_convert"
            )
