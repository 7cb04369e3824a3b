"""The published version as a Hugging Face directory: safetensors, config and index, as transformers and SGLang load
them.

The bytes are the store's: an FP8 weight and its `weight_scale_inv` are written as they are, never through BF16.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch

from weftpub.canonical import CanonicalTensor, ModelFamily, family_of
from weftpub.checkpoint.atomic import AtomicDirectory
from weftpub.checkpoint.files import ShardedWriter
from weftpub.checkpoint.scheme import check_experts, check_others, excluded_modules, quantization_config
from weftpub.errors import CheckpointError, ConfigError
from weftpub.masters import ExpertMatrix, format_names
from weftpub.store import ExpertStore

__all__ = ["COMPANION_FILES", "ExportReport", "export_hf"]

# What a serving engine reads beside weights and config.
COMPANION_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
)

# transformers 5 writes the second name for what every config class calls by the first.
_EXPERT_COUNTS = ("num_experts", "num_local_experts")


@dataclass(frozen=True)
class ExportReport:
    """What was written.

    Attributes:
        directory: the directory, complete.
        version: as given.
        tensors: number of tensors.
        nbytes: bytes of tensors and headers.
        excluded: modules listed in `modules_to_not_convert`; empty for BF16 experts, which need no quantization_config.
    """

    directory: Path
    version: int
    tensors: int
    nbytes: int
    excluded: tuple[str, ...]


def export_hf(
    directory: Path | str,
    experts: ExpertStore | Iterable[CanonicalTensor],
    others: Mapping[str, torch.Tensor],
    config: Mapping[str, Any],
    *,
    version: int,
    companions: Path | str | None = None,
    expected: Iterable[str] | None = None,
    overwrite: bool = False,
    max_shard_bytes: int = 4 << 30,
) -> ExportReport:
    """Write a model directory that `transformers` and SGLang load.

    A store is held by a lease while it is read, so a step that begins meanwhile waits. The directory appears whole or
    not at all.

    Args:
        experts: the sealed store of all experts, or canonical tensors gathered from several.
        others: checkpoint name to tensor of everything else, any float dtype but FP8.
        config: the model's Hugging Face config as plain data; its `quantization_config`, if any, is replaced.
        version: recorded in every file's metadata as ``weftpub_version``.
        companions: directory to copy `COMPANION_FILES` from, as far as it has them.
        expected: checkpoint names that the directory must hold, such as those of the directory the model came from.
            Names of routed experts in it are passed over: the config says which there must be.
        overwrite: replace an existing directory.

    Raises:
        ConfigError: unknown architecture, missing scales, missing or unknown experts, wrong dtypes or shapes; nothing
            was written.
        GenerationError, TornError, StateError: the store is not sealed, torn, or offloaded.
        CheckpointError: the disk is full or fails; names file, bytes needed and free; the target is untouched.
    """
    family = _family(config)
    with ExitStack() as stack:
        if isinstance(experts, ExpertStore):
            _check_family(family, experts.layout.family)
            stack.enter_context(experts.reading(purpose=f"export of version {version}"))
            experts = experts.canonical()
        items = _by_name(experts)
        check_experts(family, items)
        check_others(family, others, items)
        _check_complete(family, config, items, others)
        tensors = {**others, **{family.to_checkpoint(name): item.tensor for name, item in items.items()}}
        if expected is not None:
            _check_expected(family, expected, others)
        excluded = _excluded(family, items, others)
        writer = ShardedWriter(
            "model", tensors, metadata={"weftpub_version": str(version)}, max_shard_bytes=max_shard_bytes
        )
        config_bytes = _config_bytes(config, excluded)
        extra = dict(_companions(Path(companions))) if companions is not None else {}
        needed = writer.nbytes + len(config_bytes) + sum(len(data) for data in extra.values())
        with AtomicDirectory(Path(directory), needed=needed, overwrite=overwrite) as target:
            for name, data in extra.items():
                target.write(name, [data])
            target.write("config.json", [config_bytes])
            writer.write(target)
    return ExportReport(target.target, version, len(tensors), needed, tuple(excluded or ()))


def _family(config: Mapping[str, Any]) -> ModelFamily:
    architectures = config.get("architectures")
    if not isinstance(architectures, list) or not architectures:
        raise ConfigError("config has no 'architectures'; engines choose the model class by it")
    return family_of(str(cast("list[object]", architectures)[0]))


def _check_family(wanted: ModelFamily, found: ModelFamily) -> None:
    if wanted.architecture != found.architecture:
        raise ConfigError(
            f"config is of {wanted.architecture}, the store was made for {found.architecture}; "
            "give it family=family_of(...)"
        )


def _by_name(experts: Iterable[CanonicalTensor]) -> dict[str, CanonicalTensor]:
    items: dict[str, CanonicalTensor] = {}
    for item in experts:
        if item.name in items:
            raise ConfigError(f"{item.name}: given twice; experts of several ranks must be disjoint")
        items[item.name] = item
    return items


def _check_complete(
    family: ModelFamily,
    config: Mapping[str, Any],
    items: Mapping[str, CanonicalTensor],
    others: Mapping[str, torch.Tensor],
) -> None:
    """Every routed expert that the config promises is there once, with its shape, and none besides."""
    text: Mapping[str, Any] = config.get("text_config") or config
    hidden, intermediate = _number(text, "hidden_size"), _number(text, "moe_intermediate_size")
    shapes = {"fc1": (intermediate, hidden), "fc2": (hidden, intermediate)}
    promised = {name: shapes[matrix.projection] for matrix, name in _promised(family, text)}
    weights = {name for name, item in items.items() if item.role == "weight"}
    unknown = sorted(weights - set(promised))
    if unknown:
        raise ConfigError(
            f"{len(unknown)} experts that the config does not know ({_number(text, *_EXPERT_COUNTS)} in each of its "
            f"expert layers): {format_names(unknown)}; a shared expert keeps its own name"
        )
    given = {family.from_checkpoint(name) for name in others}
    stacked = {name.rpartition(".")[0] for name in given if name.rpartition(".")[2] in family.stacked.values()}
    missing = [
        n for n in promised if n not in weights and n not in given and not any(n.startswith(s + ".") for s in stacked)
    ]
    if missing:
        raise ConfigError(
            f"{len(missing)} expert tensors that the config promises are missing: {format_names(missing)}"
        )
    for name in sorted(weights):
        if tuple(items[name].tensor.shape) != promised[name]:
            raise ConfigError(f"{name}: the config says {promised[name]}, found {tuple(items[name].tensor.shape)}")


def _promised(family: ModelFamily, text: Mapping[str, Any]) -> Iterator[tuple[ExpertMatrix, str]]:
    """Matrix and canonical weight name of every routed expert, by the rule of transformers' decoder layers."""
    dense: set[int] = set(text.get("mlp_only_layers") or ())
    every = int(text.get("decoder_sparse_step", 1))
    for layer in range(_number(text, "num_hidden_layers")):
        if layer in dense or (layer + 1) % every:
            continue
        for expert in range(_number(text, *_EXPERT_COUNTS)):
            for projection, parts in family.parts.items():
                matrix = ExpertMatrix(layer, expert, projection)
                for part in parts:
                    yield matrix, family.name(matrix, part, "weight")


