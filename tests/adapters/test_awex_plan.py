"""Plans made by AWEX's real converters, resolvers and builder, from Megatron's model and SGLang's descriptions."""

import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from layouts import BASE, LAYOUTS, Layout, load_descriptions
from megatron_support import bare_trainer, megatron_ready

from weftpub.errors import ConfigError, PlanError
from weftpub.plan import Plan, check_plan
from weftpub.receive import EngineDescription
from weftpub.store import ExpertStore

pytestmark = pytest.mark.isolated("megatron")


@pytest.fixture(scope="module", autouse=True)
def _ready() -> None:
    megatron_ready()


@cache
def descriptions() -> dict[str, list[EngineDescription]]:
    return load_descriptions()


def trainer(layout: Layout) -> tuple[Any, ExpertStore]:
    """Megatron's model, with uninitialised weights, and an empty store."""
    return bare_trainer(layout.config, layout.format)


def plan(name: str, ranks: list[EngineDescription] | None = None) -> Plan:
    from weftpub_adapters.awex import plan_publish

    layout = LAYOUTS[name]
    model, store = trainer(layout)
    return plan_publish(model, store, layout.config, descriptions()[name] if ranks is None else ranks)


def written(plan: Plan) -> Iterator[tuple[Any, torch.Tensor]]:
    """Each destination with how often each of its elements is written: counted, not reasoned."""
    seen: dict[tuple[str, int], int] = {}
    for destination in plan.destinations:
        place = destination.shard.name, destination.shard.rank
        replica = seen.get(place, 0)
        seen[place] = replica + 1
        count = torch.zeros(destination.shard.shape, dtype=torch.int8)
        for move in plan.moves:
            if (move.name, move.recv_rank, move.replica) == (*place, replica):
                count[tuple(slice(s, s + n) for s, n in zip(move.recv_start, move.shape, strict=True))] += 1
        yield destination, count


@pytest.mark.parametrize("name", LAYOUTS)
def test_plans_are_complete_and_write_everything_once(name: str) -> None:
    layout = LAYOUTS[name]
    made = plan(name)
    check_plan(made)
    assert made.receivers == tuple(range(layout.tp))
    assert made.senders == (0,)
    for destination, count in written(made):
        assert torch.all(count == 1), destination.shard
    ranks = {rank.rank: rank for rank in descriptions()[name]}
    for rank, description in ranks.items():
        covered = dict.fromkeys(description.layout(), 0)
        for destination in made.destinations:
            if destination.shard.rank == rank:
                covered[destination.view.param] += torch.Size(destination.shard.shape).numel()
        partial = {n for n, spec in description.layout().items() if covered[n] != spec.numel}
        assert partial <= description.exempt.keys()
        assert all(
            not n.endswith(("proj.weight", "qkvz.weight", "ba.weight")) and ".experts." not in n for n in partial
        )
        assert made.layouts[rank] == description.layout_digest


@pytest.mark.parametrize("name", ["tp4-ep4", "tp4-ep2", "tp6-ep6", "tp8-ep8"])
def test_expert_ids_are_global(name: str) -> None:
    """Every rank of a peer advertised its experts as 0 to n-1, so three quarters of the experts were never updated."""
    layout = LAYOUTS[name]
    per_rank = layout.config["num_experts"] // layout.ep
    for destination in plan(name).destinations:
        if ".experts." not in destination.shard.name:
            continue
        expert = int(destination.shard.name.split(".experts.")[1].split(".")[0])
        rank = destination.shard.rank // (layout.tp // layout.ep)
        assert rank == expert // per_rank
        size = torch.Size(next(s.shape for s in _specs(name, destination) if s.name == destination.view.param)).numel()
        assert destination.view.offset // (size // per_rank) == expert % per_rank


def test_gate_and_up_rows_are_split_inside_their_own_halves() -> None:
    """A plain gather over two ranks gives [g0|u0|g1|u1]; each rank must hold its gate rows over its up rows."""
    for destination in plan("tp2").destinations:
        name, view = destination.shard.name, destination.view
        if "experts.3.gate_proj.weight" in name or "experts.3.up_proj.weight" in name:
            scale = name.endswith("_scale_inv")
            rows, columns = (2, 2) if scale else (256, 256)
            assert view.shape == (rows, columns)
            assert view.offset == (3 * 2 * rows + (rows if "up_proj" in name else 0)) * columns
            assert destination.shard.offset == (destination.shard.rank * rows, 0)
            assert destination.shard.global_shape == (2 * rows, columns)


