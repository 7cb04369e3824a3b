"""Speed of the transposition on a GPU beside a device copy of as many bytes and torch's own, and the fastest way to
compile it (tuning.py).

    python -m weftpub_kernels.bench.transpose --out transpose.json [--seconds 1] [--write]

Two bytes move per element: one read, one written; scales go along. Every candidate's bytes are compared with torch's
before and after it was timed; one that is wrong is named and left out. All are timed a few launches each in turn, round
after round, with a cold cache (tune.py). A share is the median over rounds of copy time over time within a round. The
last line is the candidate with the best mean, or the one in use where that is as good within a thousandth; ``--write``
puts it into tuning.py of this very tree.
"""

import argparse
import math
import re
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from triton.errors import TritonError

from .. import tuning
from ..launch_transpose import launch
from ..pair import grid_of
from ..transposes import transpose
from ..tuning import TURN, Turn
from .environment import describe, write
from .tune import _time_turn, interleave

__all__ = ["CANDIDATES", "WORK", "Work", "best", "main", "measure"]

CANDIDATES = (
    Turn(),
    Turn(cache=".cs"),
    Turn(down_first=True),
    Turn(down_first=True, cache=".cs"),
    Turn(down=4),
    Turn(down=4, down_first=True),
    Turn(columns=8, down=4),
    Turn(columns=4, down=4),
)
_AS_GOOD = 1.001


@dataclass(frozen=True)
class Work:
    """Batches of matrices, [E, M, N] each, that many times over: one launch each."""

    name: str
    shapes: tuple[tuple[int, int, int], ...]
    layers: int = 1

    @property
    def bytes(self) -> int:
        """Read and written, scales apart."""
        return 2 * self.layers * sum(math.prod(shape) for shape in self.shapes)


_SMALL, _LARGE = ((32, 1024, 2048), (32, 2048, 512)), ((16, 3072, 4096), (16, 4096, 1536))
WORK = (
    Work("1x1024x2048", ((1, 1024, 2048),)),
    Work("1x7168x4096", ((1, 7168, 4096),)),
    *(Work("x".join(map(str, shape)), (shape,)) for shape in (*_SMALL, *_LARGE)),
    Work("one layer", _SMALL),
    Work("40 layers, 4 GB", _SMALL, 40),
)
"""Matrices alone, a layer's experts of one projection, and what a store of 4 GB turns at a reload."""


class _Buffers:
    """W, W^T and scales of one piece of work; W is random."""

    def __init__(self, work: Work, device: str) -> None:
        self.all: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]] = []
        for _ in range(work.layers):
            for e, m, n in work.shapes:
                mb, nb = grid_of((m, n))
                w = torch.empty((e, m, n), dtype=torch.uint8, device=device).random_(0, 256)
                scale = torch.rand((e, mb, nb), device=device)
                wt, scale_t = torch.empty((e, n, m), dtype=w.dtype, device=device), scale.new_empty((e, nb, mb))
                self.all.append((w, wt, scale, scale_t))

    def by_torch(self) -> None:
        for w, wt, scale, scale_t in self.all:
            wt.copy_(w.transpose(1, 2))
            scale_t.copy_(scale.transpose(1, 2))

    def in_use(self) -> None:
        for tensors in self.all:
            transpose(*tensors)

    def by(self, candidate: Turn) -> Callable[[], None]:
        return lambda: [launch(*tensors, candidate) for tensors in self.all] and None

    def fault(self, run: Callable[[], None]) -> str | None:
        """What is wrong with the bytes of ``run``, which must write over others."""
        for _, wt, _, scale_t in self.all:
            wt.fill_(0xEE)
            scale_t.fill_(-1.0)
        try:
            run()
        except (RuntimeError, TritonError) as error:
            return f"{type(error).__name__}: {error}"
        for place, (w, wt, scale, scale_t) in enumerate(self.all):
            for what, got, source in (("W^T", wt, w), ("scale_t", scale_t, scale)):
                wrong = int((got != source.transpose(1, 2)).sum())
                if wrong:
                    return f"{wrong} values of {what} of batch {place} are wrong"
        return None


