"""Model directories: names to tensors, experts in the trainer's terms, and writing."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import random_tensors, write_checkpoint
from safetensors.torch import save_file

from weftpub.errors import CheckpointError, ConfigError
from weftpub.masters import ExpertMatrix
from weftpub_adapters.safetensors import HFDirectory, write_directory
from weftpub_kernels import dequantize, quantize_pair

PREFIX = "model.layers.1.mlp.experts"


def test_a_directory_is_a_mapping_of_its_tensors(tmp_path: Path, hf_config: dict[str, Any]) -> None:
    tensors = write_checkpoint(tmp_path / "model", hf_config)
    directory = HFDirectory(tmp_path / "model")
    assert directory.config == hf_config
    assert set(directory) == set(tensors)
    assert len(directory) == len(tensors)
    assert all(torch.equal(directory[name], tensors[name]) for name in tensors)
    assert directory.file_of("lm_head.weight").name == "model.safetensors"
    with pytest.raises(KeyError):
        directory["model.layers.99.mlp.gate.weight"]


def test_a_matrix_is_gate_over_up_whatever_the_file_does(tmp_path: Path, hf_config: dict[str, Any]) -> None:
    """Half of the experts of a model were once loaded as up over gate. Expert by expert or stacked in one tensor, the
    trainer's matrix is the same."""
    apart = write_checkpoint(tmp_path / "apart", hf_config)
    experts, layers = hf_config["num_experts"], hf_config["num_hidden_layers"]

    def fc1(layer: int, expert: int) -> torch.Tensor:
        at = f"model.layers.{layer}.mlp.experts.{expert}"
        return torch.cat([apart[f"{at}.gate_proj.weight"], apart[f"{at}.up_proj.weight"]])

    stacked = {name: tensor for name, tensor in apart.items() if ".mlp.experts." not in name}
    for layer in range(layers):
        at = f"model.layers.{layer}.mlp.experts"
        stacked[f"{at}.gate_up_proj"] = torch.stack([fc1(layer, e) for e in range(experts)])
        stacked[f"{at}.down_proj"] = torch.stack([apart[f"{at}.{e}.down_proj.weight"] for e in range(experts)])
    write_directory(tmp_path / "stacked", stacked, hf_config)

    for path in ("apart", "stacked"):
        directory = HFDirectory(tmp_path / path)
        for layer in range(layers):
            for expert in (0, experts - 1):
                assert torch.equal(directory.expert(ExpertMatrix(layer, expert, "fc1")), fc1(layer, expert))
                down = apart[f"model.layers.{layer}.mlp.experts.{expert}.down_proj.weight"]
                assert torch.equal(directory.expert(ExpertMatrix(layer, expert, "fc2")), down)
        assert set(directory.others()) == {name for name in apart if ".mlp.experts." not in name}
        with pytest.raises(ConfigError, match=f"expert {experts}"):
            directory.expert(ExpertMatrix(0, experts, "fc1"))


def test_multimodal_directories_are_read_by_canonical_matrices(tmp_path: Path, hf_config: dict[str, Any]) -> None:
    tensors = {
        name.replace("model.", "model.language_model.", 1) if name.startswith("model.") else name: tensor
        for name, tensor in random_tensors(hf_config).items()
    }
    config = {**hf_config, "architectures": ["Qwen3_5MoeForConditionalGeneration"]}
    write_directory(tmp_path / "model", tensors, config)
    directory = HFDirectory(tmp_path / "model")
    at = "model.language_model.layers.1.mlp.experts.2"
    expected = torch.cat([tensors[f"{at}.gate_proj.weight"], tensors[f"{at}.up_proj.weight"]])
    assert torch.equal(directory.expert(ExpertMatrix(1, 2, "fc1")), expected)
    assert "model.language_model.embed_tokens.weight" in directory.others()


