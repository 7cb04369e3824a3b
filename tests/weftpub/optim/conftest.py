"""Masters, gradients and writers for optimizer tests."""

from collections.abc import Callable

import pytest
import torch

Tensors = dict[str, torch.Tensor]


class RecordingWriter:
    """A writer that keeps what it saw of the latest step, copied on the stream it was called on."""

    def __init__(self) -> None:
        self.seen: Tensors = {}

    def __call__(self, name: str, matrix: torch.Tensor) -> None:
        self.seen[name] = matrix.clone()


@pytest.fixture
def writer() -> RecordingWriter:
    return RecordingWriter()


@pytest.fixture
def weights() -> Tensors:
    """Wide, tall and square matrices, one with a ragged shape."""
    generator = torch.Generator().manual_seed(11)
    shapes = {
        "layers.0.experts.0.fc1": (128, 96),
        "layers.0.experts.0.fc2": (96, 64),
        "layers.0.experts.1.fc1": (33, 130),
        "layers.0.experts.1.fc2": (64, 64),
    }
    return {name: torch.randn(shape, generator=generator) * 0.02 for name, shape in shapes.items()}


@pytest.fixture
def gradients_of() -> Callable[[Tensors, int], Tensors]:
    """Gradients of a step: random, the same for the same step."""

    def make(weights: Tensors, step: int) -> Tensors:
        generator = torch.Generator().manual_seed(100 + step)
        return {name: torch.randn(w.shape, generator=generator) * 1e-2 for name, w in weights.items()}

    return make
