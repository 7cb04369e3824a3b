"""Where an engine makes experts that may be shared: in a pool beside torch-memory-saver's, whose memory comes free.

    with pool_apart() as apart:                outside of any region of the saver
        with saver.region("weights"):
            with apart():                      experts are made here: ordinary memory
                ...
            ...                                everything else is the saver's
    ...                                        experts move elsewhere
    trimmed(device)                            and their first memory is the GPU's again

What this rests on, in PyTorch 2.11's allocator and torch-memory-saver 0.0.9.post1. `tests/adapters/pool_rules.py` plays
these rules on a CPU, the section `pools` of `tests/gpu/zero_copy.py` plays the same calls on a GPU.

- A thread allocates from the pool that it entered last; pools may be entered within each other.
- A freed block goes back to the pool that it came from, whenever and by whomever it is freed, and nobody is told. Only
  `empty_cache` and the end of a pool give blocks back to the GPU.
- `empty_cache` touches no pool that an object stands for, so it never touches the saver's. It must not: the saver's
  library, where it is the pool's allocator (hook mode "torch"), ends the process when a block is given back outside of
  a region. So what the saver's pool has once taken stays its own, and experts must not be made in it.
- When a pool's object ends, PyTorch waits for the pool's blocks, and aborts the process if any pool is in use at that
  moment: within a region the saver's is. So the pool of the experts outlives the region. It ends on the way out, when
  its experts are still there; `empty_cache` gives back whatever of it is free from then on.
- A region that is left and entered again by its flag alone keeps its pool and its tag. While the flag is down, the
  saver's library leaves calls of `cudaMalloc` alone (hook mode "preload"), and nothing asks the saver's pool.
"""

import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from typing import Any

import torch

from weftpub.errors import ConfigError

__all__ = ["inside_a_region", "pool_apart", "trimmed"]


@contextmanager
def pool_apart() -> Generator[Callable[[], AbstractContextManager[None]]]:
    """A pool beside the saver's, for as long as this lasts. Enter it outside of the saver's regions.

    Yields:
        a function that makes contexts: what is allocated inside of one, in the middle of a region, is ordinary memory.
        Outside of a region, or without the saver, such a context changes nothing.
    """
    pool = [_new_pool()]  # emptied on the way out, so that it ends there and not when a collector comes by
    try:
        yield partial(_outside_of_the_saver, pool)
    finally:
        pool.clear()


def _new_pool() -> Any:
    """A pool of PyTorch's allocator; None where there is no GPU."""
    return torch.cuda.MemPool() if torch.cuda.is_available() else None


@contextmanager
def _outside_of_the_saver(pool: Sequence[Any]) -> Generator[None]:
    """The saver's own `disable` does the same with a pool that ends inside of the region."""
    inside = False
    with suppress(ConfigError):  # said when it comes to sharing
        inside = inside_a_region()
    if not inside:
        yield
        return
    library = sys.modules["torch_memory_saver"].torch_memory_saver._impl._binary_wrapper.cdll
    library.tms_set_interesting_region(False)
    try:
        with torch.cuda.use_mem_pool(pool[0]) if pool[0] is not None else nullcontext():
            yield
    finally:
        library.tms_set_interesting_region(True)


def inside_a_region() -> bool:
    """Whether torch-memory-saver, if it is in use, takes what is allocated now.

    Raises:
        ConfigError: a release of it that is not known.
    """
    module = sys.modules.get("torch_memory_saver")
    saver = None if module is None else getattr(module.torch_memory_saver, "_impl", None)
    if saver is None:
        return False
    if not hasattr(saver, "_binary_wrapper"):
        raise ConfigError(
            "this release of torch-memory-saver is not known; use 0.0.9.post1, or leave the experts unshared"
        )
    return bool(saver._binary_wrapper.cdll.tms_get_interesting_region())


def trimmed(device: torch.device) -> int:
    """Hand what nobody uses back to the GPU; the bytes that are free then, 0 on a CPU."""
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0]
