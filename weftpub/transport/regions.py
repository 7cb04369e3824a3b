"""Copies between named tensors and packed buffers, and checksums of what lies in them.

Both sides of a publish look alike here: named tensors (a trainer's buffers, an engine's live parameters) in which
pieces lie as `ViewSpec`s, and buffers in which the same pieces lie packed. Everything is copied as bytes: bit patterns
never pass through a floating-point conversion. Neighbouring pieces that are neighbours on both sides become one copy,
so a layer's experts that lie alike in trainer and engine cost one copy, however many tensors they are.

Tables are compiled once per plan from layouts alone, into arrays; a publish adds the tensors' addresses to them. So it
costs a few array operations and launches, whether there are ten pieces or ten thousand.
"""

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

import weftpub_kernels
from weftpub.errors import TransportError
from weftpub.plan import ViewSpec, torch_dtype
from weftpub.transport.shared_store import moving
from weftpub.transport.tensors import FlatTensors, Integers, Places, Rows, bits_dtype, dense_offset, rows_of

__all__ = ["CopyTable", "RegionTable"]

type Checksums = np.ndarray[tuple[int], np.dtype[np.uint64]]
type Table = np.ndarray[tuple[int, int], np.dtype[np.int64]]

# Columns of a compiled copy: tensor, its rows (offset, width, count, pitch), buffer and byte position in it.
_TENSOR, _OFFSET, _WIDTH, _COUNT, _PITCH, _BUFFER, _POSITION = range(7)


class CopyTable:
    """Which bytes of named tensors correspond to which bytes of packed buffers. Made by `compile`."""

    def __init__(self, names: tuple[str, ...], copies: Table) -> None:
        self._names = names
        self._copies = copies
        self._ends = copies[:, _OFFSET] + copies[:, _PITCH] * (copies[:, _COUNT] - 1) + copies[:, _WIDTH]
        self._stops = copies[:, _POSITION] + copies[:, _COUNT] * copies[:, _WIDTH]
        self._copiers: dict[torch.device, weftpub_kernels.SpanCopies] = {}

    def __len__(self) -> int:
        """Number of copies."""
        return len(self._copies)

    @classmethod
    def compile(
        cls, views: Sequence[ViewSpec], positions: Sequence[int], buffers: Sequence[int] | None = None
    ) -> "CopyTable":
        """Compile the copies for pieces.

        Args:
            views: where each piece lies in its tensor.
            positions, buffers: byte position of each piece in its buffer, and the index of that buffer (0 if left
        out).

        Raises:
            PlanError: elements of a width that cannot travel.
        """
        names: dict[str, int] = {}
        copies: list[list[int]] = []
        for index, (view, position) in enumerate(zip(views, positions, strict=True)):
            bits_dtype(view.dtype)
            tensor = names.setdefault(view.param, len(names))
            buffer = 0 if buffers is None else buffers[index]
            for rows in rows_of(view):
                last = copies[-1] if copies else None
                if (
                    last is not None
                    and rows.count == last[_COUNT] == 1
                    and (last[_TENSOR], last[_BUFFER]) == (tensor, buffer)
                    and last[_OFFSET] + last[_WIDTH] == rows.offset
                    and last[_POSITION] + last[_WIDTH] == position
                ):
                    last[_WIDTH] += rows.width
                else:
                    copies.append([tensor, rows.offset, rows.width, rows.count, rows.pitch, buffer, position])
                position += rows.width * rows.count
        return cls(tuple(names), np.array(copies, dtype=np.int64).reshape(-1, 7))

    def gather(self, tensors: FlatTensors, buffers: Sequence[torch.Tensor]) -> None:
        """Copy the pieces from the tensors into the buffers (uint8, 1-D); asynchronous on CUDA.

        Raises:
            TransportError: a piece does not lie inside its tensor or its buffer; nothing was copied.
        """
        self._copy(tensors, buffers, into_buffers=True)

    def scatter(self, tensors: FlatTensors, buffers: Sequence[torch.Tensor]) -> None:
        """Copy the pieces from the buffers into the tensors; otherwise as `gather`."""
        self._copy(tensors, buffers, into_buffers=False)

    def _copy(self, tensors: FlatTensors, buffers: Sequence[torch.Tensor], *, into_buffers: bool) -> None:
        if not len(self._copies):
            return
        here, there = tensors.places(self._names), _places_of(buffers)
        self._check(here, there)
        if here.device is not None and here.device == there.device:
            self._copy_on(here.device, slice(None), here, there, into_buffers=into_buffers)
            return
        for pair, members in self._by_devices(here, there):
            if pair[0] == pair[1]:
                self._copy_on(pair[0], members, here, there, into_buffers=into_buffers)
            else:
                self._copy_across(members, tensors, buffers, into_buffers=into_buffers)

    def _check(self, here: Places, there: Places) -> None:
        copies = self._copies
        outside = np.flatnonzero(self._ends > here.reaches[copies[:, _TENSOR]])
        if len(outside):
            name, reach = self._names[copies[outside[0], _TENSOR]], here.reaches[copies[outside[0], _TENSOR]]
            raise TransportError(f"{name}: byte {self._ends[outside[0]]} was planned, the tensor has {reach}")
        offered = there.reaches[copies[:, _BUFFER]]
        # A position near the largest integer has a stop beyond it, which is negative.
        outside = np.flatnonzero((self._stops > offered) | (copies[:, _POSITION] < 0) | (self._stops < 0))
        if len(outside):
            first = outside[0]
            raise TransportError(
                f"bytes {copies[first, _POSITION]} to {self._stops[first]} are not inside the offered "
                f"{offered[first]} bytes"
            )

    def _by_devices(self, here: Places, there: Places) -> Iterator[tuple[tuple[torch.device, torch.device], Integers]]:
        """Copies by the devices of their two ends."""
        pairs: dict[tuple[torch.device, torch.device], list[int]] = {}
        for index, copy in enumerate(self._copies.tolist()):
            pairs.setdefault((here.devices[copy[_TENSOR]], there.devices[copy[_BUFFER]]), []).append(index)
        for pair, members in pairs.items():
            yield pair, np.array(members, dtype=np.int64)

    def _copy_on(
        self, device: torch.device, members: slice | Integers, here: Places, there: Places, *, into_buffers: bool
    ) -> None:
        """Copies within one device: all at once, by address."""
        copies = self._copies[members]
        inner = here.bases[copies[:, _TENSOR]] + copies[:, _OFFSET], copies[:, _PITCH]
        outer = there.bases[copies[:, _BUFFER]] + copies[:, _POSITION], copies[:, _WIDTH]
        source, target = (inner, outer) if into_buffers else (outer, inner)
        table = np.stack([source[0], target[0], copies[:, _WIDTH], copies[:, _COUNT], source[1], target[1]], axis=1)
        if device not in self._copiers:
            self._copiers[device] = weftpub_kernels.SpanCopies(device)
        self._copiers[device].copy(moving(table))

    def _copy_across(
        self, members: Integers, tensors: FlatTensors, buffers: Sequence[torch.Tensor], *, into_buffers: bool
    ) -> None:
        """Copies between two devices, one after the other."""
        for tensor, offset, width, count, pitch, buffer, position in self._copies[members].tolist():
            inner = tensors.rows(self._names[tensor], Rows(offset, width, count, pitch))
            outer = buffers[buffer].narrow(0, position, width * count).view(count, width)
            target, source = (outer, inner) if into_buffers else (inner, outer)
            target.copy_(source, non_blocking=True)