def test_a_scale_travels_with_its_weight() -> None:
    made = plan("tp4-ep2")
    moves = {(move.name, move.recv_rank): move for move in made.moves}
    scales = [key for key in moves if key[0].endswith("_scale_inv")]
    assert len(scales) == 2 * 8 * 3 * 2
    for name, rank in scales:
        scale, weight = moves[name, rank], moves[name.removesuffix("_scale_inv"), rank]
        assert scale.send_rank == weight.send_rank
        assert tuple(128 * s for s in scale.send_start) == weight.send_start
        assert tuple(128 * n for n in scale.shape) == weight.shape
        assert (scale.dtype, weight.dtype) == ("float32", "float8_e4m3fn")


def test_attention_follows_its_own_size_under_data_parallel_attention() -> None:
    """AWEX splits Qwen3-MoE's attention by the whole tensor parallel size, and counts the world twice."""
    made = plan("tp4-ep4-dp2")
    name = "model.layers.0.self_attn.q_proj.weight"
    shards = {d.shard.rank: d.shard for d in made.destinations if d.shard.name == name}
    assert [shards[rank].offset[0] for rank in range(4)] == [0, 128, 0, 128]
    assert {shard.shape for shard in shards.values()} == {(128, 256)}
    assert len([move for move in made.moves if move.name == name]) == 4


def test_key_value_heads_go_to_every_rank_that_serves_them() -> None:
    made = plan("tp8-ep8")  # eight ranks, four key/value heads
    for part in ("k_proj", "v_proj"):
        name = f"model.layers.1.self_attn.{part}.weight"
        offsets = {d.shard.rank: d.shard.offset[0] for d in made.destinations if d.shard.name == name}
        assert [offsets[rank] for rank in range(8)] == [0, 0, 32, 32, 64, 64, 96, 96]
        assert {d.shard.global_shape for d in made.destinations if d.shard.name == name} == {(128, 256)}


def test_a_vocabulary_ends_on_the_rank_where_it_ends() -> None:
    made = plan("tp6-ep6")  # 500 rows, padded to 768, in six parts of 128
    rows = {
        d.shard.rank: (d.shard.offset[0], d.shard.shape[0])
        for d in made.destinations
        if d.shard.name == "lm_head.weight"
    }
    assert rows == {0: (0, 128), 1: (128, 128), 2: (256, 128), 3: (384, 116)}


def test_a_tied_head_is_published_as_the_embedding() -> None:
    from weftpub_adapters.awex import canonical_sources

    made = plan("tp2-ep2-tied")
    assert {move.name for move in made.moves} >= {"lm_head.weight", "model.embed_tokens.weight"}
    layout = LAYOUTS["tp2-ep2-tied"]
    model, store = trainer(layout)
    _fill(store)
    sources = canonical_sources(model, store, layout.config)
    assert sources["lm_head.weight"].data_ptr() == sources["model.embed_tokens.weight"].data_ptr()


def test_two_equal_engines_are_two_sets_of_receivers() -> None:
    ranks = descriptions()["tp2-ep2"]
    second = [rank.model_copy(update={"engine": "other", "rank": rank.rank + 2}) for rank in ranks]
    made = plan("tp2-ep2", [*ranks, *second])
    assert made.receivers == (0, 1, 2, 3)
    for destination, count in written(made):
        assert torch.all(count == 1), destination.shard
    first = [(d.shard.name, d.view) for d in made.destinations if d.shard.rank == 1]
    assert first == [(d.shard.name, d.view) for d in made.destinations if d.shard.rank == 3]


def test_a_plan_is_plain_and_the_same_every_time() -> None:
    made = plan("tp4-ep2")
    assert Plan.from_json(made.to_json()) == made
    assert plan("tp4-ep2").digest == made.digest
    assert plan("tp4-ep2", descriptions()["tp4-ep2"][::-1]).digest == made.digest


