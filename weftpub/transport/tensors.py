"""The bytes of named tensors: where they are at this moment, and how a view of one decomposes into rows of bytes.

Layouts are compiled once and kept; pointers enter only through `FlatTensors`, which lives for one publish.
"""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from weftpub.errors import PlanError
from weftpub.plan import ViewSpec, torch_dtype
from weftpub.plan.boxes import Index

__all__ = [
    "FlatTensors",
    "Integers",
    "Known",
    "Places",
    "Rows",
    "bits_dtype",
    "dense_offset",
    "enqueued",
    "narrow_view",
    "rows_of",
    "settle",
    "wait_for_devices",
]

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

type Integers = np.ndarray[tuple[int], np.dtype[np.int64]]


def narrow_view(view: ViewSpec, start: Index, shape: Index) -> ViewSpec:
    """The box of `view` that begins at `start` and has `shape`."""
    offset = view.offset + sum(s * k for s, k in zip(start, view.stride, strict=True))
    return ViewSpec(view.param, offset, shape, view.stride, view.dtype)


def wait_for_devices(devices: Iterable[torch.device]) -> None:
    """Return when everything that this thread enqueued on the devices is done; nothing to wait for on a CPU."""
    for device in devices:
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()


def enqueued(devices: Iterable[torch.device]) -> list[torch.cuda.Event]:
    """Events that come when everything that this thread has enqueued on the devices so far is done; none for a CPU."""
    events: list[torch.cuda.Event] = []
    for device in devices:
        if device.type == "cuda":
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(device))
            events.append(event)
    return events


def settle(devices: Iterable[torch.device]) -> None:
    """Return when everything that anybody in this process enqueued on the devices is done: before memory is shown to
    another process, or written for it, whoever wrote or read it last, on whatever stream."""
    for device in devices:
        if device.type == "cuda":
            torch.cuda.synchronize(device)


def bits_dtype(dtype: str) -> torch.dtype:
    """The integer dtype as wide as `dtype`; PlanError if no integer is."""
    width = torch_dtype(dtype).itemsize
    if width not in _BITS:
        raise PlanError(
            f"elements of {dtype} are {width} bytes wide; widths that can travel: {', '.join(map(str, _BITS))}"
        )
    return _BITS[width]


def dense_offset(view: ViewSpec) -> int | None:
    """Byte offset of a view that is one dense row-major run in its tensor, None if it is strided."""
    step = 1
    for n, k in zip(reversed(view.shape), reversed(view.stride), strict=True):
        if n != 1 and k != step:
            return None
        step *= n
    return view.offset * torch_dtype(view.dtype).itemsize


@dataclass(frozen=True, slots=True)
class Rows:
    """Equally long rows of bytes of one tensor: `count` of `width` bytes, the first at byte `offset`, the next `pitch`
    bytes further on."""

    offset: int
    width: int
    count: int
    pitch: int


def rows_of(view: ViewSpec) -> list[Rows]:
    """What a view consists of, in row-major order: one row if it is dense, one group of rows for a box of a matrix, as
    many groups as it takes for others."""
    size = torch_dtype(view.dtype).itemsize
    if math.prod(view.shape) == 0:
        return []
    dims: list[tuple[int, int]] = []
    for n, k in zip(view.shape, view.stride, strict=True):
        if n == 1:
            continue
        if dims and dims[-1][1] == n * k:
            dims[-1] = dims[-1][0] * n, k
        else:
            dims.append((n, k))
    width = dims.pop()[0] if dims and dims[-1][1] == 1 else 1
    count, pitch = dims.pop() if dims else (1, 0)
    starts = itertools.product(*([i * k for i in range(n)] for n, k in dims))
    return [Rows((view.offset + sum(start)) * size, width * size, count, pitch * size) for start in starts]


