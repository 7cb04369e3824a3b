"""Which tensors of an exported model are FP8, and the `quantization_config` that says so to the engines.

Only routed experts are FP8. Both loaders decide per module, before they see a tensor, and both take everything that is
not excluded for FP8: a linear that the list forgets would be read through a scale that does not exist. So the list is
made from the tensors themselves, every tensor of two or more dimensions is either an expert with its scale or on the
list, and the list is checked against both loaders' matching rules.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from weftpub.canonical import CanonicalTensor, ModelFamily
from weftpub.errors import ConfigError

__all__ = ["BLOCK", "check_experts", "check_others", "excluded_modules", "quantization_config"]

BLOCK = 128
_FP8 = frozenset({torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu})


def check_experts(family: ModelFamily, experts: Mapping[str, CanonicalTensor]) -> None:
    """Check names, dtypes, shapes, and that every FP8 weight has its scale and every scale its weight.

    Raises:
        ConfigError: lists what is wrong, before anything was written.
    """
    if not experts:
        raise ConfigError("no expert tensors to export")
    for name, item in experts.items():
        role = family.role(name)
        if role != item.role:
            raise ConfigError(f"{name}: its name says role {role!r}, it was given as {item.role!r}")
        if role == "weight":
            _check_weight(family, name, item.tensor, experts)
    orphans = [
        name for name, item in experts.items() if item.role == "scale" and _weight_name(family, name) not in experts
    ]
    if orphans:
        raise ConfigError(f"{len(orphans)} scales without their weight, first: {orphans[:3]}")
    formats = {item.tensor.dtype for item in experts.values() if item.role == "weight"}
    if len(formats) != 1:
        raise ConfigError(f"experts of one export have one dtype, found {sorted(map(str, formats))}")


def check_others(
    family: ModelFamily, others: Mapping[str, torch.Tensor], experts: Mapping[str, CanonicalTensor]
) -> None:
    """Check that the tensors outside the store need no scale and do not name an expert that the store holds."""
    clash = sorted(set(others) & {family.to_checkpoint(name) for name in experts})
    if clash:
        raise ConfigError(f"{len(clash)} tensors are given as expert and as other, first: {clash[:3]}")
    fp8_modules = _fp8_modules(family, experts)
    for name, tensor in others.items():
        if tensor.dtype in _FP8 or name.endswith("_scale_inv"):
            raise ConfigError(f"{name}: {tensor.dtype} outside the store; only routed experts are FP8, give it in BF16")
        inside = next((module for module in fp8_modules if name.startswith(module + ".")), None)
        if inside is not None:
            raise ConfigError(
                f"{name}: lies inside {inside}, whose experts are FP8; one layer's experts have one format, put "
                "it into the store"
            )


def excluded_modules(
    family: ModelFamily, others: Mapping[str, torch.Tensor], experts: Mapping[str, CanonicalTensor]
) -> list[str]:
    """Checkpoint module paths of every tensor of two or more dimensions outside the scheme, sorted.

    Raises:
        ConfigError: an entry would also exclude FP8 experts under the rules of transformers or SGLang.
    """
    modules = {_excluded_module(family, name) for name, tensor in others.items() if tensor.ndim >= 2}
    for expert in sorted(_fp8_modules(family, experts)):
        hits = [
            module for module in modules if _transformers_excludes(module, expert) or _sglang_excludes(module, expert)
        ]
        if hits:
            raise ConfigError(
                f"{hits[0]}: excluding this module would also exclude the FP8 experts {expert}; "
                "rename the tensor that sits there"
            )
    return sorted(modules)


def quantization_config(excluded: Iterable[str]) -> dict[str, Any]:
    """The `quantization_config` of a 128 x 128 block FP8 checkpoint, as transformers' FineGrainedFP8Config and SGLang's
    Fp8Config read it.
    """
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "weight_block_size": [BLOCK, BLOCK],
        "activation_scheme": "dynamic",
        "modules_to_not_convert": list(excluded),
    }


def _check_weight(family: ModelFamily, name: str, weight: torch.Tensor, experts: Mapping[str, CanonicalTensor]) -> None:
    scale_name = _scale_name(family, name)
    scale = experts.get(scale_name)
    if weight.ndim != 2 or weight.dtype not in (torch.float8_e4m3fn, torch.bfloat16):
        raise ConfigError(
            f"{name}: expected a 2-D float8_e4m3fn or bfloat16 matrix, found {weight.dtype} {tuple(weight.shape)}"
        )
    if weight.dtype == torch.bfloat16:
        if scale is not None:
            raise ConfigError(f"{scale_name}: a bfloat16 weight has no scale; drop it, or give the FP8 weight")
        return
    if scale is None:
        raise ConfigError(
            f"{name}: FP8 without its scale; expected {scale_name}; an engine would serve it through "
            "an uninitialised scale"
        )
    rows, columns = weight.shape
    if rows % BLOCK or columns % BLOCK:
        # transformers takes rows // scale rows for the block size, so a ragged edge would be scaled wrongly without an
        # error.
        raise ConfigError(f"{name}: {rows}x{columns} has a ragged block; engines read only multiples of {BLOCK}")
    expected = (rows // BLOCK, columns // BLOCK)
    if scale.tensor.dtype != torch.float32 or tuple(scale.tensor.shape) != expected:
        raise ConfigError(
            f"{scale_name}: expected float32 {expected}, found {scale.tensor.dtype} {tuple(scale.tensor.shape)}"
        )


def _scale_name(family: ModelFamily, weight_name: str) -> str:
    return weight_name.removesuffix("." + family.weight) + "." + family.scale


def _weight_name(family: ModelFamily, scale_name: str) -> str:
    return scale_name.removesuffix("." + family.scale) + "." + family.weight


def _fp8_modules(family: ModelFamily, experts: Mapping[str, CanonicalTensor]) -> set[str]:
    """Checkpoint paths of the modules that hold FP8 experts."""
    parsed = [family.parse(name) for name, item in experts.items() if item.role == "scale"]
    return {family.to_checkpoint(family.experts_module(item.matrix.layer)) for item in parsed if item is not None}


def _excluded_module(family: ModelFamily, name: str) -> str:
    parsed = family.parse(family.from_checkpoint(name))
    if parsed is not None:
        # Both loaders hold all experts of a layer in one module, and ask about that one.
        return family.to_checkpoint(family.experts_module(parsed.matrix.layer))
    return name.rpartition(".")[0] or name


def _transformers_excludes(entry: str, module: str) -> bool:
    """quantizers_utils.should_convert_module of transformers 5.17: a regular expression from the start, or a literal
    end.
    """
    return re.match(entry, module) is not None or module.endswith(entry)


def _sglang_excludes(entry: str, module: str) -> bool:
    """layers/quantization/utils.is_layer_skipped of SGLang 0.5.23: whole dotted components anywhere, or an expert path
    inside the entry; Fp8Config tries each entry with and without a leading ``model.``.
    """
    base = entry.removeprefix("model.")
    return f".{base}." in f".{module}." or ("experts" in base and module in f"model.{base}")
