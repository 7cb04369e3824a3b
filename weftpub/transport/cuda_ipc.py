"""GPU memory shared between processes of one host by CUDA IPC: nothing crosses the host, a copy runs at the GPU's own
speed.

Packed buffers are allocations of their own, made through the driver and not through PyTorch's allocator: they can be
exported whatever that allocator does, they show a receiver nothing else, and they stay in place until they are freed
here. Receivers keep them open across publishes under their allocation's name, which holds the process and the driver's
allocation number and is never used twice.

Memory of the trainer can be exported where it is, if its allocator allows it. It is opened for one publish and closed
before the receiver answers,
unless the sender vouches that it stays in place: a mapping of memory that its owner frees is a use after free.
"""

import os

import torch

from weftpub.device import resolve_device
from weftpub.errors import TransportError
from weftpub.transport import cuda_driver
from weftpub.transport.base import SendBuffer, TransportKind
from weftpub.transport.tensors import wait_for_devices
from weftpub.wire.identity import device_index, gpu_uuid, local_identity
from weftpub.wire.offers import CudaIpcOffer, Offer

__all__ = ["CudaIpcReceive", "CudaIpcSend", "export_obstacle"]


def export_obstacle(tensor: torch.Tensor) -> str | None:
    """Why this CUDA tensor's memory cannot be exported, with the setting that would change it; None if it can be."""
    if not tensor.is_cuda or tensor.untyped_storage().nbytes() == 0:
        return f"a tensor of {tensor.numel()} elements on {tensor.device} has no CUDA memory to export"
    if cuda_driver.ipc_capable(tensor.get_device(), tensor.data_ptr()):
        return None
    return (
        "its memory comes from expandable segments or another allocator that maps memory piece by piece, which CUDA "
        "IPC cannot export; "
        "set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False, or let weftpub pack it into a buffer of its own"
    )


class CudaIpcSend:
    """Sender's side.

    Args:
        device: the CUDA device that holds the sources.
    """

    kind: TransportKind = "cuda_ipc"

    def __init__(self, device: torch.device) -> None:
        self._index = resolve_device(device).index
        self._gpu = gpu_uuid(self._index)
        here = local_identity()
        self._owner = f"{here.boot[:8]}-{here.started}-{os.getpid()}"
        self._buffers: dict[str, int] = {}
        self._handles: dict[str, bytes] = {}
        self._exports: dict[int, tuple[tuple[int, bool], CudaIpcOffer, int]] = {}
        self._shown: set[int] = set()

    def allocate(self, nbytes: int) -> SendBuffer:
        """Allocate a packed buffer on the device."""
        address = cuda_driver.allocate(self._index, nbytes)
        offer = self._offer(address, nbytes, keep=True)
        self._buffers[offer.allocation] = address
        return SendBuffer(cuda_driver.tensor_at(self._index, address, nbytes), offer)

    def export(self, tensor: torch.Tensor, keep: bool) -> tuple[Offer, int]:
        """Offer the allocation that holds `tensor`; TransportError names what is in the way."""
        if tensor.device.type != "cuda" or tensor.get_device() != self._index:
            raise TransportError(
                f"a tensor on {tensor.device} cannot be exported from cuda:{self._index}; it is packed instead"
            )
        if not self._shown:  # the first of this publish: is what was exported before still the same memory?
            ids = cuda_driver.buffer_ids(self._index, self._exports)
            same = zip(tuple(self._exports.items()), ids, strict=True)
            self._exports = {address: known for (address, known), found in same if known[0][0] == found}
        address = tensor.data_ptr()
        self._shown.add(address)
        known = self._exports.get(address)
        if known is not None and known[0][1] == keep:
            return known[1], known[2]
        obstacle = export_obstacle(tensor)
        if obstacle is not None:
            raise TransportError(f"memory of the trainer cannot be shown in place: {obstacle}")
        start, size = cuda_driver.region_of(self._index, address)
        offer = self._offer(start, size, keep=keep)
        self._exports[address] = (cuda_driver.buffer_id(self._index, address), keep), offer, address - start
        return offer, address - start

    def everyone_opened(self, buffer: SendBuffer) -> None:
        """Nothing to do: a handle is not a name that others could find."""

    def free(self, buffer: SendBuffer) -> None:
        """Free a packed buffer. Its receivers have closed it, or are gone."""
        address = self._buffers.pop(buffer.offer.allocation, None)
        if address is not None:
            wait_for_devices([torch.device("cuda", self._index)])
            self._handles.pop(buffer.offer.allocation, None)
            cuda_driver.free(self._index, address)

    def end_publish(self) -> None:
        """Forget what this publish did not show."""
        for address in self._exports.keys() - self._shown:
            del self._exports[address]
        named = {offer.allocation for _, offer, _ in self._exports.values()}
        self._handles = {name: h for name, h in self._handles.items() if name in named or name in self._buffers}
        self._shown.clear()

    def close(self) -> None:
        """Free all packed buffers."""
        wait_for_devices([torch.device("cuda", self._index)])
        for address in self._buffers.values():
            cuda_driver.free(self._index, address)
        self._buffers.clear()
        self._handles.clear()
        self._exports.clear()

    def _offer(self, address: int, nbytes: int, keep: bool) -> CudaIpcOffer:
        name = f"{self._owner}-{cuda_driver.buffer_id(self._index, address)}"
        if name not in self._handles:
            self._handles[name] = cuda_driver.export_handle(self._index, address)
        return CudaIpcOffer(allocation=name, nbytes=nbytes, keep=keep, gpu=self._gpu, handle=self._handles[name])


