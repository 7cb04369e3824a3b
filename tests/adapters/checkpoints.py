"""Random Qwen3-MoE and Qwen3.5-MoE checkpoints for the adapter tests, by Hugging Face name; written out here,
independent of any adapter.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

__all__ = ["apart", "expert_tensors", "fp8_tensors", "random_tensors", "shapes", "write_checkpoint"]


def shapes(config: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and shape of every tensor of a BF16 checkpoint."""
    hidden, vocabulary = config["hidden_size"], config["vocab_size"]
    yield "model.embed_tokens.weight", (vocabulary, hidden)
    for layer in range(config["num_hidden_layers"]):
        kind = config["layer_types"][layer] if "layer_types" in config else "full_attention"
        yield from _layer(config, f"model.layers.{layer}", kind)
    yield "model.norm.weight", (hidden,)
    if config.get("mtp_num_hidden_layers"):
        yield "mtp.fc.weight", (hidden, 2 * hidden)
        yield "mtp.pre_fc_norm_embedding.weight", (hidden,)
        yield "mtp.pre_fc_norm_hidden.weight", (hidden,)
        yield from _layer(config, "mtp.layers.0", "full_attention")
        yield "mtp.norm.weight", (hidden,)
    if not config["tie_word_embeddings"]:
        yield "lm_head.weight", (vocabulary, hidden)


def _layer(config: Mapping[str, Any], at: str, kind: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, wide = config["hidden_size"], config["moe_intermediate_size"]
    yield f"{at}.input_layernorm.weight", (hidden,)
    yield from _attention(config, at) if kind == "full_attention" else _delta_net(config, at)
    yield f"{at}.post_attention_layernorm.weight", (hidden,)
    yield f"{at}.mlp.gate.weight", (config["num_experts"], hidden)
    if "shared_expert_intermediate_size" in config:
        shared = config["shared_expert_intermediate_size"]
        yield f"{at}.mlp.shared_expert.gate_proj.weight", (shared, hidden)
        yield f"{at}.mlp.shared_expert.up_proj.weight", (shared, hidden)
        yield f"{at}.mlp.shared_expert.down_proj.weight", (hidden, shared)
        yield f"{at}.mlp.shared_expert_gate.weight", (1, hidden)
    for expert in range(config["num_experts"]):
        yield f"{at}.mlp.experts.{expert}.gate_proj.weight", (wide, hidden)
        yield f"{at}.mlp.experts.{expert}.up_proj.weight", (wide, hidden)
        yield f"{at}.mlp.experts.{expert}.down_proj.weight", (hidden, wide)


def _attention(config: Mapping[str, Any], at: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, head = config["hidden_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    gated = 2 if config.get("attn_output_gate") else 1
    yield f"{at}.self_attn.q_proj.weight", (gated * queries, hidden)
    yield f"{at}.self_attn.k_proj.weight", (keys, hidden)
    yield f"{at}.self_attn.v_proj.weight", (keys, hidden)
    yield f"{at}.self_attn.o_proj.weight", (hidden, queries)
    yield f"{at}.self_attn.q_norm.weight", (head,)
    yield f"{at}.self_attn.k_norm.weight", (head,)


def _delta_net(config: Mapping[str, Any], at: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, keys, values = config["hidden_size"], *_delta_rows(config)
    heads = config["linear_num_value_heads"]
    yield f"{at}.linear_attn.in_proj_qkv.weight", (2 * keys + values, hidden)
    yield f"{at}.linear_attn.in_proj_z.weight", (values, hidden)
    yield f"{at}.linear_attn.in_proj_b.weight", (heads, hidden)
    yield f"{at}.linear_attn.in_proj_a.weight", (heads, hidden)
    yield f"{at}.linear_attn.conv1d.weight", (2 * keys + values, 1, config["linear_conv_kernel_dim"])
    yield f"{at}.linear_attn.A_log", (heads,)
    yield f"{at}.linear_attn.dt_bias", (heads,)
    yield f"{at}.linear_attn.norm.weight", (config["linear_value_head_dim"],)
    yield f"{at}.linear_attn.out_proj.weight", (hidden, values)


def _delta_rows(config: Mapping[str, Any]) -> tuple[int, int]:
    """Rows of query (or key) and of value."""
    keys = config["linear_num_key_heads"] * config["linear_key_head_dim"]
    return keys, config["linear_num_value_heads"] * config["linear_value_head_dim"]


def apart(config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A checkpoint's tensors as they are published: what it fuses of a gated delta net, in parts."""
    published: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        for fused, part in (("in_proj_qkv", "in_proj"), ("conv1d", "conv1d")):
            if f".linear_attn.{fused}." in name:
                keys, values = _delta_rows(config)
                for letter, rows in zip("qkv", tensor.split((keys, keys, values)), strict=True):
                    published[name.replace(fused, f"{part}_{letter}")] = rows.contiguous()
                break
        else:
            published[name] = tensor
    return published


def random_tensors(config: Mapping[str, Any], seed: int = 0) -> dict[str, torch.Tensor]:
    """A BF16 checkpoint: matrices of small normal numbers, norm weights around one."""
    generator = torch.Generator().manual_seed(seed)

    def draw(shape: tuple[int, ...]) -> torch.Tensor:
        noise = torch.randn(shape, generator=generator)
        return (noise * 0.05 if len(shape) == 2 else 1 + 0.1 * noise).to(torch.bfloat16)

    tensors = {name: draw(shape) for name, shape in shapes(config)}
    # FP32 in an engine; a trainer keeps it in BF16, so the values are BF16's.
    return {name: t.float() if name.endswith(".A_log") else t for name, t in tensors.items()}


def expert_tensors(config: Mapping[str, Any]) -> list[str]:
    """Names of the routed experts' weights; those of multi-token prediction are in no store."""
    return [name for name, _ in shapes(config) if ".mlp.experts." in name and not name.startswith("mtp.")]


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
