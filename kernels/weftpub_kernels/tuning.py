"""How the kernel is compiled for a grid: registers, and how loads and stores treat the cache. No byte depends on it.

Three programs of 256 threads share a multiprocessor at 80 registers, two without a limit. Which is faster depends on
how the programs of a launch divide among the multiprocessors, so the rows below go by programs per multiprocessor.
They were measured on an H200 by ``python -m weftpub_kernels.bench.tune``, which prints such rows for any GPU.
"""

from dataclasses import dataclass

__all__ = ["ROWS", "Tuning", "choose"]


@dataclass(frozen=True, slots=True)
class Tuning:
    """One way to compile: at most ``registers`` per thread (None: no limit), and Triton's cache modifiers and eviction
    policies of the loads of x and of the stores of codes ("" is the default)."""

    registers: int | None = None
    load_cache: str = ""
    load_evict: str = ""
    store_cache: str = ""
    store_evict: str = ""


ROWS: list[tuple[float, Tuning]] = [
    (1.0, Tuning(registers=None, load_cache="", load_evict="", store_cache=".cs", store_evict="")),
    (3.0, Tuning(registers=80, load_cache="", load_evict="evict_first", store_cache=".cs", store_evict="")),
    (32.0, Tuning(registers=None, load_cache="", load_evict="", store_cache=".cs", store_evict="")),
    (float("inf"), Tuning(registers=None, load_cache="", load_evict="", store_cache="", store_evict="evict_first")),
]
"""(most programs per multiprocessor, tuning), ascending."""


def choose(programs: int, processors: int) -> Tuning:
    """The row for a launch of that many programs on a GPU of that many multiprocessors."""
    return next(tuning for most, tuning in ROWS if programs <= most * processors)
