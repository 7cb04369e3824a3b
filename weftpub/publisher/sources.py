"""The sender's tensors, as named buffers with views in them, and the checksums and copies that a publish needs of them.

A trainer may hand over one tensor per canonical name. One whose canonical tensors lie in a few large buffers (a store
with all experts of a layer in one tensor) hands over the buffers and, once, where each name lies in them: then a
publish looks at a few pointers instead of at thousands of tensors.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from weftpub.errors import PlanError
from weftpub.plan import Plan, Shard, ViewSpec, dtype_name
from weftpub.plan.views import listing
from weftpub.transport import FlatTensors, RegionTable

__all__ = ["SourceBuffers", "SourceIndex", "as_buffers"]

_MASK = (1 << 64) - 1


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


def as_buffers(sources: Mapping[str, torch.Tensor] | SourceBuffers) -> SourceBuffers:
    """Sources in the form of buffers: every plain tensor is a buffer of its own name.

    Raises:
        PlanError: something that is no tensor; names it.
    """
    if isinstance(sources, SourceBuffers):
        return sources
    for name, tensor in sources.items():
        if not isinstance(tensor, torch.Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise PlanError(f"{name}: expected a tensor to publish, found {type(tensor).__name__}")
    views = {
        name: ViewSpec(name, 0, tuple(tensor.shape), tuple(tensor.stride()), dtype_name(tensor.dtype))
        for name, tensor in sources.items()
    }
    return SourceBuffers(sources, views)


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
        self._table: RegionTable | None = None
        self._needs: dict[str, tuple[int, str]] = {}
        for name, view in views.items():
            last = view.offset + sum((n - 1) * k for n, k in zip(view.shape, view.stride, strict=True))
            most, dtype = self._needs.get(view.param, (-1, view.dtype))
            if dtype != view.dtype:
                raise PlanError(f"{name}: views of buffer {view.param} have two dtypes, {dtype} and {view.dtype}")
            self._needs[view.param] = max(most, last), dtype

    @property
    def buffers(self) -> Sequence[str]:
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
        unknown = sorted(known.keys() - self.views.keys())
        if unknown:
            raise PlanError(
                f"checksums were given for {len(unknown)} tensors that this sender rank does not publish: "
                f"{listing(unknown)}; give them by canonical name, of this rank's tensors only"
            )
        regions = self.regions
        result = np.zeros(len(regions), dtype=np.uint64)
        given = {number: known[name] & _MASK for number, name in self._names.items() if name in known}
        if given:
            result[list(given)] = np.array(list(given.values()), dtype=np.uint64)
        missing = [number for number in range(len(regions)) if number not in given]
        if missing:
            result[missing] = regions.checksums(tensors, scratch_bytes, missing)
        return result

    def check(self, buffers: Mapping[str, torch.Tensor]) -> None:
        """PlanError unless every buffer is there, has the dtype of its views and reaches to their last elements."""
        absent = [name for name in self._needs if name not in buffers]
        if absent:
            raise PlanError(f"buffers are viewed but were not handed over: {listing(absent)}")
        for name, (last, dtype) in self._needs.items():
            buffer = buffers[name]
            reach = (
                sum((n - 1) * k for n, k in zip(buffer.shape, buffer.stride(), strict=True)) if buffer.numel() else -1
            )
            if last > reach or dtype_name(buffer.dtype) != dtype:
                raise PlanError(
                    f"buffer {name} is {dtype_name(buffer.dtype)} {list(buffer.shape)}, its views are {dtype} and end "
                    f"at element {last}; "
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
