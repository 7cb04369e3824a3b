"""Boxes in an index space, and how often a set of them covers it.

A box is (start, shape), both tuples with one entry per dimension. Everything here is exact integer work without
tensors: coordinates are compressed to the cut points of the boxes, so the cost depends on how many boxes there are and
never on how many elements they hold.
"""

import math
from collections.abc import Sequence

import numpy as np

__all__ = ["Box", "Index", "coverage", "inside", "intersect"]

Index = tuple[int, ...]
Box = tuple[Index, Index]


def intersect(a: Box, b: Box) -> Box | None:
    """The common part of two boxes of one rank, or None if they share no element."""
    start = tuple(max(x, y) for x, y in zip(a[0], b[0], strict=True))
    shape = tuple(min(x + n, y + m) - s for x, n, y, m, s in zip(a[0], a[1], b[0], b[1], start, strict=True))
    return None if any(n <= 0 for n in shape) else (start, shape)


def inside(box: Box, shape: Index) -> bool:
    """Whether `box` lies wholly in ``[0, shape)``, with one entry per dimension and no negative start or extent."""
    start, extent = box
    if len(start) != len(shape) or len(extent) != len(shape):
        return False
    if extent == shape and not any(start):
        return True
    return all(s >= 0 and n >= 0 and s + n <= limit for s, n, limit in zip(start, extent, shape, strict=True))


def coverage(boxes: Sequence[Box], shape: Index) -> tuple[int, int]:
    """How often the least and the most covered element of ``[0, shape)`` is covered by `boxes`, all of which lie
    inside.

    Exactly once everywhere is ``(1, 1)``; a hole makes the first 0, an overlap the second 2 or more. An empty space
    counts as covered once.
    """
    if math.prod(shape) == 0:
        return 1, 1
    if not boxes:
        return 0, 0
    if len(boxes) == 1:
        return (1, 1) if boxes[0][1] == shape else (0, 1)
    cut = [d for d in range(len(shape)) if any(extent[d] != shape[d] for _, extent in boxes)]
    if not cut:
        return len(boxes), len(boxes)
    if len(cut) == 1:
        return _line_coverage([(start[cut[0]], extent[cut[0]]) for start, extent in boxes], shape[cut[0]])
    return _grid_coverage(boxes, shape, cut)


def _line_coverage(spans: Sequence[tuple[int, int]], length: int) -> tuple[int, int]:
    """Coverage of ``[0, length)`` by (start, extent) spans: one sweep over the sorted end points."""
    events = sorted(
        [(start, 1) for start, extent in spans if extent] + [(start + extent, -1) for start, extent in spans if extent]
    )
    least, most, depth, position = len(spans), 0, 0, 0
    for place, step in events:
        if place > position:
            least, most, position = min(least, depth), max(most, depth), place
        depth += step
    if position < length:
        least = 0
    return least, most


def _grid_coverage(boxes: Sequence[Box], shape: Index, cut: Sequence[int]) -> tuple[int, int]:
    """Coverage in the dimensions `cut`, on the grid of all cut points."""
    points = [sorted({0, shape[d], *(s[d] for s, _ in boxes), *(s[d] + n[d] for s, n in boxes)}) for d in cut]
    rank_of = [{point: index for index, point in enumerate(axis)} for axis in points]
    counts = np.zeros([len(axis) - 1 for axis in points], dtype=np.int64)
    for start, extent in boxes:
        cell = tuple(slice(rank_of[i][start[d]], rank_of[i][start[d] + extent[d]]) for i, d in enumerate(cut))
        counts[cell] += 1
    return int(counts.min()), int(counts.max())
