"""Qwen3.5-MoE over two ranks that split its attention, delta nets and experts, against transformers' whole model."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hybrid_checkpoints import read_tensors

pytestmark = pytest.mark.slow

RANKS = 2


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("hybrid-ranks")
    worker = Path(__file__).with_name("hybrid_ranks.py")
    run = subprocess.run(
        [sys.executable, str(worker), str(directory)],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONWARNINGS": "ignore"},
    )
    assert run.returncode == 0, run.stderr[-6000:]
    return directory


def ranks(found: Path, key: str) -> list[Any]:
    return [torch.load(found / f"rank{rank}.pt")[key] for rank in range(RANKS)]


def test_logits_of_both_ranks_are_those_of_transformers(found: Path) -> None:
    together = torch.cat(ranks(found, "logits"), dim=-1)
    torch.testing.assert_close(together, torch.load(found / "expected.pt"), rtol=0, atol=5e-3)


def test_both_ranks_together_publish_the_checkpoint(found: Path) -> None:
    """Every element of it lies in some rank's tensor, where the planner says that it lies."""
    expected = read_tensors(found / "checkpoint")
    whole: dict[str, torch.Tensor] = {}
    for published in ranks(found, "published"):
        for name, (offset, tensor) in published.items():
            fused = next((f for f in ("in_proj_qkv", "conv1d") if _part_of(name, f)), None)
            target, first = (name, 0) if fused is None else _place(name, fused)
            place = whole.setdefault(target, torch.full_like(expected[target].float(), float("nan")))
            start = (offset[0] + first, *offset[1:])
            for dimension, (begin, length) in enumerate(zip(start, tensor.shape, strict=True)):
                place = place.narrow(dimension, begin, length)
            place.copy_(tensor)
    assert sorted(whole) == sorted(expected)
    for name, tensor in whole.items():
        torch.testing.assert_close(tensor, expected[name].float(), rtol=1e-6, atol=1e-7, msg=name)


def _part_of(name: str, fused: str) -> bool:
    stem = fused.removesuffix("_qkv")
    return any(f".{stem}_{letter}." in name for letter in "qkv")


def _place(name: str, fused: str) -> tuple[str, int]:
    """The checkpoint's tensor that a part belongs to, and its first row there."""
    stem, keys = fused.removesuffix("_qkv"), 2 * 16
    letter = next(letter for letter in "qkv" if f".{stem}_{letter}." in name)
    return name.replace(f"{stem}_{letter}", fused), {"q": 0, "k": keys, "v": 2 * keys}[letter]
