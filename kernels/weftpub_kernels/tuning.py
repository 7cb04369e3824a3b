"""How the kernel is compiled for a grid: registers, and how loads and stores treat the cache. No byte depends on it.

Three programs of 256 threads share a multiprocessor at 80 registers, two without a limit. Which is faster depends on
how the programs of a launch divide among the multiprocessors, so the rows below go by programs per multiprocessor.
They were measured on an H200 by ``python -m weftpub_kernels.bench.tune``, which prints such rows for any GPU.
"""

from dataclasses import dataclass

__all__ = ["ROWS", "Tuning", "choose"]


@dataclass(frozen=True, slots=True)
class Tuning:
    """One way to compile: at most ``registers`` per thread (None: no limit), the load's eviction policy ("" or
    "evict_first"), the stores' cache modifier ("" or ".cs"), and how many block rows a band has that is worked off
    column by column, so that neighbours in W^T are written together (1: row by row)."""

    registers: int | None = None
    evict: str = ""
    cache: str = ""
    group: int = 1


ROWS: list[tuple[float, Tuning]] = [
    (1.0, Tuning(registers=None, evict="evict_first", cache="", group=1)),
    (3.0, Tuning(registers=80, evict="evict_first", cache="", group=1)),
    (float("inf"), Tuning(registers=None, evict="", cache=".cs", group=1)),
]
"""(most programs per multiprocessor, tuning), ascending."""


def choose(programs: int, processors: int) -> Tuning:
    """The row for a launch of that many programs on a GPU of that many multiprocessors."""
    return next(tuning for most, tuning in ROWS if programs <= most * processors)
