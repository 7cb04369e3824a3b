"""A tiny random Qwen3.5-MoE in transformers' own classes, as checkpoints of both forms."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

__all__ = ["LAYERS", "make_model", "multimodal_form", "read_tensors", "save_text_form"]

LAYERS = ("linear_attention", "full_attention", "linear_attention")
_SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "num_hidden_layers": len(LAYERS),
    "layer_types": list(LAYERS),
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 64,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 128,
    "use_cache": False,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.25,
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    },
}


def make_model(seed: int = 0, **changes: Any) -> Any:
    """transformers' Qwen3_5MoeForCausalLM in FP32, every weight away from where it begins, and a number of BF16."""
    from transformers import Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig

    torch.manual_seed(seed)
    config = Qwen3_5MoeTextConfig(**{**_SIZES, **changes})
    model = Qwen3_5MoeForCausalLM._from_config(config, experts_implementation="eager").float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            wide = 1.0 if name.endswith("mlp.gate.weight") else 0.15  # routers must decide clearly
            parameter.add_(torch.randn_like(parameter) * wide)
            parameter.copy_(parameter.bfloat16())
    return model


def save_text_form(model: Any, directory: Path) -> None:
    """As transformers saves it: one expert a tensor, no prefix."""
    model.save_pretrained(str(directory))
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    assert config["architectures"] == ["Qwen3_5MoeForCausalLM"]


def multimodal_form(directory: Path, target: Path) -> None:
    """The same weights as the language model of a multimodal checkpoint with stacked experts, beside a vision tower and
    a layer of multi-token prediction.
    """
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    text = {key: value for key, value in config.items() if key != "architectures"}
    whole = {
        "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "model_type": "qwen3_5_moe",
        "text_config": {**text, "mtp_num_hidden_layers": 1},
        "vision_config": {"depth": 1},
        "tie_word_embeddings": config["tie_word_embeddings"],
    }
    tensors = read_tensors(directory)
    made: dict[str, torch.Tensor] = {
        "mtp.fc.weight": torch.ones(2, 4),
        "mtp.layers.0.mlp.experts.0.gate_proj.weight": torch.ones(2, 2),
        "model.visual.blocks.0.norm1.weight": torch.ones(2),
    }
    for layer in range(config["num_hidden_layers"]):
        at, experts = f"model.layers.{layer}.mlp.experts", range(config["num_experts"])
        parts = {
            part: [tensors.pop(f"{at}.{e}.{part}_proj.weight") for e in experts] for part in ("gate", "up", "down")
        }
        pairs = zip(parts["gate"], parts["up"], strict=True)
        tensors[f"{at}.gate_up_proj"] = torch.stack([torch.cat(pair) for pair in pairs])
        tensors[f"{at}.down_proj"] = torch.stack(parts["down"])
    for name, tensor in tensors.items():
        made[name.replace("model.", "model.language_model.", 1)] = tensor
    target.mkdir()
    save_file(made, target / "model.safetensors", metadata={"format": "pt"})
    (target / "config.json").write_text(json.dumps(whole), encoding="utf-8")


def read_tensors(directory: Path) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint of one file."""
    return load_file(directory / "model.safetensors")
