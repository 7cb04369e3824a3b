"""Byte views of named tensors, and copies between them and packed buffers.

Both sides of a publish look alike here: named tensors (a trainer's buffers, an engine's live parameters) in which
pieces lie as `ViewSpec`s, and buffers in which the same pieces lie packed. A piece that is dense in its tensor is a run
of bytes; neighbouring runs that are neighbours on both sides become one copy, so a layer's experts that lie alike in
trainer and engine cost one copy, however many tensors they are. Everything is copied as integers of the element's
width: bit patterns never pass through a floating-point conversion.

Tables are compiled once per plan from layouts alone. Pointers enter only through `FlatTensors`, which lives for one
publish.
"""

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

import weftpub_kernels
from weftpub.errors import PlanError, TransportError
from weftpub.plan import ViewSpec, torch_dtype
from weftpub.plan.boxes import Index
from weftpub_kernels.pair import has_storage

__all__ = ["CopyTable", "FlatTensors", "RegionTable", "narrow_view", "settle", "wait_for_devices"]

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

# One call for a whole list: the one batched copy that torch has, and a loop in C++ where no fused kernel fits.
_foreach_copy: Callable[..., None] = getattr(torch, "_foreach_copy_")  # noqa: B009 - not in torch's stubs

type Checksums = np.ndarray[tuple[int], np.dtype[np.uint64]]


def narrow_view(view: ViewSpec, start: Index, shape: Index) -> ViewSpec:
    """The box of `view` that begins at `start` and has `shape`."""
    offset = view.offset + sum(s * k for s, k in zip(start, view.stride, strict=True))
    return ViewSpec(view.param, offset, shape, view.stride, view.dtype)


def wait_for_devices(devices: Iterable[torch.device]) -> None:
    """Return when everything that this thread enqueued on the devices is done; nothing to wait for on a CPU."""
    for device in devices:
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()


def settle(devices: Iterable[torch.device]) -> None:
    """Return when everything that anybody in this process enqueued on the devices is done: before memory is shown to
    another process, or written for it, whoever wrote or read it last, on whatever stream."""
    for device in devices:
        if device.type == "cuda":
            torch.cuda.synchronize(device)


class FlatTensors:
    """The bytes of named tensors, without regard to their shapes. Valid while the tensors keep their storages: one
    publish at most.

    Args:
        tensors: the live tensors.
        names: those that are used; PlanError if one is missing, released, or on no CPU or GPU.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor], names: Iterable[str]) -> None:
        self._tensors: dict[str, torch.Tensor] = {}
        self._bytes: dict[str, torch.Tensor] = {}
        for name in names:
            tensor = tensors.get(name)
            if tensor is None:
                raise PlanError(
                    f"{name}: the plan uses this tensor, which is not there any more; describe and plan again"
                )
            if tensor.device.type not in ("cpu", "cuda") or tensor.layout is not torch.strided:
                raise PlanError(
                    f"{name}: {tensor.dtype} {list(tensor.shape)} is {tensor.layout} on {tensor.device}; expected a "
                    "dense tensor on a CPU or GPU"
                )
            if not has_storage(tensor):
                # torch would quietly put new memory of undefined content behind it.
                raise PlanError(
                    f"{name}: {tensor.dtype} {list(tensor.shape)} has no memory behind it, it was released; "
                    "bring it back (reload the store, or resume the engine's weights) before the publish"
                )
            self._tensors[name] = tensor.detach()
        self.pointers = {name: tensor.data_ptr() for name, tensor in self._tensors.items()}

    @cached_property
    def devices(self) -> tuple[torch.device, ...]:
        """Devices of the tensors, each once."""
        return tuple(dict.fromkeys(tensor.device for tensor in self._tensors.values()))

    def moved(self, tensors: Mapping[str, torch.Tensor]) -> list[str]:
        """Names whose tensor is gone or starts at another address than when this object was made."""
        return [
            name
            for name, pointer in self.pointers.items()
            if name not in tensors or tensors[name].data_ptr() != pointer
        ]

    def run(self, name: str, offset: int, nbytes: int) -> torch.Tensor:
        """`nbytes` bytes of a tensor from byte `offset` on, as uint8 [nbytes]."""
        flat = self._bytes.get(name)
        if flat is None:
            flat = self._bytes[name] = self._flatten(name)
        return flat.narrow(0, offset, nbytes)

    def box(self, view: ViewSpec) -> torch.Tensor:
        """A view as integers of its element's width."""
        tensor = self._tensors[view.param]
        bits = bits_dtype(view.dtype)
        whole = torch.empty(0, dtype=bits, device=tensor.device).set_(tensor.untyped_storage(), 0, (0,), (1,))
        return whole.as_strided(view.shape, view.stride, tensor.storage_offset() + view.offset)

    def _flatten(self, name: str) -> torch.Tensor:
        tensor = self._tensors[name]
        size = tensor.element_size()
        reach = (
            sum((n - 1) * k for n, k in zip(tensor.shape, tensor.stride(), strict=True)) + 1 if tensor.numel() else 0
        )
        flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        return flat.set_(tensor.untyped_storage(), tensor.storage_offset() * size, (reach * size,), (1,))


