"""How the kernel is compiled for a grid: registers, and how loads and stores treat the cache. No byte depends on it.

Three programs of 256 threads share a multiprocessor at 80 registers, two without a limit. Which is faster depends on
how the programs of a launch divide among the multiprocessors, so the rows below go by programs per multiprocessor.
They were measured on an H200 by ``python -m weftpub_kernels.bench.tune``, which prints such rows for any GPU.
"""

from dataclasses import dataclass

__all__ = ["RESIDENT", "ROWS", "Tuning", "choose"]


RESIDENT = 2
"""Programs that share a multiprocessor where registers are not limited."""


@dataclass(frozen=True, slots=True)
class Tuning:
    """One way to compile: at most ``registers`` per thread (None: no limit), and Triton's cache modifiers and eviction
    policies ("" is the default): ``load_*`` for the loads of x, ``store_cache`` for the stores of W, ``turned_cache``
    for those of W^T.

    ``apart`` puts the checksum's sums after the stores of W. ``fixed`` compiles the row strides of x, W and W^T in,
    which saves an eighth of the instructions and costs a compilation and self-test for each layout of matrices.

    ``by_rows`` makes the sums from W's words instead of W^T's (fragments.py), a dozen instructions less. ``early``
    works the addresses of all stores out while values are under way; without it ptxas does so after that, a fifth more
    instructions. ``late`` works the dequant scale out after the stores of "W" or "W^T", and the sums after it, where
    the multiplier comes first (recipe.py). ``order`` "down" numbers blocks down each column of blocks; "stay" keeps
    ``RESIDENT`` programs for each multiprocessor, each of which asks for its next block as soon as it has made this
    one's codes. ``stagger`` lets the second program of each multiprocessor sleep about so many nanoseconds before its
    first load.
    """

    registers: int | None = None
    load_cache: str = ""
    load_evict: str = ""
    store_cache: str = ".cs"
    turned_cache: str = ".cs"
    apart: bool = False
    fixed: bool = False
    by_rows: bool = False
    early: bool = False
    late: str = ""
    order: str = ""
    stagger: int = 0


ROWS: list[tuple[float, Tuning]] = [
    (1.0, Tuning(store_cache="", turned_cache="", fixed=True, early=True, late="W^T")),
    (3.0, Tuning(registers=80, load_evict="evict_first", apart=True)),
    (32.0, Tuning(store_cache="", turned_cache="", fixed=True, early=True, late="W^T")),
    (float("inf"), Tuning(store_cache="", turned_cache="", fixed=True, early=True, late="W^T")),
]
"""(most programs per multiprocessor, tuning), ascending."""


def choose(programs: int, processors: int) -> Tuning:
    """The row for a launch of that many programs on a GPU of that many multiprocessors."""
    return next(tuning for most, tuning in ROWS if programs <= most * processors)
