"""Hugging Face model directories: config and tensors, read one at a time, and written whole or not at all.

`HFDirectory` is a mapping from checkpoint name to tensor; nothing is read before it is asked for. It also answers in
the trainer's terms: one expert matrix (fc1 is gate over up), whether the file holds experts apart or stacked in one
tensor.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from weftpub.canonical import ModelFamily, family_of
from weftpub.checkpoint.atomic import AtomicDirectory
from weftpub.checkpoint.files import LazyTensors, ShardedWriter, read_json
from weftpub.errors import ConfigError
from weftpub.masters import ExpertMatrix
from weftpub_kernels import dequantize

__all__ = ["HFDirectory", "write_directory"]

_FP8 = frozenset({torch.float8_e4m3fn, torch.float8_e5m2})


class HFDirectory(Mapping[str, torch.Tensor]):
    """Checkpoint name to tensor of one directory.

    Args:
        path: holds ``config.json`` and ``model.safetensors``, or shards and their index.

    Attributes:
        config: the config as plain data.

    Raises:
        CheckpointError: a file is missing or damaged, or index and files disagree; names it.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.config = read_json(self.path / "config.json", "the config of a model directory")
        self._tensors = LazyTensors(self.path)

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    @property
    def family(self) -> ModelFamily:
        """How this architecture names its experts; ConfigError for one that is not known."""
        architectures = self.config.get("architectures")
        first = architectures[0] if isinstance(architectures, list) and architectures else f"{architectures!r}"
        return family_of(str(first))

    def file_of(self, name: str) -> Path:
        """The file that holds a tensor."""
        return self.path / self._tensors.file_of[name]

    def others(self) -> dict[str, torch.Tensor]:
        """Every tensor that is not of a routed expert, by checkpoint name, mapped from its file."""
        family = self.family
        return {name: self[name] for name in self if not family.is_expert(name)}

    def expert(self, matrix: ExpertMatrix, *, dequantized: bool = False) -> torch.Tensor:
        """One matrix of one routed expert: fc1 ``[2I, H]`` gate over up, fc2 ``[H, I]``, in the file's dtype.

        Args:
            dequantized: allow FP8 files, and return float32 code * scale: a start from bytes that have lost the bits
                that a master keeps.

        Raises:
            ConfigError: the directory does not hold the matrix, or holds it in FP8, which can be dequantized only where
                each expert has tensors of its own; names the tensors looked for.
        """
        family = self.family
        names = [family.to_checkpoint(family.name(matrix, p, "weight")) for p in family.parts[matrix.projection]]
        stacked = f"{family.experts_module(matrix.layer)}.{family.stacked[matrix.projection]}"
        stacked = family.to_checkpoint(stacked)
        if all(name in self for name in names):
            parts = [self._weight(name, family, dequantized) for name in names]
            return parts[0] if len(parts) == 1 else torch.cat(parts)
        if stacked in self and matrix.expert < self._tensors.shape(stacked)[0]:
            weight = self._tensors.rows(stacked, matrix.expert, matrix.expert + 1)[0]
            if weight.dtype in _FP8:  # codes without their scales; releases lay stacked scales out in several ways
                raise ConfigError(
                    f"{stacked}: is {weight.dtype}, which has lost the bits that a master keeps; start from the BF16 "
                    "checkpoint"
                )
            return weight
        raise ConfigError(f"{self.path}: holds neither {names} nor expert {matrix.expert} of {stacked}")

    def _weight(self, name: str, family: ModelFamily, dequantized: bool) -> torch.Tensor:
        weight = self[name]
        if weight.dtype not in _FP8:
            return weight
        if not dequantized or weight.dtype != torch.float8_e4m3fn:
            raise ConfigError(
                f"{name}: is {weight.dtype}, which has lost the bits that a master keeps; start from the BF16 "
                "checkpoint, or allow dequantized=True for float8_e4m3fn"
            )
        scale = name.removesuffix(family.weight) + family.scale
        if scale not in self:
            raise ConfigError(f"{name}: is FP8 without its scale; expected {scale} in {self.path}")
        return dequantize(weight, self[scale])


def write_directory(
    path: Path | str, tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any], *, overwrite: bool = False
) -> Path:
    """Write a directory of tensors as they are; for FP8 experts use `weftpub.checkpoint.export_hf`.

    Raises:
        CheckpointError: it exists (without overwrite), or the disk is full or fails; an existing one is untouched.
        ConfigError: FP8 tensors, which need a quantization_config, or a dtype that the format does not have.
    """
    fp8 = [name for name, tensor in tensors.items() if tensor.dtype in _FP8]
    if fp8:
        raise ConfigError(f"{fp8[0]}: is FP8; export_hf writes it with its scale and quantization_config")
    writer = ShardedWriter("model", tensors, metadata={})
    document = (json.dumps(dict(config), indent=2, sort_keys=True) + "\n").encode()
    with AtomicDirectory(Path(path), needed=writer.nbytes + len(document), overwrite=overwrite) as target:
        target.write("config.json", [document])
        writer.write(target)
    return target.target