@pytest.mark.parametrize(
    ("spoil", "error", "message"),
    [
        (lambda ranks: ranks[:1], ConfigError, "whole engines of 2 ranks"),
        (lambda ranks: [ranks[0], ranks[0]], ConfigError, "whole engines"),
        (lambda ranks: [], ConfigError, "no engine rank"),
        (lambda ranks: [_with_setting(r, parallel=None) for r in ranks], ConfigError, "description has no parallel"),
        (
            lambda ranks: [_with_setting(r, parallel={**r.settings["parallel"], "rank": 0}) for r in ranks],
            ConfigError,
            "receiver rank 1 is rank 0 of its engine",
        ),
    ],
)
def test_ranks_that_do_not_make_an_engine_are_refused(spoil: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        plan("tp2-ep2", spoil(descriptions()["tp2-ep2"]))


def test_engines_of_two_kinds_need_two_plans() -> None:
    ranks = descriptions()["tp2-ep2"]
    other = [r.model_copy(update={"rank": r.rank + 2}) for r in descriptions()["tp2-ep2-bf16"]]
    with pytest.raises(ConfigError, match="one plan for each kind of engine"):
        plan("tp2-ep2", [*ranks, *other])


def test_sizes_that_cut_a_block_are_refused_with_the_legal_ones() -> None:
    """1536 over eight ranks is 192, not a multiple of 128: AWEX's plan alone leaves holes without a word."""
    ranks = [
        _with_setting(
            rank,
            hf_config={**rank.settings["hf_config"], "moe_intermediate_size": 192},
        )
        for rank in descriptions()["tp2"]
    ]
    with pytest.raises(PlanError, match=r"192.*legal"):
        plan("tp2", ranks)


def test_an_engine_of_another_format_is_refused() -> None:
    """BF16 bytes into FP8 memory would be served as codes without scales."""
    from weftpub_adapters.awex import plan_publish

    model, store = trainer(LAYOUTS["tp2-ep2-bf16"])
    with pytest.raises(PlanError, match=r"AWEX cannot join.*(scale_inv|dtype)"):
        plan_publish(model, store, BASE, descriptions()["tp2-ep2"])


def test_a_model_of_another_size_is_refused() -> None:
    from weftpub_adapters.awex import plan_publish

    model, store = trainer(Layout(1, 1, model={"vocab_size": 501}))
    with pytest.raises(PlanError, match=r"(lm_head|model\.embed_tokens)\.weight: "):
        plan_publish(model, store, BASE, descriptions()["tp2-ep2"])


def test_another_architecture_is_refused() -> None:
    from weftpub_adapters.awex import trainer_shards

    model, store = trainer(LAYOUTS["tp1"])
    with pytest.raises(ConfigError, match="LlamaForCausalLM"):
        trainer_shards(model, store, {**BASE, "architectures": ["LlamaForCausalLM"]})


# -- AWEX's part in it ---------------------------------------------------------------------------------------------


def test_a_broken_megatron_converter_breaks_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    from awex.converter.mcore_converter import McoreToHFWeightConverter

    original = McoreToHFWeightConverter._convert_linear

    def swapped(self: Any, name: str, parameter: torch.Tensor) -> Any:
        return [(target.replace("gate_proj", "gait_proj"), part) for target, part in original(self, name, parameter)]

    monkeypatch.setattr(McoreToHFWeightConverter, "_convert_linear", swapped)
    with pytest.raises(PlanError, match=r"disagree about 32 expert tensors.*gate_proj"):
        plan("tp2-ep2")


def test_a_converter_that_halves_a_matrix_breaks_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    from awex.converter.mcore_converter import McoreToHFWeightConverter

    original = McoreToHFWeightConverter._convert_linear

    def halved(self: Any, name: str, parameter: torch.Tensor) -> Any:
        return [(target, part[: part.shape[0] // 2]) for target, part in original(self, name, parameter)]

    monkeypatch.setattr(McoreToHFWeightConverter, "_convert_linear", halved)
    with pytest.raises(PlanError, match=r"experts\.\d\.(gate|up|down)_proj.*\[512, 256\].*\(256, 256\)"):
        plan("tp2-ep2")


def swap_gate_and_up(pairs: Any) -> Any:
    names = {"gate_proj": "up_proj", "up_proj": "gate_proj"}
    return [(_renamed(name, names), part) for name, part in pairs]


def _renamed(name: str, names: dict[str, str]) -> str:
    return ".".join(names.get(part, part) for part in name.split("."))


def test_a_megatron_converter_that_takes_gate_for_up_is_caught_at_the_first_publish(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Names and shapes agree, so a plan can be made; the bytes under the names are not the store's."""
    from awex.converter.mcore_converter import McoreToHFWeightConverter

    from weftpub_adapters.awex import canonical_sources

    original = McoreToHFWeightConverter._convert_linear
    monkeypatch.setattr(
        McoreToHFWeightConverter, "_convert_linear", lambda self, *args: swap_gate_and_up(original(self, *args))
    )
    plan("tp2-ep2")
    model, store = trainer(LAYOUTS["tp2-ep2"])
    _fill(store)
    with pytest.raises(PlanError, match=r"gives 64 names of experts to other bytes.*gate_proj"):
        canonical_sources(model, store, BASE)


def test_an_engine_converter_that_takes_gate_for_up_breaks_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    from awex.converter.sglang_converter import SGlangToHFWeightConverter

    original = SGlangToHFWeightConverter._split_gate_up
    monkeypatch.setattr(
        SGlangToHFWeightConverter, "_split_gate_up", lambda self, *args: swap_gate_and_up(original(self, *args))
    )
    with pytest.raises(PlanError, match=r"gate_proj.*keeps gate rows first"):
        plan("tp2-ep2")


def test_an_engine_that_loads_up_before_gate_gets_it_so() -> None:
    """A backend wanted up rows first, weights and scales, and got gate rows."""
    ranks = [_with_setting(rank, w13_order="up") for rank in descriptions()["tp2"]]
    for destination in plan("tp2", ranks).destinations:
        name = destination.shard.name
        if "experts.3." in name and ("gate_proj" in name or "up_proj" in name):
            rows, columns = (2, 2) if name.endswith("_scale_inv") else (256, 256)
            assert destination.view.offset == (3 * 2 * rows + (rows if "gate_proj" in name else 0)) * columns
    with pytest.raises(ConfigError, match="w13_order is 'sideways'"):
        plan("tp2", [_with_setting(rank, w13_order="sideways") for rank in ranks])


def test_a_shared_expert_fused_as_one_more_expert_is_refused_by_name() -> None:
    """An engine kept its shared expert as expert n+1 in the routed experts' tensors. The trainer has no such expert, so
    its rows would stay garbage after an offload; they are listed by name."""
    ranks = [
        rank.model_copy(
            update={
                "parameters": tuple(
                    replace(spec, shape=(spec.shape[0] + 1, *spec.shape[1:])) if ".mlp.experts." in spec.name else spec
                    for spec in rank.parameters
                )
            }
        )
        for rank in descriptions()["tp2"]
    ]
    with pytest.raises(PlanError, match=r"layers\.0\.mlp\.experts\.w13_weight holds 9 experts.*describes 8.*-fusion"):
        plan("tp2", ranks)


def test_a_broken_engine_converter_breaks_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Local expert ids instead of global ones: the fault of a peer, planted into AWEX's converter."""
    from awex.converter.sglang_converter import SGlangToHFWeightConverter

    original = SGlangToHFWeightConverter._convert_expert_moe_param

    def local(self: Any, name: str, parameter: torch.Tensor, layer: str) -> Any:
        rank, self.ep_rank = self.ep_rank, 0
        try:
            return original(self, name, parameter, layer)
        finally:
            self.ep_rank = rank

    monkeypatch.setattr(SGlangToHFWeightConverter, "_convert_expert_moe_param", local)
    with pytest.raises(PlanError, match=r"experts\.0\.gate_proj.*slots 4 to 7.*over all ranks"):
        plan("tp2-ep2")


def test_a_broken_builder_breaks_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    from awex.transfer.transfer_plan import TransferPlanBuilder

    original = TransferPlanBuilder.build_weights_mapping_operations
    monkeypatch.setattr(
        TransferPlanBuilder, "build_weights_mapping_operations", lambda self, *args: original(self, *args)[:-1]
    )
    with pytest.raises(PlanError, match=r"model\.norm\.weight"):
        plan("tp2-ep2")


def test_a_converter_that_copies_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes received into a copy never reach the engine's parameter."""
    from awex.converter.sglang_converter import SGlangToHFWeightConverter

    original = SGlangToHFWeightConverter._split_gate_up
    monkeypatch.setattr(
        SGlangToHFWeightConverter,
        "_split_gate_up",
        lambda self, name, parameter: [(n, part.contiguous().clone()) for n, part in original(self, name, parameter)],
    )
    with pytest.raises(PlanError, match=r"gate_proj\.weight: AWEX's converter copies it out of .*w13_weight"):
        plan("tp2-ep2")


def test_awex_is_left_as_it_was(capsys: pytest.CaptureFixture[str]) -> None:
    from awex import logging
    from awex.models.registry import ModelRegistry
    from awex.util import device

    before = (dict(ModelRegistry.models), logging._default_level, device.device_count)
    plan("tp2-ep2")
    assert (dict(ModelRegistry.models), logging._default_level, device.device_count) == before
    with pytest.raises(ConfigError):
        plan("tp2-ep2", [])
    assert (dict(ModelRegistry.models), logging._default_level, device.device_count) == before
    assert capsys.readouterr().out == ""  # AWEX prints its log to standard output, where reports go


def test_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from weftpub_adapters.awex import seams

    monkeypatch.setattr(seams, "version", lambda name: "0.10.0")
    with pytest.raises(ConfigError, match=r"awex 0\.10\.0"):
        plan("tp1")


# -- the tensors ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", ["fp8", "bf16"])
def test_sources_are_the_checkpoints_tensors_and_the_stores_bytes(format: str) -> None:
    """A round trip: AWEX's converter takes apart what our loader put together, every bit in its place."""
    from checkpoints import random_tensors

    from weftpub_adapters.awex import canonical_sources
    from weftpub_adapters.megatron import ExpertAttachment, Qwen3MoeFields, fill_parameters, read_parameters

    model, store = trainer(Layout(1, 1, format=format))
    tensors = random_tensors(BASE)
    loaded = list(read_parameters(tensors, Qwen3MoeFields.from_hf(BASE)))
    fill_parameters(model, loaded)
    with store.writing(0):
        for item in loaded:
            if item.source.expert is not None:
                store.writer()(item.source.expert.name, item.tensor.float())
    ExpertAttachment(model, store)
    sources = canonical_sources(model, store, BASE)
    held = {item.name: item.tensor for item in store.canonical()}
    assert sources.keys() == {name for name in tensors if ".experts." not in name} | held.keys()
    for name, source in sources.items():
        expected = held.get(name, tensors.get(name))
        assert source.dtype == expected.dtype
        assert torch.equal(_bits(source), _bits(expected)), name
        if name in held:
            assert source.data_ptr() == expected.data_ptr(), f"{name} is a copy"
    if format == "bf16":
        assert all(torch.equal(sources[name], tensors[name]) for name in tensors)


def test_sources_fit_the_plan() -> None:
    from weftpub_adapters.awex import canonical_sources

    model, store = trainer(LAYOUTS["tp4-ep2"])
    _fill(store)
    sources = canonical_sources(model, store, BASE)
    made = plan("tp4-ep2")
    assert sources.keys() == {shard.name for shard in made.sources}
    for shard in made.sources:
        assert tuple(sources[shard.name].shape) == shard.shape
        assert str(sources[shard.name].dtype) == f"torch.{shard.dtype}"
        assert sources[shard.name].is_contiguous()


def test_sources_are_taken_anew_for_each_publish() -> None:
    """A cached list of tensors kept the weights of an earlier step."""
    from weftpub_adapters.awex import canonical_sources

    model, store = trainer(LAYOUTS["tp1"])
    for parameter in model.parameters():
        parameter.data.zero_()
    _fill(store)
    name = "model.layers.0.self_attn.k_proj.weight"
    assert torch.all(canonical_sources(model, store, BASE)[name] == 0)
    dict(model.named_parameters())["module.decoder.layers.0.self_attention.linear_qkv.weight"].data.fill_(2)
    assert torch.all(canonical_sources(model, store, BASE)[name] == 2)


def test_no_engine_was_needed() -> None:
    assert "awex" in sys.modules
    assert "sglang" not in sys.modules


def _fill(store: ExpertStore) -> None:
    from megatron_support import write_generation

    write_generation(store, 0, seed=1)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def _with_setting(description: EngineDescription, **settings: Any) -> EngineDescription:
    return description.model_copy(update={"settings": {**description.settings, **settings}})


def _specs(name: str, destination: Any) -> Any:
    return descriptions()[name][destination.shard.rank].parameters
