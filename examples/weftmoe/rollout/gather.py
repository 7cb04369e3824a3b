"""Whole tensors on every trainer rank, a bucket at a time: what SGLang's own update from tensors needs.

Each of an engine's workers loads whole Hugging Face tensors, from the memory of its own GPU, and takes its part of them
itself; a trainer's ranks hold parts: rows or columns of a tensor-parallel matrix, some of the experts. So each rank
lays its own parts into a bucket, receives the others' from their owners, and hands the bucket to the worker on its GPU.

`make_buckets` says, the same on every rank, which tensors travel together, where they lie in the bucket, and who sends
which box of them; a box that several ranks hold is sent by one of them. `BucketGather` runs it: no rank begins an
exchange before all have said that they can, and an error on one is raised on all.
"""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import torch

from weftpub.canonical import ModelFamily
from weftpub.errors import ConfigError, DeadlineError, PlanError
from weftpub.plan import Shard, torch_dtype
from weftpub.publisher import RankGroup
from weftpub.publisher.agreement import agree
from weftpub_kernels import checksum

__all__ = ["Box", "Bucket", "BucketGather", "Whole", "make_buckets", "near_shards", "require_equal"]

_ALIGNMENT = 256  # bytes, of a tensor's first one in its bucket: what copies are fastest with
_LOOK_S = (2e-4, 1e-2)  # between two looks whether an exchange has ended: the first time, and at most
_UNFINISHED = "that rank has died, or waits elsewhere; its own error says more"


@dataclass(frozen=True)
class Box:
    """A part of a tensor that one rank sends: `start` and `shape` in the whole tensor, `holders` all ranks with it,
    `source` the canonical tensor that they hold it as.
    """

    start: tuple[int, ...]
    shape: tuple[int, ...]
    holders: tuple[int, ...]
    source: str

    @property
    def owner(self) -> int:
        """The rank that sends it."""
        return self.holders[0]

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """The view of it in the whole tensor."""
        for dimension, (start, length) in enumerate(zip(self.start, self.shape, strict=True)):
            whole = whole.narrow(dimension, start, length)
        return whole


@dataclass(frozen=True)
class Whole:
    """A checkpoint's tensor in its bucket, from byte `start` on."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    boxes: tuple[Box, ...]

    @property
    def nbytes(self) -> int:
        """Of the tensor."""
        return math.prod(self.shape) * self.dtype.itemsize

    def of(self, buffer: torch.Tensor) -> torch.Tensor:
        """The tensor as a view of its bucket's bytes."""
        return buffer[self.start : self.start + self.nbytes].view(self.dtype).view(self.shape)


