"""SGLang's real model for any rank in one process: sizes, formats, refusals, description."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import fp8_tensors, shapes
from layouts import BASE, GOLDEN, HYBRID, LAYOUTS, MULTIMODAL, dump_descriptions, load_descriptions
from transformers import AutoConfig

from weftpub.canonical import CanonicalTensor, family_of
from weftpub.checkpoint.scheme import excluded_modules
from weftpub.checkpoint.scheme import quantization_config as scheme_of
from weftpub.errors import ConfigError, PlanError
from weftpub.receive import EngineDescription
from weftpub_adapters.sglang import (
    build_model,
    describe_live,
    describe_model,
    plain_config,
    quantization_config,
    support,
    unquantized_modules,
)

pytestmark = pytest.mark.isolated("sglang")

_SCHEME = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


def describe(name: str) -> list[EngineDescription]:
    layout = LAYOUTS[name]
    models = [build_model(layout.config, **layout.request(rank)) for rank in range(layout.tp)]
    return [describe_model(model, engine="engine") for model in models]


def test_descriptions_are_the_golden_ones(request: pytest.FixtureRequest) -> None:
    """What the planner's tests plan with is what SGLang is today."""
    live = {name: describe(name) for name in LAYOUTS}
    if request.config.getoption("--update-golden"):
        GOLDEN.parent.mkdir(parents=True, exist_ok=True)
        GOLDEN.write_text(dump_descriptions(live), encoding="utf-8")
    golden = load_descriptions()
    assert golden.keys() == live.keys()
    for name, ranks in live.items():
        assert golden[name] == ranks, f"{name}: SGLang's layout changed; check it, then run with --update-golden"


def test_a_description_is_plain_data() -> None:
    (description,) = describe("tp1")
    assert EngineDescription.model_validate_json(description.model_dump_json()) == description


def test_a_worker_describes_itself_from_its_own_context(monkeypatch: pytest.MonkeyPatch) -> None:
    """What SGLang was told on its command line and what it does differ; a description says what it does."""
    layout = LAYOUTS["tp4-ep4-dp2"]
    served = build_model(layout.config, **layout.request(3))

    def live(**changes: Any) -> EngineDescription:
        with served.active():
            return describe_live(served.model, hf_config=served.hf_config, engine="engine", **changes)

    assert live() == describe_model(served, engine="engine")
    assert (live().rank, live(rank=21).rank) == (3, 21)
    assert served.context.server_args.tp_size == 4
    assert live().settings["parallel"]["attn_tp_size"] == 2
    monkeypatch.setitem(served.context.parallel._overrides, "pp_size", 2)
    with pytest.raises(ConfigError, match="pp_size is 2: pipeline parallel"):
        live()


def test_a_workers_config_is_enough_to_plan_with() -> None:
    """Workers hold SGLang's configuration object, not the config.json."""
    plain = plain_config(build_model(HYBRID).model.config)
    assert json.loads(json.dumps(plain)) == plain
    needed = [key for key in HYBRID if "num_" in key or key.endswith(("dim", "size", "architectures"))]
    assert {key: plain[key] for key in needed} == {key: HYBRID[key] for key in needed}


def test_a_workers_config_does_not_say_where_it_was_read_from(tmp_path: Path) -> None:
    """Two nodes' engines of one model, each with a folder of its own for it, were taken for engines of two kinds."""
    read = []
    for node in ("node-0", "node-1"):
        folder = tmp_path / node
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(HYBRID), encoding="utf-8")
        read.append(plain_config(AutoConfig.from_pretrained(folder)))
    assert read[0] == read[1]
    assert "_name_or_path" not in json.dumps(read[0])


def test_linears_say_how_many_ranks_split_them() -> None:
    """Attention follows its own ranks, shared experts all of them."""
    layout = LAYOUTS["hybrid-tp4-ep2-dp2"]
    (sizes, *_) = [description.settings["linears"] for description in describe("hybrid-tp4-ep2-dp2")]
    assert sizes["model.layers.0.linear_attn.in_proj_qkvz"] == sizes["model.layers.3.qkv_proj"] == 2
    assert sizes["model.layers.0.mlp.shared_expert.down_proj"] == layout.tp


def test_a_draft_is_described_with_its_target() -> None:
    """Embedding and head are the target's; experts are BF16 whatever the target's are."""
    (description, *_) = describe("hybrid-tp4-ep2-dp2-mtp")
    names = [spec.name for spec in description.parameters]
    assert names.count("model.embed_tokens.weight") == names.count("lm_head.weight") == 1
    assert {"draft.fc.weight", "draft.model.layers.0.mlp.experts.w13_weight"} <= set(names)
    assert not [name for name in names if name.startswith("draft.") and ("embed_tokens" in name or "lm_head" in name)]
    assert description.settings["format"] == "fp8"
    dtypes = {spec.name: spec.dtype for spec in description.parameters}
    assert dtypes["draft.model.layers.0.mlp.experts.w13_weight"] == "bfloat16"
    assert "mtp" in unquantized_modules(LAYOUTS["hybrid-tp4-ep2-dp2-mtp"].config)