@dataclass(frozen=True, eq=False)
class Places:
    """Where some named tensors are: for each its address, how many bytes it reaches over, and its device."""

    bases: Integers
    reaches: Integers
    devices: tuple[torch.device, ...]

    @cached_property
    def device(self) -> torch.device | None:
        """The one device of all, None if there are several or no tensors."""
        return self.devices[0] if len(set(self.devices)) == 1 else None


@dataclass(frozen=True, eq=False)
class Known:
    """What was found out about tensors by name, for as long as tensors of the same layouts lie at the same addresses.
    Holds neither them nor their memory.

    Attributes:
        pointers: addresses, in the order of `names`.
        shapes, strides, dtypes: layouts.
        starts: offset of each in its storage, in elements.
        rooms: bytes of the storages.
        whole: where all of them are.
        places: where some of them are.
    """

    names: tuple[str, ...]
    pointers: list[int]
    shapes: list[torch.Size]
    strides: list[tuple[int, ...]]
    dtypes: list[torch.dtype]
    starts: list[int]
    rooms: list[int]
    whole: Places
    places: dict[tuple[str, ...], Places]

    def are(
        self,
        names: tuple[str, ...],
        tensors: Sequence[torch.Tensor],
        storages: Sequence[torch.UntypedStorage],
        pointers: list[int],
    ) -> bool:
        """Whether all of this is true of these tensors, with these storages and addresses. An address says nothing by
        itself: an allocator gives it away again, and a tensor's `.data` can get another layout where it is."""
        return (
            pointers == self.pointers
            and names == self.names
            and [tensor.dtype for tensor in tensors] == self.dtypes
            and [tensor.shape for tensor in tensors] == self.shapes
            and list(map(torch.Tensor.stride, tensors)) == self.strides
            and list(map(torch.Tensor.storage_offset, tensors)) == self.starts
            and list(map(torch.UntypedStorage.nbytes, storages)) == self.rooms
        )

    def moved(self, tensors: Mapping[str, torch.Tensor]) -> list[str]:
        """Names whose tensor is gone or starts at another address."""
        try:
            if [tensors[name].data_ptr() for name in self.names] == self.pointers:
                return []
        except KeyError:
            pass  # named below
        at = zip(self.names, self.pointers, strict=True)
        return [name for name, pointer in at if name not in tensors or tensors[name].data_ptr() != pointer]


