"""What weftmoe's loop decides for Qwen3.5-MoE: microbatches, names in TransformerEngine's layers, FLOPs, what the
engine is told, and the smoke's model.
"""

import functools
import inspect
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe

from weftmoe import settings as composed
from weftmoe.grpo import Sequence, microbatches
from weftmoe.loop import trainer as trainer_module
from weftmoe.loop.model import config_fields
from weftmoe.loop.shape import shape_of
from weftmoe.loop.trainer import layout_of
from weftmoe.loop.weights import megatron_name, rank_parameters
from weftmoe.needs import budget_of, model_shape
from weftmoe.rollout.served_config import served_config
from weftmoe.smoke.model import make_model, model_config
from weftpub.budget import load_shape
from weftpub.errors import ConfigError
from weftpub_adapters.megatron import Qwen35MoeFields, read_config, read_fields

MODEL = "qwen3.5-35b-a3b-base"
ONE_RANK = ("train.tensor=1", "train.sequence_parallel=false")
KINDS = {"l": "linear_attention", "f": "full_attention"}
# What the shipped sizes leave out.
MORE = {"rms_norm_eps": 1e-6, "rope_parameters": {"rope_theta": 1e7, "rope_type": "default"}}


@pytest.fixture(scope="module")
def fields() -> Qwen35MoeFields:
    """Of the real model, by the sizes that the plan knows."""
    path = Path(__file__).parents[2] / "weftpub" / "budget" / "models.json"
    config = json.loads(path.read_text(encoding="utf-8"))["qwen3.5-35b-a3b"]["config"]
    config["text_config"] |= {**MORE, "max_position_embeddings": 262144}
    found = read_fields(config)
    assert isinstance(found, Qwen35MoeFields)
    return found


@pytest.mark.parametrize(
    ("model", "place", "overrides", "layout"),
    [
        (MODEL, None, (), "packed"),
        (MODEL, None, ("train.deterministic=true",), "padded"),
        (MODEL, "cpu", (), "padded"),
        ("qwen3-30b-a3b", None, ("train.deterministic=true",), "packed"),
        ("qwen3-30b-a3b", "cpu", (), "padded"),
    ],
)
def test_sequences_are_packed_where_every_layer_can_tell_them_apart(
    model: str, place: Any, overrides: tuple[str, ...], layout: str
) -> None:
    """Megatron's delta nets take packed sequences only with flash-linear-attention, which they do not use when they are
    to be deterministic."""
    assert layout_of(composed.load("fp8", model=model, smoke=place, overrides=list(overrides))) == layout


