"""Where source and destination are the same bytes: which moves of a plan need no copy, and why the others do.

A trainer's buffer and an engine's parameter may both lie in one allocation that both processes map. A move whose box
lies at the same place of the same allocation on both sides is done as soon as the bytes are written. This is pure
arithmetic on what both sides say; a receiver trusts none of it, and looks at its own addresses when a publish comes.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from weftpub.errors import PlanError
from weftpub.plan.dtypes import itemsize
from weftpub.plan.types import Move, Plan, ViewSpec

__all__ = ["Coincidences", "MoveVerdict", "Place", "SourcePlaces", "find_coincidences", "places_of"]

SETTINGS_KEY = "shared_memory"  # in an engine description's settings: parameter name -> [allocation, byte offset]


@dataclass(frozen=True, slots=True)
class Place:
    """Where a named tensor's first element lies.

    Attributes:
        gpu: "cpu", or the UUID of the GPU.
        allocation: id of the shared allocation.
        offset: bytes from its start.
    """

    gpu: str
    allocation: str
    offset: int


@dataclass(frozen=True)
class SourcePlaces:
    """One sender rank's side.

    Attributes:
        views: canonical name to its place in a buffer.
        places: buffer name to its place; buffers of the trainer's own memory are left out.
        reasons: buffer name to why it is not shared, where there is more to say than that it is not.
    """

    views: Mapping[str, ViewSpec]
    places: Mapping[str, Place]
    reasons: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class MoveVerdict:
    """What becomes of one move.

    Attributes:
        in_place: whether its bytes are the same on both sides, so that nothing is copied.
        reason: why, in words.
    """

    move: Move
    in_place: bool
    reason: str


@dataclass(frozen=True)
class Coincidences:
    """Verdicts on all moves of a plan, in its order."""

    verdicts: tuple[MoveVerdict, ...]

    @property
    def nbytes(self) -> int:
        """Bytes that need no copy."""
        return sum(verdict.move.nbytes for verdict in self.verdicts if verdict.in_place)

    def explain(self) -> list[str]:
        """One line for each reason, with how many moves and bytes it concerns, most bytes first."""
        moves, sizes = Counter[tuple[bool, str]](), Counter[tuple[bool, str]]()
        for verdict in self.verdicts:
            key = verdict.in_place, verdict.reason
            moves[key] += 1
            sizes[key] += verdict.move.nbytes
        return [
            f"{'in place' if in_place else 'copied'}: {moves[in_place, reason]} moves, {nbytes} bytes: {reason}"
            for (in_place, reason), nbytes in sizes.most_common()
        ]


def places_of(device: str, settings: Mapping[str, Any]) -> dict[str, Place]:
    """Parameter name to its place, from what an engine says about itself; empty if it shares nothing.

    Raises:
        PlanError: what it says cannot be read.
    """
    try:
        return {
            str(name): Place(device, str(allocation), int(offset))
            for name, (allocation, offset) in settings.get(SETTINGS_KEY, {}).items()
        }
    except (TypeError, ValueError, AttributeError):
        raise PlanError(
            f"the engine's {SETTINGS_KEY} cannot be read; trainer and engine must run the same release of weftpub"
        ) from None


def find_coincidences(
    plan: Plan, sources: Mapping[int, SourcePlaces], targets: Mapping[int, Mapping[str, Place]]
) -> Coincidences:
    """Judge every move.

    Args:
        plan: the plan.
        sources: sender rank to its side; ranks that share nothing may be left out.
        targets: receiver rank to its parameters' places (`places_of`).
    """
    views = {
        (destination.shard.name, destination.shard.rank, number): destination.view
        for destination, number in _numbered(plan)
    }
    verdicts: list[MoveVerdict] = []
    for move in plan.moves:
        source, target = sources.get(move.send_rank), targets.get(move.recv_rank, {})
        verdicts.append(_judge(move, source, views[move.name, move.recv_rank, move.replica], target))
    return Coincidences(tuple(verdicts))


def _judge(move: Move, source: SourcePlaces | None, served: ViewSpec, target: Mapping[str, Place]) -> MoveVerdict:
    there = target.get(served.param)
    if source is None or there is None:
        who = "the trainer's" if source is None else f"the engine's {_kind(served.param)}"
        return MoveVerdict(move, False, f"{who} memory is its own")
    sent = source.views[move.name]
    here = source.places.get(sent.param)
    if here is None:
        reason = source.reasons.get(sent.param, "the trainer's buffer is its own memory")
        return MoveVerdict(move, False, reason)
    if here.gpu != there.gpu:
        return MoveVerdict(
            move, False, f"trainer rank {move.send_rank} has it on {here.gpu}, the engine on {there.gpu}"
        )
    if here.allocation != there.allocation:
        return MoveVerdict(move, False, "trainer and engine map two different allocations of this GPU")
    if _first(here, sent, move.send_start) != _first(there, served, move.recv_start):
        return MoveVerdict(move, False, "it lies elsewhere in the same allocation: the orders of experts differ")
    if _steps(sent, move) != _steps(served, move):
        return MoveVerdict(move, False, "rows are laid out differently on the two sides")
    return MoveVerdict(move, True, "trainer and engine map the same bytes")


def _first(place: Place, view: ViewSpec, start: tuple[int, ...]) -> int:
    """Byte offset in the allocation of the first element of a box of a view."""
    element = view.offset + sum(s * k for s, k in zip(start, view.stride, strict=True))
    return place.offset + element * itemsize(view.dtype)


def _steps(view: ViewSpec, move: Move) -> tuple[int, ...]:
    return tuple(k for n, k in zip(move.shape, view.stride, strict=True) if n != 1)


def _numbered(plan: Plan) -> Iterable[tuple[Any, int]]:
    """Destinations with their number among those of their name and rank."""
    seen = Counter[tuple[str, int]]()
    for destination in plan.destinations:
        key = destination.shard.name, destination.shard.rank
        yield destination, seen[key]
        seen[key] += 1


def _kind(param: str) -> str:
    """The parameter without its layer, so that all layers have one reason."""
    return param.rpartition(".")[2]