class FlatTensors:
    """The bytes of named tensors, without regard to their shapes. Valid while the tensors keep their storages: one
    publish at most.

    Args:
        tensors: the live tensors.
        names: those that are used; PlanError if one is missing, released, or on no CPU or GPU.
        known: of an earlier one: there are hundreds of tensors, mostly where they were, and an engine waits while they
            are looked at.

    Attributes:
        known: for a later one.
        seen: whether `known` was given and holds.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor], names: Iterable[str], known: "Known | None" = None) -> None:
        names = tuple(dict.fromkeys(names))
        try:
            found = [tensors[name] for name in names]
        except KeyError as error:
            raise PlanError(
                f"{error.args[0]}: the plan uses this tensor, which is not there any more; describe and plan again"
            ) from None
        try:
            # They hold the memory, whatever becomes of a tensor's `.data`.
            self._storages = [tensor.untyped_storage() for tensor in found]
            pointers = list(map(torch.Tensor.data_ptr, found))
        except RuntimeError:
            _require_dense(names, found)  # others have no storage
            raise
        self.seen = known is not None and known.are(names, found, self._storages, pointers)
        self.known = known if known is not None and self.seen else self._look_at(names, found, pointers)
        self._bytes: dict[str, torch.Tensor] = {}

    def _look_at(self, names: tuple[str, ...], tensors: Sequence[torch.Tensor], pointers: list[int]) -> Known:
        _require_dense(names, tensors)
        rooms = [storage.nbytes() for storage in self._storages]
        starts = [int(tensor.storage_offset()) for tensor in tensors]
        reaches: list[int] = []
        for name, tensor, start, room in zip(names, tensors, starts, rooms, strict=True):
            reach = tensor.nbytes if tensor.is_contiguous() else _reach(tensor)
            if reach and start * tensor.element_size() + reach > room:
                # torch would quietly put new memory of undefined content behind it.
                raise PlanError(
                    f"{name}: {tensor.dtype} {list(tensor.shape)} has no memory behind it, it was released; "
                    "bring it back (reload the store, or resume the engine's weights) before the publish"
                )
            reaches.append(reach)
        whole = Places(
            np.array(pointers, dtype=np.int64),
            np.array(reaches, dtype=np.int64),
            tuple(tensor.device for tensor in tensors),
        )
        shapes, strides = [tensor.shape for tensor in tensors], [tensor.stride() for tensor in tensors]
        dtypes = [tensor.dtype for tensor in tensors]
        return Known(names, pointers, shapes, strides, dtypes, starts, rooms, whole, {names: whole})

    @cached_property
    def devices(self) -> tuple[torch.device, ...]:
        """Devices of the tensors, each once."""
        return tuple(dict.fromkeys(self.known.whole.devices))

    def moved(self, tensors: Mapping[str, torch.Tensor]) -> list[str]:
        """Names whose tensor is gone or starts at another address than when this object was made."""
        return self.known.moved(tensors)

    def places(self, names: tuple[str, ...]) -> Places:
        """Where the named tensors are."""
        known = self.known
        if names not in known.places:
            index = [self._index[name] for name in names]
            devices = known.whole.devices
            known.places[names] = Places(
                known.whole.bases[index], known.whole.reaches[index], tuple(devices[number] for number in index)
            )
        return known.places[names]

    def run(self, name: str, offset: int, nbytes: int) -> torch.Tensor:
        """`nbytes` bytes of a tensor from byte `offset` on, as uint8 [nbytes]."""
        return self._flat(name).narrow(0, offset, nbytes)

    def rows(self, name: str, rows: Rows) -> torch.Tensor:
        """Rows of a tensor's bytes, as uint8 [count, width]."""
        flat = self._flat(name)
        end = rows.offset + rows.pitch * (rows.count - 1) + rows.width
        return flat[rows.offset : end].as_strided(
            (rows.count, rows.width), (rows.pitch, 1), flat.storage_offset() + rows.offset
        )

    def box(self, view: ViewSpec) -> torch.Tensor:
        """A view as integers of its element's width."""
        number, bits = self._index[view.param], bits_dtype(view.dtype)
        whole = torch.empty(0, dtype=bits, device=self.known.whole.devices[number])
        whole.set_(self._storages[number], 0, (0,), (1,))
        return whole.as_strided(view.shape, view.stride, self._start(number) // bits.itemsize + view.offset)

    @cached_property
    def _index(self) -> dict[str, int]:
        return {name: number for number, name in enumerate(self.known.names)}

    def _flat(self, name: str) -> torch.Tensor:
        flat = self._bytes.get(name)
        if flat is None:
            number, whole = self._index[name], self.known.whole
            flat = torch.empty(0, dtype=torch.uint8, device=whole.devices[number])
            flat.set_(self._storages[number], self._start(number), (int(whole.reaches[number]),), (1,))
            self._bytes[name] = flat
        return flat

    def _start(self, number: int) -> int:
        """Byte offset of a tensor in its storage."""
        return self.known.starts[number] * self.known.dtypes[number].itemsize


def _require_dense(names: Sequence[str], tensors: Sequence[torch.Tensor]) -> None:
    for name, tensor in zip(names, tensors, strict=True):
        if not (tensor.is_cuda or tensor.is_cpu) or tensor.layout is not torch.strided:
            raise PlanError(
                f"{name}: {tensor.dtype} {list(tensor.shape)} is {tensor.layout} on {tensor.device}; expected a dense "
                "tensor on a CPU or GPU"
            )


def _reach(tensor: torch.Tensor) -> int:
    """Bytes from a tensor's first element to the end of its last."""
    if not tensor.numel():
        return 0
    last = sum((n - 1) * k for n, k in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()