def test_a_drafts_redundant_slots_are_refused() -> None:
    layout = LAYOUTS["hybrid-tp4-ep2-dp2-mtp"]
    served = build_model(layout.config, **{**layout.request(0), "redundant_experts": 2})
    with pytest.raises(ConfigError, match=r"draft\.model\.layers\.0\.mlp\.experts: .*2 slots.*no map"):
        describe_model(served, engine="engine")


def test_a_shared_expert_fused_into_the_routed_ones_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    served = build_model(HYBRID)
    monkeypatch.setattr(served.model.model.layers[2].mlp.experts, "num_fused_shared_experts", 1)
    with pytest.raises(ConfigError, match=r"layers\.2\.mlp\.experts: 1 shared experts.*-experts-fusion"):
        describe_model(served, engine="engine")


@pytest.mark.parametrize(
    ("name", "rank", "expected"),
    [
        ("tp4-ep2", 3, {"attn_tp_size": 4, "moe_ep_size": 2, "moe_ep_rank": 1, "moe_tp_size": 2, "moe_tp_rank": 1}),
        ("tp4-ep4-dp2", 3, {"attn_tp_size": 2, "attn_tp_rank": 1, "attn_dp_size": 2, "attn_dp_rank": 1}),
        ("tp8-ep4-dp4", 5, {"attn_tp_size": 2, "attn_dp_rank": 2, "moe_ep_rank": 2, "moe_tp_rank": 1}),
    ],
)
def test_sizes_are_the_real_ones(name: str, rank: int, expected: dict[str, int]) -> None:
    """Attention tensor parallelism is narrower than the engine's under data-parallel attention; command lines say
    otherwise.
    """
    layout = LAYOUTS[name]
    served = build_model(layout.config, **layout.request(rank))
    sizes = dataclasses.asdict(served.parallel)
    assert {key: sizes[key] for key in expected} == expected
    assert (sizes["world_size"], sizes["rank"]) == (layout.tp, rank)
    block = served.model.model.layers[0]
    heads = layout.config["num_attention_heads"] // sizes["attn_tp_size"]
    assert block.self_attn.num_heads == heads
    assert block.mlp.experts.w13_weight.shape[0] == layout.config["num_experts"] // sizes["moe_ep_size"]


def test_only_routed_experts_are_fp8(hf_config: dict[str, Any]) -> None:
    """A router, a head or attention in FP8 would serve other numbers than the trainer computed."""
    from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
    from sglang.srt.layers.quantization.fp8 import Fp8MoEMethod

    served = build_model(hf_config)
    for name, parameter in served.model.named_parameters():
        routed = ".mlp.experts." in name
        scale = name.endswith("_scale_inv")
        assert parameter.dtype == (torch.float32 if scale else torch.float8_e4m3fn if routed else torch.bfloat16), name
    experts = served.model.model.layers[1].mlp.experts
    assert isinstance(experts, FusedMoE)
    assert isinstance(experts.quant_method, Fp8MoEMethod)
    assert build_model(hf_config, format="bf16").model.model.layers[1].mlp.experts.w13_weight.dtype == torch.bfloat16


@pytest.mark.parametrize("dropped", ["mlp.gate", "self_attn.o_proj", "self_attn.q_proj", "lm_head"])
def test_a_scheme_that_forgets_a_module_is_refused(hf_config: dict[str, Any], dropped: str) -> None:
    scheme = quantization_config(hf_config)
    scheme["modules_to_not_convert"] = [m for m in scheme["modules_to_not_convert"] if not m.endswith(dropped)]
    config = {**hf_config, "quantization_config": scheme}
    if dropped in ("mlp.gate", "lm_head"):  # SGLang itself never quantizes these two
        build_model(config)
    else:
        with pytest.raises((ConfigError, ValueError), match=r"FP8 covers routed experts only|some but not all"):
            build_model(config)


@pytest.mark.parametrize("base", [BASE, HYBRID, MULTIMODAL], ids=lambda base: base["architectures"][0])
def test_the_list_of_unquantized_modules_is_the_exporters(base: dict[str, Any]) -> None:
    """A shared expert's gate of shape [1, H] was quantized, because the list was written by hand."""
    family = family_of(base["architectures"][0])
    text = {**base, **base.get("text_config", {})}
    others = {family.to_checkpoint(name): torch.empty(shape) for name, shape in shapes(text) if ".experts." not in name}
    experts = {
        name: CanonicalTensor(name, torch.empty(0), "scale" if name.endswith("_scale_inv") else "weight")
        for name in fp8_tensors({**text, "num_hidden_layers": 1, "num_experts": 1})
        if ".experts." in name
    }
    assert unquantized_modules(base) == excluded_modules(family, others, experts)
    assert quantization_config(base) == scheme_of(unquantized_modules(base))


@pytest.mark.parametrize("dropped", ["in_proj_a", "in_proj_z", "out_proj", "shared_expert.up_proj"])
def test_a_scheme_that_forgets_a_hybrids_module_is_refused(dropped: str) -> None:
    scheme = quantization_config(HYBRID)
    scheme["modules_to_not_convert"] = [m for m in scheme["modules_to_not_convert"] if not m.endswith(dropped)]
    with pytest.raises((ConfigError, ValueError), match=r"FP8 covers routed experts only|some but not all"):
        build_model({**HYBRID, "quantization_config": scheme})