@pytest.mark.parametrize(("experts", "masked"), [("sequential", True), ("grouped", False)])
def test_padded_rows_have_a_mask_where_attention_needs_one(
    experts: str, masked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TransformerEngine's causal attention takes none, and one of a whole microbatch's length squared is memory."""
    trainer: Any = object.__new__(trainer_module.MegatronGrpo)
    trainer._settings = composed.load("fp8", model=MODEL, overrides=[f"train.experts={experts}", *ONE_RANK])
    masks: list[Any] = []
    trainer.ddp = lambda tokens, positions, mask, **_: masks.append(mask)
    trainer.device = torch.device("cpu")
    sequences = [Sequence(n, tuple(range(5 + n)), 2, (-1.0,) * (3 + n)) for n in range(2)]
    (batch,) = microbatches(sequences, budget=100, layout="padded")
    trainer._log_probabilities(batch)
    (mask,) = masks
    assert (mask is not None) is masked
    if mask is not None:
        assert mask.shape == (1, 1, 5, 5)
        assert torch.equal(mask[0, 0], ~torch.ones(5, 5, dtype=torch.bool).tril())


def test_megatron_is_told_what_the_checkpoint_fixes(fields: Qwen35MoeFields) -> None:
    on_cpu = composed.load("fp8", model=MODEL, smoke="cpu")
    found = config_fields(on_cpu, fields, torch.device("cpu"))
    assert found["linear_attention_freq"] == ([1, 1, 1, 0] * 10)
    assert found["deterministic_mode"] is True, "plain torch is the only way without a GPU"
    assert found["attention_output_gate"] is found["layernorm_zero_centered_gamma"] is True
    assert found["moe_router_pre_softmax"] is False, "chosen probabilities are rescaled"
    assert (found["moe_shared_expert_intermediate_size"], found["moe_shared_expert_gate"]) == (512, True)
    assert found["mtp_num_layers"] is None
    assert fields.rotary_percent == 0.25


@pytest.mark.parametrize(
    ("local", "grouped"),
    [
        ("decoder.layers.0.input_layernorm.weight", "decoder.layers.0.self_attention.in_proj.layer_norm_weight"),
        ("decoder.layers.3.input_layernorm.weight", "decoder.layers.3.self_attention.linear_qkv.layer_norm_weight"),
        ("decoder.layers.3.pre_mlp_layernorm.weight", "decoder.layers.3.pre_mlp_layernorm.weight"),
        ("decoder.layers.0.self_attention.in_proj.weight", "decoder.layers.0.self_attention.in_proj.weight"),
        ("decoder.layers.2.mlp.shared_experts.gate_weight", "decoder.layers.2.mlp.shared_experts.gate_weight"),
        (
            "decoder.layers.0.mlp.experts.local_experts.12.linear_fc1.weight",
            "decoder.layers.0.mlp.experts.linear_fc1.weight12",
        ),
    ],
)
def test_names_in_transformer_engines_layers(fields: Qwen35MoeFields, local: str, grouped: str) -> None:
    assert megatron_name(local, fields) == grouped


def test_flops_count_the_weights_that_a_token_meets(fields: Qwen35MoeFields) -> None:
    """The name says three thousand million active parameters, the embedding among them, which computes nothing."""
    shape = shape_of(fields)
    assert shape.full_layers == 10
    embedding = fields.vocab * fields.hidden
    state = 30 * 3 * fields.value_heads * fields.key_dim * fields.value_dim
    assert shape.active + embedding - state == pytest.approx(3e9, rel=0.2)
    # Counted from its groups: everything but experts that a token does not visit, vision and norms.
    groups = {group.name: group.count for group in load_shape(MODEL).groups}
    visited = groups["routed experts"] * fields.top_k // fields.experts
    others = ("attention", "keys and values", "shared experts", "routers", "head", "convolutions and decays")
    small = 30 * 2 * fields.value_heads  # decays and their biases multiply nothing
    assert shape.active - state == visited + sum(groups[name] for name in others) - small


def test_an_engine_serves_the_language_model_alone() -> None:
    text = {"layer_types": ["linear_attention", "full_attention"] * 2}
    whole = {"architectures": ["Qwen3_5MoeForConditionalGeneration"], "text_config": text, "vision_config": {}}
    served = served_config(whole)
    assert served["language_model_only"] is True
    assert served["text_config"]["full_attention_interval"] == 2
    assert "full_attention_interval" not in text, "the caller's own is left alone"
    assert served_config(text)["full_attention_interval"] == 2
    assert "language_model_only" not in served_config(text)
    assert served_config({"num_experts": 4}) == {"num_experts": 4}


@pytest.mark.parametrize(("kinds", "every"), [("lfl", 2), ("llfl", 3), ("ll", 3), ("ff", 1)])
def test_sglang_reads_an_interval(kinds: str, every: int) -> None:
    served = served_config({"layer_types": [KINDS[kind] for kind in kinds]})
    assert served.get("full_attention_interval", 1) == every


def test_layers_that_sglang_cannot_be_told_are_refused() -> None:
    with pytest.raises(ConfigError, match="every n-th layer"):
        served_config({"layer_types": [KINDS[kind] for kind in "ffl"]})


def test_the_smokes_model_is_a_checkpoint_of_the_real_ones_form(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @functools.wraps(inspect.unwrap(modeling_qwen3_5_moe.torch_chunk_gated_delta_rule))
    def kernel(*_: Any, **__: Any) -> Any:
        # flash-linear-attention, where it is installed; on an H200 it ended the warm-up.
        raise AssertionError("the made model came from kernels that not everybody has")

    monkeypatch.setattr(modeling_qwen3_5_moe, "torch_chunk_gated_delta_rule", kernel)
    settings = composed.load(
        "fp8",
        model=MODEL,
        smoke="cpu",
        overrides=["smoke.layers=4", "smoke.hidden=64", "smoke.intermediate=32", "smoke.heads=4", "smoke.kv_heads=2",
                   "smoke.head_dim=16", "smoke.experts=4", "smoke.warmup_steps=1", "smoke.problems=8",
                   "smoke.warmup_batch=2"],
    )  # fmt: skip
    made = {"seed": 1, "tokens": 64, "device": "cpu", "architecture": settings.model.architecture}
    warmup = make_model(tmp_path / "model", settings.smoke, **made)
    assert modeling_qwen3_5_moe.torch_chunk_gated_delta_rule is kernel, "others keep theirs"
    assert warmup == make_model(tmp_path / "model", settings.smoke, **made), "made once"
    config = read_config(tmp_path / "model")
    found = read_fields(config)
    assert isinstance(found, Qwen35MoeFields)
    assert found.multimodal
    assert found.full == (False, False, False, True)
    from weftpub.checkpoint import LazyTensors

    tensors = LazyTensors(tmp_path / "model")
    assert any(name.startswith("model.language_model.layers.3.self_attn.") for name in tensors)
    names = [name for name, _ in rank_parameters(tensors, found)]
    assert len(set(names)) == len(names) > 40
    assert model_shape(settings).linear is not None
    assert budget_of(settings).fits


def test_a_smoke_of_one_layer_is_refused() -> None:
    smoke = composed.load("fp8", model=MODEL, smoke="cpu", overrides=["smoke.layers=1"]).smoke
    with pytest.raises(ConfigError, match="layers of two kinds"):
        model_config(smoke, 64, "Qwen3_5MoeForConditionalGeneration")
