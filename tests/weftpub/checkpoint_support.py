"""A tiny Qwen3-MoE around a store: what is not an expert, and its config, under Hugging Face's names."""

from typing import Any

import torch
from store_support import fill, make_masters, make_store

from weftpub.store import ExpertStore

LAYERS, EXPERTS, HIDDEN, INTERMEDIATE = 2, 4, 256, 128
HEADS, KV_HEADS, HEAD_DIM, VOCABULARY = 4, 2, 64, 512

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": 512,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "moe_intermediate_size": INTERMEDIATE,
    "num_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "hidden_act": "silu",
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "attention_bias": False,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def model_store(seed: int = 0, **settings: Any) -> ExpertStore:
    """A sealed store of all experts of the tiny model."""
    store = make_store(
        layers=range(LAYERS), experts=range(EXPERTS), hidden=HIDDEN, intermediate=INTERMEDIATE, **settings
    )
    fill(store, 0, make_masters(store, seed))
    return store


def other_tensors() -> dict[str, torch.Tensor]:
    """Everything of the tiny model that is not an expert, in BF16."""
    generator = torch.Generator().manual_seed(99)

    def random(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, generator=generator) * 0.05).bfloat16()

    tensors = {
        "model.embed_tokens.weight": random(VOCABULARY, HIDDEN),
        "model.norm.weight": random(HIDDEN),
        "lm_head.weight": random(VOCABULARY, HIDDEN),
    }
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        tensors |= {
            prefix + "self_attn.q_proj.weight": random(HEADS * HEAD_DIM, HIDDEN),
            prefix + "self_attn.k_proj.weight": random(KV_HEADS * HEAD_DIM, HIDDEN),
            prefix + "self_attn.v_proj.weight": random(KV_HEADS * HEAD_DIM, HIDDEN),
            prefix + "self_attn.o_proj.weight": random(HIDDEN, HEADS * HEAD_DIM),
            prefix + "self_attn.q_norm.weight": random(HEAD_DIM),
            prefix + "self_attn.k_norm.weight": random(HEAD_DIM),
            prefix + "input_layernorm.weight": random(HIDDEN),
            prefix + "post_attention_layernorm.weight": random(HIDDEN),
            prefix + "mlp.gate.weight": random(EXPERTS, HIDDEN),
        }
    return tensors
