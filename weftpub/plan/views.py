"""Views inside engine parameters: they must fit, must not overlap, and together must leave no element unwritten that
nobody accounts for.

After an offload an engine's weight memory is undefined, so a parameter that no destination covers would stay garbage.
Either the stream writes it, or the engine lists it as `exempt` with the reason (a buffer that it restores itself,
padding that no kernel reads).
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from weftpub.errors import PlanError
from weftpub.plan.boxes import Index
from weftpub.plan.types import Destination, ViewSpec, digest_of

__all__ = ["ParameterSpec", "check_disjoint", "check_views", "layout_digest", "listing"]

_RUN_LIMIT = 1 << 26  # row starts that one overlap test may compare: 0.5 GiB of integers


@dataclass(frozen=True, slots=True)
class ParameterSpec:
    """Layout of one live engine tensor: shape and stride in elements, dtype by name."""

    name: str
    shape: Index
    stride: Index
    dtype: str

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


def layout_digest(parameters: Iterable[ParameterSpec]) -> str:
    """sha256 over the layouts, whatever their order: equal digests mean that views made for one fit the other."""
    return digest_of(sorted([p.name, p.shape, p.stride, p.dtype] for p in parameters))


def listing(items: Sequence[str], limit: int = 12) -> str:
    """Names for an error message: the first `limit`, and how many more there are."""
    shown = ", ".join(items[:limit])
    return shown if len(items) <= limit else f"{shown} and {len(items) - limit} more"


def check_views(
    destinations: Sequence[Destination], parameters: Mapping[str, ParameterSpec], exempt: Mapping[str, str]
) -> None:
    """Check one receiver's views against the parameters that it has.

    Args:
        destinations: the destinations of one receiver rank.
        parameters: its live parameters and buffers, by name.
        exempt: names that need not be written wholly, each with the reason.

    Raises:
        PlanError: a view names no parameter, has another dtype, leaves its parameter, walks it with strides that the
            parameter does not have, overlaps another view, or elements stay unwritten.
    """
    unknown = sorted({d.view.param for d in destinations} - parameters.keys())
    if unknown:
        raise PlanError(
            f"the plan writes parameters that the engine does not have: {listing(unknown)}; describe the engine and "
            "plan again"
        )
    written: dict[str, int] = {}
    for destination in destinations:
        view = destination.view
        _check_fit(destination.shard.name, view, parameters[view.param])
        written[view.param] = written.get(view.param, 0) + math.prod(view.shape)
    check_disjoint(destinations)
    missing = [
        f"{name} ({written.get(name, 0)} of {spec.numel} elements written)"
        for name, spec in sorted(parameters.items())
        if written.get(name, 0) < spec.numel and name not in exempt
    ]
    if missing:
        raise PlanError(
            f"{len(missing)} engine tensors would keep undefined content after an offload: {listing(missing)}; "
            "publish them, or list them as exempt with the reason"
        )


def check_disjoint(destinations: Iterable[Destination]) -> None:
    """PlanError if two views of one rank share an element of a parameter."""
    by_param: dict[tuple[int, str], list[tuple[int, int, Destination]]] = {}
    for destination in destinations:
        view = destination.view
        if math.prod(view.shape):
            last = _last(view)
            by_param.setdefault((destination.shard.rank, view.param), []).append((view.offset, last, destination))
    for group in by_param.values():
        group.sort(key=lambda item: item[:2])
        cluster: list[Destination] = []
        end = -1
        for first, last, destination in group:
            if first > end and cluster:
                _check_cluster(cluster)
                cluster = []
            cluster.append(destination)
            end = max(end, last)
        _check_cluster(cluster)


def _last(view: ViewSpec) -> int:
    """The view's last element, counted from its parameter's first."""
    last = view.offset
    for n, k in zip(view.shape, view.stride, strict=True):
        last += (n - 1) * k
    return last


def _check_fit(name: str, view: ViewSpec, parameter: ParameterSpec) -> None:
    where = f"{name}: its view of {view.param}"
    if view.dtype != parameter.dtype:
        raise PlanError(
            f"{where} is planned as {view.dtype}, the live parameter is {parameter.dtype}; describe the engine and "
            "plan again"
        )
    if len(view.shape) != len(view.stride):
        raise PlanError(f"{where} has {len(view.shape)} dimensions but {len(view.stride)} strides")
    last = _last(view)
    reach = sum(max(n - 1, 0) * k for n, k in zip(parameter.shape, parameter.stride, strict=True))
    if math.prod(view.shape) and (view.offset < 0 or last > reach or parameter.numel == 0):
        raise PlanError(
            f"{where} ends at element {last}, the live parameter of shape {list(parameter.shape)} at {reach}; "
            "describe the engine and plan again"
        )
    if not _dense(parameter.shape, parameter.stride) and not _walks(view, parameter):
        raise PlanError(
            f"{where} has strides {list(view.stride)}, the live parameter of shape {list(parameter.shape)} has "
            f"{list(parameter.stride)}; "
            "describe the engine and plan again"
        )


def _dense(shape: Index, stride: Index) -> bool:
    step = 1
    for n, k in zip(reversed(shape), reversed(stride), strict=True):
        if n != 1 and k != step:
            return False
        step *= n
    return True


def _walks(view: ViewSpec, parameter: ParameterSpec) -> bool:
    """Whether the view's strides are a selection of the parameter's, in order: what narrow() and an index give."""
    steps = iter(parameter.stride)
    return all(k in steps for n, k in zip(view.shape, view.stride, strict=True) if n != 1)


def _check_cluster(cluster: Sequence[Destination]) -> None:
    """Views whose extents interleave: compare their dense runs."""
    if len(cluster) < 2:
        return
    runs = [_runs(destination.view) for destination in cluster]
    if sum(len(starts) for starts, _ in runs) > _RUN_LIMIT:
        names = listing([d.shard.name for d in cluster])
        raise PlanError(
            f"the views of {cluster[0].view.param} for {names} interleave element by element; use views that keep "
            "rows together"
        )
    starts = np.concatenate([starts for starts, _ in runs])
    ends = starts + np.concatenate([np.full(len(s), length, dtype=np.int64) for s, length in runs])
    owner = np.concatenate([np.full(len(s), index, dtype=np.int64) for index, (s, _) in enumerate(runs)])
    order = np.argsort(starts, kind="stable")
    clash = np.flatnonzero(ends[order][:-1] > starts[order][1:])
    if len(clash):
        first, second = (cluster[int(owner[order[clash[0] + step]])] for step in (0, 1))
        raise PlanError(
            f"{first.shard.name} and {second.shard.name} are both to be written to element "
            f"{int(starts[order[clash[0] + 1]])} of {first.view.param} "
            f"on receiver rank {first.shard.rank}"
        )


def _runs(view: ViewSpec) -> tuple[np.ndarray, int]:
    """First elements of the dense runs that make up a view, and the length of each."""
    dims = [(n, k) for n, k in zip(view.shape, view.stride, strict=True) if n != 1]
    length = 1
    while dims and dims[-1][1] == length:
        length *= dims.pop()[0]
    if math.prod(n for n, _ in dims) > _RUN_LIMIT:
        raise PlanError(
            f"the view {view} of {view.param} consists of single elements; use a view that keeps rows together"
        )
    starts = np.array([view.offset], dtype=np.int64)
    for n, k in dims:
        starts = (starts[:, None] + np.arange(n, dtype=np.int64) * k).reshape(-1)
    return starts, length
