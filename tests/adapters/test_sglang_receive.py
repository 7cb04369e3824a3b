"""Payloads through AWEX's plan and its views into SGLang's real layers, on every rank of every layout."""

import hashlib
import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import apart, fp8_tensors, random_tensors
from layouts import LAYOUTS, Layout

from weftpub.canonical import family_of
from weftpub.errors import ConfigError, PlanError, StateError, TornError
from weftpub.plan import Plan, ViewSpec
from weftpub.receive import EngineDescription
from weftpub.receive.views import BoundPlan
from weftpub_adapters.sglang import SGLangEngine, build_model

pytestmark = pytest.mark.isolated("sglang")

TESTED = ("tp1", "tp2", "tp4", "tp2-ep2", "tp4-ep4", "tp4-ep2", "tp6-ep2", "tp6-ep6", "tp8-ep8", "tp4-ep4-dp2")
BALANCED = ("tp4-ep4-eplb", "tp4-ep2-eplb", "tp2-redundant")
HYBRIDS = tuple(name for name in LAYOUTS if name.startswith("hybrid"))
BF16 = "tp2-ep2-bf16"
ALL = (*TESTED, *BALANCED, *HYBRIDS, BF16)


def engines(layout: Layout) -> list[SGLangEngine]:
    return [SGLangEngine(build_model(layout.config, **layout.request(rank))) for rank in range(layout.tp)]


