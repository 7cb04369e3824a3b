"""Parameters are counted right: against the modules of transformers on the meta device, and published sizes."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from weftpub.budget import ModelShape, known_models, load_shape
from weftpub.budget.shape import _table
from weftpub.errors import ConfigError

# What the names promise, in billions.
PROMISED = {"qwen3-30b-a3b": 30.5, "qwen3-235b-a22b": 235, "qwen3.5-35b-a3b": 35, "qwen3.5-122b-a10b": 122}


def built(config: dict[str, Any]) -> torch.nn.Module:
    with torch.device("meta"):
        if config["architectures"] == ["Qwen3MoeForCausalLM"]:
            from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

            return Qwen3MoeForCausalLM(Qwen3MoeConfig(**config))
        from transformers import Qwen3_5MoeConfig, Qwen3_5MoeForConditionalGeneration

        return Qwen3_5MoeForConditionalGeneration(Qwen3_5MoeConfig(**config))


@pytest.mark.parametrize("name", ["qwen3-30b-a3b", "qwen3.5-35b-a3b", "qwen3.5-122b-a10b"])
def test_counts_are_those_of_the_built_modules(name: str) -> None:
    parameters = dict(built(_table()[name]["config"]).named_parameters())
    shape = load_shape(name)
    experts = sum(p.numel() for key, p in parameters.items() if ".mlp.experts." in key)
    vision = sum(p.numel() for key, p in parameters.items() if ".visual." in key)
    assert shape.parameters == sum(parameter.numel() for parameter in parameters.values())
    assert {group.name: group.count for group in shape.groups}["routed experts"] == experts
    assert sum(group.count for group in shape.groups if group.train == "absent") == vision


@pytest.mark.parametrize("name", sorted(PROMISED))
def test_a_name_keeps_its_promise(name: str) -> None:
    assert load_shape(name).parameters / 1e9 == pytest.approx(PROMISED[name], rel=0.01)
    assert name in known_models()


def test_active_parameters_of_the_inferred_model() -> None:
    # One size of this config was inferred: both numbers of its name have to come out.
    shape = load_shape("qwen3.5-122b-a10b")
    counts = {group.name: group.count for group in shape.groups}
    idle = counts["routed experts"] * (1 - shape.top_k / shape.experts)
    active = shape.parameters - idle - counts["vision tower"] - counts["embedding"]
    assert active / 1e9 == pytest.approx(10, rel=0.1)


def test_directories_names_and_bases(tmp_path: Path) -> None:
    config = _table()["qwen3.5-35b-a3b"]["config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    shape = load_shape("qwen3.5-35b-a3b")
    assert load_shape(str(tmp_path)) == shape
    assert load_shape(str(tmp_path / "config.json")) == shape
    assert load_shape("Qwen/Qwen3.5-35B-A3B-Base") == shape
    listed = {**config, "text_config": {**config["text_config"], "layer_types": ["linear_attention"] * 40}}
    assert ModelShape.from_config(listed).full_layers == 0


def test_the_experts_of_a_checkpoint_that_transformers_5_saved() -> None:
    """It writes the number as `num_local_experts`; the plan refused such a directory, which the trainer loads."""
    config = _table()["qwen3-30b-a3b"]["config"]
    renamed = {key: value for key, value in config.items() if key != "num_experts"} | {"num_local_experts": 128}
    assert ModelShape.from_config(renamed) == ModelShape.from_config(config)


def test_what_cannot_be_counted_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"neither a directory.*qwen3-30b-a3b"):
        load_shape("no/such-model")
    with pytest.raises(ConfigError, match=r"there is no file .*config\.json; give a"):
        load_shape(str(tmp_path))
    config = _table()["qwen3-30b-a3b"]["config"]
    with pytest.raises(ConfigError, match="no canonical names"):
        ModelShape.from_config({**config, "architectures": ["LlamaForCausalLM"]})
    with pytest.raises(ConfigError, match="no field 'num_experts'"):
        ModelShape.from_config({key: value for key, value in config.items() if key != "num_experts"})
    with pytest.raises(ConfigError, match="dense layers"):
        ModelShape.from_config({**config, "mlp_only_layers": [0]})
