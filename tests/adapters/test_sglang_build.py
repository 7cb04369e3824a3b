"""SGLang's real model for any rank in one process: sizes, formats, refusals, description."""

import dataclasses
from typing import Any

import pytest
import torch
from layouts import GOLDEN, LAYOUTS, dump_descriptions, load_descriptions

from weftpub.errors import ConfigError, PlanError
from weftpub.receive import EngineDescription
from weftpub_adapters.sglang import build_model, describe_model, quantization_config, support

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


@pytest.mark.parametrize("backend", [*support.REFUSED_BACKENDS, "brand_new"])
def test_backends_that_change_weights_are_refused_by_name(hf_config: dict[str, Any], backend: str) -> None:
    """A backend with derived copies kept the old ones after a publish."""
    with pytest.raises(ConfigError, match=rf"'{backend}' cannot be published to: .*set it to 'triton'"):
        build_model(hf_config, moe_runner_backend=backend)


def test_moved_experts_and_other_movers_are_refused() -> None:
    support.check_backends("triton")
    with pytest.raises(ConfigError, match="load balancing"):
        support.check_backends("triton", eplb=True)
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
