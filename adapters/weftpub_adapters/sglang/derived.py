"""What a publish does not write, and an engine needs all the same: zero padding, scales of the key/value cache, and
what modules derive from their weights and keep.

A publish writes parameters. Norms with a zero-centred weight also keep a copy with one added, linear attention keeps
views of its parameters, quantization methods post-process what was loaded. `post_process_weights` brings all of it up
to date, by SGLang's own functions, once per publish and after the last byte.
"""

from collections.abc import Iterator
from typing import Any

import torch

from weftpub.errors import ConfigError

__all__ = ["kept_parameters", "post_process_weights"]

_RESTORED = "computed at start-up and kept by the engine through an offload"
_WRITTEN_BACK = "scale of the key/value cache, written back from the host"
_UNSET = -1.0  # what SGLang takes for "no scale was loaded"


def kept_parameters(model: torch.nn.Module) -> dict[str, str]:
    """Names of parameters and buffers that no publish writes, each with the reason."""
    kept = {name: "computed at start-up and kept by the engine through an offload" for name, _ in model.named_buffers()}
    kept.update(
        {name: "scale of the key/value cache, written back from the host" for name, _, _ in _cache_scales(model)}
    )
    return kept


@torch.no_grad()
def post_process_weights(model: torch.nn.Module) -> None:
    """Do what SGLang does after loading, and prove that it moved no weight. Call it in the model's runtime context.

    Raises:
        ConfigError: a layer replaced, moved or reshaped a parameter, or holds a derived copy that cannot be refreshed:
            its backend cannot be published to.
    """
    from weftpub_adapters.sglang.describe import vocabulary_shards

    parameters = dict(model.named_parameters())
    for name, shard in vocabulary_shards(model).items():
        # Rows of no token: SGLang's loader leaves them zero, and a NaN there would reach the logits.
        parameters[name].data[shard["end"] - shard["start"] :].zero_()
    for _, parameter, value in _cache_scales(model):
        parameter.data.fill_(value)
    before = _places(model)
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if method is not None:
            method.process_weights_after_loading(module)
    after = _places(model)
    moved = sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
    if moved:
        raise ConfigError(
            f"post-processing replaced or reshaped {moved[:4]} ({len(moved)} in all); this backend derives its own "
            "weights and cannot be published to in place, use moe_runner_backend='triton'"
        )
    _refresh(model)


def _refresh(model: torch.nn.Module) -> None:
    from sglang.srt.layers.layernorm import GemmaRMSNorm
    from sglang.srt.layers.radix_linear_attention import RadixLinearAttention

    for name, module in model.named_modules():
        reason = getattr(module, "_derived_weight_cache_error", None)
        if reason:
            raise ConfigError(f"{name}: {reason}")
        if isinstance(module, GemmaRMSNorm):
            module.refresh_gemma_weight()
        attention = getattr(module, "attn", None)
        if isinstance(attention, RadixLinearAttention):
            attention.A_log, attention.dt_bias = module.A_log, module.dt_bias
            attention.refresh_conv_weights(module.conv1d.weight)


def _cache_scales(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter, float]]:
    """Scales of the key/value cache: name, parameter, and the value that the engine computes with."""
    from sglang.srt.layers.radix_attention import RadixAttention

    for name, module in model.named_modules():
        if isinstance(module, RadixAttention):
            for scale in ("k_scale", "v_scale"):
                parameter: Any = getattr(module, scale)
                if isinstance(parameter, torch.nn.Parameter):
                    value = getattr(module, f"{scale}_float")
                    yield f"{name}.{scale}", parameter, _UNSET if value is None else float(value)


def _places(model: torch.nn.Module) -> dict[str, tuple[object, ...]]:
    return {name: (p.data_ptr(), p.shape, p.stride(), p.dtype) for name, p in model.named_parameters()}
