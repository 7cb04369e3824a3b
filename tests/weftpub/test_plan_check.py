"""Every fault that a plan can have is refused before a byte moves, in words that name tensors and ranks."""

from dataclasses import replace

import pytest
import torch
from publish_world import World

from weftpub.errors import PlanError
from weftpub.plan import (
    Destination,
    Move,
    Plan,
    Shard,
    ViewSpec,
    check_plan,
    explain_illegal_tp,
    legal_ep,
    legal_tp,
    make_plan,
)
from weftpub.plan import require_legal_tp as require
from weftpub.receive import parameter_specs

GATE = "model.layers.0.mlp.experts.0.gate_proj.weight"


@pytest.fixture(scope="module")
def plan() -> Plan:
    return World(experts=2, ep=2, tp=2).plan()


def change(plan: Plan, name: str, **fields: object) -> Plan:
    """The plan with the first move of `name` changed."""
    moves = list(plan.moves)
    index = next(i for i, m in enumerate(moves) if m.name == name)
    moves[index] = replace(moves[index], **fields)
    return replace(plan, moves=tuple(moves))


def without(plan: Plan, which: str, name: str) -> Plan:
    """The plan without the sources, destinations or moves of `name`."""
    keep = {
        "sources": lambda x: x.name != name,
        "destinations": lambda x: x.shard.name != name,
        "moves": lambda x: x.name != name,
    }[which]
    return replace(plan, **{which: tuple(x for x in getattr(plan, which) if keep(x))})


def test_a_good_plan_passes(plan: Plan) -> None:
    check_plan(plan)
    world = World(experts=2, ep=2, tp=2)
    specs = {p.name: p for p in parameter_specs(world.parameters())}
    check_plan(plan, parameters=dict.fromkeys(range(4), specs))


def test_names_on_one_side_only_are_listed(plan: Plan) -> None:
    """A name that nothing matched was dropped with a warning, and the engine served the old tensor."""
    with pytest.raises(PlanError, match=rf"sends nothing for 1 tensors of the engine: {GATE}"):
        check_plan(without(plan, "sources", GATE))
    with pytest.raises(PlanError, match=rf"no place for 1 tensors of the trainer: {GATE}"):
        check_plan(without(plan, "destinations", GATE))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        pytest.param({"send_rank": 5}, "sender rank 5, which does not hold it", id="unknown-sender"),
        pytest.param({"recv_rank": 9}, "replica 0 on receiver rank 9, which serves 0", id="unknown-receiver"),
        pytest.param({"send_start": (128, 0)}, "reads element", id="shifted"),
        pytest.param({"send_start": (999, 0)}, "leaves a shard", id="outside"),
        pytest.param({"nbytes": 7}, "with 7 bytes does not fit", id="bytes"),
        pytest.param({"dtype": "bfloat16"}, "does not fit float8_e4m3fn", id="dtype"),
    ],
)
def test_moves_that_do_not_fit(plan: Plan, fields: dict[str, object], words: str) -> None:
    with pytest.raises(PlanError, match=words):
        check_plan(change(plan, GATE, **fields))


def test_an_element_that_nobody_writes(plan: Plan) -> None:
    with pytest.raises(PlanError, match="is written only in part; every element must be written exactly once"):
        check_plan(without(plan, "moves", "model.norm.weight"))


def test_an_element_that_is_written_twice(plan: Plan) -> None:
    with pytest.raises(PlanError, match="written 2 times"):
        check_plan(replace(plan, moves=(*plan.moves, plan.moves[-1])))


def test_both_sides_must_have_one_dtype_and_shape(plan: Plan) -> None:
    """A BF16 tensor sent to an FP8 parameter was cast without a scale when checks were off."""
    sources = tuple(replace(s, dtype="bfloat16") if s.name == GATE else s for s in plan.sources)
    with pytest.raises(
        PlanError, match=r"gate_proj.weight: receiver rank 0 has float8_e4m3fn.*sender rank 0 has bfloat16"
    ):
        check_plan(replace(plan, sources=sources))


