"""No transport at all: memory that trainer and engine both map. A piece that lies there on both sides has arrived when
it was written.

An offer names the allocation; a receiver opens it only if its own process has joined that very allocation, and finds by
address which pieces are in place already. What lies in the allocation but is served from elsewhere is copied, within
the GPU. Writing to another place of the same allocation is refused: the trainer computes with it.
"""

from collections.abc import Iterable, Mapping
from functools import lru_cache

import numpy as np
import torch

from weftpub.errors import TransportError
from weftpub.memory import SharedAllocation, joined
from weftpub.memory.allocation import joined_allocations
from weftpub.plan.coincide import Place, SourcePlaces
from weftpub.plan.types import ViewSpec
from weftpub.transport.base import TransportKind
from weftpub.transport.tensors import Integers
from weftpub.wire.offers import Offer, SharedStoreOffer

__all__ = ["SharedStoreReceive", "moving", "offer_of", "shared_exports", "source_places"]

type Table = np.ndarray[tuple[int, int], np.dtype[np.int64]]

_SOURCE, _TARGET, _, _COUNT, _SOURCE_PITCH, _TARGET_PITCH = range(6)  # columns of a table of copies by address


def offer_of(memory: SharedAllocation) -> SharedStoreOffer:
    """The offer of an allocation, the same object every time."""
    return _offer(memory.id, memory.nbytes, memory.gpu)


@lru_cache(maxsize=64)
def _offer(allocation: str, nbytes: int, gpu: str) -> SharedStoreOffer:
    return SharedStoreOffer(allocation=allocation, nbytes=nbytes, keep=True, gpu=gpu)


def shared_exports(
    buffers: Mapping[str, torch.Tensor], allocations: Iterable[str] | None = None
) -> dict[str, tuple[SharedStoreOffer, int]]:
    """Offer and byte offset of every buffer that lies in shared memory.

    Args:
        buffers: tensors by name.
        allocations: those that count, by id; all by default.
    """
    wanted = None if allocations is None else frozenset(allocations)
    found: dict[str, tuple[SharedStoreOffer, int]] = {}
    held = [memory for memory in joined_allocations() if wanted is None or memory.id in wanted]
    if not held:
        return found
    names = tuple(buffers)
    addresses = np.array([buffer.data_ptr() for buffer in buffers.values()], dtype=np.int64)  # 0 if it is empty
    for memory in held:
        offer, inside = offer_of(memory), _inside(addresses, memory)
        for index in np.flatnonzero(inside).tolist():
            found[names[index]] = offer, int(addresses[index]) - memory.address
    return found


def source_places(views: Mapping[str, ViewSpec], buffers: Mapping[str, torch.Tensor]) -> SourcePlaces:
    """A sender rank's side for `find_coincidences`, before anything is published.

    Args:
        views, buffers: of its `SourceBuffers`.
    """
    found = shared_exports(buffers)
    places = {name: Place(offer.gpu, offer.allocation, offset) for name, (offer, offset) in found.items()}
    held = joined_allocations()
    reasons = dict.fromkeys(
        buffers.keys() - places.keys(),
        "the trainer's buffer lies outside of the memory that it shares" if held else "the trainer shares no memory",
    )
    return SourcePlaces(views, places, reasons)


class SharedStoreReceive:
    """Receiver's side: allocations that this process has joined."""

    kind: TransportKind = "shared_store"

    def open(self, offer: Offer) -> torch.Tensor:
        """All bytes of the allocation, as they are mapped here."""
        if not isinstance(offer, SharedStoreOffer):
            raise TransportError(f"allocation {offer.allocation} is offered over {offer.transport}, not as shared")
        memory = joined(offer.allocation)
        if memory is None:
            raise TransportError(f"this process has not joined shared memory {offer.allocation[:8]} on {offer.gpu}")
        if memory.gpu != offer.gpu or memory.nbytes != offer.nbytes:
            raise TransportError(
                f"shared memory {offer.allocation[:8]}: {offer.nbytes} bytes on {offer.gpu} are offered, this process "
                f"maps {memory.nbytes} on {memory.gpu}"
            )
        return memory.whole()

    def done(self, offer: Offer) -> None:
        """Nothing to do: the mapping stays for as long as the engine serves from it."""

    def drop(self, allocations: tuple[str, ...]) -> None:
        """Nothing to do, as for `done`."""

    def end_publish(self) -> None:
        """Nothing to do."""

    def close(self) -> None:
        """Nothing to do: whoever joined the allocation leaves it."""


def moving(table: Table) -> Table:
    """The copies that have anything to do: all but those whose source and target are the same bytes.

    Args:
        table: copies by address, one a row, as `weftpub_kernels.SpanCopies` takes them.

    Raises:
        TransportError: a copy leads from one place of a shared allocation to another one of it, or into one that this
            process has mapped so that a write would end it.
    """
    source, target = table[:, _SOURCE], table[:, _TARGET]
    rows_differ = (table[:, _COUNT] > 1) & (table[:, _SOURCE_PITCH] != table[:, _TARGET_PITCH])
    away = (source != target) | rows_differ
    for memory in joined_allocations():
        wrong = np.flatnonzero(away & _inside(source, memory) & _inside(target, memory))
        if len(wrong):
            first = int(wrong[0])
            raise TransportError(
                f"shared memory {memory.id[:8]}: byte {source[first] - memory.address} would be copied over byte "
                f"{target[first] - memory.address}, from which the trainer computes; plan again, or give the engine "
                "memory of its own"
            )
        if not memory.writable and len(refused := np.flatnonzero(away & _inside(target, memory))):
            raise TransportError(
                f"shared memory {memory.id[:8]}: {len(refused)} copies lead into it, and it is protected here (debug "
                "mode): what is not written by the trainer that shares it must not be written. Let the trainer share "
                "it, or start the engine without protected"
            )
    return table if away.all() else table[away]


def _inside(addresses: Integers, memory: SharedAllocation) -> "np.ndarray[tuple[int], np.dtype[np.bool_]]":
    return (addresses >= memory.address) & (addresses < memory.address + memory.nbytes)
