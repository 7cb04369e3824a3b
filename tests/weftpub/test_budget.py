"""`weftpub plan`: bytes are those of the real stores, masters, slots and engine layouts; what cannot run is refused."""

import json
import re
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch

from weftpub import cli
from weftpub.budget import GIB, PHASES, Budget, Engine, Limits, ModelShape, Request, Trainer, load_shape, make_budget
from weftpub.budget.command import plan
from weftpub.budget.counts import SCALE_BYTES, served, state_bytes
from weftpub.budget.memory import slot_bytes
from weftpub.errors import ConfigError, PlanError
from weftpub.masters import MasterSet
from weftpub.staging import SlotPool
from weftpub.store import ExpertStore

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests/golden/adapters/sglang_descriptions.json"

TINY = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_hidden_layers": 2,
    "hidden_size": 256,
    "moe_intermediate_size": 128,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 512,
}


def request(model: str = "qwen3-30b-a3b", **changes: Any) -> Request:
    values: dict[str, Any] = {
        "shape": load_shape(model),
        "variant": "fp8",
        "rule": "muon",
        "trainer": Trainer(world=8, tensor=2, expert=8),
        "engine": Engine(tensor=8, data=8, expert=8),
    }
    return Request(**{**values, **changes})


def tiny(**changes: Any) -> Request:
    alone = {
        "shape": ModelShape.from_config(TINY),
        "trainer": Trainer(world=1, sequence_parallel=False),
        "engine": Engine(tensor=1),
    }
    return request(**{**alone, **changes})


def rows(budget: Budget, phase: Any) -> dict[str, int]:
    return {f"{row.owner} {row.what}": row.bytes for row in budget.phases[phase]}


# Against the real things.


def test_expert_bytes_are_the_stores() -> None:
    store = ExpertStore(layers=range(2), experts=range(8), hidden=256, intermediate=128, device="cpu")
    real = store.footprint()
    counted = rows(make_budget(tiny()), "train")
    assert counted["trainer W"] == real["w"]
    assert counted["trainer scales of W"] == real["scale"]
    assert counted["trainer W^T and scales"] == real["wt"] + real["scale_t"]
    bf16 = ExpertStore(
        layers=range(2), experts=range(8), hidden=256, intermediate=128, device="cpu", format="bf16", preset=None
    )
    assert rows(make_budget(tiny(variant="bf16")), "train")["trainer BF16 experts"] == sum(bf16.footprint().values())


@pytest.mark.parametrize(("rule", "each"), [("muon", 8), ("adamw", 12)])
def test_host_bytes_are_the_masters(rule: Any, each: int) -> None:
    states = ("momentum_buffer",) if rule == "muon" else ("exp_avg", "exp_avg_sq")
    masters = MasterSet.from_tensors({"m": torch.zeros(256, 128), "n": torch.zeros(128, 128)}, states)
    assert masters.nbytes == each * (256 * 128 + 128 * 128)
    whole = tiny(rule=rule)
    elements = {group.matrices: 0 for group in whole.shape.groups}
    for group in whole.shape.groups:
        elements[group.matrices] += group.count
    assert state_bytes(whole) == each * elements[True] + 12 * elements[False]


def test_slot_bytes_are_the_pools() -> None:
    counted = tiny()
    pool = SlotPool("cpu", 3, numel=counted.shape.largest_matrix(1), tensors_per_slot=3)
    assert slot_bytes(counted) == sum(slot.flat.numel() * 4 for slot in pool.slots)


ATTENTION = {"qkv_proj", "o_proj", "in_proj_qkvz", "in_proj_ba", "out_proj"}


def golden_layouts() -> list[str]:
    """Layouts without redundant experts and draft models, which are not counted."""

    def counted(rank: dict[str, Any]) -> bool:
        config = rank["settings"]["hf_config"]
        experts = config.get("text_config", config)["num_experts"]
        size = rank["settings"]["parallel"]["moe_ep_size"]
        placed = rank["settings"]["experts"]
        return not any(key.startswith("draft") or len(held) * size != experts for key, held in placed.items())

    layouts = {name: ranks[0] for name, ranks in json.loads(GOLDEN.read_text()).items() if counted(ranks[0])}
    assert len(layouts) > 20
    return sorted(layouts)


