"""Memory for a store: from torch, or one physical allocation that trainer and engine both map."""

from weftpub.memory.allocation import SharedAllocation, joined
from weftpub.memory.allocator import Allocator, TorchAllocator, Witness
from weftpub.memory.catalogue import Catalogue, Entry
from weftpub.memory.header import Committed, SharedState, Standing
from weftpub.memory.preflight import sharing_obstacle
from weftpub.memory.shared import SharedAllocator
from weftpub.memory.vmm import Access

__all__ = [
    "Access",
    "Allocator",
    "Catalogue",
    "Committed",
    "Entry",
    "SharedAllocation",
    "SharedAllocator",
    "SharedState",
    "Standing",
    "TorchAllocator",
    "Witness",
    "joined",
    "sharing_obstacle",
]
