"""The rules of PyTorch's CUDA allocator about pools, and of torch-memory-saver's two libraries, played on a CPU.

    rules = Rules("torch", end)                 end(reason) where a real process would end
    with rules.installed():                     torch.cuda's functions and the module torch_memory_saver
        with torch.cuda.use_mem_pool(torch.cuda.MemPool()):
            tensor = rules.empty(1 << 20)

Written from CUDACachingAllocator.cpp and MemPool.cpp of PyTorch 2.11 (createOrIncrefPool, beginAllocateToPool,
endAllocateToPool, releasePool, get_pool, free_block, release_cached_blocks, ~MemPool) and from entrypoint.cpp and
core.cpp of torch-memory-saver 0.0.9.post1 (tms_torch_malloc, tms_torch_free, cudaMalloc, pause, resume). Every
allocation is a segment of its own; streams and splitting are left out.
"""

import sys
import weakref
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Literal
from unittest import mock

import numpy as np
import torch

__all__ = ["ABORTS", "SAVER_EXITS", "HookMode", "Rules"]

type HookMode = Literal["preload", "torch"]

ABORTS = "captures_underway.empty() INTERNAL ASSERT FAILED"
SAVER_EXITS = "only support interesting region"
_TOTAL = 1 << 40


@dataclass(eq=False)
class _Segment:
    """One cudaMalloc."""

    nbytes: int
    tag: str | None  # the saver's; None if it is ordinary memory
    active: bool = True  # mapped; the saver's may be away


@dataclass(eq=False)
class _Pool:
    use_count: int = 1
    savers: bool = False  # its allocator is the saver's library
    mallocs: int = 0
    cached: list[_Segment] = field(default_factory=list[_Segment])


class Rules:
    """One GPU and one thread.

    Args:
        mode: how torch-memory-saver sees allocations.
        end: called with the reason where the process would end. If it returns, what would have followed is left out.
    """

    def __init__(self, mode: HookMode, end: Callable[[str], None]) -> None:
        self.free = _TOTAL
        self.saver = _Saver(self, mode)
        self.mode = mode
        self._end = end
        self._pools: dict[int, _Pool] = {0: _Pool()}  # 0 is nobody's
        self._freeable: set[int] = set()
        self._in_use: list[int] = []
        self._next = 1
        self._segments: set[_Segment] = set()

    @contextmanager
    def installed(self) -> Generator["Rules"]:
        """Put the rules where code looks for the real thing."""
        rules = self

        class MemPool:
            def __init__(self, allocator: object = None) -> None:
                self.id = rules.make(savers=allocator is not None)

            def __del__(self) -> None:
                rules.ends(self.id)

        names = {
            "MemPool": MemPool,
            "use_mem_pool": self.use,
            "empty_cache": self.empty_cache,
            "synchronize": lambda device=None: None,
            "is_available": lambda: True,
            "mem_get_info": lambda device=None: (self.free, _TOTAL),
        }
        with ExitStack() as stack:
            for name, value in names.items():
                stack.enter_context(mock.patch.object(torch.cuda, name, value))
            module = SimpleNamespace(torch_memory_saver=self.saver)
            stack.enter_context(mock.patch.dict(sys.modules, {"torch_memory_saver": module}))
            yield self
            self.saver.forget()

    # The allocator.

    def empty(self, nbytes: int) -> torch.Tensor:
        """uint8 ``[nbytes]`` from the pool that was entered last; freed with the last tensor over it."""
        number = self._in_use[-1] if self._in_use else 0
        pool = self._pools[number]
        found = next((one for one in pool.cached if one.nbytes == nbytes), None)
        if found is not None:
            pool.cached.remove(found)
        else:
            found = self._malloc(pool, nbytes)
        array = np.zeros(nbytes, dtype=np.uint8)
        weakref.finalize(array, pool.cached.append, found)
        return torch.from_numpy(array)

    def make(self, *, savers: bool) -> int:
        """A pool that an object stands for."""
        number, self._next = self._next, self._next + 1
        self._pools[number] = _Pool(savers=savers)
        return number

    @contextmanager
    def use(self, pool: Any) -> Generator[None]:
        """`torch.cuda.use_mem_pool`."""
        state = self._pools[pool.id]
        assert state.use_count > 0, "a pool that has ended is entered"
        assert pool.id not in self._in_use, "beginAllocateToPool: already recording to mempool_id"
        state.use_count += 1
        self._in_use.append(pool.id)
        try:
            yield
        finally:
            self._in_use.remove(pool.id)
            self._release(pool.id)

    def ends(self, number: int) -> None:
        """`~MemPool`."""
        self._release(number)
        if number in self._freeable:
            if self._in_use:
                self._end(ABORTS)
                return
            self._give_back(number)

    def empty_cache(self) -> None:
        """`torch.cuda.empty_cache`."""
        if not self._in_use:
            self._free_cached(self._pools[0])
        for number in list(self._freeable):
            self._give_back(number)

    def _release(self, number: int) -> None:
        self._pools[number].use_count -= 1
        if self._pools[number].use_count == 0:
            self._freeable.add(number)

    def _give_back(self, number: int) -> None:
        pool = self._pools[number]
        self._free_cached(pool)
        if pool.mallocs == 0:
            self._freeable.discard(number)
            del self._pools[number]

    def _malloc(self, pool: _Pool, nbytes: int) -> _Segment:
        if pool.savers and not self.saver.open:
            self._end(SAVER_EXITS)
        hooked = pool.savers if self.mode == "torch" else True
        made = _Segment(nbytes, self.saver.tag if hooked and self.saver.open else None)
        pool.mallocs += 1
        self.free -= nbytes
        self._segments.add(made)
        return made

    def _free_cached(self, pool: _Pool) -> None:
        while pool.cached:
            if pool.savers and not self.saver.open:
                self._end(SAVER_EXITS)
                return
            segment = pool.cached.pop()
            assert segment.active, "the saver unmaps what is not mapped"
            pool.mallocs -= 1
            self.free += segment.nbytes
            self._segments.discard(segment)

    # The saver's library.

    def move(self, tag: str, *, away: bool) -> None:
        """Release or resume the memory of a tag."""
        for segment in self._segments:
            if segment.tag == tag:
                assert segment.active is away, "Cannot pause allocation that is not active"
                segment.active = not away
                self.free += segment.nbytes if away else -segment.nbytes