def test_a_weight_without_its_scale(plan: Plan) -> None:
    """Weights arrived without their scales, and the scales stayed uninitialised."""
    scale = GATE + "_scale_inv"
    bare = without(without(without(plan, "moves", scale), "destinations", scale), "sources", scale)
    with pytest.raises(PlanError, match=rf"FP8 weights without a dequant scale: {GATE}"):
        check_plan(bare)


def test_a_scale_without_its_weight(plan: Plan) -> None:
    orphan = without(without(without(plan, "moves", GATE), "destinations", GATE), "sources", GATE)
    with pytest.raises(PlanError, match="dequant scales without an FP8 weight"):
        check_plan(orphan)


def test_a_scale_from_another_sender_than_its_weight() -> None:
    plan = World(experts=2, ep=2, replicas=2).plan()
    assert {s.rank for s in plan.sources if s.name == GATE} == {0, 1}
    other = next(m for m in plan.moves if m.name == GATE + "_scale_inv")
    moved = change(plan, GATE + "_scale_inv", send_rank=1 - other.send_rank)
    with pytest.raises(PlanError, match="without the scale of just these blocks"):
        check_plan(moved)


def test_overlapping_views_are_refused() -> None:
    shards = [Shard(name, "float32", (4, 4), (4, 4), (0, 0), 0) for name in "ab"]
    views = [ViewSpec("p", start, (4, 4), (8, 1), "float32") for start in (0, 3)]
    with pytest.raises(PlanError, match="both to be written to element 3 of p"):
        make_plan(shards, [Destination(s, v) for s, v in zip(shards, views, strict=True)])
    make_plan(shards, [Destination(s, replace(v, offset=o)) for s, v, o in zip(shards, views, (0, 4), strict=True)])


def test_different_overlapping_parts_are_no_replicas() -> None:
    shards = [Shard("a", "float32", (6,), (8,), (0,), 0), Shard("a", "float32", (6,), (8,), (2,), 1)]
    target = Destination(Shard("a", "float32", (8,), (8,), (0,), 0), ViewSpec("p", 0, (8,), (1,), "float32"))
    moves = (Move("a", 0, (0,), 0, (0,), (6,), "float32", 24), Move("a", 1, (4,), 0, (6,), (2,), "float32", 8))
    with pytest.raises(PlanError, match="replicas must be equal"):
        check_plan(Plan(tuple(shards), (target,), moves))


def test_a_part_that_no_receiver_serves() -> None:
    source = Shard("a", "float32", (8,), (8,), (0,), 0)
    target = Destination(Shard("a", "float32", (4,), (8,), (0,), 0), ViewSpec("p", 0, (4,), (1,), "float32"))
    with pytest.raises(PlanError, match="no receiver serves some elements"):
        make_plan([source], [target])


