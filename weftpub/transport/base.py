"""What a transport is: a way for one process to show memory to another.

The sender makes a buffer and an offer for it, or an offer for memory that it has; the receiver opens the offer as a
uint8 tensor, copies out of it, closes it, and only then replies. The sender touches the memory again when that reply
has come. A transport moves no control messages and decides
nothing: which bytes, where to and when is the business of plan, receiver and publisher.
"""

from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from weftpub.wire.offers import Offer

__all__ = ["ReceiveTransport", "SendBuffer", "SendTransport", "TransportKind"]

TransportKind = Literal["inprocess", "shared_memory", "cuda_ipc", "shared_store"]


@dataclass(frozen=True, eq=False)
class SendBuffer:
    """Memory to pack into.

    Attributes:
        tensor: uint8, 1-D, on the sender's device or pinned on the host.
        offer: what the receiver needs to open it.
    """

    tensor: torch.Tensor
    offer: Offer


class SendTransport(Protocol):
    """The sender's side. Not shared between threads."""

    kind: TransportKind

    def allocate(self, nbytes: int) -> SendBuffer:
        """Make a buffer of `nbytes`; TransportError if that is impossible."""
        ...

    def export(self, tensor: torch.Tensor, keep: bool) -> tuple[Offer, int]:
        """Offer memory where it is.

        Args:
            tensor: any tensor; its bytes are shown from its first element on.
            keep: whether its allocation stays in place until `close`.

        Returns:
            the offer of the allocation that holds the tensor, and the tensor's byte offset in it.

        Raises:
            TransportError: this memory cannot be shown, with the reason; pack it instead.
        """
        ...

    def everyone_opened(self, buffer: SendBuffer) -> None:
        """Every receiver that will ever use this buffer has opened it: its name may disappear."""
        ...

    def free(self, buffer: SendBuffer) -> None:
        """Give the buffer's memory back. No receiver may have it open any more."""
        ...

    def end_publish(self) -> None:
        """A publish ended, well or not: forget what was exported for it alone."""
        ...

    def close(self) -> None:
        """Free everything, names included."""
        ...


class ReceiveTransport(Protocol):
    """The receiver's side. Not shared between threads."""

    kind: TransportKind

    def open(self, offer: Offer) -> torch.Tensor:
        """Map the offered allocation as uint8 [nbytes]; TransportError says what is in the way."""
        ...

    def done(self, offer: Offer) -> None:
        """The copies out of `offer` have finished: let go of it, unless the offer says that it may be kept."""
        ...

    def drop(self, allocations: tuple[str, ...]) -> None:
        """Let go of kept allocations that the sender is about to free."""
        ...

    def end_publish(self) -> None:
        """A publish ended, well or not: let go of what lives no longer than a publish."""
        ...

    def close(self) -> None:
        """Let go of everything."""
        ...
