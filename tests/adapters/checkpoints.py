"""Random Qwen3-MoE checkpoints for the adapter tests, by Hugging Face name; written out here, independent of any
adapter.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

__all__ = ["expert_tensors", "fp8_tensors", "random_tensors", "shapes", "write_checkpoint"]


def shapes(config: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and shape of every tensor of a BF16 checkpoint."""
    hidden, head, vocabulary = config["hidden_size"], config["head_dim"], config["vocab_size"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    wide = config["moe_intermediate_size"]
    yield "model.embed_tokens.weight", (vocabulary, hidden)
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        yield f"{at}.input_layernorm.weight", (hidden,)
        yield f"{at}.self_attn.q_proj.weight", (queries, hidden)
        yield f"{at}.self_attn.k_proj.weight", (keys, hidden)
        yield f"{at}.self_attn.v_proj.weight", (keys, hidden)
        yield f"{at}.self_attn.o_proj.weight", (hidden, queries)
        yield f"{at}.self_attn.q_norm.weight", (head,)
        yield f"{at}.self_attn.k_norm.weight", (head,)
        yield f"{at}.post_attention_layernorm.weight", (hidden,)
        yield f"{at}.mlp.gate.weight", (config["num_experts"], hidden)
        for expert in range(config["num_experts"]):
            yield f"{at}.mlp.experts.{expert}.gate_proj.weight", (wide, hidden)
            yield f"{at}.mlp.experts.{expert}.up_proj.weight", (wide, hidden)
            yield f"{at}.mlp.experts.{expert}.down_proj.weight", (hidden, wide)
    yield "model.norm.weight", (hidden,)
    if not config["tie_word_embeddings"]:
        yield "lm_head.weight", (vocabulary, hidden)


def random_tensors(config: Mapping[str, Any], seed: int = 0) -> dict[str, torch.Tensor]:
    """A BF16 checkpoint: matrices of small normal numbers, norm weights around one."""
    generator = torch.Generator().manual_seed(seed)

    def draw(shape: tuple[int, ...]) -> torch.Tensor:
        noise = torch.randn(shape, generator=generator)
        return (noise * 0.05 if len(shape) == 2 else 1 + 0.1 * noise).to(torch.bfloat16)

    return {name: draw(shape) for name, shape in shapes(config)}


def expert_tensors(config: Mapping[str, Any]) -> list[str]:
    """Names of the routed experts' weights."""
    return [name for name, _ in shapes(config) if ".mlp.experts." in name]


def fp8_tensors(config: Mapping[str, Any], seed: int = 0) -> dict[str, torch.Tensor]:
    """A published checkpoint: as `random_tensors`, experts as random FP8 codes with random scales."""
    generator = torch.Generator().manual_seed(seed + 1)
    tensors = random_tensors(config, seed)
    for name in expert_tensors(config):
        rows, columns = tensors[name].shape
        codes = torch.randint(0, 120, (rows, columns), generator=generator, dtype=torch.uint8)
        tensors[name] = codes.view(torch.float8_e4m3fn)
        grid = (-(-rows // 128), -(-columns // 128))
        tensors[f"{name}_scale_inv"] = torch.rand(grid, generator=generator) + 0.5
    return tensors


def write_checkpoint(directory: Path, config: Mapping[str, Any], seed: int = 0) -> dict[str, torch.Tensor]:
    """Write a BF16 checkpoint directory; returns its tensors."""
    tensors = random_tensors(config, seed)
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(dict(config)), encoding="utf-8")
    return tensors
