"""The plan as plain data: which shard of which tensor goes where, and where it lives in an engine's live parameters.

Conventions. A *shard* is the part of a canonical tensor that one rank holds, always dense and row-major in its own
index space; `offset` places it in the global tensor. A *view* says where a destination shard lives inside a live engine
parameter, in elements from the parameter's first element. A *move* copies one box of a sender's shard to one box of a
receiver's shard; its starts are relative to the two local shards. Ranks of senders and of receivers are two separate
numberings, both from 0. With several engines the receivers are numbered through all of them.
"""

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from weftpub.errors import PlanError
from weftpub.plan.boxes import Box, Index
from weftpub.plan.dtypes import itemsize

__all__ = ["BLOCK", "SCALE_SUFFIX", "Destination", "Move", "Plan", "PlanPart", "Shard", "ViewSpec", "digest_of"]

BLOCK = (128, 128)
SCALE_SUFFIX = "_scale_inv"  # canonical name of a weight + this = canonical name of its dequant scale


@dataclass(frozen=True, slots=True)
class Shard:
    """What one rank holds of one canonical tensor.

    Attributes:
        name: canonical name.
        dtype: torch dtype name, such as ``float8_e4m3fn``.
        shape: extent of this shard.
        global_shape: extent of the whole canonical tensor.
        offset: where the shard's first element lies in the whole tensor.
        rank: sender rank or receiver rank, whichever side the shard is on.
    """

    name: str
    dtype: str
    shape: Index
    global_shape: Index
    offset: Index
    rank: int

    @property
    def box(self) -> Box:
        """(offset, shape): the shard's place in the whole tensor."""
        return self.offset, self.shape

    @property
    def nbytes(self) -> int:
        """Bytes of this shard."""
        return math.prod(self.shape) * itemsize(self.dtype)


@dataclass(frozen=True, slots=True)
class ViewSpec:
    """Where a shard lives inside a named tensor (a live parameter, or a buffer of the trainer).

    Attributes:
        param: name of that tensor in its own system.
        offset: elements from that tensor's first element (not from its storage's).
        shape: the view's shape; equals the shard's.
        stride: the view's strides, in elements.
        dtype: torch dtype name; equals that tensor's.
    """

    param: str
    offset: int
    shape: Index
    stride: Index
    dtype: str


@dataclass(frozen=True, slots=True)
class Destination:
    """A shard that an engine rank serves, and its place in that rank's live parameters."""

    shard: Shard
    view: ViewSpec


@dataclass(frozen=True, slots=True)
class Move:
    """One box of one tensor, from a sender's shard to a receiver's shard.

    Attributes:
        send_start, recv_start: first element of the box, relative to the local shards.
        shape: extent of the box.
        nbytes: bytes of the box.
        replica: which of the destinations of this name on this rank, in the plan's order. An engine that balances
            experts may hold one expert twice.
    """

    name: str
    send_rank: int
    send_start: Index
    recv_rank: int
    recv_start: Index
    shape: Index
    dtype: str
    nbytes: int
    replica: int = 0


