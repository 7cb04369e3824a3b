"""Reading config.json, and what the Megatron adapter refuses before a model is built."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from weftpub.errors import ConfigError
from weftpub_adapters.megatron import support
from weftpub_adapters.megatron.fields import Qwen3MoeFields, read_config


def test_fields_are_read_as_written(hf_config: dict[str, Any]) -> None:
    fields = Qwen3MoeFields.from_hf(hf_config)
    assert (fields.layers, fields.hidden, fields.experts, fields.top_k, fields.intermediate) == (2, 256, 8, 2, 512)
    assert (fields.heads, fields.kv_heads, fields.head_dim, fields.vocab) == (8, 4, 32, 500)
    assert fields.norm_topk
    assert not fields.tied


def test_the_spelling_of_newer_transformers_is_read(hf_config: dict[str, Any]) -> None:
    newer = {key: value for key, value in hf_config.items() if key not in ("num_experts", "rope_theta")}
    newer |= {"num_local_experts": 8, "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}}
    fields = Qwen3MoeFields.from_hf(newer)
    assert (fields.experts, fields.rope_theta) == (8, 5000.0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["Qwen3ForCausalLM"]}, "Qwen3ForCausalLM"),
        ({"mlp_only_layers": [0]}, "mlp_only_layers"),
        ({"decoder_sparse_step": 2}, "decoder_sparse_step"),
        ({"attention_bias": True}, "attention_bias"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1.0}}, "yarn"),
        ({"quantization_config": {"quant_method": "fp8"}}, "already quantized"),
        ({"num_hidden_layers": None}, "num_hidden_layers"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok"),
    ],
)
def test_what_cannot_be_trained_is_refused_by_name(
    hf_config: dict[str, Any], change: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        Qwen3MoeFields.from_hf({**hf_config, **change})


@pytest.mark.parametrize(
    ("content", "message"), [(None, "not found"), ("{", "not valid JSON"), ("[]", "expected a JSON object")]
)
def test_a_directory_without_a_config_is_named(tmp_path: Path, content: str | None, message: str) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=message):
        read_config(tmp_path)


def test_a_config_is_read(tmp_path: Path, hf_config: dict[str, Any]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(hf_config))
    assert read_config(tmp_path) == hf_config


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("tensor_model_parallel_size", 2),
        ("expert_tensor_parallel_size", 2),
        ("pipeline_model_parallel_size", 2),
        ("moe_grouped_gemm", True),
        ("moe_mlp_glu_interleave_size", 32),
        ("fp8", "e4m3"),
        ("fp8_param", True),
        ("add_bias_linear", True),
    ],
)
def test_a_refused_setting_is_named_with_the_one_that_works(setting: str, value: object) -> None:
    settings = {name: allowed[0] for name, (allowed, _) in support.REFUSED_SETTINGS.items()}
    support.check_settings(SimpleNamespace(**settings))
    with pytest.raises(ConfigError, match=rf"{setting}=.*set it to"):
        support.check_settings(SimpleNamespace(**{**settings, setting: value}))


@pytest.mark.parametrize("found", ["0.18.0", "0.19.1", "0.20.0"])
def test_another_version_is_refused(monkeypatch: pytest.MonkeyPatch, found: str) -> None:
    monkeypatch.setattr(support, "version", lambda name: found)
    with pytest.raises(ConfigError, match=found):
        support.require_supported()


def test_a_later_patch_release_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(support, "version", lambda name: "0.19.4+local")
    assert support.require_supported() == "0.19.4+local"
