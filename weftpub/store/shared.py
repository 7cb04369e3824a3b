"""A store's layout as the catalogue of shared memory, and the way back: an engine that maps the memory reads from its
catalogue which experts lie there, and proves their bytes without asking the trainer.
"""

import os

import torch

from weftpub.canonical import FAMILIES, CanonicalTensor
from weftpub.errors import ChannelError, ChecksumError, ConfigError, TornError, TransportError
from weftpub.memory import (
    Allocator,
    Catalogue,
    SharedAllocation,
    SharedAllocator,
    TorchAllocator,
    sharing_obstacle,
)
from weftpub.store.layout import BUFFERS, MatrixView, StoreLayout
from weftpub.store.sums import StoreSums, content_digest
from weftpub.wire.identity import local_identity

__all__ = ["layout_of", "shared_allocator", "shared_canonical", "shared_catalogue", "verify_shared"]


def shared_catalogue(layout: StoreLayout) -> Catalogue:
    """W and scales of every layer, under the names that a store asks its allocator for."""
    tensors = {
        f"layers.{layer}.{name}": found for layer in layout.layers for name, found in layout.buffer_shapes().items()
    }
    return Catalogue.pack(tensors, layout.to_json())


def layout_of(catalogue: Catalogue) -> StoreLayout:
    """The layout that a catalogue was made from; ConfigError if it is no store's."""
    about = catalogue.about
    try:
        layout = StoreLayout(
            tuple(about["layers"]),
            tuple(about["experts"]),
            about["hidden"],
            about["intermediate"],
            about["format"],
            FAMILIES[about["architecture"]],
        )
    except (KeyError, TypeError) as error:
        raise ConfigError(f"the shared memory holds no expert store: {error!r}") from None
    if shared_catalogue(layout).digest != catalogue.digest:
        raise ConfigError("the shared memory holds no expert store as this release lays it out; run one release")
    return layout


def shared_canonical(memory: SharedAllocation) -> list[CanonicalTensor]:
    """Every canonical tensor as a view of shared memory, in a store's order."""
    layout = layout_of(memory.catalogue)
    buffers = {layer: _layer(memory, layout, layer) for layer in layout.layers}
    found: list[CanonicalTensor] = []
    for entry in layout.entries():
        name, expert = BUFFERS[entry.matrix.projection], layout.experts.index(entry.matrix.expert)
        layer = buffers[entry.matrix.layer]
        w, scale = layer[name][expert], layer.get(f"{name}_scale")
        view = MatrixView(w, w.t(), None if scale is None else scale[expert], None)
        found.append(CanonicalTensor(entry.name, layout.view(entry, view), entry.role))
    return found


def verify_shared(memory: SharedAllocation) -> int:
    """Prove that the bytes in shared memory are the committed version's, by reading each of them once.

    Returns:
        the version.

    Raises:
        TornError: they are not whole, or not committed. ChecksumError: they changed since they were sealed.
    """
    standing = memory.standing()
    obstacle = standing.obstacle(local_identity())
    if obstacle is not None or standing.committed is None:
        raise TornError(f"shared memory {memory.id[:8]}: must not be served: {obstacle}; publish a complete version")
    memory.admit_reading()
    sums = StoreSums(layout_of(memory.catalogue), shared_canonical(memory), memory.device)
    found = content_digest(sums.read())
    if found != standing.digest:
        raise ChecksumError(
            f"shared memory {memory.id[:8]}: generation {standing.generation} was sealed with digest "
            f"{standing.digest[:12] or 'none'}, its bytes have {found[:12]}; somebody wrote to it, publish again"
        )
    return standing.committed.version


def _layer(memory: SharedAllocation, layout: StoreLayout, layer: int) -> dict[str, torch.Tensor]:
    return {name: memory.tensor(f"layers.{layer}.{name}") for name in layout.buffer_shapes()}


def shared_allocator(
    layout: StoreLayout,
    device: torch.device | str,
    folder: str | os.PathLike[str],
    *,
    name: str = "experts",
    protected: bool = False,
) -> tuple[Allocator, str]:
    """The allocator for a store whose W and scales an engine maps too, if that is possible here.

    Args:
        layout: of the store.
        device: of the store.
        folder: where trainer and engine meet, see `SharedAllocation.join`.
        name, protected: likewise.

    Returns:
        a `SharedAllocator` and "", or torch's allocator and what forbids sharing, by name: then publishes copy.

    Raises:
        DeadlineError: another process takes too long to join.
    """
    obstacle = sharing_obstacle(device, folder)
    if obstacle is None:
        try:
            memory = SharedAllocation.join(folder, name, device, shared_catalogue(layout), protected=protected)
        except (ConfigError, TransportError, ChannelError) as error:
            obstacle = str(error)
        else:
            return SharedAllocator(memory), ""
    return TorchAllocator(), obstacle