@dataclass(frozen=True)
class Bucket:
    """Tensors that travel together, in `nbytes` of memory."""

    nbytes: int
    tensors: tuple[Whole, ...]

    def named(self, buffer: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
        """Its tensors, as views of its bytes."""
        return [(whole.name, whole.of(buffer)) for whole in self.tensors]


def make_buckets(shards: Iterable[Shard], *, most: int, family: ModelFamily | None = None) -> tuple[Bucket, ...]:
    """Deal the tensors that `shards` are parts of into buckets; the order of the shards does not matter.

    Args:
        shards: of all ranks, by canonical name.
        most: bytes of a bucket; a tensor that is larger travels alone.
        family: says what a checkpoint calls them, and which it joins; None if it has them as they are.

    Raises:
        PlanError: shards of a tensor disagree about it, overlap, or leave elements out; names the tensor.
        ConfigError: a tensor that a checkpoint joins lacks one of its parts.
    """
    by_name: dict[str, list[Shard]] = {}
    for shard in shards:
        by_name.setdefault(shard.name, []).append(shard)
    canonical = {name: _whole(name, parts) for name, parts in by_name.items()}
    wholes = list(canonical.values()) if family is None else _named_as_in_checkpoints(canonical, family)
    # What one rank sends lies side by side, and is one exchange.
    wholes.sort(key=lambda whole: (whole.boxes[0].owner, len(whole.boxes), whole.name))
    return tuple(_dealt(wholes, most))


class BucketGather:
    """Runs the exchanges of one rank.

    Args:
        buckets: of `make_buckets`, the same on all ranks.
        group: the trainer's ranks, for plain data.
        device: where this rank's tensors are, and its buckets are made.
        seconds: deadline of each wait: for the other ranks, and for an exchange.
        verify: compare what each rank holds of a tensor with what it got, and the ranks' buckets with each other.
        process_group: of torch.distributed, with the ranks of `group`; None is the default one.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        group: RankGroup,
        device: torch.device,
        *,
        seconds: float,
        verify: bool = False,
        process_group: Any = None,
    ) -> None:
        self._buckets, self._group, self._device = tuple(buckets), group, device
        self._seconds, self._verify, self._process_group = seconds, verify, process_group
        self._rounds = count()

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """What travels, in order."""
        return self._buckets

    def run(
        self,
        sources: Mapping[str, torch.Tensor],
        pack: Callable[[Bucket, torch.Tensor], str],
        deliver: Callable[[list[str]], None],
        *,
        delivery: float,
    ) -> list[int]:
        """Gather and deliver all buckets; every rank calls it. A bucket's memory is let go of before the next is made.

        Args:
            sources: this rank's tensors by canonical name.
            pack: on every rank, from a bucket and its bytes to what is delivered of it.
            deliver: on rank 0, what all ranks have packed, in their order.
            delivery: seconds that it may take.

        Raises:
            PlanError: this rank has not the tensors that the shards said. DeadlineError: a rank did not come, or an
                exchange did not end. Whatever a rank raises, the others raise too, and nothing more is delivered.

        Returns:
            checksums of the buckets, where they are verified; else zeros.
        """
        return [
            self._run_one(f"bucket {number} of {len(self._buckets)}", bucket, sources, pack, deliver, delivery)
            for number, bucket in enumerate(self._buckets, 1)
        ]

    def _run_one(
        self,
        name: str,
        bucket: Bucket,
        sources: Mapping[str, torch.Tensor],
        pack: Callable[[Bucket, torch.Tensor], str],
        deliver: Callable[[list[str]], None],
        delivery: float,
    ) -> int:
        held: list[torch.Tensor] = []

        def fill() -> None:
            held.append(self._filled(bucket, sources))

        def complete() -> tuple[str, int]:
            self._exchange(name, bucket, held[0])
            found = self._checked(bucket, held[0], sources) if self._verify else 0
            return pack(bucket, held[0]), found

        def conclude(all_ranks: list[tuple[str, int]]) -> int:
            if len({found for _, found in all_ranks}) > 1:
                sums = {rank: hex(found) for rank, (_, found) in enumerate(all_ranks)}
                raise PlanError(f"{name}: the ranks have gathered different bytes, checksums {sums}")
            deliver([payload for payload, _ in all_ranks])
            return all_ranks[0][1]

        # Nobody enters an exchange, which waits for all, before all have their parts in place.
        self._agree(f"{name}: own parts", fill, lambda _: None, 0.0, self._seconds)
        found: int = self._agree(f"{name}: exchange and delivery", complete, conclude, delivery, 2 * self._seconds)
        return found

    def _agree(
        self, phase: str, work: Callable[[], Any], conclude: Callable[[list[Any]], Any], allowance: float, wait: float
    ) -> Any:
        self._group.begin(f"gather-{next(self._rounds)}")
        return agree(self._group, phase, wait, work, conclude, allowance=allowance + wait)

    def _filled(self, bucket: Bucket, sources: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The bucket's memory, with this rank's boxes in place."""
        mine = self._group.rank
        buffer = torch.zeros(bucket.nbytes, dtype=torch.uint8, device=self._device)
        for whole in bucket.tensors:
            view = whole.of(buffer)
            for box in whole.boxes:
                if mine == box.owner:
                    box.of(view).copy_(_source(sources, whole, box, mine))
        return buffer

    def _exchange(self, name: str, bucket: Bucket, buffer: torch.Tensor) -> None:
        if self._group.size > 1:
            until = time.monotonic() + self._seconds
            runs, others = _spans(bucket, buffer)
            waiting = [(owner, self._broadcast(run, owner)) for owner, run in runs]
            for owner, work in waiting:
                self._await(name, owner, work, until)
            for owner, span in others:  # one after the other: each needs memory for itself
                part = span.contiguous()
                self._await(name, owner, self._broadcast(part.flatten().view(torch.uint8), owner), until)
                span.copy_(part)
        if buffer.is_cuda:  # whoever reads it next does so from another process
            torch.cuda.current_stream(buffer.device).synchronize()

    def _broadcast(self, part: torch.Tensor, owner: int) -> Any:
        return torch.distributed.broadcast(part, group=self._process_group, group_src=owner, async_op=True)

    def _await(self, name: str, owner: int, work: Any, until: float) -> None:
        pause, longest = _LOOK_S
        while not work.is_completed():
            if time.monotonic() >= until:
                raise DeadlineError(
                    f"{name}: what rank {owner} sends did not reach rank {self._group.rank} within "
                    f"{self._seconds:g} s; {_UNFINISHED}"
                )
            time.sleep(pause)
            pause = min(2 * pause, longest)
        work.wait()

    def _checked(self, bucket: Bucket, buffer: torch.Tensor, sources: Mapping[str, torch.Tensor]) -> int:
        """Checksum of the bucket; PlanError if it holds other bytes than this rank does, replicas included."""
        mine = self._group.rank
        for whole in bucket.tensors:
            view = whole.of(buffer)
            for box in whole.boxes:
                if mine in box.holders and not _same(box.of(view), _source(sources, whole, box, mine)):
                    raise PlanError(
                        f"{box.source}: rank {mine} holds other bytes at {list(box.start)} than rank {box.owner} sent "
                        "for all; replicas of a tensor have grown apart"
                    )
        return checksum(buffer)


def near_shards(shards: Iterable[Shard], ranks: range) -> list[Shard]:
    """What the ranks of one node hold, in their own numbering: each node gathers for its own engine."""
    return [replace(shard, rank=shard.rank - ranks.start) for shard in shards if shard.rank in ranks]


def require_equal(found: Sequence[Sequence[int]]) -> None:
    """PlanError if nodes have gathered other bytes, by the checksums that `BucketGather.run` gives each rank."""
    for rank, checksums in enumerate(found):
        for number, (here, first) in enumerate(zip(checksums, found[0], strict=True), 1):
            if here != first:
                raise PlanError(
                    f"bucket {number} of {len(checksums)}: rank {rank}'s node has gathered other bytes than rank 0's, "
                    f"checksums {here:#x} and {first:#x}; replicas of a tensor have grown apart"
                )


def _whole(name: str, shards: Sequence[Shard]) -> Whole:
    """A tensor from all shards of it, not yet in a bucket."""
    kinds = {(shard.dtype, shard.global_shape) for shard in shards}
    if len(kinds) > 1:
        raise PlanError(f"{name}: ranks disagree about its dtype or shape: {sorted(kinds)}")
    ((dtype, shape),) = kinds
    holders: dict[tuple[tuple[int, ...], tuple[int, ...]], set[int]] = {}
    for shard in shards:
        holders.setdefault(shard.box, set()).add(shard.rank)
    boxes = tuple(Box(start, extent, tuple(sorted(ranks)), name) for (start, extent), ranks in sorted(holders.items()))
    _check_cover(name, shape, boxes)
    return Whole(name, torch_dtype(dtype), shape, 0, boxes)


def _named_as_in_checkpoints(canonical: Mapping[str, Whole], family: ModelFamily) -> list[Whole]:
    """The same under the names of a checkpoint, and joined where it joins them: rows below rows."""
    waiting, made = dict(canonical), []
    for name in canonical:
        for joined, parts in family.joined.items():
            prefix = name.removesuffix(parts[0])
            if prefix != name and prefix.endswith("."):
                missing = [part for part in parts if prefix + part not in waiting]
                if missing:
                    raise ConfigError(f"{prefix}{joined}: the trainer has no {missing}, which are parts of it")
                rows = [waiting.pop(prefix + part) for part in parts]
                made.append(_joined(family.to_checkpoint(prefix + joined), rows))
    for whole in waiting.values():
        made.append(replace(whole, name=family.to_checkpoint(whole.name)))
    return made


def _joined(name: str, rows: Sequence[Whole]) -> Whole:
    kinds = {(whole.dtype, whole.shape[1:]) for whole in rows}
    if len(kinds) > 1:
        raise PlanError(f"{name}: its parts {[whole.name for whole in rows]} differ in more than their rows")
    boxes, first = [], 0
    for whole in rows:
        boxes += [replace(box, start=(box.start[0] + first, *box.start[1:])) for box in whole.boxes]
        first += whole.shape[0]
    return Whole(name, rows[0].dtype, (first, *rows[0].shape[1:]), 0, tuple(boxes))


def _check_cover(name: str, shape: tuple[int, ...], boxes: Sequence[Box]) -> None:
    """Boxes that lie inside, do not overlap, and have as many elements as the whole, are the whole."""
    for number, box in enumerate(boxes):
        outside = len(box.start) != len(shape) or any(
            start < 0 or start + length > size for start, length, size in zip(box.start, box.shape, shape, strict=True)
        )
        if outside:
            raise PlanError(f"{name}: a shard at {list(box.start)} of shape {list(box.shape)} is outside {list(shape)}")
        for other in boxes[:number]:
            if all(
                a < b + n and b < a + m
                for a, m, b, n in zip(box.start, box.shape, other.start, other.shape, strict=True)
            ):
                raise PlanError(
                    f"{name}: shards of ranks {other.owner} and {box.owner} overlap, at {list(other.start)} and "
                    f"{list(box.start)}"
                )
    found, expected = sum(math.prod(box.shape) for box in boxes), math.prod(shape)
    if found != expected:
        raise PlanError(f"{name}: all ranks together hold {found} of its {expected} elements")


def _dealt(wholes: Iterable[Whole], most: int) -> Iterator[Bucket]:
    placed: list[Whole] = []
    end = 0
    for whole in wholes:
        start = -(-end // _ALIGNMENT) * _ALIGNMENT
        if placed and start + whole.nbytes > most:
            yield Bucket(end, tuple(placed))
            placed, start = [], 0
        placed.append(replace(whole, start=start))
        end = start + whole.nbytes
    if placed:
        yield Bucket(end, tuple(placed))


def _spans(
    bucket: Bucket, buffer: torch.Tensor
) -> tuple[list[tuple[int, torch.Tensor]], list[tuple[int, torch.Tensor]]]:
    """What is exchanged, each with its owner, the same on all ranks: runs of bytes that one rank sends, and boxes that
    are no such run, such as columns.
    """
    runs: list[tuple[int, int, int]] = []  # owner, first byte, last byte
    others: list[tuple[int, torch.Tensor]] = []
    joins = False  # a run must not reach over a box that is none
    for whole in bucket.tensors:
        view = whole.of(buffer)
        for box in whole.boxes:
            span = box.of(view)
            if not span.is_contiguous():
                others.append((box.owner, span))
                joins = False
                continue
            first = whole.start + (span.storage_offset() - view.storage_offset()) * whole.dtype.itemsize
            last = first + span.numel() * whole.dtype.itemsize
            if joins and runs[-1][0] == box.owner and 0 <= first - runs[-1][2] < _ALIGNMENT:
                first = runs.pop()[1]
            runs.append((box.owner, first, last))
            joins = True
    return [(owner, buffer[first:last]) for owner, first, last in runs], others


def _source(sources: Mapping[str, torch.Tensor], whole: Whole, box: Box, rank: int) -> torch.Tensor:
    found = sources.get(box.source)
    if found is None or tuple(found.shape) != box.shape or found.dtype != whole.dtype:
        what = "nothing" if found is None else f"{found.dtype} {list(found.shape)}"
        raise PlanError(
            f"{box.source}: rank {rank} was to hold {whole.dtype} {list(box.shape)} of it and has {what}; was the "
            "model changed after the start?"
        )
    return found


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.flatten().view(torch.uint8), other.flatten().view(torch.uint8))
