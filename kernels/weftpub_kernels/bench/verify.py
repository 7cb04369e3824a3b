"""Proof on a GPU: every golden preset byte for byte, and W^T == W.T with all bytes equal to the reference over the
shape classes.

    python -m weftpub_kernels.bench.verify --out verify.json

Prints a table, writes JSON, and exits 1 when a single byte is wrong. Needs the repository's golden files (``--golden
DIR``).
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import torch

from ..entry import quantize_into, quantize_pair
from ..errors import ShapeError
from ..nonfinite import NonFiniteMonitor
from ..pair import QuantizedPair
from ..recipe import PRESETS, Recipe
from ..reference import quantize_reference
from .environment import describe, write
from .golden import GOLDEN, INPUTS, load_case
from .shapes import SHAPE_CLASSES, ShapeClass, classes_for

__all__ = ["check_shape_class", "golden_rows", "main", "shape_rows"]


def golden_rows(directory: Path, device: str = "cuda") -> list[dict[str, Any]]:
    """One row per preset and input: how many bytes differ from the peer's, or that this input is refused."""
    rows = []
    for preset, recipe in PRESETS.items():
        for name in INPUTS:
            case = load_case(preset, name, directory)
            row: dict[str, Any] = {"preset": preset, "input": name}
            if case is None or (recipe.refuses_ragged and name == "ragged"):
                row["refused"] = _refuses(preset, recipe, name, device)
                rows.append(row | {"ok": bool(row["refused"])})
                continue
            got = quantize_pair(case.x.to(recipe.input_dtype).to(device), preset)
            row["w"] = _differ(got.w.view(torch.uint8), case.w)
            row["scale"] = _differ(got.scale.view(torch.int32), case.scale.view(torch.int32))
            row["wt"] = _differ(got.wt.view(torch.uint8), case.w.t())
            row["scale_t"] = _differ(got.scale_t.view(torch.int32), case.scale.t().contiguous().view(torch.int32))
            rows.append(row | {"ok": not any(row[key] for key in ("w", "scale", "wt", "scale_t"))})
    return rows


def shape_rows(device: str = "cuda") -> list[dict[str, Any]]:
    """One row per preset with operators of its own and shape class: bytes that differ from W.T and from the
    reference."""
    distinct = {(recipe.operators, recipe.input_dtype): recipe for recipe in reversed(PRESETS.values())}
    return [
        {"preset": recipe.name, "shape": shape.name} | check_shape_class(recipe, shape, device)
        for recipe in reversed(distinct.values())
        for shape in classes_for(recipe)
    ]


def check_shape_class(recipe: Recipe, shape: ShapeClass, device: str) -> dict[str, Any]:
    """Quantize awkward matrices of this class; count bytes of W^T that are not W.T, and bytes that are not the
    reference's."""
    x, out = shape.input(recipe.input_dtype, device), shape.output(device)
    monitor = NonFiniteMonitor(device)
    quantize_into(x, out, recipe, monitor)
    monitor.raise_if_set()
    w, wt = out.w.view(torch.uint8), out.wt.view(torch.uint8)
    row: dict[str, Any] = {
        "wt": _differ(wt, w.transpose(-1, -2)),
        "scale_t": _differ(out.scale_t.view(torch.int32), out.scale.view(torch.int32).transpose(-1, -2)),
    }
    if recipe.ieee:
        want = QuantizedPair.empty(x.shape, "cpu", sums=True)
        quantize_reference(x.cpu(), want, recipe)
        row["reference"] = sum(
            _differ(got.view(kind), want.present()[name].view(kind))
            for name, got in out.present().items()
            for kind in (
                torch.uint8 if got.element_size() == 1 else torch.int32 if got.element_size() == 4 else torch.int64,
            )
        )
    return row | {"ok": not any(row.values())}


def _refuses(preset: str, recipe: Recipe, name: str, device: str) -> str:
    shape = (256, 256) if name != "ragged" else (200, 300)
    try:
        quantize_pair(torch.ones(shape, dtype=recipe.input_dtype, device=device), preset)
    except ShapeError as error:
        return str(error)
    return ""


def _differ(got: torch.Tensor, want: torch.Tensor) -> int:
    return int((got.cpu() != want.cpu()).sum())


def main(arguments: list[str] | None = None) -> int:
    """Run both proofs; 0 when all bytes are right."""
    parser = argparse.ArgumentParser(
        prog="python -m weftpub_kernels.bench.verify", description="Proves the GPU kernels."
    )
    parser.add_argument("--out", type=Path, help="write the table as JSON to this file")
    parser.add_argument("--golden", type=Path, default=GOLDEN, help="folder of the golden files")
    parser.add_argument("--commit", help="commit to record, where git cannot say")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("no CUDA GPU: run this where the kernels run", file=sys.stderr)
        return 2
    golden, shapes = golden_rows(options.golden), shape_rows()
    for row in golden:
        counts = " ".join(f"{key} {row[key]}" for key in ("w", "scale", "wt", "scale_t") if key in row)
        print(f"{'ok ' if row['ok'] else 'BAD'} {row['preset']:20s} {row['input']:8s} {counts or 'refused'}")
    for shape in SHAPE_CLASSES:
        mine = [row for row in shapes if row["shape"] == shape.name]
        bad = [row["preset"] for row in mine if not row["ok"]]
        size = "x".join(map(str, shape.shape))
        print(f"{'BAD' if bad else 'ok '} {shape.name:30s} {size:14s} {len(mine)} presets {' '.join(bad)}")
    right = all(row["ok"] for row in golden + shapes)
    write(options.out, {"environment": describe(options.commit), "golden": golden, "shapes": shapes, "ok": right})
    counted = sum("refused" not in row for row in golden)
    print(
        f"{'ALL BYTES RIGHT' if right else 'WRONG BYTES'}: {counted} golden cases, {len(shapes)} preset and shape pairs"
    )
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