@dataclass(frozen=True)
class Plan:
    """Who sends what to whom. Made once per pair of layouts, checked by `check_plan` before a byte moves.

    Attributes:
        sources: what every sender rank holds. Equal boxes on several ranks are replicas: moves use one of them.
        destinations: what every receiver rank serves, with its view.
        moves: the copies; together they write every destination element exactly once.
        block: block shape of FP8 weights.
        layouts: receiver rank to digest of the parameter layout that its views were made from
            (`EngineDescription.layout_digest`); a rank that has another layout by the time the plan arrives refuses it.
            Ranks may be left out.
    """

    sources: tuple[Shard, ...]
    destinations: tuple[Destination, ...]
    moves: tuple[Move, ...]
    block: tuple[int, int] = BLOCK
    layouts: Mapping[int, str] = field(default_factory=dict[int, str])

    @cached_property
    def digest(self) -> str:
        """sha256 of the canonical JSON: equal digests mean equal plans."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    @cached_property
    def senders(self) -> tuple[int, ...]:
        """Ranks that hold a source shard, ascending."""
        return tuple(sorted({shard.rank for shard in self.sources}))

    @cached_property
    def receivers(self) -> tuple[int, ...]:
        """Ranks that serve a destination shard, ascending."""
        return tuple(sorted({destination.shard.rank for destination in self.destinations}))

    def for_sender(self, rank: int) -> tuple[Move, ...]:
        """The moves that sender `rank` makes, in the plan's order."""
        return self._moves_by_sender.get(rank, ())

    def for_receiver(self, rank: int) -> "PlanPart":
        """What receiver `rank` must know: its destinations, and its moves in the order of their places in its
        parameters.
        """
        destinations = self._destinations_by_rank.get(rank, ())
        index: dict[tuple[str, int], int] = {}
        seen: dict[str, int] = {}
        for position, destination in enumerate(destinations):
            name = destination.shard.name
            index[name, seen.setdefault(name, 0)] = position
            seen[name] += 1
        pairs = [(move, index.get((move.name, move.replica), -1)) for move in self._moves_by_receiver.get(rank, ())]
        for move, position in pairs:
            if position < 0:
                raise PlanError(
                    f"{move.name}: a move goes to replica {move.replica} on receiver rank {rank}, which serves no "
                    "such shard"
                )
        pairs.sort(key=lambda pair: _place(pair[0], destinations[pair[1]].view))
        return PlanPart(
            rank=rank,
            plan_digest=self.digest,
            block=self.block,
            layout=self.layouts.get(rank, ""),
            destinations=destinations,
            moves=tuple(move for move, _ in pairs),
            targets=tuple(position for _, position in pairs),
        )

    def to_json(self) -> str:
        """Canonical JSON: plain lists, one row per shard, destination and move; read back by `from_json`."""
        return _dump(
            {
                "format": 1,
                "block": self.block,
                "layouts": {str(rank): self.layouts[rank] for rank in sorted(self.layouts)},
                "sources": [_shard_row(shard) for shard in self.sources],
                "destinations": [_destination_row(destination) for destination in self.destinations],
                "moves": [_move_row(move) for move in self.moves],
            }
        )

    @classmethod
    def from_json(cls, text: str | bytes) -> "Plan":
        """Read a plan; PlanError if the text is not one. Call `check_plan` on the result."""
        data = _load(text, ("format", "block", "layouts", "sources", "destinations", "moves"))
        try:
            return cls(
                sources=tuple(_shard(row) for row in data["sources"]),
                destinations=tuple(_destination(row) for row in data["destinations"]),
                moves=tuple(_move(row) for row in data["moves"]),
                block=_block(data["block"]),
                layouts={int(rank): _text(digest) for rank, digest in data["layouts"].items()},
            )
        except (TypeError, ValueError, AttributeError) as error:
            raise PlanError(f"not a plan: {error}") from None

    @cached_property
    def _moves_by_sender(self) -> dict[int, tuple[Move, ...]]:
        return _grouped((move.send_rank, move) for move in self.moves)

    @cached_property
    def _moves_by_receiver(self) -> dict[int, tuple[Move, ...]]:
        return _grouped((move.recv_rank, move) for move in self.moves)

    @cached_property
    def _destinations_by_rank(self) -> dict[int, tuple[Destination, ...]]:
        return _grouped((destination.shard.rank, destination) for destination in self.destinations)


