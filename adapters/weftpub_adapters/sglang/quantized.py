"""Which modules of SGLang's model are FP8, and the `quantization_config` that says so.

Only routed experts are. SGLang asks its quantization scheme about linears by name, and takes FP8 for an answer unless
the name is on the list `modules_to_not_convert`. So the real model is built once without memory, and every module with
a matrix outside the routed experts goes on the list: under the name it asks by, or its own. The list is made by the
function that the exporter uses (`weftpub.checkpoint.scheme.excluded_modules`), and is the exporter's.
"""

import importlib
import json
import tempfile
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import torch

from weftpub.canonical import family_of
from weftpub.checkpoint.scheme import excluded_modules
from weftpub.checkpoint.scheme import quantization_config as scheme_of
from weftpub.errors import ConfigError
from weftpub_adapters.sglang.context import worker_context

__all__ = [
    "MODELS",
    "check_scheme",
    "make_draft",
    "make_model",
    "quant_config",
    "quantization_config",
    "unquantized_modules",
]

Format = Literal["fp8", "bf16"]

# Architecture to the module of SGLang that holds its class.
MODELS: Mapping[str, str] = MappingProxyType(
    {
        "Qwen3MoeForCausalLM": "sglang.srt.models.qwen3_moe",
        "Qwen3_5MoeForCausalLM": "sglang.srt.models.qwen3_5_text",
        "Qwen3_5MoeForConditionalGeneration": "sglang.srt.models.qwen3_5",
    }
)
_DRAFTS = dict.fromkeys(
    ("Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration"),
    ("sglang.srt.models.qwen3_5_mtp", "Qwen3_5ForCausalLMMTP"),
)
_MTP_LAYERS = "mtp_num_hidden_layers"


