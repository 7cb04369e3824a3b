"""Plans between trainers and engines of any two sizes, by AWEX's resolver over every rank of both.

Trainer ranks are played one after the other in one process: each has its own part of the experts, AWEX is told the
rank's place, and what it would gather from the others is put together here.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any
from unittest import mock

import pytest
import torch
from layouts import LAYOUTS, load_descriptions
from megatron_support import bare_trainer, megatron_ready

from weftpub.errors import ConfigError, PlanError
from weftpub.plan import Plan, check_plan
from weftpub.receive import EngineDescription

pytestmark = pytest.mark.isolated("megatron")

WORLDS = (1, 2, 3, 4, 6, 8)


@pytest.fixture(scope="module", autouse=True)
def _ready() -> None:
    megatron_ready()


class RankModel:
    """One expert-parallel rank's part of a whole model: all dense parameters, and the experts that lie here."""

    def __init__(self, model: Any, held: int) -> None:
        self.config = model.config
        self._named = [
            (name, parameter)
            for name, parameter in model.named_parameters()
            if ".local_experts." not in name or int(name.split(".local_experts.")[1].split(".")[0]) < held
        ]

    def named_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(self._named)

    def named_buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(())

    def state_dict(self) -> Mapping[str, torch.Tensor]:
        return dict(self._named)


@contextmanager
def played(rank: int, world: int, gathered: dict[int, Any], hosts: int = 1) -> Iterator[None]:
    """AWEX believes to be `rank` of `world`, experts dealt within each host; what it gathers is kept, and answered with
    what there is.
    """
    near = world // hosts
    from awex.sharding import mcore_sharding
    from awex.sharding.rank_info import RankInfo

    place = RankInfo(
        tp_rank=0, tp_size=1, pp_rank=0, pp_size=1, dp_size=world, dp_rank=rank, ep_rank=rank % near, ep_size=near,
        ep_tp_rank=0, ep_tp_size=1, attn_tp_rank=0, attn_tp_size=1, attn_dp_rank=rank, world_size=world,
        global_rank=rank, local_rank=rank, engine_rank=0, is_infer=False,
    )  # fmt: skip

    def gather(out: list[Any], mine: Any) -> None:
        gathered[rank] = mine
        out[:] = [gathered.get(other, mine) for other in range(world)]

    dist = torch.distributed
    with (
        mock.patch.object(mcore_sharding, "get_mcore_rank_info", return_value=place),
        mock.patch.object(dist, "get_rank", return_value=rank),
        mock.patch.object(dist, "get_world_size", return_value=world),
        mock.patch.object(dist, "all_gather_object", gather),
    ):
        yield


@cache
def trainer_world(name: str, world: int, hosts: int = 1) -> Any:
    """TrainerShards of a trainer whose `world` ranks share the experts of a layout's model, those of each host all."""
    from weftpub_adapters.awex import trainer_shards

    config = LAYOUTS[name].config
    near = world // hosts
    held = config["num_experts"] // near
    gathered: dict[int, Any] = {}
    made = None
    for rank in (*range(world), 0):
        first = rank % near * held
        model, store = bare_trainer(config, LAYOUTS[name].format, range(first, first + held))
        with played(rank, world, gathered, hosts):
            made = trainer_shards(RankModel(model, held), store, config)
    return made


@cache
def descriptions() -> dict[str, list[EngineDescription]]:
    return load_descriptions()


def plan(name: str, world: int) -> Plan:
    from weftpub_adapters.awex import build_plan, engine_shards

    return build_plan(trainer_world(name, world), engine_shards(descriptions()[name]))


def require_once(made: Plan) -> None:
    """Every element of every destination, and of every replica of it, is written once: counted."""
    check_plan(made)
    counts = {}
    for rank in made.receivers:
        part = made.for_receiver(rank)
        for move, target in zip(part.moves, part.targets, strict=True):
            key = rank, target
            if key not in counts:
                counts[key] = torch.zeros(part.destinations[target].shard.shape, dtype=torch.int8)
            counts[key][tuple(slice(s, s + n) for s, n in zip(move.recv_start, move.shape, strict=True))] += 1
    assert len(counts) == len(made.destinations)
    assert all(bool((count == 1).all()) for count in counts.values())


@pytest.mark.parametrize("rollout", WORLDS)
@pytest.mark.parametrize("train", WORLDS)
def test_any_world_publishes_to_any_other(train: int, rollout: int) -> None:
    """A peer's transport skipped ranks silently unless the engine's world was a power of two."""
    name = f"world-{rollout}"
    made = plan(name, train)
    require_once(made)
    assert made.receivers == tuple(range(rollout))
    assert made.senders == tuple(range(train))
    experts = LAYOUTS[name].config["num_experts"]
    for move in made.moves:
        if ".experts." in move.name:
            expert = int(move.name.split(".experts.")[1].split(".")[0])
            assert move.send_rank == expert // (experts // train)
            assert move.recv_rank == expert // (experts // rollout)