@pytest.mark.parametrize("layout", golden_layouts())
def test_engine_bytes_are_those_of_sglangs_modules(layout: str) -> None:
    # Described once from SGLang's real modules of every rank; the vocabulary's padding is the engine's own.
    description = json.loads(GOLDEN.read_text())[layout][0]
    sizes, settings = description["settings"]["parallel"], description["settings"]
    counted = Engine(
        tensor=sizes["moe_tp_size"] * sizes["moe_ep_size"], data=sizes["attn_dp_size"], expert=sizes["moe_ep_size"]
    )
    asked = request(shape=ModelShape.from_config(settings["hf_config"]), variant=settings["format"], engine=counted)
    real = {p["name"]: prod(p["shape"]) for p in description["parameters"] if "visual" not in p["name"]}
    experts = sum(n * (4 if "scale" in name else 1) for name, n in real.items() if ".experts." in name)
    if settings["format"] == "bf16":
        experts *= 2
    assert served(asked)[0] == experts
    attention = sum(counted.share(g) for g in asked.shape.groups if g.name in ("attention", "keys and values"))
    assert attention == sum(n for name, n in real.items() if name.split(".")[-2] in ATTENTION)
    shared = sum(counted.share(g) for g in asked.shape.groups if g.name == "shared experts")
    assert shared == sum(n for name, n in real.items() if ".shared_expert." in name)
    vocabulary = sum(counted.share(g) for g in asked.shape.groups if g.name in ("embedding", "head"))
    padded = sum(n for name, n in real.items() if "embed_tokens" in name or "lm_head" in name)
    tied = not any(group.name == "head" for group in asked.shape.groups)
    assert vocabulary <= padded if not tied else vocabulary < padded


MEASURED = json.loads(
    (ROOT / "docs/results/2026-11-29-megatron-h200/layer-schedule-memory-checkpoint.json").read_text()
)["memory"]


@pytest.mark.parametrize("row", MEASURED["rows"], ids=lambda row: f"{row['optimizer']}-{row['variant']}")
def test_trainer_bytes_are_those_measured_on_an_h200(row: dict[str, Any]) -> None:
    # The layer of the results page: two layers, 32 experts, one rank; between two steps, everything loaded.
    shape = ModelShape.from_config(
        {
            **TINY,
            "hidden_size": 3072,
            "moe_intermediate_size": 1024,
            "num_experts": 32,
            "num_experts_per_tok": 8,
            "num_attention_heads": 24,
            "num_key_value_heads": 12,
            "head_dim": 128,
            "vocab_size": 256,
        }
    )
    rule = {"adam": "adamw", "muon": "muon"}[row["optimizer"]]
    budget = make_budget(tiny(shape=shape, variant=row["variant"], rule=rule))
    counted = sum(r.bytes for r in budget.phases["train"] if r.owner == "trainer" and r.kind == "exact")
    assert shape.groups[0].count == MEASURED["expert_parameters"]
    assert counted == pytest.approx(row["between_bytes"], rel=0.015)


# Arithmetic that must hold.


def test_fp8_halves_what_is_served_and_published() -> None:
    bf16, fp8 = make_budget(request(variant="bf16")), make_budget(request())
    half = rows(bf16, "rollout")["engine routed experts"] / 2
    assert rows(fp8, "rollout")["engine routed experts"] == pytest.approx(half * (1 + SCALE_BYTES))
    assert fp8.publish[0].bytes == rows(fp8, "rollout")["engine routed experts"]


def test_one_allocation_moves_and_offloads_no_expert() -> None:
    copied, shared = make_budget(request()), make_budget(request(shared_experts=True))
    experts = copied.publish[0].bytes
    assert sum(r.bytes for r in copied.publish) - sum(r.bytes for r in shared.publish) == experts
    assert copied.host_bytes - shared.host_bytes == experts
    assert sum(f.up for f in copied.pcie) - sum(f.up for f in shared.pcie) == experts
    assert shared.peak("publish") == copied.peak("publish") - experts


def test_rebuilt_transposes_cost_one_layer() -> None:
    stored, rebuilt = (rows(make_budget(request(rebuild_wt=wt)), "train") for wt in (False, True))
    assert rebuilt["trainer W^T and scales"] == stored["trainer W^T and scales"] // 48


