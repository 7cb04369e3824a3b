"""Reads the golden cases: the bytes that each peer's own quantizer returned for fixed inputs on an H200.

A case ``<preset>__<input>.safetensors`` says in its metadata where each of its tensors lies, as ``file#tensor``: x is
stored once per input, and equal bytes once per folder.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open

__all__ = ["GOLDEN", "INPUTS", "GoldenCase", "load_case"]

GOLDEN = Path(__file__).resolve().parents[3] / "tests" / "golden" / "quantizers"
"""Where the cases lie in a checkout of the repository."""

INPUTS = ("normal", "ragged", "edge", "ties")


@dataclass(frozen=True)
class GoldenCase:
    """x float32 [M, N]; codes uint8 w [M, N] and, where the peer makes it, wt [N, M]; scales float32."""

    x: torch.Tensor
    w: torch.Tensor
    scale: torch.Tensor
    wt: torch.Tensor | None
    scale_t: torch.Tensor | None
    metadata: dict[str, str]


def load_case(preset: str, name: str, directory: Path = GOLDEN) -> GoldenCase | None:
    """The case of one preset and input, or None where the peer refused that input."""
    path = directory / f"{preset}__{name}.safetensors"
    if not path.exists():
        return None
    with safe_open(path, framework="pt") as file:
        metadata: dict[str, str] = dict(file.metadata())
    return GoldenCase(
        *(_tensor(directory, metadata[key]) for key in ("x", "w", "scale")),
        *(_tensor(directory, metadata[key]) if key in metadata else None for key in ("wt", "scale_t")),
        metadata=metadata,
    )


def _tensor(directory: Path, place: str) -> torch.Tensor:
    name, key = place.split("#")
    with safe_open(directory / name, framework="pt") as file:
        return file.get_tensor(key)
