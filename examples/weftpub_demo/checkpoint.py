"""A small Hugging Face Qwen3-MoE checkpoint, made from a seed: what a user would point `--model` at."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from weftpub.errors import ConfigError
from weftpub_adapters.megatron import Qwen3MoeFields, read_config
from weftpub_demo.config import ModelShape

__all__ = ["hf_config", "read_shape", "tensor_shapes", "write_checkpoint"]

_INIT_STD = 0.02


def hf_config(shape: ModelShape) -> dict[str, Any]:
    """config.json of a Qwen3-MoE of this shape, as transformers and SGLang read it."""
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "decoder_sparse_step": 1,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "hidden_size": shape.hidden,
        "initializer_range": _INIT_STD,
        "intermediate_size": shape.expert_intermediate,
        "max_position_embeddings": 4096,
        "mlp_only_layers": [],
        "moe_intermediate_size": shape.expert_intermediate,
        "norm_topk_prob": True,
        "num_attention_heads": shape.heads,
        "num_experts": shape.experts,
        "num_experts_per_tok": shape.experts_per_token,
        "num_hidden_layers": shape.layers,
        "num_key_value_heads": shape.kv_heads,
        "output_router_logits": False,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "router_aux_loss_coef": 0.0,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": shape.vocabulary,
    }


def tensor_shapes(shape: ModelShape) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Every tensor of the checkpoint, in the order in which the seed draws them; 1-D tensors are norm weights."""
    query, key = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    yield "model.embed_tokens.weight", (shape.vocabulary, shape.hidden)
    for layer in range(shape.layers):
        at = f"model.layers.{layer}"
        yield f"{at}.input_layernorm.weight", (shape.hidden,)
        yield f"{at}.self_attn.q_proj.weight", (query, shape.hidden)
        yield f"{at}.self_attn.k_proj.weight", (key, shape.hidden)
        yield f"{at}.self_attn.v_proj.weight", (key, shape.hidden)
        yield f"{at}.self_attn.o_proj.weight", (shape.hidden, query)
        yield f"{at}.self_attn.q_norm.weight", (shape.head_dim,)
        yield f"{at}.self_attn.k_norm.weight", (shape.head_dim,)
        yield f"{at}.post_attention_layernorm.weight", (shape.hidden,)
        yield f"{at}.mlp.gate.weight", (shape.experts, shape.hidden)
        for expert in range(shape.experts):
            yield f"{at}.mlp.experts.{expert}.gate_proj.weight", (shape.expert_intermediate, shape.hidden)
            yield f"{at}.mlp.experts.{expert}.up_proj.weight", (shape.expert_intermediate, shape.hidden)
            yield f"{at}.mlp.experts.{expert}.down_proj.weight", (shape.hidden, shape.expert_intermediate)
    yield "model.norm.weight", (shape.hidden,)
    yield "lm_head.weight", (shape.vocabulary, shape.hidden)


def write_checkpoint(directory: Path, shape: ModelShape, *, seed: int) -> Path:
    """Write config.json and model.safetensors (BF16) into `directory`; one seed gives one set of bytes."""
    shape.check()
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        name: (
            torch.ones(size)
            if len(size) == 1
            else torch.randn(size, generator=generator, dtype=torch.float32) * _INIT_STD
        ).to(torch.bfloat16)
        for name, size in tensor_shapes(shape)
    }
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(hf_config(shape), indent=2) + "\n", encoding="utf-8")
    return directory


def read_shape(directory: Path) -> ModelShape:
    """The shape of the checkpoint in `directory`.

    Raises:
        ConfigError: the trainer cannot load it (another architecture, dense layers, quantized already, fields missing),
            it has too few experts or layers for two receivers, widths that 128 does not divide, or fewer tokens than
            bytes.
    """
    fields = Qwen3MoeFields.from_hf(read_config(directory))
    shape = ModelShape(
        layers=fields.layers,
        experts=fields.experts,
        experts_per_token=fields.top_k,
        hidden=fields.hidden,
        expert_intermediate=fields.intermediate,
        heads=fields.heads,
        kv_heads=fields.kv_heads,
        head_dim=fields.head_dim,
        vocabulary=fields.vocab,
    )
    shape.check()
    if shape.vocabulary < 256:
        raise ConfigError(f"{directory}: vocab_size is {shape.vocabulary}; the demo's tokens are bytes and need 256")
    return shape