class CudaIpcReceive:
    """Receiver's side: mappings by GPU and allocation name.

    Memory of another GPU is mapped for the one that copies out of it, whose kernels then read over the link. A copy
    that the other GPU makes would have to write into the engine's parameters, and a memory saver maps those for their
    own GPU only.

    Args:
        home: the GPU that copies; None maps memory for the GPU that it is on.
    """

    kind: TransportKind = "cuda_ipc"

    def __init__(self, home: torch.device | None = None) -> None:
        self._home = None if home is None else resolve_device(home)
        self._open: dict[str, tuple[int, int, torch.Tensor]] = {}

    def open(self, offer: Offer) -> torch.Tensor:
        """Map the allocation, or find it mapped."""
        if not isinstance(offer, CudaIpcOffer):
            raise TransportError(f"allocation {offer.allocation} is offered over {offer.transport}, not over CUDA IPC")
        kept = self._open.get(_key(offer))
        if kept is not None:
            return kept[2]
        index = device_index(offer.gpu)
        if index is None:
            seen = ", ".join(local_identity().gpus) or "none"
            raise TransportError(
                f"the offered memory is on {offer.gpu}, which this process cannot see; it sees: {seen}. "
                "Add the GPU to the engine's CUDA_VISIBLE_DEVICES, or use shared memory"
            )
        place = self._place(index)
        address = cuda_driver.open_handle(place, offer.handle)
        _, size = cuda_driver.region_of(place, address)
        if size < offer.nbytes:
            cuda_driver.close_handle(place, address)
            raise TransportError(f"allocation {offer.allocation} has {size} bytes, {offer.nbytes} were offered")
        if place == index:
            tensor = cuda_driver.tensor_at(index, address, offer.nbytes)
        else:
            tensor = cuda_driver.reached_from(torch.device("cuda", place), address, offer.nbytes)
        self._open[_key(offer)] = (place, address, tensor)
        return tensor

    def done(self, offer: Offer) -> None:
        """Unmap, unless the sender vouches for the allocation."""
        if not offer.keep:
            self._close([key for key in self._open if key.endswith(f"/{offer.allocation}")])

    def drop(self, allocations: tuple[str, ...]) -> None:
        """Unmap the named allocations."""
        wanted = set(allocations)
        self._close([key for key in self._open if key.rpartition("/")[2] in wanted])

    def end_publish(self) -> None:
        """Nothing to do: what is still open may be kept."""

    def close(self) -> None:
        """Unmap everything."""
        self._close(list(self._open))

    def _place(self, index: int) -> int:
        """The GPU for which memory of GPU `index` is mapped."""
        if self._home is None or not torch.cuda.can_device_access_peer(self._home.index, index):
            return index  # torch copies between the two, through the host if need be
        return self._home.index

    def _close(self, keys: list[str]) -> None:
        for key in keys:
            index, address, _ = self._open.pop(key)
            wait_for_devices([torch.device("cuda", index)])
            cuda_driver.close_handle(index, address)


def _key(offer: CudaIpcOffer) -> str:
    return f"{offer.gpu}/{offer.allocation}"
