"""Everything that must hold before a byte moves.

The checks run once per plan and cost time linear in its size: every lookup is by name and rank, and coverage is counted
on boxes, not elements.
Their order gives the most useful error first: names, then shapes and dtypes, then block alignment (an illegal tensor
parallel size shows up there with the sizes that would do), then coverage, scales and views.
"""

import math
import re
from collections.abc import Iterable, Mapping

from weftpub.errors import PlanError
from weftpub.plan.boxes import Box, Index, coverage, inside
from weftpub.plan.dtypes import itemsize
from weftpub.plan.legal import explain_illegal_tp
from weftpub.plan.types import SCALE_SUFFIX, Destination, Move, Plan, PlanPart, Shard
from weftpub.plan.views import ParameterSpec, check_disjoint, check_views, listing

__all__ = ["check_part", "check_plan"]

_FP8 = ("float8_e4m3fn",)
_EXPERT = re.compile(r"(.*\.experts\.)(\d+)\.")

type _Layout = Mapping[str, ParameterSpec]


def check_plan(
    plan: Plan,
    *,
    parameters: Mapping[int, _Layout] | None = None,
    exempt: Mapping[int, Mapping[str, str]] | None = None,
) -> None:
    """Prove that `plan` writes every destination element exactly once, with the right bytes' box, and nothing else.

    Args:
        plan: the plan.
        parameters: receiver rank to its parameter layouts (`EngineDescription.layout()`); with them the views are
            checked to lie inside and to leave nothing unwritten. Receivers repeat that check against their live
            parameters.
        exempt: receiver rank to the parameters that need not be written wholly, with reasons.

    Raises:
        PlanError: the first fault found, naming tensors, ranks, what was expected and what was found.
    """
    sources, targets = _index(plan)
    _check_names(plan)
    _check_shards(plan)
    _check_blocks(plan)
    _check_moves(plan, sources, targets)
    _check_coverage(plan, targets)
    _check_whole(plan)
    _check_scales(plan, targets)
    if parameters is None:
        check_disjoint(plan.destinations)
        return
    for rank in plan.receivers:
        if rank not in parameters:
            raise PlanError(
                f"receiver rank {rank}: no description of its parameters; describe every rank before planning"
            )
        part = [d for d in plan.destinations if d.shard.rank == rank]
        check_views(part, parameters[rank], (exempt or {}).get(rank, {}))


def check_part(part: PlanPart) -> None:
    """Prove that a receiver's part writes every element of its destinations exactly once, and nothing beside them: what
    a receiver can see by itself of a plan that nobody may have checked.

    Raises:
        PlanError: the first fault found, naming the tensor.
    """
    boxes: list[list[Box]] = [[] for _ in part.destinations]
    for move, target in zip(part.moves, part.targets, strict=True):
        shard = part.destinations[target].shard
        if (move.name, move.recv_rank) != (shard.name, shard.rank) or shard.rank != part.rank:
            raise PlanError(
                f"{move.name}: a move to receiver rank {move.recv_rank} is in the part of rank {part.rank}, where it "
                f"writes {shard.name} of rank {shard.rank}"
            )
        if not inside((move.recv_start, move.shape), shard.shape):
            raise PlanError(
                f"{move.name}: a move writes {list(move.shape)} at {list(move.recv_start)}, which leaves the shard "
                f"{list(shard.shape)} of receiver rank {part.rank}"
            )
        _check_size(move, shard)
        boxes[target].append((move.recv_start, move.shape))
    for destination, written in zip(part.destinations, boxes, strict=True):
        _check_place(destination)
        _check_once(destination.shard, written)


type _Sources = Mapping[tuple[str, int], Shard]
type _Targets = Mapping[tuple[str, int], list[Destination]]


def _index(plan: Plan) -> tuple[_Sources, _Targets]:
    sources: dict[tuple[str, int], Shard] = {}
    for shard in plan.sources:
        if sources.setdefault((shard.name, shard.rank), shard) is not shard:
            raise PlanError(
                f"{shard.name}: sender rank {shard.rank} lists two shards of it; a sender holds one shard of a name"
            )
    targets: dict[tuple[str, int], list[Destination]] = {}
    for destination in plan.destinations:
        targets.setdefault((destination.shard.name, destination.shard.rank), []).append(destination)
    return sources, targets