def _places_of(buffers: Sequence[torch.Tensor]) -> Places:
    return Places(
        np.array([buffer.data_ptr() for buffer in buffers], dtype=np.int64),
        np.array([buffer.numel() for buffer in buffers], dtype=np.int64),
        tuple(buffer.device for buffer in buffers),
    )


@dataclass(frozen=True, eq=False)
class _Spans:
    """Regions by address, nearly always the same from one publish to the next.

    Attributes:
        places, numbers: of the tensors and regions that they were found for.
        by_device: device, numbers of the regions there, and for each its address and bytes.
    """

    places: Places
    numbers: Integers
    by_device: list[tuple[torch.device, Integers, Integers, Integers]]

    def are(self, places: Places, numbers: Integers) -> bool:
        """Whether these are the spans of these regions of tensors at these places."""
        mine = self.places
        return (
            (numbers is self.numbers or np.array_equal(numbers, self.numbers))
            and np.array_equal(places.bases, mine.bases)
            and np.array_equal(places.reaches, mine.reaches)
            and places.devices == mine.devices
        )


class RegionTable:
    """Regions of named tensors whose content is to be proven. Compiled once from layouts.

    Args:
        views: the regions.

    Attributes:
        nbytes: of each region.
    """

    def __init__(self, views: Iterable[ViewSpec]) -> None:
        self._views = tuple(views)
        names: dict[str, int] = {}
        self._tensor = np.array([names.setdefault(v.param, len(names)) for v in self._views], dtype=np.int64)
        self._names = tuple(names)
        self.nbytes = np.array(
            [math.prod(v.shape) * torch_dtype(v.dtype).itemsize for v in self._views], dtype=np.int64
        )
        offsets = [dense_offset(view) for view in self._views]
        self._dense = np.array([offset is not None for offset in offsets], dtype=np.bool_)
        self._offset = np.array([0 if offset is None else offset for offset in offsets], dtype=np.int64)
        self._all = np.arange(len(self._views), dtype=np.int64)
        self._all_dense = self._all[self._dense]
        self._spans: _Spans | None = None
        self._sums: dict[torch.device, weftpub_kernels.SpanChecksums] = {}

    def __len__(self) -> int:
        return len(self._views)

    def checksums(self, tensors: FlatTensors, scratch_bytes: int, only: Sequence[int] | None = None) -> Checksums:
        """64-bit checksums of the regions' bytes in row-major order, computed on the tensors' devices.

        Args:
            scratch_bytes: most memory for dense copies of strided regions at one time; a single larger one is copied
                alone.
            only: numbers of the regions that are wanted; all by default.

        Returns:
            uint64, one per region that is wanted.

        Raises:
            TransportError: a region does not lie inside its tensor.
        """
        return self.begin_checksums(tensors, scratch_bytes, only)()

    def begin_checksums(
        self, tensors: FlatTensors, scratch_bytes: int, only: Sequence[int] | None = None
    ) -> Callable[[], Checksums]:
        """What `checksums` does, up to where the host would wait for the devices; call the result to wait, and have
        them. The tensors must stay until then.
        """
        wanted = self._all if only is None else np.asarray(only, dtype=np.int64)
        result = np.zeros(len(self._views), dtype=np.uint64)
        dense = self._all_dense if only is None else wanted[self._dense[wanted]]
        started = self._begin_dense(tensors, dense) if len(dense) else []
        if len(dense) < len(wanted):
            self._sum_strided(tensors, wanted[~self._dense[wanted]].tolist(), scratch_bytes, result)

        def finish() -> Checksums:
            for members, values in started:
                result[members] = values.cpu().numpy().view(np.uint64)
            return result if only is None else result[wanted]

        return finish

    def _begin_dense(self, tensors: FlatTensors, numbers: Integers) -> list[tuple[Integers, torch.Tensor]]:
        """Checksums of regions that are one run of bytes each, by address: one launch per device, with the numbers of
        the regions there."""
        places = tensors.places(self._names)
        if self._spans is None or not self._spans.are(places, numbers):
            self._spans = self._locate(places, numbers)
        found: list[tuple[Integers, torch.Tensor]] = []
        for device, members, addresses, nbytes in self._spans.by_device:
            if device not in self._sums:
                self._sums[device] = weftpub_kernels.SpanChecksums(device)
            found.append((members, self._sums[device].compute(addresses, nbytes)))
        return found

    def _locate(self, places: Places, numbers: Integers) -> "_Spans":
        """Where regions are, device by device; TransportError if one does not lie inside its tensor."""
        owner, offset, nbytes = self._tensor[numbers], self._offset[numbers], self.nbytes[numbers]
        outside = np.flatnonzero((offset + nbytes > places.reaches[owner]) | (offset < 0))
        if len(outside):
            first = outside[0]
            raise TransportError(
                f"{self._names[owner[first]]}: bytes {offset[first]} to {offset[first] + nbytes[first]} were planned, "
                f"the tensor has {places.reaches[owner[first]]}"
            )
        addresses = places.bases[owner] + offset
        found: list[tuple[torch.device, Integers, Integers, Integers]] = []
        for device in dict.fromkeys(places.devices):
            here = np.array([d == device for d in places.devices], dtype=np.bool_)[owner]
            if here.any():
                found.append((device, numbers[here], addresses[here], nbytes[here]))
        return _Spans(places, numbers, found)

    def _sum_strided(self, tensors: FlatTensors, numbers: list[int], scratch_bytes: int, result: Checksums) -> None:
        """Checksums of the others, of dense copies."""
        batches: dict[torch.device, tuple[list[int], list[torch.Tensor]]] = {}
        used = 0
        for number in numbers:
            nbytes = int(self.nbytes[number])
            if used and used + nbytes > scratch_bytes:
                _finish(batches, result)
                used = 0
            used += nbytes
            dense = tensors.box(self._views[number]).contiguous()
            indices, batch = batches.setdefault(dense.device, ([], []))
            indices.append(number)
            batch.append(dense)
        _finish(batches, result)

    def sha256(self, tensors: FlatTensors) -> list[str]:
        """sha256 of the regions' bytes in row-major order, in hex; copies each to the host, one after the other."""
        digests: list[str] = []
        for view, dense, offset, nbytes in zip(
            self._views, self._dense.tolist(), self._offset.tolist(), self.nbytes.tolist(), strict=True
        ):
            part = tensors.run(view.param, offset, nbytes) if dense else tensors.box(view).contiguous()
            digests.append(hashlib.sha256(part.cpu().reshape(-1).view(torch.uint8).numpy()).hexdigest())
        return digests


def _finish(batches: dict[torch.device, tuple[list[int], list[torch.Tensor]]], result: Checksums) -> None:
    """Compute what was collected, one launch per device."""
    for indices, batch in batches.values():
        result[indices] = weftpub_kernels.checksum_many(batch).cpu().numpy().view(np.uint64)
    batches.clear()