def several(name: str, engines: int) -> list[EngineDescription]:
    """Descriptions of several engines of one layout."""
    ranks = descriptions()[name]
    return [
        rank.model_copy(update={"rank": engine * len(ranks) + rank.rank, "engine": f"engine-{engine}"})
        for engine in range(engines)
        for rank in ranks
    ]


@pytest.mark.parametrize(("name", "train", "hosts"), [("world-1", 2, 2), ("world-2", 4, 2), ("world-2", 3, 3)])
def test_engines_take_weights_from_their_own_hosts(name: str, train: int, hosts: int) -> None:
    """CUDA IPC and host memory end at a host: AWEX deals engines out over all replicas in turn, and one would have
    waited for bytes of another host's ranks.
    """
    from weftpub_adapters.awex import build_plan, engine_shards

    near = train // hosts
    ranks = [range(host * near, (host + 1) * near) for host in range(hosts)]
    trainer, engine = trainer_world(name, train, hosts), engine_shards(several(name, hosts))
    made = build_plan(trainer, engine, ranks)
    require_once(made)
    assert {(move.send_rank // near, move.recv_rank // engine.world_size) for move in made.moves} == {
        (host, host) for host in range(hosts)
    }
    assert {shard.rank for shard in made.sources} == set(range(train)), "replicas are compared over all hosts"
    if engine.world_size > 1:  # else they are dealt as the hosts are
        assert any(m.send_rank // near != m.recv_rank // engine.world_size for m in build_plan(trainer, engine).moves)


def test_a_host_without_all_experts_is_named() -> None:
    from weftpub_adapters.awex import build_plan, engine_shards

    trainer, engine = trainer_world("world-2", 2), engine_shards(several("world-2", 2))
    with pytest.raises(PlanError, match=r"experts\..*trainer ranks \[0\] of one host do not hold all of it"):
        build_plan(trainer, engine, [[0], [1]])
    with pytest.raises(PlanError, match="expected the trainer ranks of 2 engines' hosts, found 1"):
        build_plan(trainer, engine, [[0, 1]])


def test_engines_of_two_kinds_are_told_apart_by_what_differs() -> None:
    """The message said nothing of it; two nodes' engines differed in the folder that their model was read from."""
    from weftpub_adapters.awex import engine_shards

    *first, last = several("world-2", 2)
    other = last.settings | {"hf_config": last.settings["hf_config"] | {"rope_theta": 1.0}}
    with pytest.raises(ConfigError, match=r"engine-1 rank 3 is not laid out like engine-0 rank 1: they differ in hf_c"):
        engine_shards([*first, last.model_copy(update={"settings": other})])


@pytest.mark.parametrize(
    ("name", "train"),
    [
        ("tp3", 2),
        ("tp3-ep3", 6),
        ("tp4-ep2", 8),
        ("tp6-ep2", 3),
        ("tp8-ep4-dp4", 4),
        ("tp4-ep4-dp2", 2),
        ("tp4-ep4-eplb", 8),
        ("tp4-ep2-eplb", 4),
        ("tp2-redundant", 2),
        ("hybrid-tp3", 2),
        ("hybrid-tp4-ep2-dp2", 8),
        ("hybrid-tp4-ep2-dp2-mtp", 2),
        ("hybrid-tp6-ep6", 3),
        ("hybrid-tp8-ep8-dp4", 4),
    ],
)
def test_layouts_of_two_kinds_meet(name: str, train: int) -> None:
    """Expert parallel trainers of one size, engines of other expert, tensor and attention sizes."""
    made = plan(name, train)
    require_once(made)
    assert made.senders == tuple(range(train))


def test_dense_tensors_come_from_all_trainer_ranks() -> None:
    """Every trainer rank holds them, so the work of sending them is shared."""
    moves = [move for move in plan("world-8", 4).moves if move.name == "model.norm.weight"]
    assert [(move.recv_rank, move.send_rank) for move in moves] == [(rank, rank % 4) for rank in range(8)]


def test_multi_token_prediction_is_published_where_engines_have_it() -> None:
    """Whoever trains it may serve without; its experts are BF16, because no store holds them."""
    from weftpub_adapters.awex import build_plan, engine_shards

    name = "hybrid-tp4-ep2-dp2-mtp"
    trainer = trainer_world(name, 2)
    sent = {shard.name: shard.dtype for shard in plan(name, 2).sources if shard.name.startswith("mtp.")}
    assert sent["mtp.layers.0.mlp.experts.7.up_proj.weight"] == "bfloat16"
    assert {"mtp.fc.weight", "mtp.norm.weight", "mtp.layers.0.self_attn.q_proj.weight"} <= sent.keys()
    made = build_plan(trainer, engine_shards(descriptions()["hybrid-tp4-ep2-dp2"]))
    require_once(made)
    assert not [shard for shard in made.sources if shard.name.startswith("mtp.")]
    with pytest.raises(PlanError, match=r"extra_on_infer=\['mtp\.fc\.weight'"):
        build_plan(trainer_world("hybrid-tp4-ep2-dp2", 2), engine_shards(descriptions()[name]))


def test_a_trainer_whose_store_holds_other_experts_is_refused() -> None:
    from weftpub_adapters.awex import trainer_shards

    config = LAYOUTS["world-2"].config
    model, store = bare_trainer(config, "fp8", range(12))
    with played(1, 2, {}), pytest.raises(PlanError, match=r"disagree about 72 expert tensors.*experts\.0\."):
        trainer_shards(RankModel(model, 12), store, config)


# -- experts that move -----------------------------------------------------------------------------------------------


def test_every_replica_gets_its_expert() -> None:
    """Experts were moved between two publishes, and the slots got each other's weights."""
    name = "tp4-ep4-eplb"
    rows = LAYOUTS[name].slots
    assert rows is not None
    held = len(rows[0]) // LAYOUTS[name].ep
    made = plan(name, 2)
    found: dict[tuple[int, int, int], int] = {}
    for destination in made.destinations:
        shard, view = destination.shard, destination.view
        if shard.name.endswith(".down_proj.weight") and ".experts." in shard.name:
            layer, expert = int(shard.name.split(".")[2]), int(shard.name.split(".experts.")[1].split(".")[0])
            slot = view.offset // (view.shape[0] * view.shape[1])
            found[layer, shard.rank, slot] = expert
    assert found == {
        (layer, slot // held, slot % held): expert for layer, row in enumerate(rows) for slot, expert in enumerate(row)
    }
    sends = [m for m in made.moves if m.name == "model.layers.0.mlp.experts.5.gate_proj.weight"]
    assert [(m.recv_rank, m.replica) for m in sends] == [(0, 0), (1, 0), (3, 0)]
    twice = [m for m in plan("tp4-ep2-eplb", 1).moves if m.name == "model.layers.0.mlp.experts.3.down_proj.weight"]
    assert sorted((m.recv_rank, m.replica) for m in twice) == [(0, 0), (0, 1), (1, 0), (1, 1)]


def test_a_plan_is_stale_once_experts_moved() -> None:
    from weftpub_adapters.awex import plan_is_current

    ranks = descriptions()["tp4-ep4-eplb"]
    made = plan("tp4-ep4-eplb", 1)
    assert plan_is_current(made, ranks)
    assert plan_is_current(made, ranks[::-1])
    moved = [*ranks[:3], ranks[3].model_copy(update={"placement": "elsewhere"})]
    assert not plan_is_current(made, moved)
    assert not plan_is_current(made, ranks[:3])
    changed = _placed(ranks, [row[::-1] for row in LAYOUTS["tp4-ep4-eplb"].slots or ()])
    assert not plan_is_current(made, changed)


def test_engines_that_balance_apart_are_planned_together() -> None:
    """Each engine moves its own experts; one plan serves them all."""
    from weftpub_adapters.awex import build_plan, engine_shards

    ranks = descriptions()["tp4-ep4-eplb"]
    rows = LAYOUTS["tp4-ep4-eplb"].slots or ()
    second = _placed(ranks, [row[::-1] for row in rows])
    third = [rank.model_copy(update={"rank": rank.rank + 8}) for rank in ranks]
    second = [rank.model_copy(update={"rank": rank.rank + 4}) for rank in second]
    shards = engine_shards([*ranks, *second, *third])
    assert [kind.engines for kind in shards.kinds] == [(0, 2), (1,)]
    made = build_plan(trainer_world("tp4-ep4-eplb", 2), shards)
    require_once(made)
    assert made.receivers == tuple(range(12))
    places = [
        {(d.shard.name, d.view) for d in made.destinations if d.shard.rank in range(first, first + 4)}
        for first in (0, 4, 8)
    ]
    assert places[0] == places[2] != places[1]


def test_slots_that_leave_an_expert_out_are_refused() -> None:
    from weftpub_adapters.awex import build_plan, engine_shards

    rows = [[0 if expert == 6 else expert for expert in row] for row in LAYOUTS["tp4-ep4-eplb"].slots or ()]
    with pytest.raises(PlanError, match=r"missing_on_infer=.*experts\.6\.down_proj"):
        build_plan(trainer_world("tp4-ep4-eplb", 1), engine_shards(_placed(descriptions()["tp4-ep4-eplb"], rows)))


def _placed(ranks: list[EngineDescription], rows: Any) -> list[EngineDescription]:
    """The same engine after its experts were moved."""
    found = []
    for description in ranks:
        modules = sorted(description.settings["experts"])
        first = description.settings["parallel"]["moe_ep_rank"] * (held := len(rows[0]) // 4)
        slots = {module: list(row[first : first + held]) for module, row in zip(modules, rows, strict=True)}
        settings = {**description.settings, "experts": slots}
        found.append(description.model_copy(update={"settings": settings, "placement": f"moved {slots}"}))
    return found