def _check_names(plan: Plan) -> None:
    sent = {shard.name for shard in plan.sources}
    served = {destination.shard.name for destination in plan.destinations}
    faults: list[str] = []
    if sent - served:
        faults.append(
            f"the engine has no place for {len(sent - served)} tensors of the trainer: {listing(sorted(sent - served))}"
        )
    if served - sent:
        faults.append(
            f"the trainer sends nothing for {len(served - sent)} tensors of the engine: "
            f"{listing(sorted(served - sent))}"
        )
    if faults:
        raise PlanError(
            "; ".join(faults) + "; every name must be on both sides: check the name tables and the expert numbering"
        )


def _check_shards(plan: Plan) -> None:
    known: dict[str, Shard] = {}
    for side, shards in (("sender", plan.sources), ("receiver", tuple(d.shard for d in plan.destinations))):
        for shard in shards:
            itemsize(shard.dtype)
            if len(shard.shape) != len(shard.global_shape) or not inside(shard.box, shard.global_shape):
                raise PlanError(
                    f"{shard.name}: the shard of {side} rank {shard.rank} at {list(shard.offset)} with shape "
                    f"{list(shard.shape)} "
                    f"is not inside the whole tensor {list(shard.global_shape)}"
                )
            first = known.setdefault(shard.name, shard)
            if (first.dtype, first.global_shape) != (shard.dtype, shard.global_shape):
                raise PlanError(
                    f"{shard.name}: {side} rank {shard.rank} has {shard.dtype} {list(shard.global_shape)}, sender "
                    f"rank {first.rank} has "
                    f"{first.dtype} {list(first.global_shape)}; both sides must have one dtype and one whole shape"
                )
    for destination in plan.destinations:
        _check_place(destination)


def _check_place(destination: Destination) -> None:
    shard, view = destination.shard, destination.view
    if (view.shape, view.dtype) != (shard.shape, shard.dtype):
        raise PlanError(
            f"{shard.name}: its view of {view.param} on receiver rank {shard.rank} is {view.dtype} "
            f"{list(view.shape)}, "
            f"the shard is {shard.dtype} {list(shard.shape)}"
        )


def _check_blocks(plan: Plan) -> None:
    """Shards of FP8 weights begin and end at block edges, or at the edge of the tensor."""
    for side, shards in (("receiver", (d.shard for d in plan.destinations)), ("sender", plan.sources)):
        for shard in shards:
            if shard.dtype not in _FP8:
                continue
            dimension = _cut_block(shard.box, shard.global_shape, plan.block)
            if dimension is not None:
                whole, part = shard.global_shape[dimension], shard.shape[dimension]
                tp = max(1, round(whole / part)) if part else 1
                reason = explain_illegal_tp(
                    whole,
                    tp,
                    experts=_experts(plan, shard.name),
                    block=plan.block[dimension],
                    name=f"dimension {dimension} of size",
                )
                raise PlanError(
                    f"{shard.name}: the shard of {side} rank {shard.rank} cuts through a quantization block: {reason}"
                )


def _cut_block(box: Box, whole: Index, block: tuple[int, int]) -> int | None:
    """-2 or -1, whichever of the last two dimensions `box` cuts inside a block; None if neither."""
    for dimension in (-2, -1):
        if len(whole) < -dimension:
            continue
        start, end = box[0][dimension], box[0][dimension] + box[1][dimension]
        if start % block[dimension] or (end % block[dimension] and end != whole[dimension]):
            return dimension
    return None


def _experts(plan: Plan, name: str) -> int | None:
    """Number of routed experts beside the one `name` belongs to, as far as the names tell."""
    match = _EXPERT.match(name)
    if match is None:
        return None
    prefix = match[1]
    return len({found[2] for shard in plan.sources if (found := _EXPERT.match(shard.name)) and found[1] == prefix})


