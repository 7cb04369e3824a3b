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
    policies of the loads of x and of the stores of codes ("" is the default; loads take "256B" too, which makes the L2
    cache fetch 256 bytes at a time).

    ``ahead`` is how a program has the block fetched that will run ``resident`` programs per multiprocessor later: "128"
    and "32" prefetch lines or sectors into the L2 cache, "bulk" whole rows, each as soon as its own block was asked
    for, or with "late " before it when that has come; "stay" keeps the programs, which copy their next block into
    shared memory meanwhile. ``exchange`` reduces over a program by one exchange in shared memory and over a warp by
    instructions for words, instead of by shuffles. ``apart`` puts the checksum's sums after the stores of "W" or "W^T".
    """

    registers: int | None = None
    load_cache: str = ""
    load_evict: str = ""
    store_cache: str = ""
    store_evict: str = ""
    ahead: str = ""
    exchange: bool = False
    apart: str = ""
    resident: int = 2


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