def test_muon_replicates_dense_masters_and_adamw_shards_them() -> None:
    two = request(trainer=Trainer(world=8, tensor=2, expert=8))
    one = request(trainer=Trainer(world=8, tensor=1, expert=8))
    experts = 12 * load_shape("qwen3-30b-a3b").groups[0].count // 8
    assert state_bytes(replace(two, rule="adamw")) - experts < 12 * 1_541_000_000 / 8 * 1.01
    assert state_bytes(replace(one, rule="muon")) > state_bytes(two)


def test_nodes_have_copies_of_the_experts() -> None:
    """Experts are dealt over the ranks of one node, and each node has all of them: a rank holds the same of them."""
    one = request(rule="adamw", trainer=Trainer(world=8, tensor=2, expert=8))
    two = replace(one, trainer=Trainer(world=16, tensor=2, expert=8))
    assert state_bytes(two) == state_bytes(one), "each node has an instance of the distributed optimizer"
    assert rows(make_budget(two), "train") == rows(make_budget(one), "train")
    shared = [state_bytes(replace(run, variant="bf16")) for run in (one, two)]
    assert shared[1] == shared[0] // 2
    muon = [state_bytes(replace(run, rule="muon")) for run in (one, two)]
    assert muon[0] == muon[1]


# Whether it fits.


def test_what_does_not_fit_is_told_with_what_does() -> None:
    budget = make_budget(request("qwen3.5-122b-a10b", variant="baseline"))
    assert not budget.fits
    (problem,) = budget.problems()
    assert "GiB too much; largest: trainer FP32 masters and state 133.9" in problem
    missing = float(problem.partition(", ")[2].partition(" GiB")[0])
    assert missing == pytest.approx((budget.peak("train") - budget.usable) / GIB, abs=0.06)
    assert any("--cpu-offload" in remedy for remedy in budget.remedies())
    assert budget.remedies({"adamw": "say {}"}) == ("AdamW with Megatron's CPU offload (say 0)",), "what can be typed"


def test_every_remedy_is_enough() -> None:
    tight = request("qwen3.5-122b-a10b", limits=Limits(gpu_memory=120))
    budget = make_budget(tight)
    assert not budget.fits
    assert any("--rebuild-wt" in remedy for remedy in budget.remedies())
    assert make_budget(replace(tight, rebuild_wt=True)).fits
    hopeless = make_budget(replace(tight, limits=Limits(gpu_memory=40)))
    assert hopeless.remedies() == ()


def test_an_engine_without_room_for_one_sequence() -> None:
    budget = make_budget(request("qwen3.5-122b-a10b", limits=Limits(memory_fraction=0.1)))
    assert budget.sequences < 1
    assert any("no room for one sequence" in problem for problem in budget.problems())
    assert budget.peak("rollout") >= 0


# Refusals.


def test_an_expert_that_tensor_parallel_ranks_would_cut_inside_a_block() -> None:
    """A moe_intermediate of 1536 over eight ranks is 192 a rank: a block of 128 would lie on two ranks, and an engine
    that was started so served garbage scales. The sizes that work have to be named before a machine is rented."""
    with pytest.raises(PlanError, match=r"192 per rank, not a multiple of 128; legal .*1, 2, 3, 4, 6, 12"):
        make_budget(request("qwen3-235b-a22b", engine=Engine(tensor=8)))
    make_budget(request("qwen3-235b-a22b", engine=Engine(tensor=8, expert=2)))
    make_budget(request("qwen3-235b-a22b", engine=Engine(tensor=8), variant="bf16"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"trainer": Trainer(world=8, expert=4, expert_tensor=2)}, "splits experts; fp8 needs 1"),
        ({"trainer": Trainer(world=8, tensor=3, expert=8)}, "must divide its 8 ranks"),
        ({"trainer": Trainer(world=6, expert=6)}, "cannot be dealt to expert=6.*--expert, that divides 128"),
        ({"engine": Engine(tensor=8, expert=3)}, "expert=3 must divide tensor=8"),
        ({"engine": Engine(tensor=3, expert=3)}, "cannot be dealt to expert=3.*legal on its 3 ranks"),
        ({"engine": Engine(tensor=16, expert=16)}, "must divide the 8 GPUs"),
        ({"cpu_offload": True}, "Megatron's own"),
        ({"shared_experts": True, "engine": Engine(tensor=8, expert=4)}, "same experts on the same GPU"),
        ({"variant": "bf16", "rebuild_wt": True}, "of variant 'fp8'"),
        ({"variant": "int4"}, "variant 'int4' is unknown"),
    ],
)
def test_refusals_name_what_works(changes: dict[str, Any], message: str) -> None:
    with pytest.raises((ConfigError, PlanError), match=message):
        make_budget(request(**changes))


