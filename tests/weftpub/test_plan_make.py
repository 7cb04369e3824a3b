"""Planning tables: which boxes go where, for the layouts that trainers and engines have."""

from dataclasses import replace

import pytest
import torch
from publish_world import World

from weftpub.errors import PlanError
from weftpub.plan import Destination, Plan, PlanPart, Shard, ViewSpec, check_plan, make_plan


def line(name: str, size: int, cuts: list[tuple[int, int]]) -> list[Shard]:
    """1-D float32 shards: (start, stop) per rank."""
    return [Shard(name, "float32", (b - a,), (size,), (a,), rank) for rank, (a, b) in enumerate(cuts)]


def served(shards: list[Shard]) -> list[Destination]:
    """Each shard as a parameter of its own."""
    return [
        Destination(s, ViewSpec(f"p.{s.name}", 0, s.shape, torch.empty(s.shape, device="meta").stride(), s.dtype))
        for s in shards
    ]


@pytest.mark.parametrize(
    ("send", "recv", "moves"),
    [
        pytest.param([(0, 8)], [(0, 8)], [(0, 0, 0, 0, 8)], id="one-to-one"),
        pytest.param([(0, 8)], [(0, 4), (4, 8)], [(0, 0, 0, 0, 4), (0, 4, 1, 0, 4)], id="split"),
        pytest.param([(0, 4), (4, 8)], [(0, 8)], [(0, 0, 0, 0, 4), (1, 0, 0, 4, 4)], id="join"),
        pytest.param(
            [(0, 3), (3, 8)],
            [(0, 5), (5, 8)],
            [(0, 0, 0, 0, 3), (1, 0, 0, 3, 2), (1, 2, 1, 0, 3)],
            id="recut",
        ),
        pytest.param(
            [(0, 8), (0, 8)], [(0, 8), (0, 8)], [(0, 0, 0, 0, 8), (1, 0, 1, 0, 8)], id="replicas-share-the-work"
        ),
    ],
)
def test_moves_of_one_dimension(
    send: list[tuple[int, int]], recv: list[tuple[int, int]], moves: list[tuple[int, ...]]
) -> None:
    plan = make_plan(line("a", 8, send), served(line("a", 8, recv)))
    found = [(m.send_rank, m.send_start[0], m.recv_rank, m.recv_start[0], m.shape[0]) for m in plan.moves]
    assert found == moves
    assert all(m.nbytes == 4 * m.shape[0] for m in plan.moves)


def test_a_grid_is_recut_in_two_dimensions() -> None:
    rows = [Shard("a", "float32", (2, 6), (4, 6), (2 * r, 0), r) for r in range(2)]
    columns = [Shard("a", "float32", (4, 2), (4, 6), (0, 2 * r), r) for r in range(3)]
    plan = make_plan(rows, served(columns))
    assert len(plan.moves) == 6
    assert all(m.shape == (2, 2) for m in plan.moves)
    source = torch.arange(24.0).view(4, 6)
    for rank, shard in enumerate(columns):
        local = torch.full(shard.shape, -1.0)
        for m in (m for m in plan.moves if m.recv_rank == rank):
            box = source[2 * m.send_rank : 2 * m.send_rank + 2]
            part = box[m.send_start[0] : m.send_start[0] + m.shape[0], m.send_start[1] : m.send_start[1] + m.shape[1]]
            local[m.recv_start[0] : m.recv_start[0] + m.shape[0], m.recv_start[1] : m.recv_start[1] + m.shape[1]] = part
        assert torch.equal(local, source[:, 2 * rank : 2 * rank + 2])


def test_scalars_and_empty_tensors_are_planned() -> None:
    scalar = [Shard("s", "float32", (), (), (), 0)]
    empty = [Shard("e", "float32", (0, 4), (0, 4), (0, 0), 0)]
    plan = make_plan(scalar + empty, served(scalar + empty))
    assert [(m.name, m.nbytes) for m in plan.moves if m.nbytes] == [("s", 4)]


def test_expert_ids_are_global() -> None:
    """A peer's engine ranks all advertised local ids 0 to 31, so the plan matched rank 3's experts with the first
    ones and experts 32 to 127 were never updated. Here each rank's shards carry global ids: every expert's payload
    is planned onto the rank and slot that serve it."""
    world = World(experts=8, ep=4)
    plan = world.plan()
    for move in plan.moves:
        if ".experts." in move.name:
            expert = int(move.name.split(".experts.")[1].split(".")[0])
            assert move.recv_rank == expert // 2
    local_ids = [
        Destination(
            Shard(d.shard.name.replace(f".experts.{4 + i}", f".experts.{i}"), *(getattr(d.shard, f) for f in FIELDS)),
            d.view,
        )
        for i in range(4)
        for d in World(experts=8, ep=2).destinations(0, 1)
        if f".experts.{4 + i}." in d.shard.name
    ]
    other = World(experts=8, ep=2).destinations(0, 0)
    with pytest.raises(PlanError, match=r"no place for 24 tensors .*experts\.4\.down_proj"):
        make_plan(World(experts=8).source_shards(), other + local_ids)


