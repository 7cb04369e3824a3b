"""Trainer and engine in one process: an offer is a name in a table of this process, and opening it costs nothing."""

import itertools
import os
import weakref

import torch

from weftpub.errors import TransportError
from weftpub.transport.base import SendBuffer, TransportKind
from weftpub.wire.offers import InProcessOffer, Offer

__all__ = ["InProcessReceive", "InProcessSend"]

_NUMBERS = itertools.count()
# Tensors by allocation name. Weak, so that a sender that is forgotten without being closed keeps nothing alive.
_OFFERED: "weakref.WeakValueDictionary[str, torch.Tensor]" = weakref.WeakValueDictionary()


class InProcessSend:
    """Sender's side.

    Args:
        device: where buffers are made.
    """

    kind: TransportKind = "inprocess"

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._alive: dict[str, torch.Tensor] = {}
        self._exports: list[str] = []

    def allocate(self, nbytes: int) -> SendBuffer:
        """Make a buffer on the device."""
        tensor = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        return SendBuffer(tensor, self._offer(tensor, keep=True))

    def export(self, tensor: torch.Tensor, keep: bool) -> tuple[Offer, int]:
        """Offer a tensor's bytes where they are."""
        size = tensor.element_size()
        reach = sum((n - 1) * k for n, k in zip(tensor.shape, tensor.stride(), strict=True)) + 1
        flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        flat.set_(tensor.untyped_storage(), tensor.storage_offset() * size, (reach * size,), (1,))
        offer = self._offer(flat, keep=False)
        self._exports.append(offer.allocation)
        return offer, 0

    def everyone_opened(self, buffer: SendBuffer) -> None:
        """Nothing to do: the name is of this process."""

    def free(self, buffer: SendBuffer) -> None:
        """Forget the buffer."""
        self._alive.pop(buffer.offer.allocation, None)

    def end_publish(self) -> None:
        """Forget the exports: a reference kept here would keep a store from giving its memory back."""
        for name in self._exports:
            self._alive.pop(name, None)
        self._exports.clear()

    def close(self) -> None:
        """Forget all buffers and exports."""
        self._alive.clear()

    def _offer(self, tensor: torch.Tensor, keep: bool) -> InProcessOffer:
        name = f"inprocess-{os.getpid()}-{next(_NUMBERS)}"
        self._alive[name] = _OFFERED[name] = tensor
        return InProcessOffer(allocation=name, nbytes=tensor.numel(), keep=keep, pid=os.getpid())


class InProcessReceive:
    """Receiver's side."""

    kind: TransportKind = "inprocess"

    def open(self, offer: Offer) -> torch.Tensor:
        """Find the tensor."""
        if not isinstance(offer, InProcessOffer) or offer.pid != os.getpid():
            raise TransportError(
                f"allocation {offer.allocation} is not of this process; use shared memory or CUDA IPC between processes"
            )
        tensor = _OFFERED.get(offer.allocation)
        if tensor is None or tensor.numel() != offer.nbytes:
            raise TransportError(f"allocation {offer.allocation} is no longer offered; was its sender closed?")
        return tensor

    def done(self, offer: Offer) -> None:
        """Nothing was mapped."""

    def drop(self, allocations: tuple[str, ...]) -> None:
        """Nothing is kept."""

    def end_publish(self) -> None:
        """Nothing is kept."""

    def close(self) -> None:
        """Nothing is kept."""