def measure(work: Work, candidates: Sequence[Turn], seconds: float, device: str = "cuda") -> dict[str, Any]:
    """Microseconds of the copy, of torch, of what is in use, host included, and of every candidate; shares of the
    copy's speed."""
    buffers = _Buffers(work, device)
    source = torch.empty(work.bytes // 2, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    ours: dict[str, Callable[[], None]] = {"in use": buffers.in_use} | {repr(c): buffers.by(c) for c in candidates}
    faults = {name: fault for name, run in ours.items() if (fault := buffers.fault(run))}
    runs: dict[str, Callable[[], Any]] = {"copy": lambda: target.copy_(source), "torch": buffers.by_torch}
    runs |= {name: run for name, run in ours.items() if name not in faults}
    rounds = interleave(runs, _time_turn, seconds)
    faults |= {name: fault for name, run in ours.items() if (fault := buffers.fault(run))}
    us = {name: statistics.median(values) for name, values in rounds.items()}
    return {
        "work": work.name,
        "bytes": work.bytes,
        "rounds": len(rounds["copy"]),
        "faults": faults,
        "us": us,
        "tb_s": {name: work.bytes / value / 1e6 for name, value in us.items()},
        "of_copy": {
            name: statistics.median(b / a for a, b in zip(values, rounds["copy"], strict=True))
            for name, values in rounds.items()
        },
    }


def best(measured: Sequence[dict[str, Any]], candidates: Sequence[Turn]) -> Turn | None:
    """The candidate with the best geometric mean of its shares; none with a fault anywhere, and the one in use where it
    is as good. None where all are wrong."""
    wrong = {name for row in measured for name in row["faults"]}
    share = {
        candidate: statistics.geometric_mean(row["of_copy"][repr(candidate)] for row in measured)
        for candidate in candidates
        if repr(candidate) not in wrong
    }
    if not share:
        return None
    found = max(share, key=share.__getitem__)
    return TURN if share.get(TURN, 0.0) * _AS_GOOD >= share[found] else found


def source_of(candidate: Turn) -> str:
    """The line of tuning.py that says this one is in use."""
    fields = ((name, getattr(candidate, name), getattr(Turn(), name)) for name in Turn.__dataclass_fields__)
    said = ", ".join(f"{name}={value!r}" for name, value, default in fields if value != default)
    return f"TURN = Turn({said})".replace("'", '"')


def main(arguments: list[str] | None = None) -> int:
    """Measure and print; 0 unless there is no GPU or some bytes were wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m weftpub_kernels.bench.transpose", description="Times the transposition."
    )
    parser.add_argument("--out", type=Path, help="write the table as JSON to this file, after each line")
    parser.add_argument("--commit", help="commit to record, where git cannot say")
    parser.add_argument("--seconds", type=float, default=1.0, help="time for each piece of work")
    parser.add_argument("--write", action="store_true", help="write the best candidate into tuning.py")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("no CUDA GPU: run this where the kernels run", file=sys.stderr)
        return 2
    candidates = list(dict.fromkeys((TURN, *CANDIDATES)))
    document: dict[str, Any] = {"environment": describe(options.commit), "rows": []}
    began = time.monotonic()
    for work in WORK:
        row = measure(work, candidates, options.seconds)
        document["rows"].append(row)
        write(options.out, document)
        print(f"{work.name}, {work.bytes / 1e6:.1f} MB moved, at {time.monotonic() - began:.0f} s")
        for name, us in sorted(row["us"].items(), key=lambda item: item[1]):
            print(f"  {us:9.2f} us  {row['tb_s'][name]:5.2f} TB/s  {row['of_copy'][name]:.3f} of the copy  {name}")
        for name, fault in row["faults"].items():
            print(f"  WRONG  {name}: {fault}")
        sys.stdout.flush()
    found = best(document["rows"], candidates)
    if found is not None:
        print(source_of(found))
        document["best"] = source_of(found)
        if options.write:
            path = Path(tuning.__file__)
            path.write_text(re.sub(r"(?m)^TURN = .*$", lambda _: source_of(found), path.read_text(), count=1))
    write(options.out, document)
    return 1 if any(row["faults"] for row in document["rows"]) else 0


if __name__ == "__main__":
    sys.exit(main())