@dataclass(frozen=True)
class PlanPart:
    """One receiver's part of a plan: all that an engine process needs, as plain data.

    Attributes:
        plan_digest: digest of the whole plan.
        layout: digest of the parameter layout the views were made from, or "".
        moves: this rank's moves, ordered by parameter and place, so that neighbours in memory are neighbours on the
            way.
        targets: for each move, the index of its destination.
    """

    rank: int
    plan_digest: str
    block: tuple[int, int]
    layout: str
    destinations: tuple[Destination, ...]
    moves: tuple[Move, ...]
    targets: tuple[int, ...]

    def to_json(self) -> str:
        """Canonical JSON, read back by `from_json`."""
        return _dump(
            {
                "format": 1,
                "rank": self.rank,
                "plan_digest": self.plan_digest,
                "block": self.block,
                "layout": self.layout,
                "destinations": [_destination_row(destination) for destination in self.destinations],
                "moves": [_move_row(move) for move in self.moves],
                "targets": self.targets,
            }
        )

    @classmethod
    def from_json(cls, text: str | bytes) -> "PlanPart":
        """Read a part; PlanError if the text is not one."""
        data = _load(text, ("format", "rank", "plan_digest", "block", "layout", "destinations", "moves", "targets"))
        try:
            part = cls(
                rank=_whole(data["rank"]),
                plan_digest=_text(data["plan_digest"]),
                block=_block(data["block"]),
                layout=_text(data["layout"]),
                destinations=tuple(_destination(row) for row in data["destinations"]),
                moves=tuple(_move(row) for row in data["moves"]),
                targets=_index(data["targets"]),
            )
        except (TypeError, ValueError, AttributeError) as error:
            raise PlanError(f"not a plan part: {error}") from None
        if len(part.targets) != len(part.moves) or any(t < 0 or t >= len(part.destinations) for t in part.targets):
            raise PlanError("not a plan part: every move needs the index of one of its destinations")
        return part


def digest_of(value: object) -> str:
    """sha256 of the canonical JSON of plain data."""
    return hashlib.sha256(_dump(value).encode()).hexdigest()


def _place(move: Move, view: ViewSpec) -> tuple[str, int]:
    return view.param, view.offset + sum(s * k for s, k in zip(move.recv_start, view.stride, strict=True))


def _grouped[T](pairs: Iterable[tuple[int, T]]) -> dict[int, tuple[T, ...]]:
    groups: dict[int, list[T]] = {}
    for rank, item in pairs:
        groups.setdefault(rank, []).append(item)
    return {rank: tuple(items) for rank, items in groups.items()}


def _dump(value: object) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=True)


def _load(text: str | bytes, keys: tuple[str, ...]) -> dict[str, Any]:
    try:
        data = json.loads(text)
    except (ValueError, TypeError, RecursionError) as error:
        raise PlanError(f"not a plan: {error}") from None
    if not isinstance(data, dict) or tuple(sorted(data)) != tuple(sorted(keys)):
        raise PlanError(f"not a plan: expected an object with the keys {', '.join(keys)}")
    if data["format"] != 1:
        raise PlanError(
            f"plan format {data['format']!r} is not known to this release, which reads format 1; make the plan again"
        )
    return data


def _shard_row(s: Shard) -> list[object]:
    return [s.name, s.dtype, s.shape, s.global_shape, s.offset, s.rank]


def _destination_row(d: Destination) -> list[object]:
    return [*_shard_row(d.shard), d.view.param, d.view.offset, d.view.shape, d.view.stride, d.view.dtype]


def _move_row(m: Move) -> list[object]:
    return [m.name, m.send_rank, m.send_start, m.recv_rank, m.recv_start, m.shape, m.dtype, m.nbytes, m.replica]


def _shard(row: list[Any]) -> Shard:
    name, dtype, shape, global_shape, offset, rank = row
    return Shard(_text(name), _text(dtype), _index(shape), _index(global_shape), _index(offset), _whole(rank))


def _destination(row: list[Any]) -> Destination:
    param, offset, shape, stride, dtype = row[6:]
    return Destination(
        _shard(row[:6]), ViewSpec(_text(param), _whole(offset), _index(shape), _index(stride), _text(dtype))
    )


def _move(row: list[Any]) -> Move:
    name, send_rank, send_start, recv_rank, recv_start, shape, dtype, nbytes, replica = row
    return Move(
        _text(name),
        _whole(send_rank),
        _index(send_start),
        _whole(recv_rank),
        _index(recv_start),
        _index(shape),
        _text(dtype),
        _whole(nbytes),
        _whole(replica),
    )


def _block(value: list[Any]) -> tuple[int, int]:
    rows, columns = _index(value)
    return rows, columns


def _index(value: list[Any]) -> Index:
    return tuple(_whole(item) for item in value)


def _whole(value: object) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"expected a whole number that is not negative, found {value!r}")
    return value


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"expected text, found {value!r}")
    return value
