"""Which tuning of the quantizer is fastest on this GPU, per class of launch (tuning.py).

    python -m weftpub_kernels.bench.tune --out tune.json [--candidates strides] [--focus 1x7168x4096] [--write]

Every tuning's bytes are compared with those of the present rows, before and after it was timed, and it must find a NaN;
one that does not is named and left out. All are timed on the specs of quantize.py beside TransformerEngine and a device
copy: a few launches each in turn, round after round, in another order each time, so that a drifting clock touches all
alike. Every launch finds a cold cache, as with ``do_bench``. A ratio is the median over rounds of the ratio within a
round. For each class of programs per multiprocessor the candidate with the best mean over its specs is printed, or the
row in use where that is as good within a thousandth; ``--write`` puts these rows into tuning.py of this very tree.
``--focus`` measures one spec with every candidate, three times as long, and the others with its best few only.
"""

import argparse
import dataclasses
import itertools
import math
import re
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from triton.errors import TritonError
from triton.runtime import driver

from .. import tuning
from ..entry import quantize_into
from ..errors import NonFiniteError
from ..launch import launch
from ..nonfinite import NonFiniteMonitor
from ..pair import QuantizedPair
from ..recipe import BLOCK, PRESETS
from ..tuning import Tuning
from .environment import describe, write
from .quantize import LAYERS, MATRICES, Spec, _check, transformer_engine

__all__ = ["CANDIDATES", "best_rows", "interleave", "label", "main", "source_of"]

_LOADS = (("", ""), (".cg", ""), ("", "evict_first"))
CANDIDATES: dict[str, tuple[Tuning, ...]] = {
    "caches": tuple(
        Tuning(registers, *load, *store, apart=registers is not None)
        for registers in (None, 80)
        for load in _LOADS
        for store in (("", ""), (".cs", ".cs"))
    ),
    "strides": (
        Tuning(),
        Tuning(apart=True),
        Tuning(fixed=True),
        Tuning(fixed=True, apart=True),
        Tuning(fixed=True, turned_cache=""),
        Tuning(fixed=True, store_cache="", turned_cache=""),
        Tuning(80, load_evict="evict_first", apart=True),
        Tuning(80, load_evict="evict_first", fixed=True, apart=True),
    ),
}
"""Sets of candidates; the first set is about caches, the second about fewer instructions and their order, the third
is what lies around the rows in use."""

_FIRST = Tuning(store_cache="", turned_cache="", fixed=True, stores_first=True)
_THREE = Tuning(80, load_evict="evict_first", apart=True)  # programs to a multiprocessor
CANDIDATES["order"] = (
    _FIRST,
    dataclasses.replace(_FIRST, stores_first=False),
    dataclasses.replace(_FIRST, fixed=False),
    dataclasses.replace(_FIRST, apart=True),
    dataclasses.replace(_FIRST, load_cache=".cg"),
    dataclasses.replace(_FIRST, load_evict="evict_first"),
    dataclasses.replace(_FIRST, turned_cache=".cs"),
    dataclasses.replace(_FIRST, store_cache=".cs", turned_cache=".cs"),
    _THREE,
    dataclasses.replace(_THREE, stores_first=True),
    dataclasses.replace(_THREE, fixed=True, stores_first=True),
    dataclasses.replace(_THREE, fixed=True, stores_first=True, apart=False),
)

_CLASSES = (1.0, 2.0, 3.0, 32.0, math.inf)
_REPEATS = 6  # launches in a turn, of which the first is not counted
_KEPT = 4  # candidates of the focus that the other specs are measured with, beside the rows in use
_AS_GOOD = 1.001
_WIDTH = 121  # of a line and its end, where the formatter breaks it


def label(candidate: Tuning) -> str:
    """The fields that differ from the defaults."""
    return " ".join(f"{name}={value}" for name, value in _unusual(candidate)) or "defaults"


def _unusual(candidate: Tuning) -> list[tuple[str, Any]]:
    named = ((field.name, getattr(candidate, field.name), field.default) for field in dataclasses.fields(candidate))
    return [(name, value) for name, value, default in named if value != default]


def source_of(rows: Sequence[tuple[float, Tuning]]) -> str:
    """The lines of tuning.py that say these rows."""
    lines = ""
    for most, candidate in rows:
        fields = ", ".join(f"{name}={value!r}" for name, value in _unusual(candidate)).replace("'", '"')
        limit = 'float("inf")' if math.isinf(most) else most
        line = f"    ({limit}, Tuning({fields})),\n"
        if len(line) > _WIDTH:
            inner = f"        Tuning({fields}),\n"
            if len(inner) > _WIDTH:
                each = fields.replace(", ", ",\n            ")
                inner = f"        Tuning(\n            {each},\n        ),\n"
            line = f"    (\n        {limit},\n{inner}    ),\n"
        lines += line
    return lines


