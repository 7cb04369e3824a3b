"""Small stores and their masters for tests: two layers that are not neighbours, and global expert ids that are not 0,
1, 2.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from weftpub.store import ExpertStore, SealReport

LAYERS, EXPERTS, HIDDEN, INTERMEDIATE = (1, 3), (4, 5, 7), 256, 128


def make_store(**settings: Any) -> ExpertStore:
    """An empty store; `settings` override the small default shape."""
    shape = {"layers": LAYERS, "experts": EXPERTS, "hidden": HIDDEN, "intermediate": INTERMEDIATE}
    return ExpertStore(**{**shape, **settings})


def make_masters(store: ExpertStore, seed: int = 0) -> dict[str, torch.Tensor]:
    """One FP32 master for every matrix, on the store's device, all different."""
    generator = torch.Generator().manual_seed(seed)
    return {
        matrix.name: (torch.randn(store.layout.shape(matrix.projection), generator=generator) * 0.02).to(store.device)
        for matrix in store.layout.matrices
    }


def fill(
    store: ExpertStore,
    generation: int,
    masters: Mapping[str, torch.Tensor] | None = None,
    on_torn: Callable[[str], None] | None = None,
) -> SealReport:
    """Write and seal one generation."""
    with store.writing(generation, on_torn=on_torn) as step:
        for name, master in (masters or make_masters(store)).items():
            store.writer()(name, master)
    return step.report


def published(store: ExpertStore) -> dict[str, torch.Tensor]:
    """Copies of the canonical tensors, as bytes: FP8 does not compare."""
    return {item.name: item.tensor.contiguous().view(torch.uint8).clone() for item in store.canonical()}


def same_bytes(first: Mapping[str, torch.Tensor], second: Mapping[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)
