"""The sender's tensors, as named buffers with views in them, and the checksums and copies that a publish needs of them.

A trainer may hand over one tensor per canonical name. One whose canonical tensors lie in a few large buffers (a store
with all experts of a layer in one tensor) hands over the buffers and, once, where each name lies in them: then a
publish looks at a few pointers instead of at thousands of tensors.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import itemgetter
from typing import cast

import numpy as np
import torch

from weftpub.checksums import Checksums
from weftpub.errors import PlanError
from weftpub.plan import Plan, Shard, ViewSpec, dtype_name, torch_dtype
from weftpub.plan.views import listing
from weftpub.transport import FlatTensors, RegionTable
from weftpub_kernels.pair import has_storage

__all__ = ["SourceBuffers", "SourceIndex", "as_buffers"]

_MASK = (1 << 64) - 1

_Take = Callable[[Mapping[str, int]], tuple[int, ...]]
type Integers = np.ndarray[tuple[int], np.dtype[np.int64]]


@dataclass(frozen=True, eq=False)
class SourceBuffers:
    """What one sender rank publishes from.

    Attributes:
        buffers: tensors by name. They must not change until the publish returns.
        views: canonical name to its place in a buffer. Pass the same mapping object at every publish: what is derived
            from it is kept as long.
        in_place: whether the buffers may be shown to receivers where they are, where the transport can do that; else
            they are packed.
        keep: whether the buffers' memory stays where it is from one publish to the next, so that receivers may keep it
            open. Wrong for a store whose memory is offloaded between publishes.
    """

    buffers: Mapping[str, torch.Tensor]
    views: Mapping[str, ViewSpec]
    in_place: bool = False
    keep: bool = False

    @classmethod
    def of_tensors(
        cls, tensors: Mapping[str, torch.Tensor], *, in_place: bool = False, keep: bool = False
    ) -> "SourceBuffers":
        """Sources whose buffers are the memory that the tensors share: a store's thousands of canonical tensors are
        views of a few. Make it once, publish it as often as the tensors stay views of the same storages; what is freed
        and brought back behind a storage is found again.

        Args:
            tensors: canonical name to tensor.
            in_place, keep: see the attributes.

        Raises:
            PlanError: something that is no tensor; names it.
        """
        buffers: dict[str, torch.Tensor] = {}
        names: dict[tuple[int, torch.dtype], str] = {}
        views: dict[str, ViewSpec] = {}
        for name, tensor in tensors.items():
            _require_tensor(name, tensor)
            if not has_storage(tensor):
                raise PlanError(f"{name}: has no memory behind it, it was released; make the sources while it is there")
            storage = tensor.untyped_storage()
            # The storage object is the same for all views of it, also while its memory is released.
            key = names.setdefault((storage._cdata, tensor.dtype), name)
            if key == name:
                whole = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
                buffers[key] = whole.set_(storage, 0, (storage.nbytes() // tensor.element_size(),), (1,))
            views[name] = ViewSpec(
                key, int(tensor.storage_offset()), tuple(tensor.shape), tuple(tensor.stride()), dtype_name(tensor.dtype)
            )
        return cls(buffers, views, in_place, keep)


def as_buffers(sources: Mapping[str, torch.Tensor] | SourceBuffers) -> SourceBuffers:
    """Sources in the form of buffers: every plain tensor is a buffer of its own name.

    Raises:
        PlanError: something that is no tensor; names it.
    """
    if isinstance(sources, SourceBuffers):
        return sources
    for name, tensor in sources.items():
        _require_tensor(name, tensor)
    views = {
        name: ViewSpec(name, 0, tuple(tensor.shape), tuple(tensor.stride()), dtype_name(tensor.dtype))
        for name, tensor in sources.items()
    }
    return SourceBuffers(sources, views)


@dataclass(frozen=True, eq=False)
class _Given:
    """Which of the checksums that the trainer gave last time are whose: `given` of them, for so many named `regions`.

    Attributes:
        numbers: regions.
        take: their checksums, and one more, out of a mapping.
        names, places: where they are in an array of checksums of exactly these names.
    """

    given: int
    regions: int
    numbers: Integers
    take: _Take
    names: tuple[str, ...] | None
    places: Integers


def _require_tensor(name: str, tensor: object) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise PlanError(f"{name}: expected a tensor to publish, found {type(tensor).__name__}")


class SourceIndex:
    """The regions of one sender rank's tensors that need a checksum, each once, however many receivers it goes to.
    Layouts only.

    Args:
        plan: the plan.
        rank: this sender rank.
        views: canonical name to its place in a buffer.

    Raises:
        PlanError: names, shapes or dtypes are not those of the plan; lists them.
    """

    def __init__(self, plan: Plan, rank: int, views: Mapping[str, ViewSpec]) -> None:
        self.views = views
        self.shards = {shard.name: shard for shard in plan.sources if shard.rank == rank}
        _check_sources(rank, self.shards, views)
        self._regions: dict[ViewSpec, int] = {}
        self._names: dict[int, str] = {}
        self._last: _Given | None = None
        self._table: RegionTable | None = None
        self._needs: dict[str, tuple[int, torch.dtype]] = {}
        for name, view in views.items():
            last = view.offset + sum((n - 1) * k for n, k in zip(view.shape, view.stride, strict=True))
            dtype = torch_dtype(view.dtype)
            most, first = self._needs.get(view.param, (-1, dtype))
            if first is not dtype:
                raise PlanError(
                    f"{name}: views of buffer {view.param} have two dtypes, {dtype_name(first)} and {view.dtype}"
                )
            self._needs[view.param] = max(most, last), dtype

    @property
    def buffers(self) -> tuple[str, ...]:
        """Names of the buffers that are viewed."""
        return tuple(self._needs)

    @property
    def regions(self) -> RegionTable:
        """All regions, in the order of their numbers."""
        if self._table is None or len(self._table) != len(self._regions):
            self._table = RegionTable(self._regions)
        return self._table

    def add(self, name: str, region: ViewSpec) -> int:
        """Number of a region. One that is a whole local tensor can take a checksum that the trainer has already."""
        number = self._regions.setdefault(region, len(self._regions))
        if region == self.views[name]:
            self._names[number] = name
        return number

    def checksums(
        self, tensors: FlatTensors, known: Mapping[str, int], scratch_bytes: int
    ) -> "np.ndarray[tuple[int], np.dtype[np.uint64]]":
        """Checksums of all regions: those in `known` (by canonical name, of the whole local tensor) are taken, the
        others computed.

        Raises:
            PlanError: `known` names a tensor that this rank does not send: under its right name nothing would be
                compared.
        """
        regions = self.regions
        result = np.zeros(len(regions), dtype=np.uint64)
        missing = np.ones(len(regions), dtype=np.bool_)
        if known:
            numbers, values = self._given(known)
            result[numbers] = values
            missing[numbers] = False
        if missing.any():
            result[missing] = regions.checksums(tensors, scratch_bytes, np.flatnonzero(missing).tolist())
        return result

    def _given(self, known: Mapping[str, int]) -> "tuple[Integers, np.ndarray[tuple[int], np.dtype[np.uint64]]]":
        """Numbers of the regions whose checksums are in `known`, and these; nearly always the same regions."""
        last = self._last
        if last is not None and (last.given, last.regions) == (len(known), len(self._names)):
            if isinstance(known, Checksums) and known.names is last.names:
                return last.numbers, known.values_in_order[last.places].view(np.uint64)
            try:
                return last.numbers, _integers(last.take(known), len(last.numbers))
            except KeyError:
                pass  # other names this time
        unknown = sorted(known.keys() - self.views.keys())
        if unknown:
            raise PlanError(
                f"checksums were given for {len(unknown)} tensors that this sender rank does not publish: "
                f"{listing(unknown)}; give them by canonical name, of this rank's tensors only"
            )
        pairs = [(number, name) for number, name in self._names.items() if name in known]
        numbers = np.array([number for number, _ in pairs], dtype=np.int64)
        if not pairs:
            return numbers, np.zeros(0, dtype=np.uint64)
        names = [name for _, name in pairs]
        take = cast(_Take, itemgetter(*names, names[0]))  # of two names at least it makes a tuple
        if len({*names}) == len(known):
            place = {name: place for place, name in enumerate(known)}
            places = np.array([place[name] for name in names], dtype=np.int64)
            shared = known.names if isinstance(known, Checksums) else None
            self._last = _Given(len(known), len(self._names), numbers, take, shared, places)
        return numbers, _integers(take(known), len(numbers))

    def check(self, buffers: Mapping[str, torch.Tensor]) -> None:
        """PlanError unless every buffer is there, has the dtype of its views and reaches to their last elements."""
        absent = [name for name in self._needs if name not in buffers]
        if absent:
            raise PlanError(f"buffers are viewed but were not handed over: {listing(absent)}")
        for name, (last, dtype) in self._needs.items():
            buffer = buffers[name]
            if buffer.dtype is dtype and buffer.is_contiguous() and last < buffer.numel():
                continue
            reach = (
                sum((n - 1) * k for n, k in zip(buffer.shape, buffer.stride(), strict=True)) if buffer.numel() else -1
            )
            if last > reach or buffer.dtype is not dtype:
                raise PlanError(
                    f"buffer {name} is {dtype_name(buffer.dtype)} {list(buffer.shape)}, its views are "
                    f"{dtype_name(dtype)} and end at element {last}; "
                    "was its memory released, or has it been replaced?"
                )


def _check_sources(rank: int, shards: Mapping[str, Shard], views: Mapping[str, ViewSpec]) -> None:
    missing, extra = sorted(shards.keys() - views.keys()), sorted(views.keys() - shards.keys())
    if missing or extra:
        faults: list[str] = []
        if missing:
            faults.append(f"the plan expects {len(missing)} tensors that were not handed over: {listing(missing)}")
        if extra:
            faults.append(f"{len(extra)} tensors were handed over that the plan does not know: {listing(extra)}")
        raise PlanError(f"sender rank {rank}: {'; '.join(faults)}; plan again after the model has changed")
    for name, shard in shards.items():
        view = views[name]
        if (view.shape, view.dtype) != (shard.shape, shard.dtype):
            raise PlanError(
                f"{name}: sender rank {rank} handed over {view.dtype} {list(view.shape)}, planned was {shard.dtype} "
                f"{list(shard.shape)}"
            )


def _integers(values: tuple[int, ...], count: int) -> "np.ndarray[tuple[int], np.dtype[np.uint64]]":
    """The first `count` checksums modulo 2^64: they may be signed, as the kernels give them, or not."""
    try:
        return np.fromiter(values, dtype=np.int64, count=count).view(np.uint64)
    except OverflowError:
        return np.array([value & _MASK for value in values[:count]], dtype=np.uint64)