@pytest.mark.parametrize("backend", [*support.REFUSED_BACKENDS, "brand_new"])
def test_backends_that_change_weights_are_refused_by_name(hf_config: dict[str, Any], backend: str) -> None:
    """A backend with derived copies kept the old ones after a publish."""
    with pytest.raises(ConfigError, match=rf"'{backend}' cannot be published to: .*set it to 'triton'"):
        build_model(hf_config, moe_runner_backend=backend)


@pytest.mark.parametrize("backend", ["auto", "deep_gemm", "flashinfer_trtllm", "cutlass", "marlin"])
def test_backends_that_are_known_to_change_weights_are_not_fit(backend: str) -> None:
    """FP32 scales were handed to a runner that packs exponents, and it made weights of its own. Named here, whatever
    the adapter's lists say: a runner that slipped from one list into the other would pass the test above."""
    with pytest.raises(ConfigError, match=rf"'{backend}' cannot be published to"):
        support.check_backends(backend)


def test_movers_that_rebuild_weights_are_refused() -> None:
    support.check_backends("triton")
    with pytest.raises(ConfigError, match="moe_a2a_backend='megamoe'"):
        support.check_backends("triton", a2a="megamoe")


@pytest.mark.parametrize("found", ["0.5.10.post1", "0.5.20", "0.6.0"])
def test_another_version_is_refused(monkeypatch: pytest.MonkeyPatch, found: str) -> None:
    monkeypatch.setattr(support, "version", lambda name: found)
    with pytest.raises(ConfigError, match=found):
        support.require_supported()


@pytest.mark.parametrize(
    ("change", "sizes", "error", "message"),
    [
        ({"moe_intermediate_size": 1536}, {"tp_size": 8}, PlanError, r"192 per rank.*legal"),
        ({"moe_intermediate_size": 1536}, {"tp_size": 16}, PlanError, "less than one block"),
        ({}, {"tp_size": 3, "ep_size": 2}, ConfigError, "ep_size must divide tp_size"),
        ({"num_experts": 6}, {"tp_size": 4, "ep_size": 4}, ConfigError, "6 experts cannot be dealt"),
        ({}, {"tp_size": 2, "rank": 2}, ConfigError, "rank=2"),
        ({}, {"tp_size": 4, "attention_dp": 3}, ConfigError, "attention_dp=3"),
        ({}, {"format": "int8"}, ConfigError, "int8"),
        ({"architectures": ["LlamaForCausalLM"]}, {}, ConfigError, "LlamaForCausalLM"),
        ({"mlp_only_layers": [1]}, {}, ConfigError, "dense layers"),
        ({"quantization_config": {"quant_method": "fp8"}}, {"format": "bf16"}, ConfigError, "quantization_config"),
        ({"moe_intermediate_size": 192}, {}, ConfigError, "192 is not a multiple of 128"),
        ({"num_attention_heads": 4}, {"tp_size": 8, "ep_size": 8}, ConfigError, "4 cannot be split over 8 ranks"),
        ({"quantization_config": {"quant_method": "fp8"}}, {}, ConfigError, "expected activation_scheme 'dynamic'"),
        ({"quantization_config": "fp8"}, {}, ConfigError, "quantization_config: expected"),
        (
            {
                "quantization_config": {
                    "quant_method": "fp8",
                    "activation_scheme": "dynamic",
                    "weight_block_size": [64, 64],
                }
            },
            {},
            ConfigError,
            r"\[64, 64\]",
        ),
        ({}, {"redundant_experts": 1, "tp_size": 2, "ep_size": 2}, ConfigError, "1 redundant slots cannot be dealt"),
        ({}, {"physical_to_logical": [[0] * 8] * 2}, ConfigError, "name every expert from 0 to 7"),
        ({}, {"physical_to_logical": [list(range(8))]}, ConfigError, "expected 2 rows of 8 slots"),
        ({}, {"draft": True}, ConfigError, "Qwen3MoeForCausalLM with mtp_num_hidden_layers=None has no draft"),
    ],
)
def test_requests_that_cannot_be_served_are_refused(
    hf_config: dict[str, Any], change: dict[str, Any], sizes: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        build_model({**hf_config, **change}, **sizes)


def test_the_cpu_engine_that_repacks_weights_is_refused(
    hf_config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    import sglang.srt.utils

    monkeypatch.setattr(sglang.srt.utils, "is_cpu", lambda: True)
    with pytest.raises(ConfigError, match="SGLANG_USE_CPU_ENGINE"):
        build_model(hf_config)


def test_building_leaves_no_trace_in_the_process(hf_config: dict[str, Any]) -> None:
    import sys

    from sglang.srt.runtime_context import get_context

    before = get_context()
    build_model(hf_config, tp_size=2, rank=1)
    assert get_context() is before
    assert torch.get_default_dtype() == torch.float32
    assert "vllm" not in sys.modules
    assert torch.empty(1).device.type == "cpu"
