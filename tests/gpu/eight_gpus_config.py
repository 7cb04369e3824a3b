"""The model of eight_gpus.py in Hugging Face's words. No torch: engines' helpers read it, too."""

from typing import Any

__all__ = ["hf_config"]


def hf_config(settings: dict[str, Any]) -> dict[str, Any]:
    """config.json of the model."""
    shape = settings["shape"]
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "attention_bias": False,
        "decoder_sparse_step": 1,
        "head_dim": shape["head_dim"],
        "hidden_act": "silu",
        "hidden_size": shape["hidden"],
        "intermediate_size": shape["intermediate"],
        "max_position_embeddings": shape["positions"],
        "mlp_only_layers": [],
        "model_type": "qwen3_moe",
        "moe_intermediate_size": shape["intermediate"],
        "norm_topk_prob": True,
        "num_attention_heads": shape["heads"],
        "num_experts": shape["experts"],
        "num_experts_per_tok": shape["top_k"],
        "num_hidden_layers": shape["layers"],
        "num_key_value_heads": shape["kv_heads"],
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "use_sliding_window": False,
        "vocab_size": shape["vocab"],
    }
