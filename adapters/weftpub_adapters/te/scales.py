"""Scales in the layout that block-scaled GEMMs read: a row length that is a multiple of four.

A store's scales are published as they are, ``[ceil(M/128), ceil(N/128)]`` without padding. cuBLAS wants every row of
scales to start on a
16-byte boundary, so TransformerEngine pads their last dimension to a multiple of four. Where a store's row length is
one already, its own
memory serves; else the rows are copied here after every generation (about one scale in 16,384 weights).
"""

import torch

__all__ = ["GemmScales"]

_ALIGN = 4


class GemmScales:
    """One scale buffer of a layer, for GEMMs.

    Args:
        scales: float32 ``[E, rows, columns]``, contiguous, the store's own.
    """

    def __init__(self, scales: torch.Tensor) -> None:
        self._source = scales
        experts, rows, columns = scales.shape
        padded = -(-columns // _ALIGN) * _ALIGN
        self.copied = padded != columns
        if self.copied:
            # Padding is read by nobody; zeros keep it from being mistaken for data.
            self._tensor = torch.zeros(experts, rows, padded, dtype=torch.float32, device=scales.device)
        else:
            self._tensor = scales

    def __getitem__(self, expert: int) -> torch.Tensor:
        """``[rows, columns rounded up to 4]`` of one expert, numbered within the store; a view that stays valid."""
        return self._tensor[expert]

    def refresh(self) -> None:
        """Copy the store's present scales, if they are copied at all; enqueued on the current stream."""
        if self.copied:
            self._tensor[:, :, : self._source.shape[2]].copy_(self._source, non_blocking=True)
