"""Code blocks of pages that a CPU can run in a moment are run, on small sizes: a block may compile, import what exists,
and still ask for what the library refuses."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from weftpub.masters import ExpertMatrix
from weftpub.store import ExpertStore, StoreState

ROOT = Path(__file__).resolve().parents[1]
HIDDEN, INTERMEDIATE, EXPERTS = 256, 128, (32, 33)


def block_of(page: str, number: int = 0) -> str:
    return re.findall(r"^```python\n(.*?)^```$", (ROOT / page).read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)[
        number
    ]


def run(page: str, names: dict[str, Any], number: int = 0, **changes: str) -> dict[str, Any]:
    """Run a block among given names, and return what it leaves; `changes` replace the arguments of these names."""
    source = block_of(page, number).replace('"cuda"', '"cpu"')
    for name, value in changes.items():
        source, found = re.subn(rf"\b{name}=(range\([^)]*\)|[^,)]+)", f"{name}={value}", source)
        assert found, f"{page}: nothing is called {name}"
    exec(compile(source, page, "exec"), names)
    return names


def matrices() -> dict[str, torch.Tensor]:
    shapes = {"fc1": (2 * INTERMEDIATE, HIDDEN), "fc2": (HIDDEN, INTERMEDIATE)}
    return {ExpertMatrix(0, e, fc).name: torch.randn(shape) for e in EXPERTS for fc, shape in shapes.items()}  # type: ignore[arg-type]


def test_the_readme_quantizes(capsys: pytest.CaptureFixture[str]) -> None:
    left = run("README.md", {})
    assert left["pair"].wt.shape == (8, 256, 512)
    assert "te_fp32" in capsys.readouterr().out


def test_a_staged_step_and_its_store() -> None:
    """The block called `write_all` and `step` outside of a generation, where a store's writer raises."""
    weights = matrices()
    store = ExpertStore([0], EXPERTS, HIDDEN, INTERMEDIATE)
    left = run(
        "docs/reference/optimizers.md",
        {"weights": weights, "store": store, "gradients": {name: torch.randn_like(w) for name, w in weights.items()}},
    )
    assert left["report"].updated == len(weights)
    assert (store.state, store.generation) == (StoreState.SEALED, 1)


def test_a_store_is_written_and_read() -> None:
    page, weights = "docs/reference/store.md", matrices()

    class Optimizer:
        """Writes its masters through the writer of the store that the block makes."""

        def step(self, gradients: dict[str, torch.Tensor]) -> None:
            writer = names["store"].writer()
            for name, weight in weights.items():
                writer(name, weight)

    class Masters:
        def mark_torn(self, reason: str) -> None:
            raise AssertionError(reason)

    names: dict[str, Any] = {"generation": 1, "masters": Masters(), "optimizer": Optimizer(), "gradients": {}}
    run(page, names, layers="[0]", experts=str(list(EXPERTS)), hidden=str(HIDDEN), intermediate=str(INTERMEDIATE))
    assert names["generation"] == 1
    assert names["step"].report.matrices == len(weights)