def _number(text: Mapping[str, Any], *keys: str) -> int:
    value = next((text[key] for key in keys if key in text), None)
    if not isinstance(value, int):
        raise ConfigError(f"config has no number under {' or '.join(keys)}, found {value!r}")
    return value


def _check_expected(family: ModelFamily, expected: Iterable[str], others: Iterable[str]) -> None:
    wanted, given = ({name for name in names if not family.is_expert(name)} for names in (expected, others))
    if wanted != given:
        raise ConfigError(
            f"the export would not hold the expected names: missing {format_names(wanted - given)}, "
            f"not expected {format_names(given - wanted)}; nothing was written"
        )


def _excluded(
    family: ModelFamily, items: Mapping[str, CanonicalTensor], others: Mapping[str, torch.Tensor]
) -> list[str] | None:
    if all(item.tensor.dtype == torch.bfloat16 for item in items.values()):
        return None
    # A tied lm_head has no tensor of its own, and is a linear to both loaders all the same.
    return sorted({*excluded_modules(family, others, items), "lm_head"})


def _config_bytes(config: Mapping[str, Any], excluded: list[str] | None) -> bytes:
    body = {key: value for key, value in config.items() if key != "quantization_config"}
    if excluded is not None:
        body["quantization_config"] = quantization_config(excluded)
    try:
        return (json.dumps(body, indent=2, sort_keys=True) + "\n").encode()
    except TypeError as error:
        raise ConfigError(f"config is not plain data: {error}; use PretrainedConfig.to_diff_dict()") from error


def _companions(source: Path) -> Iterator[tuple[str, bytes]]:
    for name in COMPANION_FILES:
        path = source / name
        if path.is_file():
            try:
                yield name, path.read_bytes()
            except OSError as error:
                raise CheckpointError(error.errno, f"{path}: {error.strerror}") from error