FIELDS = ("dtype", "shape", "global_shape", "offset", "rank")


def test_every_replica_of_a_moved_expert_is_written() -> None:
    """An engine that balances experts held one expert in two slots and only one was updated. Each slot is a
    destination of its own, on one rank or on several."""
    shard = Shard("w", "float32", (4, 4), (4, 4), (0, 0), 0)
    slots = [Destination(shard, ViewSpec("w13", 16 * slot, (4, 4), (4, 1), "float32")) for slot in (0, 2)]
    elsewhere = [
        Destination(Shard("w", "float32", (4, 4), (4, 4), (0, 0), 1), ViewSpec("w13", 0, (4, 4), (4, 1), "float32"))
    ]
    plan = make_plan([shard], slots + elsewhere)
    assert [(m.recv_rank, m.replica) for m in plan.moves] == [(0, 0), (0, 1), (1, 0)]
    part = plan.for_receiver(0)
    assert sorted(part.destinations[t].view.offset for t in part.targets) == [0, 32]
    forgotten = Plan(plan.sources, plan.destinations, tuple(m for m in plan.moves if m.replica == 0))
    with pytest.raises(PlanError, match="written only in part"):
        check_plan(forgotten)


@pytest.mark.parametrize(("tp", "up_first"), [(1, False), (2, False), (2, True)])
def test_gate_and_up_have_their_own_places(tp: int, up_first: bool) -> None:
    """With tensor parallel size 2 a plain gather of fc1 gives [g0|u0|g1|u1]; a backend that loads up before gate
    wants the halves the other way round. Where each half goes is the view's business, so all orders work."""
    world = World(experts=2, ep=1, tp=tp, up_first=up_first)
    for rank in range(tp):
        rows = world.intermediate // tp
        live = world.expected(0, rank, version=1)["model.layers.0.mlp.experts.w13_weight"].view(
            2, 2 * rows, world.hidden
        )
        halves = [live[0, :rows], live[0, rows:]]
        if up_first:
            halves.reverse()
        for half, part in zip(halves, ("gate_proj", "up_proj"), strict=True):
            whole = world.value(f"model.layers.0.mlp.experts.0.{part}.weight", 1).view(torch.uint8)
            assert torch.equal(half, whole[rank * rows : (rank + 1) * rows])
    check_plan(world.plan())


def test_json_keeps_plans_and_parts_exactly() -> None:
    plan = World(experts=4, ep=2, tp=2, layers=2).plan()
    again = Plan.from_json(plan.to_json())
    assert again == plan
    assert again.digest == plan.digest
    part = plan.for_receiver(1)
    assert PlanPart.from_json(part.to_json()) == part
    assert Plan(plan.sources, plan.destinations, plan.moves[::-1]).digest != plan.digest


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"format":2}',
        "[" * 100_000,
        '{"format":1,"block":[128,128],"layouts":{},"sources":[[1]],"destinations":[],"moves":[]}',
    ],
)
def test_text_that_is_no_plan_is_refused(text: str) -> None:
    with pytest.raises(PlanError, match="not a plan"):
        Plan.from_json(text)


def test_a_part_is_ordered_by_place() -> None:
    part = World(experts=4, ep=1).plan().for_receiver(0)
    places = [(part.destinations[t].view.param, part.destinations[t].view.offset) for t in part.targets]
    assert places == sorted(places)


def test_a_large_model_is_planned_without_quadratic_work() -> None:
    """36,864 expert tensors matched by a linear scan cost a peer a minute at every publish. Work here is counted, not
    timed: twice the model may cost about twice the calls and comparisons of names, not four times."""
    calls = {n: _count_calls(World(experts=n, ep=2, hidden=128, intermediate=128, extra=())) for n in (64, 128)}
    assert calls[128] < 2.5 * calls[64]


class _Name(str):
    """A name whose comparisons are calls: a scan over a list of plain strings makes none."""

    __slots__ = ()
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        return str.__eq__(self, other) is True


def _named(shard: Shard) -> Shard:
    return replace(shard, name=_Name(shard.name))


def _count_calls(world: World) -> int:
    import sys

    sources = [_named(shard) for shard in world.source_shards()]
    destinations = [replace(d, shard=_named(d.shard)) for r in range(2) for d in world.destinations(0, r)]
    count = 0

    def profile(_frame: object, event: str, _arg: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(profile)
    try:
        make_plan(sources, destinations)
    finally:
        sys.setprofile(None)
    return count
