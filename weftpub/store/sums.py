"""64-bit checksums of canonical tensors, from the quantizer's tile sums where it left them, else by reading the bytes
once.
"""

from collections.abc import Mapping, Sequence

import torch

from weftpub.canonical import CanonicalTensor
from weftpub.store.layout import CanonicalEntry, StoreLayout
from weftpub_kernels import checksum_many

__all__ = ["canonical_checksums"]


def canonical_checksums(
    entries: Sequence[CanonicalEntry],
    tensors: Sequence[CanonicalTensor],
    sums: Mapping[str, torch.Tensor],
    layout: StoreLayout,
) -> dict[str, int]:
    """Canonical name to checksum of the tensor's bytes, as an unsigned 64-bit number."""
    values = checksum_many([item.tensor for item in tensors]).tolist()
    return {item.name: value % 2**64 for item, value in zip(tensors, values, strict=True)}
