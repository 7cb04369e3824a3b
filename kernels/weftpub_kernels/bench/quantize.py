"""Speed of the quantizer on a GPU against a device copy of as many bytes, TransformerEngine, eager torch and
torch.compile.

    python -m weftpub_kernels.bench.quantize --out quantize.json

Six bytes move per element: four read, two written. Bytes are checked first, then everything is measured in this one
run, in rounds, each number the median of its rounds' medians. Ours runs with the non-finite check and the tile sums on;
for single matrices also without them, which is what TransformerEngine does.
"""

import argparse
import importlib
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from triton.testing import do_bench

from ..checksum import checksum, checksum_rows_from_sums
from ..entry import quantize_into
from ..nonfinite import NonFiniteMonitor
from ..pair import QuantizedPair
from ..recipe import BLOCK, FP8_MAX
from .environment import describe, write

__all__ = ["LAYERS", "MATRICES", "Spec", "main", "measure", "transformer_engine"]

BYTES_PER_ELEMENT = 6
COPY_SHARE = 0.97
ROUNDS = 3


@dataclass(frozen=True)
class Spec:
    """A layer's experts of one projection, [E, M, N], or a single matrix (E = 1)."""

    experts: int
    rows: int
    columns: int

    @property
    def name(self) -> str:
        return f"{self.experts}x{self.rows}x{self.columns}"

    @property
    def bytes(self) -> int:
        return self.experts * self.rows * self.columns * BYTES_PER_ELEMENT


LAYERS = (Spec(32, 2048, 3072), Spec(32, 3072, 1024), Spec(64, 1024, 2048))
MATRICES = (Spec(1, 1024, 2048), Spec(1, 2048, 3072), Spec(1, 7168, 4096), Spec(1, 16384, 8192))


