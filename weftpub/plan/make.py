"""Join two layouts: every destination shard takes each of its elements from the one sender that is to send it.

This planner knows boxes and nothing else. Layouts come from an adapter; a plan made elsewhere passes the same
`check_plan`.
"""

import math
from collections.abc import Iterable, Mapping

from weftpub.errors import PlanError
from weftpub.plan.boxes import intersect
from weftpub.plan.check import check_plan
from weftpub.plan.dtypes import itemsize
from weftpub.plan.types import BLOCK, Destination, Move, Plan, Shard

__all__ = ["make_plan"]


def make_plan(
    sources: Iterable[Shard],
    destinations: Iterable[Destination],
    *,
    block: tuple[int, int] = BLOCK,
    layouts: Mapping[int, str] | None = None,
) -> Plan:
    """Plan the moves from `sources` to `destinations` and check them.

    Replicas among the senders (equal boxes of one name) share the work: receiver rank r takes from replica r modulo
    their number, and a scale from the same rank as its weight, because both have the same replicas in the same order.

    Raises:
        PlanError: see `check_plan`.
    """
    held, served = tuple(sources), tuple(destinations)
    by_name: dict[str, dict[tuple[tuple[int, ...], tuple[int, ...]], list[Shard]]] = {}
    for shard in held:
        by_name.setdefault(shard.name, {}).setdefault(shard.box, []).append(shard)
    for boxes in by_name.values():
        for replicas in boxes.values():
            replicas.sort(key=lambda shard: shard.rank)
    moves: list[Move] = []
    seen: dict[tuple[str, int], int] = {}
    for destination in served:
        shard = destination.shard
        replica = seen.get((shard.name, shard.rank), 0)
        seen[shard.name, shard.rank] = replica + 1
        for replicas in by_name.get(shard.name, {}).values():
            move = _move(replicas[shard.rank % len(replicas)], shard, replica)
            if move is not None:
                moves.append(move)
    plan = Plan(held, served, tuple(moves), block, dict(layouts or {}))
    check_plan(plan)
    return plan


def _move(source: Shard, target: Shard, replica: int) -> Move | None:
    if len(source.offset) != len(target.offset):
        raise PlanError(
            f"{target.name}: sender rank {source.rank} holds {len(source.offset)} dimensions, receiver rank "
            f"{target.rank} serves {len(target.offset)}"
        )
    if source.box == target.box:  # most experts: nothing is cut
        whole = (0,) * len(target.shape)
        nbytes = math.prod(target.shape) * itemsize(target.dtype)
        return Move(target.name, source.rank, whole, target.rank, whole, target.shape, target.dtype, nbytes, replica)
    common = intersect(source.box, target.box)
    if common is None:
        return None
    start, shape = common
    return Move(
        name=target.name,
        send_rank=source.rank,
        send_start=tuple(s - o for s, o in zip(start, source.offset, strict=True)),
        recv_rank=target.rank,
        recv_start=tuple(s - o for s, o in zip(start, target.offset, strict=True)),
        shape=shape,
        dtype=target.dtype,
        nbytes=math.prod(shape) * itemsize(target.dtype),
        replica=replica,
    )
