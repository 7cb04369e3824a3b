"""64-bit checksums of canonical tensors: weights from the tile sums that the quantizer left, without reading a byte
again.
"""

import hashlib
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from weftpub.canonical import CanonicalTensor, Projection
from weftpub.store.layout import StoreLayout
from weftpub_kernels import checksum_many, checksum_rows_from_sums

__all__ = ["content_digest", "fused_checksums", "read_checksums"]


def read_checksums(tensors: Sequence[CanonicalTensor]) -> dict[str, int]:
    """Canonical name to checksum (signed 64-bit, as `weftpub_kernels.checksum`), by reading every byte once."""
    values = checksum_many([item.tensor for item in tensors]).tolist()
    return {item.name: value for item, value in zip(tensors, values, strict=True)}


def fused_checksums(
    layout: StoreLayout, tensors: Sequence[CanonicalTensor], sums: Mapping[Projection, torch.Tensor]
) -> dict[str, int]:
    """The same, weights from their tile sums ``[layers * experts, M/128, N/128, 8]`` and only the scales read."""
    weights: dict[str, int] = {}
    for projection, tiles in sums.items():
        matrices = [matrix for matrix in layout.matrices if matrix.projection == projection]
        shape = (len(matrices), *layout.shape(projection))
        for part in layout.family.parts[projection]:
            rows = layout.family.rows(matrices[0], part, shape[1])
            values = checksum_rows_from_sums(tiles, shape, rows.start, rows.stop).tolist()
            names = [layout.family.name(matrix, part, "weight") for matrix in matrices]
            weights.update(zip(names, values, strict=True))
    found = weights | read_checksums([item for item in tensors if item.name not in weights])
    return {item.name: found[item.name] for item in tensors}


def content_digest(checksums: Mapping[str, int]) -> str:
    """Hex sha256 over the checksums of all canonical tensors of a layout, in its order: equal digests of one layout
    mean equal bytes."""
    return hashlib.sha256(np.fromiter(checksums.values(), dtype="<i8", count=len(checksums)).tobytes()).hexdigest()