def measure(spec: Spec, candidates: Sequence[Tuning], seconds: float) -> dict[str, Any]:
    """Microseconds of every candidate, of TransformerEngine (single matrices) and of a copy of as many bytes."""
    x = torch.randn(spec.experts, spec.rows, spec.columns, device="cuda") * 0.02
    source = torch.empty(spec.bytes // 2, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    want, out = (QuantizedPair.empty(x.shape, "cuda", sums=True) for _ in range(2))
    quantize_into(x, want)
    _check(x, want)
    runs: dict[str, Callable[[], Any]] = {"copy": lambda: target.copy_(source)}
    if spec in MATRICES:
        theirs = transformer_engine(x[0], want)
        if theirs is not None:
            runs["transformer_engine"] = theirs
    faults: dict[str, str] = {}
    for candidate in candidates:
        fault = _fault(candidate, x, out, want)
        if fault:
            faults[label(candidate)] = fault
        else:
            runs[label(candidate)] = _runner(candidate, x, out)
    rounds = interleave(runs, _time_turn, seconds)
    for candidate in candidates:
        fault = _fault(candidate, x, out, want)
        if fault:
            faults[label(candidate)] = fault
    processors = torch.cuda.get_device_properties(x.device).multi_processor_count
    programs = spec.experts * math.ceil(spec.rows / BLOCK) * math.ceil(spec.columns / BLOCK)
    row: dict[str, Any] = {"spec": spec.name, "programs_per_processor": programs / processors}
    row |= {"rounds": len(rounds["copy"]), "faults": faults}
    row["us"] = {name: statistics.median(values) for name, values in rounds.items()}
    for base in ("copy", "transformer_engine"):
        if base in rounds:
            row[f"to_{base}"] = {
                name: statistics.median(a / b for a, b in zip(values, rounds[base], strict=True))
                for name, values in rounds.items()
            }
    return row


def interleave(
    runs: dict[str, Callable[[], Any]], turn: Callable[[Callable[[], Any]], float], seconds: float
) -> dict[str, list[float]]:
    """``turn`` of every run, round after round until ``seconds`` are over and five rounds done; each round starts one
    run further on."""
    names = list(runs)
    for run in runs.values():
        turn(run)
    times: dict[str, list[float]] = {name: [] for name in names}
    end = time.monotonic() + seconds
    for number in itertools.count():
        if number >= 5 and time.monotonic() > end:
            return times
        start = number * 5 % len(names)
        for name in names[start:] + names[:start]:
            times[name].append(turn(runs[name]))
    raise AssertionError("counting does not end")


def _time_turn(run: Callable[[], Any]) -> float:
    """Median microseconds of a few launches, each after the L2 cache was overwritten."""
    cache = driver.active.get_empty_cache_for_benchmark()
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(_REPEATS)]
    for start, end in events:
        driver.active.clear_cache(cache)
        start.record()
        run()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in events[1:]) * 1e3


def _runner(candidate: Tuning, x: torch.Tensor, out: QuantizedPair) -> Callable[[], None]:
    monitor = NonFiniteMonitor("cuda")
    return lambda: launch(x, out, PRESETS["te_fp32"], monitor, None, candidate)


def _fault(candidate: Tuning, x: torch.Tensor, out: QuantizedPair, want: QuantizedPair) -> str | None:
    """What is wrong with a candidate: it must write the bytes of ``want`` over others, and find a NaN in the last
    block."""
    for tensor in out.present().values():
        tensor.view(torch.uint8).fill_(0xEE)
    monitor = NonFiniteMonitor("cuda")
    try:
        launch(x, out, PRESETS["te_fp32"], monitor, None, candidate)
        monitor.raise_if_set()
    except (NonFiniteError, RuntimeError, TritonError) as error:
        return f"{type(error).__name__}: {error}"
    for name, tensor in out.present().items():
        wrong = int((tensor.view(torch.uint8) != want.present()[name].view(torch.uint8)).sum())
        if wrong:
            return f"{wrong} bytes of {name} are wrong"
    kept = x[-1, -1, -1].item()
    x[-1, -1, -1] = math.nan
    launch(x, out, PRESETS["te_fp32"], monitor, None, candidate)
    x[-1, -1, -1] = kept
    try:
        monitor.raise_if_set()
    except NonFiniteError as error:
        found = (error.row, error.column)
        return None if found == (x.shape[-2] - 1, x.shape[-1] - 1) else f"the NaN was found at {found}"
    return "the NaN was not found"