def _check_moves(plan: Plan, sources: _Sources, targets: _Targets) -> None:
    for move in plan.moves:
        source = sources.get((move.name, move.send_rank))
        if source is None:
            raise PlanError(f"{move.name}: a move reads it from sender rank {move.send_rank}, which does not hold it")
        replicas = targets.get((move.name, move.recv_rank), [])
        if move.replica >= len(replicas):
            raise PlanError(
                f"{move.name}: a move writes its replica {move.replica} on receiver rank {move.recv_rank}, which "
                f"serves {len(replicas)}"
            )
        target = replicas[move.replica].shard
        if not inside((move.send_start, move.shape), source.shape) or not inside(
            (move.recv_start, move.shape), target.shape
        ):
            raise PlanError(
                f"{move.name}: the box {list(move.shape)} from {list(move.send_start)} of sender rank "
                f"{move.send_rank} (shard {list(source.shape)}) to "
                f"{list(move.recv_start)} of receiver rank {move.recv_rank} (shard {list(target.shape)}) leaves a shard"
            )
        read = _sum(source.offset, move.send_start)
        written = _sum(target.offset, move.recv_start)
        if read != written:
            raise PlanError(
                f"{move.name}: a move reads element {list(read)} of the whole tensor from sender rank "
                f"{move.send_rank} and writes it as element "
                f"{list(written)} on receiver rank {move.recv_rank}"
            )
        _check_size(move, target)


def _check_size(move: Move, target: Shard) -> None:
    if move.dtype != target.dtype or move.nbytes != math.prod(move.shape) * itemsize(move.dtype):
        raise PlanError(
            f"{move.name}: a move of {move.dtype} {list(move.shape)} with {move.nbytes} bytes does not fit "
            f"{target.dtype}"
        )


def _check_coverage(plan: Plan, targets: _Targets) -> None:
    boxes: dict[tuple[str, int, int], list[Box]] = {}
    for move in plan.moves:
        boxes.setdefault((move.name, move.recv_rank, move.replica), []).append((move.recv_start, move.shape))
    for (name, rank), replicas in targets.items():
        for replica, destination in enumerate(replicas):
            _check_once(destination.shard, boxes.get((name, rank, replica), []))


def _check_once(shard: Shard, written: list[Box]) -> None:
    least, most = coverage(written, shard.shape)
    if (least, most) != (1, 1):
        fault = "is written only in part" if least == 0 else f"has elements that are written {most} times"
        raise PlanError(
            f"{shard.name}: the shard {list(shard.shape)} at {list(shard.offset)} of receiver rank {shard.rank} "
            f"{fault}; every element must be written exactly once"
        )


def _check_whole(plan: Plan) -> None:
    """Sender boxes of a name are equal or disjoint, and all receivers together serve the whole tensor."""
    for name, (whole, boxes) in _distinct(plan.sources).items():
        if coverage(boxes, whole)[1] > 1:
            raise PlanError(
                f"{name}: senders hold overlapping but different parts of it ({listing([str(box) for box in boxes])}); "
                "replicas must be equal, so that a checksum can prove it"
            )
    for name, (whole, boxes) in _distinct(d.shard for d in plan.destinations).items():
        if coverage(boxes, whole)[0] == 0:
            raise PlanError(
                f"{name}: no receiver serves some elements of the whole tensor {list(whole)}; "
                "are the receivers' ranks and expert numbers global?"
            )


def _distinct(shards: Iterable[Shard]) -> dict[str, tuple[Index, list[Box]]]:
    """Per name that is held in parts anywhere: the whole shape and the different boxes that ranks hold of it."""
    held = tuple(shards)
    parted = {shard.name for shard in held if shard.shape != shard.global_shape}
    found: dict[str, tuple[Index, dict[Box, None]]] = {}
    for shard in held:
        if shard.name in parted:
            found.setdefault(shard.name, (shard.global_shape, {}))[1][shard.box] = None
    return {name: (whole, list(boxes)) for name, (whole, boxes) in found.items()}


