"""Which tuning of the quantizer is fastest on this GPU, per class of launch (tuning.py).

    python -m weftpub_kernels.bench.tune --out tune.json [--write]

Every tuning's bytes are compared with those of the present rows, then it is timed on the specs of quantize.py, in
rounds, beside TransformerEngine and a device copy. For each class of programs per multiprocessor the one with the best
mean over its specs is printed; ``--write`` puts these rows into tuning.py of this very tree.
"""

import argparse
import itertools
import math
import re
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from triton.testing import do_bench

from .. import tuning
from ..entry import quantize_into
from ..launch import launch
from ..nonfinite import NonFiniteMonitor
from ..pair import QuantizedPair
from ..recipe import BLOCK, PRESETS
from ..tuning import Tuning
from .environment import describe, write
from .quantize import LAYERS, MATRICES, Spec, transformer_engine

__all__ = ["CANDIDATES", "main"]

_LOADS = (("", ""), (".cg", ""), ("", "evict_first"))
_STORES = (("", ""), (".cs", ""), ("", "evict_first"))
CANDIDATES = (
    *(Tuning(None, *load, *store) for load in _LOADS for store in _STORES),
    *(Tuning(80, *load, *store) for load in _LOADS for store in _STORES[:2]),
)
_CLASSES = (1.0, 2.0, 3.0, 32.0, math.inf)
_ROUNDS = 3


def measure(spec: Spec, milliseconds: int) -> dict[str, Any]:
    """Median microseconds of every candidate, of TransformerEngine (single matrices) and of a copy of as many bytes."""
    x = torch.randn(spec.experts, spec.rows, spec.columns, device="cuda") * 0.02
    source = torch.empty(spec.bytes // 2, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    want = QuantizedPair.empty(x.shape, "cuda", sums=True)
    quantize_into(x, want)
    runs: dict[str, Callable[[], Any]] = {"copy": lambda: target.copy_(source)}
    for candidate in CANDIDATES:
        runs[repr(candidate)] = _runner(candidate, x, want)
    if spec in MATRICES:
        theirs = transformer_engine(x[0], want)
        if theirs is not None:
            runs["transformer_engine"] = theirs
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(_ROUNDS):
        for name, run in runs.items():
            times[name].append(do_bench(run, warmup=5, rep=milliseconds, return_mode="median") * 1e3)
    processors = torch.cuda.get_device_properties(x.device).multi_processor_count
    programs = spec.experts * math.ceil(spec.rows / BLOCK) * math.ceil(spec.columns / BLOCK)
    medians = {name: statistics.median(values) for name, values in times.items()}
    return {"spec": spec.name, "programs_per_processor": programs / processors, "us": medians}


def _runner(candidate: Tuning, x: torch.Tensor, want: QuantizedPair) -> Callable[[], None]:
    """A launch of ``x`` with this tuning, after its bytes were found to be those of ``want``."""
    out, monitor = QuantizedPair.empty(x.shape, "cuda", sums=True), NonFiniteMonitor("cuda")

    def run() -> None:
        launch(x, out, PRESETS["te_fp32"], monitor, None, candidate)

    run()
    monitor.raise_if_set()
    for name, tensor in out.present().items():
        if not torch.equal(tensor.view(torch.uint8), want.present()[name].view(torch.uint8)):
            raise AssertionError(f"{name} of {list(x.shape)} is wrong with {candidate}; there is nothing to measure")
    return run


def best_rows(measured: list[dict[str, Any]]) -> list[tuple[float, Tuning]]:
    """The candidate with the best geometric mean of time over copy time, per class that has specs."""
    rows: list[tuple[float, Tuning]] = []
    for least, most in itertools.pairwise((0.0, *_CLASSES)):
        specs = [row for row in measured if least < row["programs_per_processor"] <= most]
        if specs:
            cost = {
                candidate: sum(math.log(row["us"][repr(candidate)] / row["us"]["copy"]) for row in specs)
                for candidate in CANDIDATES
            }
            rows.append((most, min(cost, key=cost.__getitem__)))
    return rows


def main(arguments: list[str] | None = None) -> int:
    """Measure and print; 0 unless there is no GPU."""
    parser = argparse.ArgumentParser(prog="python -m weftpub_kernels.bench.tune", description="Tunes the quantizer.")
    parser.add_argument("--out", type=Path, help="write the times as JSON to this file")
    parser.add_argument("--write", action="store_true", help="write the best rows into tuning.py")
    parser.add_argument("--milliseconds", type=int, default=40, help="time per candidate and round")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("no CUDA GPU: run this where the kernels run", file=sys.stderr)
        return 2
    measured = []
    for spec in (*MATRICES, *LAYERS):
        measured.append(measure(spec, options.milliseconds))
        print(f"{spec.name} ({measured[-1]['programs_per_processor']:.2f} programs per multiprocessor)")
        for name, us in sorted(measured[-1]["us"].items(), key=lambda item: item[1]):
            print(f"  {us:8.2f} us  {name}", flush=True)
    rows = best_rows(measured)
    text = "".join(f"    ({'float("inf")' if math.isinf(most) else most}, {row!r}),\n" for most, row in rows)
    print(text)
    if options.write:
        path = Path(tuning.__file__)
        source = path.read_text()
        path.write_text(
            re.sub(r"(?s)(= \[\n)    \(.*?(\]\n)", lambda m: m[1] + text.replace("'", '"') + m[2], source, count=1)
        )
    write(options.out, {"environment": describe(), "rows": measured, "best": text})
    return 0


if __name__ == "__main__":
    sys.exit(main())