def measure(spec: Spec, milliseconds: int) -> dict[str, Any]:
    """Check, then time every contender on one spec; microseconds, TB/s and the verdict against its target."""
    shape = (spec.experts, spec.rows, spec.columns)
    x = torch.randn(shape, device="cuda") * 0.02
    out, monitor = QuantizedPair.empty(shape, "cuda", sums=True), NonFiniteMonitor("cuda")
    quantize_into(x, out, "te_fp32", monitor)
    monitor.raise_if_set()
    _check(x, out)
    source = torch.empty(spec.bytes // 2, dtype=torch.uint8, device="cuda").random_(0, 256)
    target = torch.empty_like(source)
    contenders: dict[str, Callable[[], Any]] = {
        "copy": lambda: target.copy_(source),
        "weftpub": lambda: quantize_into(x, out, "te_fp32", monitor),
    }
    if spec in MATRICES:
        plain = QuantizedPair.empty(shape, "cuda")
        contenders["weftpub_unchecked"] = lambda: quantize_into(x, plain, "te_fp32")
        theirs = transformer_engine(x[0], out)
        if theirs is not None:
            contenders["transformer_engine"] = theirs
    else:
        compiled = torch.compile(_torch_quantize, dynamic=False)
        contenders |= {"torch": lambda: _torch_quantize(x), "torch_compile": lambda: compiled(x)}
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(ROUNDS):
        for name, run in contenders.items():
            times[name].append(do_bench(run, warmup=10, rep=milliseconds, return_mode="median") * 1e3)
        monitor.reset()
    row: dict[str, Any] = {"spec": spec.name, "us": {name: statistics.median(values) for name, values in times.items()}}
    row["tb_s"] = {name: spec.bytes / time / 1e6 for name, time in row["us"].items()}
    row["of_copy"] = row["us"]["copy"] / row["us"]["weftpub"]
    if spec in LAYERS:
        row["met"] = row["of_copy"] >= COPY_SHARE
    elif "transformer_engine" in row["us"]:
        row["met"] = row["us"]["weftpub"] <= row["us"]["transformer_engine"]
    return row


def _check(x: torch.Tensor, out: QuantizedPair) -> None:
    """The bytes to be timed are right: W and scales as torch makes them, W^T is W.T, the sums give W's checksum."""
    w, wt, scale = _torch_quantize(x)
    for what, got, want in (
        ("W", out.w, w),
        ("W^T", out.wt, wt),
        ("scale", out.scale, scale),
        ("scale_t", out.scale_t, scale.mT),
    ):
        view = torch.uint8 if got.element_size() == 1 else torch.int32
        if not torch.equal(got.view(view), want.contiguous().view(view)):
            raise AssertionError(f"{what} of {list(x.shape)} is wrong; there is nothing to measure")
    last = x.shape[0] - 1
    if checksum(out.w[last]) != int(checksum_rows_from_sums(out.sums, out.w.shape)[last]):  # type: ignore[arg-type]
        raise AssertionError(f"the tile sums of {list(x.shape)} are wrong; there is nothing to measure")


def _torch_quantize(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """te_fp32 for ordinary values in torch operations."""
    e, m, n = x.shape
    blocks = x.view(e, m // BLOCK, BLOCK, n // BLOCK, BLOCK)
    amax = blocks.abs().amax((2, 4))
    multiplier = torch.full_like(amax, FP8_MAX) / amax
    w = (blocks * multiplier[:, :, None, :, None]).view(e, m, n).to(torch.float8_e4m3fn)
    wt = w.view(torch.uint8).transpose(1, 2).contiguous().view(torch.float8_e4m3fn)
    return w, wt, torch.ones_like(multiplier) / multiplier


def transformer_engine(x: torch.Tensor, out: QuantizedPair) -> Callable[[], Any] | None:
    """TransformerEngine's quantizer for the same bytes, in place; None where it is not installed."""
    try:
        # By name, since this package must not depend on it.
        importlib.import_module("transformer_engine.pytorch")
        tex = importlib.import_module("transformer_engine_torch")
        module = importlib.import_module("transformer_engine.pytorch.tensor.float8_blockwise_tensor")
    except ImportError:
        return None
    quantizer = module.Float8BlockQuantizer(
        tex.DType.kFloat8E4M3,
        rowwise=True,
        columnwise=True,
        force_pow_2_scales=False,
        amax_epsilon=0.0,
        block_scaling_dim=2,
    )
    theirs = quantizer(x)
    if not torch.equal(theirs._rowwise_data, out.w[0].view(torch.uint8)):
        raise AssertionError(f"TransformerEngine's W of {list(x.shape)} is not ours; there is nothing to compare")
    return lambda: quantizer.update_quantized(x, theirs)


def main(arguments: list[str] | None = None) -> int:
    """Measure all specs; 0 when bytes were right and every target was met."""
    parser = argparse.ArgumentParser(
        prog="python -m weftpub_kernels.bench.quantize", description="Times the quantizer."
    )
    parser.add_argument("--out", type=Path, help="write the table as JSON to this file")
    parser.add_argument("--commit", help="commit to record, where git cannot say")
    parser.add_argument("--milliseconds", type=int, default=100, help="time per contender and round")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("no CUDA GPU: run this where the kernels run", file=sys.stderr)
        return 2
    rows = []
    names = ("copy", "weftpub", "weftpub_unchecked", "transformer_engine", "torch", "torch_compile")
    print(f"{'spec':14s} " + " ".join(f"{name + ' us':>22s}" for name in names) + "  of copy  target")
    for spec in (*LAYERS, *MATRICES):
        row = measure(spec, options.milliseconds)
        rows.append(row)
        cells = [f"{row['us'][n]:12.1f} {row['tb_s'][n]:4.2f} TB/s" if n in row["us"] else "" for n in names]
        verdict = {True: "met", False: "MISSED", None: "-"}[row.get("met")]
        print(
            f"{spec.name:14s} " + " ".join(f"{cell:>22s}" for cell in cells) + f"  {row['of_copy']:7.3f}  {verdict}",
            flush=True,
        )
    write(options.out, {"environment": describe(options.commit), "rows": rows})
    return 0 if all(row.get("met", True) for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
