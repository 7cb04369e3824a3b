"""64-bit checksums of a store's canonical tensors: weights from the tile sums that the quantizer left, without reading
a byte again.

A seal stands between the last update and the publish, so nothing here is done tensor by tensor: names, places and sizes
are worked out once, and a seal is a few array operations and launches.
"""

import hashlib
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from weftpub.canonical import CanonicalTensor, Projection
from weftpub.checksums import Checksums
from weftpub.store.layout import StoreLayout
from weftpub_kernels import SpanChecksums
from weftpub_kernels.checksum import finish, rows_from_sums

__all__ = ["StoreSums", "content_digest"]

type _Indices = np.ndarray[tuple[int], np.dtype[np.int64]]


class StoreSums:
    """Checksums of one store's canonical tensors (signed 64-bit, as `weftpub_kernels.checksum`).

    Args:
        layout: of the store.
        tensors: its canonical tensors, in order, while they have memory. Their storages may move afterwards.
        device: where they are.
    """

    def __init__(self, layout: StoreLayout, tensors: Sequence[CanonicalTensor], device: torch.device) -> None:
        self._names = tuple(item.name for item in tensors)
        self._spans = SpanChecksums(device)
        self._rest_spans = SpanChecksums(device)
        self._storages: list[torch.UntypedStorage] = []
        known: dict[int, int] = {}
        owners: list[int] = []
        for item in tensors:
            storage = item.tensor.untyped_storage()
            if storage._cdata not in known:
                known[storage._cdata] = len(self._storages)
                self._storages.append(storage)
            owners.append(known[storage._cdata])
        self._owner = _integers(owners)
        self._offset = _integers([int(item.tensor.storage_offset()) * item.tensor.element_size() for item in tensors])
        self._count = _integers([item.tensor.nbytes for item in tensors])
        self._parts = list(_parts(layout, self._names))
        weights = [places for _, _, places in self._parts]
        self._rest = np.setdiff1d(np.arange(len(tensors)), np.concatenate(weights)) if weights else _integers([])
        self._rest_count = self._count[self._rest]
        self._placed: tuple[list[int], _Indices, _Indices] | None = None
        self._order = np.concatenate([*weights, self._rest])
        self._counts = torch.from_numpy(self._count[self._order]).to(device)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return int(self._count.sum())

    def read(self) -> Checksums:
        """By reading every byte once; waits for the device."""
        values = self._spans.compute(self._addresses()[0], self._count)
        return Checksums(self._names, values.cpu().numpy())

    def fused(self, sums: Mapping[Projection, torch.Tensor]) -> Checksums:
        """The same, weights from their tile sums ``[layers * experts, M/128, N/128, 8]`` and only the scales read; all
        of it read where there are no tile sums.
        """
        if not sums:
            return self.read()
        found = [
            rows_from_sums(sums[projection].view(shape[0], -1, *sums[projection].shape[2:]), shape)[0]
            for projection, shape, _ in self._parts
        ]
        found.append(self._rest_spans.sums(self._addresses()[1], self._rest_count)[0])
        values = np.empty(len(self._names), dtype=np.int64)
        values[self._order] = finish(torch.cat(found), self._counts).cpu().numpy()
        return Checksums(self._names, values)

    def _addresses(self) -> tuple[_Indices, _Indices]:
        """Of all tensors, and of those that have no tile sums."""
        bases = [storage.data_ptr() for storage in self._storages]
        if self._placed is None or self._placed[0] != bases:
            addresses = _integers(bases)[self._owner] + self._offset
            self._placed = bases, addresses, addresses[self._rest]
        return self._placed[1:]


def content_digest(checksums: Checksums) -> str:
    """Hex sha256 over the checksums of all canonical tensors of a layout, in its order: equal digests of one layout
    mean equal bytes."""
    return hashlib.sha256(checksums.values_in_order.astype("<i8", copy=False).tobytes()).hexdigest()


def _parts(layout: StoreLayout, names: Sequence[str]) -> "list[tuple[Projection, tuple[int, int, int], _Indices]]":
    """For each projection the shape of all its parts together, and where each stands among the canonical tensors. Parts
    are row ranges of one height: gate and up of a matrix are, to their sums, two matrices of half the rows.
    """
    place = {name: index for index, name in enumerate(names)}
    found: list[tuple[Projection, tuple[int, int, int], _Indices]] = []
    for projection, parts in layout.family.parts.items():
        matrices = [matrix for matrix in layout.matrices if matrix.projection == projection]
        rows, columns = layout.shape(projection)
        shape = (len(matrices) * len(parts), rows // len(parts), columns)
        whole = [place[layout.family.name(matrix, part, "weight")] for matrix in matrices for part in parts]
        found.append((projection, shape, _integers(whole)))
    return found


def _integers(values: Sequence[int]) -> _Indices:
    return np.array(values, dtype=np.int64)