def _check_scales(plan: Plan, targets: _Targets) -> None:
    """Every FP8 weight has its scale, sharded in the same blocks, and every scale's move follows its weight's."""
    held = {shard.name: shard for shard in plan.sources}
    weights = {name: shard for name, shard in held.items() if shard.dtype in _FP8}
    bare = sorted(name for name in weights if name + SCALE_SUFFIX not in held)
    if bare:
        raise PlanError(f"FP8 weights without a dequant scale: {listing(bare)}; send {bare[0] + SCALE_SUFFIX} with it")
    orphans = sorted(n for n in held if n.endswith(SCALE_SUFFIX) and n.removesuffix(SCALE_SUFFIX) not in weights)
    if orphans:
        raise PlanError(
            f"dequant scales without an FP8 weight: {listing(orphans)}; send the weight in FP8, or no scale"
        )
    for name, weight in weights.items():
        scale = held[name + SCALE_SUFFIX]
        if scale.global_shape != _in_blocks(weight.global_shape, plan.block):
            raise PlanError(
                f"{scale.name}: shape {list(scale.global_shape)}, expected "
                f"{list(_in_blocks(weight.global_shape, plan.block))} for a weight "
                f"{list(weight.global_shape)} in blocks of {list(plan.block)}"
            )
    _check_scale_places(plan, targets, weights)
    _check_scale_moves(plan, targets, weights)


def _check_scale_places(plan: Plan, targets: _Targets, weights: Mapping[str, Shard]) -> None:
    for (name, rank), replicas in targets.items():
        if name not in weights:
            continue
        scales = targets.get((name + SCALE_SUFFIX, rank), [])
        if len(scales) != len(replicas):
            raise PlanError(f"{name}: receiver rank {rank} serves {len(replicas)} of it and {len(scales)} of its scale")
        for weight, scale in zip(replicas, scales, strict=True):
            expected = _box_in_blocks(weight.shard.box, plan.block)
            if scale.shard.box != expected:
                raise PlanError(
                    f"{scale.shard.name}: receiver rank {rank} serves {list(scale.shard.shape)} at "
                    f"{list(scale.shard.offset)}, its weight needs "
                    f"{list(expected[1])} at {list(expected[0])}; a scale is sharded as its weight"
                )


def _check_scale_moves(plan: Plan, targets: _Targets, weights: Mapping[str, Shard]) -> None:
    scales = {_route(move, targets) for move in plan.moves if move.name.endswith(SCALE_SUFFIX)}
    for move in plan.moves:
        if move.name not in weights:
            continue
        send, recv, replica, _, box = _route(move, targets)
        if _cut_block(box, weights[move.name].global_shape, plan.block) is not None:
            raise PlanError(
                f"{move.name}: a move of {list(move.shape)} at {list(box[0])} of the whole tensor cuts through a "
                f"quantization block of {plan.block}"
            )
        if (send, recv, replica, move.name + SCALE_SUFFIX, _box_in_blocks(box, plan.block)) not in scales:
            raise PlanError(
                f"{move.name}: sender rank {send} sends {list(move.shape)} at {list(box[0])} to receiver rank {recv} "
                "without the scale of just these "
                "blocks; a scale's moves follow its weight's"
            )


type _Route = tuple[int, int, int, str, Box]


def _route(move: Move, targets: _Targets) -> _Route:
    """Who sends which box of the whole tensor to which replica on whom."""
    offset = targets[move.name, move.recv_rank][move.replica].shard.offset
    return move.send_rank, move.recv_rank, move.replica, move.name, (_sum(offset, move.recv_start), move.shape)


def _sum(a: Index, b: Index) -> Index:
    return tuple(x + y for x, y in zip(a, b, strict=True)) if any(b) else a


def _in_blocks(shape: Index, block: tuple[int, int]) -> Index:
    sizes = (1,) * (len(shape) - 2) + block[max(0, 2 - len(shape)) :]
    return tuple(-(-n // b) for n, b in zip(shape, sizes, strict=True))


def _box_in_blocks(box: Box, block: tuple[int, int]) -> Box:
    start, shape = box
    sizes = (1,) * (len(shape) - 2) + block[max(0, 2 - len(shape)) :]
    first = tuple(s // b for s, b in zip(start, sizes, strict=True))
    return first, tuple(-(-(s + n) // b) - f for s, n, b, f in zip(start, shape, sizes, first, strict=True))
