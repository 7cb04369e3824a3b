"""What a publish does not write, and an engine needs all the same: zero padding, scales of the key/value cache, and
what modules derive from their weights and keep.

A publish writes parameters. Norms with a zero-centred weight also keep a copy with one added, linear attention keeps
views of its parameters, quantization methods post-process what was loaded. `post_process_weights` brings all of it up
to date, by SGLang's own functions, once per publish and after the last byte. It lies between a publish's bytes and its
end, so the module tree is searched once for each model.
"""

from collections.abc import Iterator
from typing import Any

import torch

from weftpub.errors import ConfigError

__all__ = ["kept_parameters", "post_process_weights"]

_RESTORED = "computed at start-up and kept by the engine through an offload"
_WRITTEN_BACK = "scale of the key/value cache, written back from the host"
_SCALES = ("k_scale", "v_scale")
_KEPT = "_weftpub_parts"
_UNSET = -1.0  # what SGLang takes for "no scale was loaded"


def kept_parameters(model: torch.nn.Module) -> dict[str, str]:
    """Names of parameters and buffers that no publish writes, each with the reason."""
    from sglang.srt.layers.radix_attention import RadixAttention

    kept = dict.fromkeys((name for name, _ in model.named_buffers()), _RESTORED)
    for name, module in model.named_modules():
        if isinstance(module, RadixAttention):
            kept.update({f"{name}.{scale}": _WRITTEN_BACK for scale in _SCALES if scale in module._parameters})
    return kept


@torch.no_grad()
def post_process_weights(model: torch.nn.Module) -> None:
    """Do what SGLang does after loading, and prove that it moved no weight. Call it in the model's runtime context.

    Raises:
        ConfigError: a layer replaced, moved or reshaped a parameter, or holds a derived copy that cannot be refreshed:
            its backend cannot be published to.
    """
    parts = model.__dict__.get(_KEPT)
    if parts is None:  # kept on the model, so that both go together
        parts = model.__dict__[_KEPT] = _Parts(model)
    for parameter, rows in parts.padded():
        # Rows of no token: SGLang's loader leaves them zero, and a NaN there would reach the logits.
        parameter.data[rows:].zero_()
    fresh = parts.restore_cache_scales()
    before = parts.places()
    for module in (*parts.processed, *fresh):
        module.quant_method.process_weights_after_loading(module)
    after = parts.places()
    moved = sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
    if moved:
        raise ConfigError(
            f"post-processing replaced or reshaped {moved[:4]} ({len(moved)} in all); this backend derives its own "
            "weights and cannot be published to in place, use moe_runner_backend='triton'"
        )
    parts.refresh()


class _Parts:
    """The modules of a model that need a hand after its weights were written."""

    def __init__(self, model: torch.nn.Module) -> None:
        from sglang.srt.layers.layernorm import GemmaRMSNorm
        from sglang.srt.layers.radix_attention import RadixAttention
        from sglang.srt.layers.radix_linear_attention import RadixLinearAttention

        from weftpub_adapters.sglang.describe import vocabulary_shards

        self._holders: list[tuple[str, Any]] = []
        self._caches: list[Any] = []
        self._norms: list[Any] = []
        self._linear_attentions: list[Any] = []
        self._vocabulary: list[tuple[Any, int]] = []
        self.processed: list[Any] = []
        vocabulary = vocabulary_shards(model)
        for name, module in model.named_modules():
            prefix = f"{name}." if name else ""
            self._holders.append((prefix, module))
            if isinstance(module, RadixAttention):
                self._caches += [module] if "k_scale" in module._parameters else []
            elif getattr(module, "quant_method", None) is not None:
                self.processed.append(module)
            if isinstance(module, GemmaRMSNorm):
                self._norms.append(module)
            if isinstance(getattr(module, "attn", None), RadixLinearAttention):
                self._linear_attentions.append(module)
            shard = vocabulary.get(f"{prefix}weight")
            if shard is not None:
                self._vocabulary.append((module, shard["end"] - shard["start"]))

    def padded(self) -> Iterator[tuple[torch.nn.Parameter, int]]:
        """Vocabulary parameters, and how many of their rows belong to tokens."""
        for module, rows in self._vocabulary:
            yield module.weight, rows

    def restore_cache_scales(self) -> list[Any]:
        """Write back the scales that the engine computes with; returns the modules that have none yet."""
        fresh: list[Any] = []
        for module in self._caches:
            known = [getattr(module, f"{scale}_float") for scale in _SCALES]
            for scale, value in zip(_SCALES, known, strict=True):
                getattr(module, scale).data.fill_(_UNSET if value is None else value)
            if None in known:
                fresh.append(module)
        return fresh

    def places(self) -> dict[str, tuple[object, ...]]:
        """Where every parameter lies, and its layout."""
        return {
            prefix + name: (p.data_ptr(), p.shape, p.stride(), p.dtype)
            for prefix, module in self._holders
            for name, p in module._parameters.items()
            if p is not None
        }

    def refresh(self) -> None:
        """Bring derived copies and views up to date; ConfigError for one that SGLang says cannot be."""
        for prefix, module in self._holders:
            reason = module.__dict__.get("_derived_weight_cache_error")
            if reason:
                raise ConfigError(f"{prefix.removesuffix('.')}: {reason}")
        for norm in self._norms:
            norm.refresh_gemma_weight()
        for module in self._linear_attentions:
            module.attn.A_log, module.attn.dt_bias = module.A_log, module.dt_bias
            module.attn.refresh_conv_weights(module.conv1d.weight)
