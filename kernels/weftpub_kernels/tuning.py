"""How the kernels are compiled: registers, and how loads and stores treat the cache. No byte depends on it.

Three programs of 256 threads share a multiprocessor at 80 registers, two without a limit. Which is faster depends on
how the programs of a launch divide among the multiprocessors, so the rows below go by programs per multiprocessor.
They were measured on an H200 by ``python -m weftpub_kernels.bench.tune``, which prints such rows for any GPU. The
transposition has one way for all launches; ``python -m weftpub_kernels.bench.transpose`` compares it with others.
"""

from dataclasses import dataclass

__all__ = ["BYTEWISE", "ROWS", "TURN", "Tuning", "Turn", "choose"]


@dataclass(frozen=True, slots=True)
class Tuning:
    """One way to compile: at most ``registers`` per thread (None: no limit), and Triton's cache modifiers and eviction
    policies ("" is the default): ``load_*`` for the loads of x, ``store_cache`` for the stores of W, ``turned_cache``
    for those of W^T.

    ``apart`` puts the checksum's sums after the stores of W. ``fixed`` compiles the row strides of x, W and W^T in,
    which saves an eighth of the instructions and costs a compilation and self-test for each layout of matrices.

    ``stores_first`` lets the stores of W and W^T wait for nothing but the codes: the addresses of all stores are worked
    out while values are under way, which ptxas else does after that, and the dequant scale and the checksum's sums
    after those stores, where the multiplier comes first (recipe.py). With strides compiled in, 220 instructions and not
    374 then lie between a block's maximum and the store of its last code.
    """

    registers: int | None = None
    load_cache: str = ""
    load_evict: str = ""
    store_cache: str = ".cs"
    turned_cache: str = ".cs"
    apart: bool = False
    fixed: bool = False
    stores_first: bool = False


ROWS: list[tuple[float, Tuning]] = [
    (1.0, Tuning(store_cache="", turned_cache="", fixed=True, stores_first=True)),
    (3.0, Tuning(registers=80, load_evict="evict_first", apart=True)),
    (32.0, Tuning(store_cache="", turned_cache="", fixed=True, stores_first=True)),
    (float("inf"), Tuning(store_cache="", turned_cache="", fixed=True, stores_first=True)),
]
"""(most programs per multiprocessor, tuning), ascending."""


def choose(programs: int, processors: int) -> Tuning:
    """The row for a launch of that many programs on a GPU of that many multiprocessors."""
    return next(tuning for most, tuning in ROWS if programs <= most * processors)


@dataclass(frozen=True, slots=True)
class Turn:
    """One way to compile the transposition: each thread holds 16 rows x ``columns`` (4, 8 or 16) bytes, and ``down``
    (4 or 8) threads of a warp lie one below the other, so that a warp reads ``32 * columns / down`` neighbouring bytes
    of W and writes ``16 * down`` of W^T. ``down_first`` starts the programs of a column of blocks one after the other,
    not those of a row. ``cache`` is Triton's modifier for the stores.
    """

    columns: int = 16
    down: int = 8
    down_first: bool = False
    cache: str = ""


TURN = Turn()
BYTEWISE = Turn(columns=4, down=4)
"""For memory that cannot be read or written in words of 16 bytes: few registers, since every byte has an address."""