def quantization_config(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """A `quantization_config` that makes routed experts block FP8 and leaves everything else in BF16: the exporter's
    scheme, with the list that SGLang's own model of this config asks for.
    """
    return scheme_of(unquantized_modules(hf_config))


def unquantized_modules(hf_config: Mapping[str, Any]) -> list[str]:
    """Checkpoint names of every module with a matrix outside the routed experts, sorted. Multi-token prediction is left
    in BF16 as a whole, experts included: its experts are in no store.

    Raises:
        ConfigError: the architecture is not supported.
    """
    plain = {key: value for key, value in hf_config.items() if key != "quantization_config"}
    return list(_asked(json.dumps(plain, sort_keys=True)))


def make_model(hf_config: Mapping[str, Any], scheme: Any) -> torch.nn.Module:
    """SGLang's model of a config, in the current `worker_context`."""
    return _model_class(hf_config)(_transformers_config(hf_config), quant_config=scheme)


def make_draft(hf_config: Mapping[str, Any], scheme: Any, target: Any) -> torch.nn.Module:
    """The draft model of multi-token prediction, in the current `worker_context`; it shares embedding and head with the
    target, as SGLang's workers do.

    Raises:
        ConfigError: the model has no such layers, or its architecture is not supported with them.
    """
    text = {**hf_config, **(hf_config.get("text_config") or {})}
    architecture = (hf_config.get("architectures") or [None])[0]
    if not text.get(_MTP_LAYERS) or architecture not in _DRAFTS:
        raise ConfigError(
            f"draft=True, but {architecture} with {_MTP_LAYERS}={text.get(_MTP_LAYERS)!r} has no draft model here; "
            f"supported with one are {', '.join(_DRAFTS)}"
        )
    from sglang.srt.layers.moe.utils import draft_model_build_scope

    module, name = _DRAFTS[architecture]
    with draft_model_build_scope():
        draft = getattr(importlib.import_module(module), name)(_transformers_config(hf_config), quant_config=scheme)
    draft.model.embed_tokens.weight = target.model.embed_tokens.weight
    draft.lm_head.weight = target.lm_head.weight
    return draft


def quant_config(hf_config: Mapping[str, Any], format: Format) -> Any:
    """SGLang's own scheme object, from the config's `quantization_config` or the one it should have; None for BF16."""
    if format == "bf16":
        return None
    from sglang.srt.layers.quantization.fp8 import Fp8Config

    scheme = hf_config.get("quantization_config") or quantization_config(hf_config)
    packed = _model_class(hf_config).packed_modules_mapping
    return Fp8Config.from_config({**scheme, "packed_modules_mapping": packed})


def check_scheme(hf_config: Mapping[str, Any]) -> None:
    """ConfigError for a `quantization_config` that SGLang itself would refuse later, with less to go by."""
    found = hf_config.get("quantization_config")
    if not found:
        return
    wanted = scheme_of([])
    for key in ("quant_method", "activation_scheme", "weight_block_size"):
        expected = wanted[key]
        if not isinstance(found, Mapping) or found.get(key) != expected:
            value = found.get(key) if isinstance(found, Mapping) else found
            raise ConfigError(
                f"quantization_config: expected {key} {expected!r}, found {value!r}; export the model anew"
            )


def _model_class(hf_config: Mapping[str, Any]) -> Any:
    architecture = (hf_config.get("architectures") or [None])[0]
    if architecture not in MODELS:
        raise ConfigError(f"architectures[0] is {architecture!r}; this adapter serves {', '.join(map(repr, MODELS))}")
    return getattr(importlib.import_module(MODELS[architecture]), architecture)


@lru_cache(maxsize=16)
def _asked(config: str) -> tuple[str, ...]:
    hf_config = json.loads(config)
    packed = _model_class(hf_config).packed_modules_mapping
    scheme, asked = _recorder()
    with worker_context(
        tp_size=1, ep_size=1, rank=0, attention_dp=1, device=torch.device("meta"), moe_runner_backend="triton"
    ):
        model = make_model(hf_config, scheme)
    family = family_of(hf_config["architectures"][0])
    matrices = {
        f"{name}.weight": torch.empty(1, 1, device="meta")
        for path, module in model.named_modules()
        if ".mlp.experts" not in path and _has_matrix(module)
        for name in _unpacked(asked.get(id(module)) or family.to_checkpoint(path), packed)
    }
    text = {**hf_config, **(hf_config.get("text_config") or {})}
    draft = ["mtp"] if text.get(_MTP_LAYERS) else []
    return tuple(sorted([*excluded_modules(family, matrices, {}), *draft]))


def _has_matrix(module: torch.nn.Module) -> bool:
    weight = module._parameters.get("weight")
    return weight is not None and weight.ndim >= 2


def _recorder() -> tuple[Any, dict[int, str]]:
    """A scheme that leaves everything but routed experts alone, and the names that modules will have asked it by."""
    from sglang.srt.layers.linear import LinearBase
    from sglang.srt.layers.quantization.fp8 import Fp8Config
    from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod

    asked: dict[int, str] = {}

    class Recorder(Fp8Config):
        def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
            asked[id(layer)] = prefix
            return (
                UnquantizedLinearMethod() if isinstance(layer, LinearBase) else super().get_quant_method(layer, prefix)
            )

    return Recorder.from_config(scheme_of([])), asked


def _unpacked(name: str, packed: Mapping[str, list[str]]) -> list[str]:
    """The checkpoint's modules of one that SGLang fuses."""
    module, _, last = name.rpartition(".")
    return [f"{module}.{part}" if module else part for part in packed.get(last, [last])]


def _transformers_config(config: Mapping[str, Any]) -> Any:
    """The configuration object as SGLang itself would read it from a checkpoint directory."""
    from sglang.srt.utils.hf_transformers.config import get_config

    with tempfile.TemporaryDirectory(prefix="weftpub-config-") as directory:
        (Path(directory) / "config.json").write_text(json.dumps(dict(config)), encoding="utf-8")
        return get_config(directory, trust_remote_code=False)