class _Saver:
    """`torch_memory_saver.torch_memory_saver`, Python's side of it."""

    def __init__(self, rules: Rules, mode: HookMode) -> None:
        self.open = False
        self.tag = "default"
        self.enabled = True
        self.regions: list[tuple[str, bool]] = []
        self.apart = 0  # how often a region was entered again
        self._rules = rules
        self._mode = mode
        self._impl: Any = None

    @contextmanager
    def region(self, tag: str, enable_cpu_backup: bool = False) -> Generator[None]:
        self._ensure_initialized()
        with torch.cuda.use_mem_pool(self._impl._primary_mem_pool):
            assert not self.open
            self.regions.append((tag, enable_cpu_backup))
            self.open, self.tag = True, tag
            try:
                yield
            finally:
                assert self.open
                self.open, self.tag = False, "default"

    @contextmanager
    def disable(self) -> Generator[None]:
        assert self.open
        self._set_open(False)
        try:
            pool = torch.cuda.MemPool()
            with torch.cuda.use_mem_pool(pool):
                yield
            del pool
        finally:
            self._set_open(True)

    def pause(self, tag: str) -> None:
        self._rules.move(tag, away=True)

    def resume(self, tag: str) -> None:
        self._rules.move(tag, away=False)

    def forget(self) -> None:
        """Let its pool end as that of a process that ends in a region's midst would: nobody looks at it any more."""
        self.open = True
        self._impl = None

    def _ensure_initialized(self) -> None:
        if self._impl is None:
            library = SimpleNamespace(
                tms_get_interesting_region=lambda: self.open, tms_set_interesting_region=self._set_open
            )
            util = SimpleNamespace(get_allocator=lambda: object() if self._mode == "torch" else None)
            self._impl = SimpleNamespace(
                _binary_wrapper=SimpleNamespace(cdll=library),
                _hook_util=util,
                _primary_mem_pool=torch.cuda.MemPool(util.get_allocator()),
            )

    def _set_open(self, value: bool) -> None:
        assert self.open is not value
        self.open = value
        self.apart += value