def test_fp8_is_no_start_for_masters_unless_it_is_asked_for(tmp_path: Path, hf_config: dict[str, Any]) -> None:
    """Masters were silently made from dequantized FP8 at start-up."""
    name = f"{PREFIX}.2.down_proj.weight"
    shape = (hf_config["hidden_size"], hf_config["moe_intermediate_size"])
    pair = quantize_pair(torch.randn(shape))
    tensors: dict[str, torch.Tensor] = {name: pair.w, f"{name}_scale_inv": pair.scale}
    tmp_path.joinpath("config.json").write_text(json.dumps(hf_config))
    save_file(tensors, tmp_path / "model.safetensors")
    directory = HFDirectory(tmp_path)
    matrix = ExpertMatrix(1, 2, "fc2")
    with pytest.raises(ConfigError, match="lost the bits that a master keeps"):
        directory.expert(matrix)
    assert torch.equal(directory.expert(matrix, dequantized=True), dequantize(pair.w, pair.scale))
    save_file({name: pair.w}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"without its scale; expected .*weight_scale_inv"):
        HFDirectory(tmp_path).expert(matrix, dequantized=True)


@pytest.mark.parametrize("dequantized", [False, True])
def test_stacked_fp8_experts_are_no_start_either(tmp_path: Path, hf_config: dict[str, Any], dequantized: bool) -> None:
    """Experts one by one were refused in FP8, and a checkpoint that stacks them in one tensor gave bare codes, without
    their scales and without a word.
    """
    hidden, intermediate = hf_config["hidden_size"], hf_config["moe_intermediate_size"]
    codes = torch.randn(4, hidden, intermediate).to(torch.float8_e4m3fn)
    tmp_path.joinpath("config.json").write_text(json.dumps(hf_config))
    save_file({f"{PREFIX}.down_proj": codes}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"experts\.down_proj: is torch\.float8_e4m3fn, which has lost the bits"):
        HFDirectory(tmp_path).expert(ExpertMatrix(1, 2, "fc2"), dequantized=dequantized)


def test_damaged_directories_are_named(tmp_path: Path, hf_config: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json: not the config of a model directory: No such file"):
        HFDirectory(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config\.json: not the config of a model directory: not JSON"):
        HFDirectory(tmp_path)
    for text in ("[1]", "3", "[" * 100_000):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(CheckpointError, match=r"config\.json: not the config of a model directory"):
            HFDirectory(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(hf_config))
    with pytest.raises(CheckpointError, match=r"model\.safetensors: no such file"):
        HFDirectory(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\x10\x00\x00\x00\x00\x00\x00\x00{}")
    with pytest.raises(CheckpointError, match=r"model\.safetensors: not a whole safetensors file"):
        HFDirectory(tmp_path)


def test_unknown_architectures_have_no_experts(tmp_path: Path, hf_config: dict[str, Any]) -> None:
    write_checkpoint(tmp_path, {**hf_config, "architectures": ["DeepseekV3ForCausalLM"]})
    directory = HFDirectory(tmp_path)
    assert directory["model.norm.weight"] is not None
    with pytest.raises(ConfigError, match="DeepseekV3ForCausalLM"):
        directory.others()


@pytest.mark.parametrize("architectures", [None, [], 3, {"a": 1}, [3]])
def test_configs_without_an_architecture_have_no_family(
    tmp_path: Path, hf_config: dict[str, Any], architectures: object
) -> None:
    write_checkpoint(tmp_path, {**hf_config, "architectures": architectures})
    with pytest.raises(ConfigError, match="architecture"):
        HFDirectory(tmp_path).others()


def test_written_directories_are_whole(tmp_path: Path, hf_config: dict[str, Any]) -> None:
    tensors = random_tensors(hf_config)
    path = write_directory(tmp_path / "model", tensors, hf_config)
    directory = HFDirectory(path)
    assert directory.config == hf_config
    assert all(torch.equal(directory[name], tensors[name]) for name in tensors)
    with pytest.raises(CheckpointError, match="overwrite=True"):
        write_directory(path, tensors, hf_config)
    with pytest.raises(ConfigError, match="export_hf"):
        write_directory(tmp_path / "two", {"x": torch.zeros(1).to(torch.float8_e4m3fn)}, hf_config)
    assert [entry.name for entry in tmp_path.iterdir()] == ["model"]