def sharded(tp: int, intermediate: int = 1536, hidden: int = 256) -> tuple[list[Shard], list[Destination]]:
    """One expert's gate, sharded over `tp` ranks without asking whether that is legal."""
    name, rows = "model.layers.0.mlp.experts.0.gate_proj.weight", intermediate // tp
    shape, blocks = (intermediate, hidden), (-(-intermediate // 128), hidden // 128)
    sources = [Shard(name, "float8_e4m3fn", shape, shape, (0, 0), 0)]
    sources.append(Shard(name + "_scale_inv", "float32", blocks, blocks, (0, 0), 0))
    destinations = []
    for rank in range(tp):
        shard = Shard(name, "float8_e4m3fn", (rows, hidden), shape, (rank * rows, 0), rank)
        destinations.append(Destination(shard, ViewSpec("w", 0, shard.shape, (hidden, 1), shard.dtype)))
        first, last = rank * rows // 128, -(-(rank + 1) * rows // 128)
        scale = Shard(name + "_scale_inv", "float32", (last - first, blocks[1]), blocks, (first, 0), rank)
        destinations.append(Destination(scale, ViewSpec("s", 0, scale.shape, (blocks[1], 1), scale.dtype)))
    return sources, destinations


@pytest.mark.parametrize(("tp", "each"), [(8, 192), (16, 96)])
def test_tensor_parallel_sizes_that_split_a_block(tp: int, each: int) -> None:
    """moe_intermediate 1536 with TP 8 leaves 192 rows a rank; TP 16 leaves less than a block, and a peer divided by
    zero. The error lists the sizes that work."""
    with pytest.raises(PlanError, match=rf"gate_proj.weight.* cuts through .* {each} per rank.*: 1, 2, 3, 4, 6, 12\b"):
        make_plan(*sharded(tp))
    check_plan(make_plan(*sharded(12)))


@pytest.mark.parametrize("shape", [(7168, 2048), (2048, 1408), (200, 200)])
def test_block_grids_of_every_shape_work(shape: tuple[int, int]) -> None:
    blocks = tuple(-(-n // 128) for n in shape)
    shards = [
        Shard("w", "float8_e4m3fn", shape, shape, (0, 0), 0),
        Shard("w_scale_inv", "float32", blocks, blocks, (0, 0), 0),
    ]
    views = [ViewSpec(s.name, 0, s.shape, (s.shape[1], 1), s.dtype) for s in shards]
    make_plan(shards, [Destination(s, v) for s, v in zip(shards, views, strict=True)])


def test_legal_sizes() -> None:
    assert legal_tp(1536) == (1, 2, 3, 4, 6, 12)
    assert legal_tp(100) == (1,)
    assert legal_ep(1536, 8, experts=128) == (2, 4, 8)
    text = explain_illegal_tp(1536, 8, experts=128)
    assert "192 per rank" in text
    assert "EP 2 with expert TP 4" in text
    assert "less than one block" in explain_illegal_tp(1536, 16)
    assert "whole number" in explain_illegal_tp(1536, 7)
    require(1536, 12)
    for tp in (0, 5, 8, 16):
        with pytest.raises(PlanError, match="legal expert tensor parallel sizes"):
            require(1536, tp)


class TestAgainstParameters:
    """With descriptions, views are checked against what the engine really has."""

    world = World(experts=2, ep=1, extra=(("model.norm.weight", (256,), torch.float32),))

    def specs(self, **changes: torch.Tensor) -> dict:
        return {0: {p.name: p for p in parameter_specs({**self.world.parameters(), **changes})}}

    def test_a_tensor_that_the_stream_forgets(self) -> None:
        """After release and resume, tensors that were not in the stream stayed garbage."""
        extra = {"model.rotary.cos": torch.zeros(8)}
        with pytest.raises(PlanError, match=r"keep undefined content.*rotary.cos \(0 of 8 elements"):
            check_plan(self.world.plan(), parameters=self.specs(**extra))
        check_plan(
            self.world.plan(),
            parameters=self.specs(**extra),
            exempt={0: {"model.rotary.cos": "restored by the engine"}},
        )

    def test_a_parameter_that_is_larger_than_its_views(self) -> None:
        with pytest.raises(PlanError, match=r"model.norm.weight \(256 of 300 elements"):
            check_plan(self.world.plan(), parameters=self.specs(**{"model.norm.weight": torch.zeros(300)}))

    @pytest.mark.parametrize(
        ("tensor", "words"),
        [
            pytest.param(torch.zeros(100), "ends at element 255", id="too-small"),
            pytest.param(torch.zeros(256, dtype=torch.bfloat16), "planned as float32", id="dtype"),
            pytest.param(torch.zeros(512)[::2], "strides", id="strided"),
        ],
    )
    def test_a_parameter_that_changed(self, tensor: torch.Tensor, words: str) -> None:
        with pytest.raises(PlanError, match=words):
            check_plan(self.world.plan(), parameters=self.specs(**{"model.norm.weight": tensor}))

    def test_a_parameter_that_is_gone(self) -> None:
        specs = self.specs()
        del specs[0]["model.norm.weight"]
        with pytest.raises(PlanError, match=r"does not have: model\.norm\.weight"):
            check_plan(self.world.plan(), parameters=specs)

    def test_a_rank_without_description(self) -> None:
        with pytest.raises(PlanError, match="receiver rank 0: no description"):
            check_plan(self.world.plan(), parameters={})