def bits_dtype(dtype: str) -> torch.dtype:
    """The integer dtype as wide as `dtype`; PlanError if no integer is."""
    width = torch_dtype(dtype).itemsize
    if width not in _BITS:
        raise PlanError(
            f"elements of {dtype} are {width} bytes wide; widths that can travel: {', '.join(map(str, _BITS))}"
        )
    return _BITS[width]


@dataclass(frozen=True, slots=True)
class _Run:
    name: str
    offset: int
    buffer: int
    position: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class _Box:
    view: ViewSpec
    buffer: int
    position: int
    nbytes: int


@dataclass(frozen=True)
class CopyTable:
    """Copies between named tensors and buffers, compiled from where each piece lies on both sides.

    Attributes:
        runs: dense pieces, neighbours joined.
        boxes: pieces that are strided in their tensor; in the buffer they are dense.
    """

    runs: tuple[_Run, ...]
    boxes: tuple[_Box, ...]

    @classmethod
    def compile(
        cls, views: Sequence[ViewSpec], positions: Sequence[int], buffers: Sequence[int] | None = None
    ) -> "CopyTable":
        """Compile from one view per piece, its byte position in its buffer, and the index of that buffer (0 if left
        out).
        """
        runs: list[_Run] = []
        boxes: list[_Box] = []
        for index, (view, position) in enumerate(zip(views, positions, strict=True)):
            buffer = 0 if buffers is None else buffers[index]
            nbytes = math.prod(view.shape) * torch_dtype(view.dtype).itemsize
            offset = dense_offset(view)
            if offset is None:
                boxes.append(_Box(view, buffer, position, nbytes))
                continue
            last = runs[-1] if runs else None
            if (
                last is not None
                and last.name == view.param
                and last.buffer == buffer
                and last.offset + last.nbytes == offset
                and last.position + last.nbytes == position
            ):
                runs[-1] = _Run(last.name, last.offset, buffer, last.position, last.nbytes + nbytes)
            else:
                runs.append(_Run(view.param, offset, buffer, position, nbytes))
        return cls(tuple(runs), tuple(boxes))

    def gather(self, tensors: FlatTensors, buffers: Sequence[torch.Tensor]) -> None:
        """Copy the pieces from the tensors into the buffers (uint8, 1-D); asynchronous on CUDA."""
        self._copy(tensors, buffers, into_buffers=True)

    def scatter(self, tensors: FlatTensors, buffers: Sequence[torch.Tensor]) -> None:
        """Copy the pieces from the buffers into the tensors; asynchronous on CUDA."""
        self._copy(tensors, buffers, into_buffers=False)

    def _copy(self, tensors: FlatTensors, buffers: Sequence[torch.Tensor], *, into_buffers: bool) -> None:
        by_width: dict[torch.dtype, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        for run in self.runs:
            here, there = by_width.setdefault(torch.uint8, ([], []))
            here.append(tensors.run(run.name, run.offset, run.nbytes))
            there.append(_part(buffers[run.buffer], run.position, run.nbytes))
        for box in self.boxes:
            bits = bits_dtype(box.view.dtype)
            here, there = by_width.setdefault(bits, ([], []))
            here.append(tensors.box(box.view))
            there.append(_part(buffers[box.buffer], box.position, box.nbytes).view(bits).view(box.view.shape))
        for here, there in by_width.values():
            targets, origins = (there, here) if into_buffers else (here, there)
            _foreach_copy(targets, origins, non_blocking=True)


def dense_offset(view: ViewSpec) -> int | None:
    """Byte offset of a view that is one dense row-major run in its tensor, None if it is strided."""
    step = 1
    for n, k in zip(reversed(view.shape), reversed(view.stride), strict=True):
        if n != 1 and k != step:
            return None
        step *= n
    return view.offset * torch_dtype(view.dtype).itemsize


def _part(buffer: torch.Tensor, position: int, nbytes: int) -> torch.Tensor:
    if position < 0 or position + nbytes > buffer.numel():
        raise TransportError(
            f"bytes {position} to {position + nbytes} are not inside the offered {buffer.numel()} bytes"
        )
    return buffer.narrow(0, position, nbytes)


@dataclass(frozen=True, slots=True)
class _Region:
    view: ViewSpec
    offset: int | None
    nbytes: int


class RegionTable:
    """Regions of named tensors whose content is to be proven. Compiled once from layouts.

    Args:
        views: the regions.
    """

    def __init__(self, views: Iterable[ViewSpec]) -> None:
        self._regions = tuple(
            _Region(view, dense_offset(view), math.prod(view.shape) * torch_dtype(view.dtype).itemsize)
            for view in views
        )

    def __len__(self) -> int:
        return len(self._regions)

    def checksums(self, tensors: FlatTensors, scratch_bytes: int, only: Sequence[int] | None = None) -> Checksums:
        """64-bit checksums of the regions' bytes in row-major order, computed on the tensors' devices.

        Args:
            scratch_bytes: most memory for dense copies of strided regions at one time; a single larger one is copied
                alone.
            only: numbers of the regions that are wanted; all by default.

        Returns:
            uint64, one per region that is wanted.
        """
        wanted = self._regions if only is None else [self._regions[number] for number in only]
        result = np.zeros(len(wanted), dtype=np.uint64)
        batches: dict[torch.device, tuple[list[int], list[torch.Tensor]]] = {}
        used = 0
        for index, region in enumerate(wanted):
            if region.offset is None:
                if used and used + region.nbytes > scratch_bytes:
                    _finish(batches, result)
                    used = 0
                used += region.nbytes
                dense = tensors.box(region.view).contiguous()
            else:
                dense = tensors.run(region.view.param, region.offset, region.nbytes)
            indices, batch = batches.setdefault(dense.device, ([], []))
            indices.append(index)
            batch.append(dense)
        _finish(batches, result)
        return result

    def sha256(self, tensors: FlatTensors) -> list[str]:
        """sha256 of the regions' bytes in row-major order, in hex; copies each to the host, one after the other."""
        digests: list[str] = []
        for region in self._regions:
            if region.offset is None:
                dense = tensors.box(region.view).contiguous()
            else:
                dense = tensors.run(region.view.param, region.offset, region.nbytes)
            digests.append(hashlib.sha256(dense.cpu().reshape(-1).view(torch.uint8).numpy()).hexdigest())
        return digests


def _finish(batches: dict[torch.device, tuple[list[int], list[torch.Tensor]]], result: Checksums) -> None:
    """Compute what was collected, one launch per device."""
    for indices, batch in batches.values():
        result[indices] = weftpub_kernels.checksum_many(batch).cpu().numpy().view(np.uint64)
    batches.clear()
