"""How many bytes a generation changed, without a second copy of the store: each matrix is compared while it is
rewritten.
"""

from collections.abc import Sequence

import torch

from weftpub.memory import Allocator

__all__ = ["ChangeMeter"]


class ChangeMeter:
    """Keeps one matrix's old bytes, and counts on the device those that its new bytes differ from.

    Calls are enqueued on the current stream; all matrices must be written on one stream, which one scratch buffer
    relies on.
    """

    def __init__(self, nbytes: int, device: torch.device, allocator: Allocator) -> None:
        self._scratch = allocator.allocate("change.scratch", (nbytes,), torch.uint8, device)
        self._changed = torch.zeros((), dtype=torch.int64, device=device)

    def keep(self, tensors: Sequence[torch.Tensor]) -> None:
        """Remember the bytes of `tensors`."""
        start = 0
        for data in _flat(tensors):
            self._scratch[start : start + data.numel()].copy_(data)
            start += data.numel()

    def count(self, tensors: Sequence[torch.Tensor]) -> None:
        """Add the bytes in which `tensors` differ from what `keep` remembered of them."""
        start = 0
        for data in _flat(tensors):
            self._changed += torch.count_nonzero(self._scratch[start : start + data.numel()] != data)
            start += data.numel()

    def reset(self) -> None:
        self._changed.zero_()

    def total(self) -> int:
        """Changed bytes since `reset`; waits for the device."""
        return int(self._changed)


def _flat(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor.reshape(-1).view(torch.uint8) for tensor in tensors]