def make_plans(described: Mapping[str, list[EngineDescription]]) -> dict[str, Plan]:
    """Plans of a trainer's process, from what live engines say of themselves."""
    worker = Path(__file__).with_name("plan_worker.py")
    request = json.dumps({name: [rank.model_dump(mode="json") for rank in ranks] for name, ranks in described.items()})
    result = subprocess.run([sys.executable, str(worker)], input=request, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stderr[-4000:]
    return {name: Plan.from_json(text) for name, text in json.loads(result.stdout).items()}


@pytest.fixture(scope="module")
def plans() -> dict[str, Plan]:
    return make_plans({name: [engine.describe() for engine in engines(LAYOUTS[name])] for name in ALL})


def receive(engine: SGLangEngine, rank: int, plan: Plan, sources: Mapping[str, torch.Tensor]) -> None:
    """Every move of this rank into views made now: the receiver's work, spelled out."""
    live = engine.live_tensors()
    views: dict[str, list[ViewSpec]] = {}
    for destination in plan.destinations:
        if destination.shard.rank == rank:
            views.setdefault(destination.shard.name, []).append(destination.view)
    for move in plan.moves:
        if move.recv_rank != rank:
            continue
        view = views[move.name][move.replica]
        parameter = live[view.param]
        target = parameter.as_strided(view.shape, view.stride, parameter.storage_offset() + view.offset)
        box = target[tuple(slice(s, s + n) for s, n in zip(move.recv_start, move.shape, strict=True))]
        source = sources[move.name][tuple(slice(s, s + n) for s, n in zip(move.send_start, move.shape, strict=True))]
        assert box.dtype == source.dtype
        box.copy_(source)


def publish(engine: SGLangEngine, rank: int, plan: Plan, sources: Mapping[str, torch.Tensor], version: int) -> None:
    """Pause, offload, new memory full of NaN, receive, post-process, commit, resume."""
    engine.pause()
    engine.offload()
    engine.reload()
    receive(engine, rank, plan, sources)
    engine.post_process()
    engine.commit(version)
    engine.resume()


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


@pytest.mark.parametrize("name", ALL)
def test_published_parameters_are_those_of_sglangs_own_loader(name: str, plans: dict[str, Plan]) -> None:
    """After an offload every byte is what SGLang's `load_weights` makes of the same checkpoint, on every rank."""
    layout = LAYOUTS[name]
    tensors = (random_tensors if layout.format == "bf16" else fp8_tensors)(layout.text)
    names = family_of(layout.config["architectures"][0])
    for rank, (engine, loaded) in enumerate(zip(engines(layout), engines(layout), strict=True)):
        for parameter in loaded.served.model.parameters():
            bits(parameter.data).zero_()
        with loaded.served.active():
            for model in filter(None, (loaded.served.target, getattr(loaded.served.model, "draft", None))):
                model.load_weights((names.to_checkpoint(key), t.clone()) for key, t in tensors.items())
            for module in loaded.served.model.modules():
                if getattr(module, "quant_method", None) is not None:
                    module.quant_method.process_weights_after_loading(module)
        publish(engine, rank, plans[name], apart(layout.text, tensors), version=1)
        expected = loaded.live_tensors()
        for parameter, tensor in engine.live_tensors().items():
            assert torch.equal(bits(tensor), bits(expected[parameter])), f"rank {rank}: {parameter}"


@pytest.mark.parametrize("name", [*TESTED, *BALANCED])
def test_each_expert_gets_its_own_bytes(name: str, plans: dict[str, Plan]) -> None:
    """Payload coded by global expert and projection: gate 1, up 2, down 3, plus 8 x expert. Rank r of a peer wrote its
    experts under the ids of rank 0; another peer interleaved gate and up by rank."""
    layout = LAYOUTS[name]
    sources = fp8_tensors(layout.config)
    for key, tensor in sources.items():
        if ".experts." in key:
            expert = int(key.split(".experts.")[1].split(".")[0])
            code = 8 * expert + {"gate_proj": 1, "up_proj": 2, "down_proj": 3}[key.split(".")[-2]]
            if key.endswith("_scale_inv"):
                tensor.fill_(float(code))
            else:
                tensor.view(torch.uint8).fill_(code)
    for rank, engine in enumerate(engines(layout)):
        publish(engine, rank, plans[name], sources, version=1)
        sizes = engine.served.parallel
        for layer, block in enumerate(engine.served.model.model.layers):
            experts = block.mlp.experts
            held = experts.w13_weight.shape[0]
            for local in range(held):
                slot = sizes.moe_ep_rank * held + local
                expert = slot % layout.config["num_experts"] if layout.slots is None else layout.slots[layer][slot]
                for weights, scales, codes in (
                    (experts.w13_weight, experts.w13_weight_scale_inv, (1, 2)),
                    (experts.w2_weight, experts.w2_weight_scale_inv, (3,)),
                ):
                    rows, grid = weights[local].data.view(torch.uint8), scales[local].data
                    for part, sub, code in zip(rows.chunk(len(codes)), grid.chunk(len(codes)), codes, strict=True):
                        assert torch.all(part == 8 * expert + code)
                        assert torch.all(sub == 8 * expert + code)


def test_three_publishes_with_moved_storage_give_the_right_bytes(plans: dict[str, Plan]) -> None:
    """A peer cached its receive views, and wrote into dead storage after the first offload."""
    layout, plan = LAYOUTS["tp2-ep2"], plans["tp2-ep2"]
    engine = engines(layout)[1]
    addresses = []
    for version in (1, 2, 3):
        sources = fp8_tensors(layout.config, seed=version)
        publish(engine, 1, plan, sources, version)
        live = engine.live_tensors()
        addresses.append(live["model.layers.0.mlp.experts.w2_weight"].data_ptr())
        wanted = sources["model.layers.0.mlp.experts.6.down_proj.weight"]
        assert torch.equal(bits(live["model.layers.0.mlp.experts.w2_weight"][2]), bits(wanted))
        assert engine.version == version
    stale = live["model.layers.0.mlp.experts.w2_weight"]
    engine.pause()
    engine.offload()
    engine.reload()
    bits(stale)[:] = 0
    assert torch.all(bits(engine.live_tensors()["model.layers.0.mlp.experts.w2_weight"]) == 0xFF)


def test_publishing_the_same_bytes_again_changes_nothing(plans: dict[str, Plan]) -> None:
    """Post-processing that is not re-entrant corrupted the second publish."""
    layout, plan = LAYOUTS["tp4-ep2"], plans["tp4-ep2"]
    engine, sources = engines(layout)[2], fp8_tensors(layout.config)
    digests = []
    for version in (1, 2, 3):
        publish(engine, 2, plan, sources, version)
        digests.append({n: hashlib.sha256(bits(t).numpy()).hexdigest() for n, t in engine.live_tensors().items()})
    assert digests[0] == digests[1] == digests[2]


def test_what_a_plan_leaves_out_stays_poisoned_and_is_listed(plans: dict[str, Plan]) -> None:
    layout, plan = LAYOUTS["tp6-ep6"], plans["tp6-ep6"]
    for rank, engine in enumerate(engines(layout)):
        described = engine.describe()
        engine.pause()
        engine.offload()
        engine.reload()
        receive(engine, rank, plan, fp8_tensors(layout.config))
        for name, tensor in engine.live_tensors().items():
            poisoned = tensor.is_floating_point() and bool(torch.isnan(tensor.float()).any())
            assert not poisoned or name in described.exempt, name
        engine.post_process()
        for name, tensor in engine.live_tensors().items():
            assert not torch.isnan(tensor.float()).any(), name


def test_experts_that_moved_are_not_published_to_by_an_old_plan(plans: dict[str, Plan]) -> None:
    """A balancer moved experts between two publishes; the second one wrote them where they had been."""
    name = "tp4-ep4-eplb"
    layout, sources = LAYOUTS[name], fp8_tensors(LAYOUTS[name].config)
    engine = engines(layout)[1]
    described = engine.describe()
    publish(engine, 1, plans[name], sources, version=1)
    assert layout.slots is not None
    engine.served.place_experts([row[::-1] for row in layout.slots])
    with pytest.raises(PlanError, match=r"experts were moved since.*plan again"):
        publish(engine, 1, plans[name], sources, version=2)
    moved = engine.describe()
    assert moved.layout_digest != described.layout_digest == plans[name].layouts[1]
    with pytest.raises(PlanError, match=r"changed since the plan was made.*plan again"):
        BoundPlan(plans[name].for_receiver(1), moved, engine.live_tensors())
    engine.served.place_experts(layout.slots)
    assert engine.describe() == described
    BoundPlan(plans[name].for_receiver(1), described, engine.live_tensors())


def test_what_norms_derive_from_their_weights_follows_a_publish(plans: dict[str, Plan]) -> None:
    """SGLang computes from weight + 1, which it kept since the load; a publish in place left the old sum."""
    layout = LAYOUTS["hybrid-tp1"]
    (engine,) = engines(layout)
    for version in (1, 2):
        tensors = fp8_tensors(layout.config, seed=version)
        publish(engine, 0, plans["hybrid-tp1"], apart(layout.config, tensors), version)
        live = engine.live_tensors()
        for name in ("model.norm", "model.layers.0.input_layernorm", "model.layers.3.q_norm"):
            assert torch.equal(live[f"{name}.gemma_weight"], live[f"{name}.weight"] + 1), name
        delta = engine.served.model.model.layers[1].linear_attn
        assert delta.attn.conv_weights.data_ptr() == delta.conv1d.weight.data_ptr()
        assert float(live["model.layers.3.attn.k_scale"]) == 1.0
    delta._derived_weight_cache_error = "packed once, at load"
    with pytest.raises(ConfigError, match=r"layers\.1\.linear_attn: packed once"):
        engine.post_process()


# -- the engine's own rules ------------------------------------------------------------------------------------------


def test_an_engine_serves_only_whole_committed_weights(plans: dict[str, Plan]) -> None:
    layout, plan = LAYOUTS["tp1"], plans["tp1"]
    (engine,) = engines(layout)
    assert not engine.weights_intact()
    assert not engine.serving
    with pytest.raises(TornError, match="no committed version"):
        engine.resume()
    with pytest.raises(StateError, match="pause first"):
        engine.offload()
    publish(engine, 0, plan, fp8_tensors(layout.config), version=7)
    assert (engine.version, engine.serving, engine.weights_intact()) == (7, True, True)
    engine.pause()
    engine.pause()
    engine.fence("byte flipped in flight")
    with pytest.raises(TornError, match="byte flipped in flight"):
        engine.resume()
    assert engine.fenced == "byte flipped in flight"
    publish(engine, 0, plan, fp8_tensors(layout.config), version=8)
    assert (engine.version, engine.serving, engine.fenced) == (8, True, None)


def test_offloaded_weights_can_neither_be_read_nor_freed_twice(plans: dict[str, Plan]) -> None:
    """Releasing memory twice, or resuming what was never released, killed a scheduler."""
    (engine,) = engines(LAYOUTS["tp1"])
    with pytest.raises(StateError, match="never offloaded"):
        engine.reload()
    engine.pause()
    engine.offload()
    assert sum(p.untyped_storage().nbytes() for p in engine.served.model.parameters()) == 0
    for call in (engine.offload, engine.live_tensors, engine.describe, engine.post_process, engine.resume):
        with pytest.raises(StateError, match="offloaded"):
            call()
    identities = {name: id(p) for name, p in engine.served.model.named_parameters()}
    engine.reload()
    assert identities == {name: id(p) for name, p in engine.served.model.named_parameters()}
    assert not engine.weights_intact()
    assert all(torch.all(bits(p.data) == 0xFF) for p in engine.served.model.parameters())


def test_post_processing_that_moves_weights_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    (engine,) = engines(LAYOUTS["tp1"])
    experts = engine.served.model.model.layers[1].mlp.experts
    original = experts.quant_method.process_weights_after_loading

    def moving(layer: torch.nn.Module) -> None:
        original(layer)
        layer.w2_weight.data = layer.w2_weight.data.clone()

    monkeypatch.setattr(experts.quant_method, "process_weights_after_loading", moving)
    with pytest.raises(ConfigError, match=r"layers\.1\.mlp\.experts\.w2_weight.*triton"):
        engine.post_process()


@pytest.mark.parametrize("name", ["tp1", "tp4-ep2", "tp4-ep4", "tp4-ep4-eplb", "tp4-ep2-eplb", BF16])
def test_the_probe_sums_to_the_layer(name: str, plans: dict[str, Plan]) -> None:
    """All ranks' shares together are the mixture of experts of the published tensors, computed here by hand."""
    layout = LAYOUTS[name]
    tensors = (random_tensors if layout.format == "bf16" else fp8_tensors)(layout.config)
    for key, tensor in tensors.items():
        if key.endswith("_scale_inv"):
            tensor.mul_(0.001)
    hidden = torch.randn(5, 256, generator=torch.Generator().manual_seed(2))
    probes = []
    for rank, engine in enumerate(engines(layout)):
        publish(engine, rank, plans[name], tensors, version=1)
        probes.append(engine.probe_layer(1, hidden))
    output = torch.stack([probe.output for probe in probes]).sum(0)
    at = "model.layers.1.mlp"
    logits = hidden @ tensors[f"{at}.gate.weight"].float().t()
    chosen, ids = logits.softmax(-1).topk(2, dim=-1)
    chosen = chosen / chosen.sum(-1, keepdim=True)
    expected = torch.zeros(5, 256)
    for token in range(5):
        for expert, weight in zip(ids[token].tolist(), chosen[token], strict=True):
            gate, up, down = (
                _plain(tensors, f"{at}.experts.{expert}.{part}") for part in ("gate_proj", "up_proj", "down_proj")
            )
            x = hidden[token]
            expected[token] += weight * (down @ (torch.nn.functional.silu(gate @ x) * (up @ x)))
    assert (output - expected).norm() < 1e-5 * expected.norm()
    named = {matrix for probe in probes for matrix in probe.sha256}
    assert named == {f"layers.1.experts.{e}.{p}" for e in range(8) for p in ("fc1", "fc2")}
    if layout.tp == layout.ep:
        fc2 = _plain(tensors, f"{at}.experts.6.down_proj").to(torch.bfloat16)
        digest = hashlib.sha256(bits(fc2).numpy()).hexdigest()
        assert {p.sha256["layers.1.experts.6.fc2"] for p in probes if "layers.1.experts.6.fc2" in p.sha256} == {digest}


def test_a_probe_takes_the_trainers_routing(plans: dict[str, Plan]) -> None:
    layout = LAYOUTS["tp1"]
    (engine,) = engines(layout)
    publish(engine, 0, plans["tp1"], fp8_tensors(layout.config), version=1)
    hidden = torch.randn(3, 256)
    ids, weights = torch.tensor([[0, 1], [2, 3], [7, 6]]), torch.full((3, 2), 0.5)
    probe = engine.probe_layer(0, hidden, ids, weights)
    assert torch.equal(probe.expert_ids, ids)
    twice = engine.probe_layer(0, hidden, ids, 2 * weights)
    assert torch.allclose(twice.output, 2 * probe.output)
    with pytest.raises(ConfigError, match="together, or neither"):
        engine.probe_layer(0, hidden, ids)
    with pytest.raises(ConfigError, match="layer 5"):
        engine.probe_layer(5, hidden)
    with pytest.raises(ConfigError, match=r"expected \[tokens, 256\]"):
        engine.probe_layer(0, torch.randn(3, 128))


def test_awex_and_megatron_are_not_in_this_process(plans: dict[str, Plan]) -> None:
    """Engines get the plan as plain data; the planner's thirteen seconds of imports are the trainer's."""
    assert plans.keys() == set(ALL)
    assert "sglang" in sys.modules
    assert not {name.split(".")[0] for name in sys.modules} & {"awex", "megatron"}


def _plain(tensors: Mapping[str, torch.Tensor], name: str) -> torch.Tensor:
    weight = tensors[f"{name}.weight"]
    scale = tensors.get(f"{name}.weight_scale_inv")
    if scale is None:
        return weight.float()
    full = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
    return (weight.float() * full).to(torch.bfloat16).float()


def test_layouts_cover_what_is_promised() -> None:
    sizes = {(LAYOUTS[name].tp, LAYOUTS[name].ep) for name in TESTED}
    assert sizes >= {(1, 1), (2, 1), (4, 1), (2, 2), (4, 4), (4, 2)}
    promised: Any = {layout.tp for layout in LAYOUTS.values()}
    assert promised == {1, 2, 3, 4, 6, 8}