# The command.


def run(*arguments: str) -> int:
    return cli.run(["plan", *arguments], commands={"plan": plan})


def test_the_command_compares_variants(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--model", "Qwen/Qwen3-30B-A3B", "--gpus", "8", "--gpu-memory", "141") == 0
    out = capsys.readouterr().out
    assert "baseline, muon: fits" in out
    assert "fp8, muon: fits" in out
    assert "FP32 main gradients" in out
    assert "30.5e9 parameters on 8 GPUs of 141 GB each" in out


def test_a_number_stands_with_its_unit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A small model had 0.0e9 parameters on 1 GPUs, and a count of sequences stood under GiB."""
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    assert run("--model", str(tmp_path), "--gpus", "1") == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "2.0e6 parameters on one GPU of 141 GB" in out
    assert "GiB of one GPU" in out
    assert "sequences of full length, a number" in out


@pytest.mark.parametrize(("gpus", "tensor"), [("1", 1), ("8", 2)])
def test_the_commands_own_sizes_fit_the_number_of_gpus(
    gpus: str, tensor: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """One GPU was refused for a tensor parallel size that nobody had asked for."""
    run("--model", "qwen3-30b-a3b", "--variant", "fp8", "--gpus", gpus, "--json")
    own = capsys.readouterr().out
    run("--model", "qwen3-30b-a3b", "--variant", "fp8", "--gpus", gpus, "--json", "--tensor", str(tensor))
    assert json.loads(own) == json.loads(capsys.readouterr().out)


def test_the_commands_json_adds_up(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--model", "qwen3.5-122b-a10b", "--variant", "baseline", "--variant", "fp8", "--json") == 1
    baseline, fp8 = json.loads(capsys.readouterr().out)
    for budget in (baseline, fp8):
        for phase in PHASES:
            part = budget["phases"][phase]
            assert part["bytes"] == sum(row["bytes"] for row in part["rows"])
            assert all(row["how"] and row["kind"] in ("exact", "estimate", "assumed") for row in part["rows"])
    assert (baseline["fits"], fp8["fits"]) == (False, True)
    assert baseline["problems"]
    assert baseline["remedies"]


@pytest.mark.parametrize(
    "arguments",
    [
        ("--model", "qwen3.5-122b-a10b", "--variant", "baseline"),
        ("--model", "qwen3.5-122b-a10b", "--variant", "fp8", "--gpu-memory", "120"),
        ("--model", "qwen3-30b-a3b", "--variant", "fp8", "--gpu-memory", "60", "--logit-chunk", "0"),
    ],
)
def test_what_would_fit_can_be_typed(arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*arguments) == 1
    said = capsys.readouterr().out.partition("it fits with")[2]
    remedies = re.findall(r"\(([^()]*)\)", said)
    assert remedies, said
    for remedy in remedies:
        words = remedy.split()
        rest = list(arguments)
        if "--variant" in words:
            del rest[rest.index("--variant") : rest.index("--variant") + 2]
        if "--logit-chunk" in words and "--logit-chunk" in rest:
            del rest[rest.index("--logit-chunk") : rest.index("--logit-chunk") + 2]
        assert run(*rest, *words) == 0, remedy


def test_the_command_refuses_in_one_message(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--model", "qwen3-30b-a3b", "--rollout-expert", "1", "--rollout-data", "1", "--variant", "fp8") == 1
    assert "legal expert tensor parallel sizes: 1, 2, 3, 6" in capsys.readouterr().err
    assert run("--model", str(ROOT)) == 1
    message = capsys.readouterr().err
    assert f"there is no file {ROOT / 'config.json'}; give a Hugging Face checkpoint directory, or one of" in message
    assert "Errno" not in message
    assert run("--model", "qwen3-30b-a3b", "--cpu-offload") == 1
    assert "add --variant baseline" in capsys.readouterr().err
    for option in ("--shared-experts", "--rebuild-wt"):
        assert run("--model", "qwen3-30b-a3b", "--variant", "bf16", option) == 1
        assert "add --variant fp8" in capsys.readouterr().err