def best_rows(measured: list[dict[str, Any]], candidates: Sequence[Tuning]) -> list[tuple[float, Tuning]]:
    """The candidate with the best geometric mean of time over copy time, per class that has specs; none with a fault
    anywhere, and the row in use where it is as good."""
    wrong = {name for row in measured for name in row["faults"]}
    candidates = [candidate for candidate in candidates if label(candidate) not in wrong]
    rows: list[tuple[float, Tuning]] = []
    for least, most in itertools.pairwise((0.0, *_CLASSES)):
        specs = [row["to_copy"] for row in measured if least < row["programs_per_processor"] <= most]
        cost = {
            candidate: statistics.geometric_mean(ratios[label(candidate)] for ratios in specs)
            for candidate in candidates
            if specs and all(label(candidate) in ratios for ratios in specs)
        }
        if cost:
            best = min(cost, key=cost.__getitem__)
            present = in_use(most)
            rows.append((most, present if cost.get(present, math.inf) <= _AS_GOOD * cost[best] else best))
    return rows


def in_use(most: float) -> Tuning:
    """The present row for launches of just that many programs per multiprocessor."""
    return next(row for limit, row in tuning.ROWS if most <= limit)


def few_for_others(row: dict[str, Any], candidates: Sequence[Tuning]) -> list[Tuning]:
    """The rows in use, and the fastest of the focus' candidates, which are measured with the other specs."""
    right = [c for c in candidates if label(c) in row["us"] and label(c) not in row["faults"]]
    right.sort(key=lambda candidate: row["us"][label(candidate)])
    return list(dict.fromkeys([row for _, row in tuning.ROWS] + right[:_KEPT]))


def main(arguments: list[str] | None = None) -> int:
    """Measure and print; 0 unless there is no GPU or a candidate was wrong."""
    parser = argparse.ArgumentParser(prog="python -m weftpub_kernels.bench.tune", description="Tunes the quantizer.")
    parser.add_argument("--out", type=Path, help="write the times as JSON to this file, after each spec")
    parser.add_argument("--write", action="store_true", help="write the best rows into tuning.py")
    parser.add_argument("--candidates", choices=[*CANDIDATES], default="caches", help="what to compare")
    parser.add_argument("--seconds", type=float, default=2.0, help="time for each spec")
    specs = {spec.name: spec for spec in (*MATRICES[::-1], *LAYERS)}
    parser.add_argument("--focus", choices=[*specs], help="measure this spec with all candidates, others with a few")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("no CUDA GPU: run this where the kernels run", file=sys.stderr)
        return 2
    candidates = turn = list(dict.fromkeys([*CANDIDATES[options.candidates], *(row for _, row in tuning.ROWS)]))
    document: dict[str, Any] = {"environment": describe(), "rows": []}
    began = time.monotonic()
    for spec in sorted(specs.values(), key=lambda spec: spec.name != options.focus):
        focused = spec.name == options.focus
        row = measure(spec, turn, options.seconds * (3 if focused else 1))
        if focused:
            turn = few_for_others(row, candidates)
        document["rows"].append(row)
        write(options.out, document)
        took = time.monotonic() - began
        print(f"{spec.name}, {row['programs_per_processor']:.2f} programs per multiprocessor, at {took:.0f} s")
        for name, us in sorted(row["us"].items(), key=lambda item: item[1]):
            ratios = " ".join(f"{row[key][name]:.4f} {key}" for key in row if key.startswith("to_"))
            print(f"  {us:8.2f} us  {ratios}  {name}", flush=True)
        for name, fault in row["faults"].items():
            print(f"  WRONG  {name}: {fault}", flush=True)
    rows = best_rows(document["rows"], candidates)
    text = source_of(rows)
    print(text)
    if options.write:
        path = Path(tuning.__file__)
        source = path.read_text()
        path.write_text(re.sub(r"(?s)(= \[\n)    \(.*?(\]\n)", lambda m: m[1] + text + m[2], source, count=1))
    write(options.out, document | {"best": text})
    return 1 if any(row["faults"] for row in document["rows"]) else 0


if __name__ == "__main__":
    sys.exit(main())
