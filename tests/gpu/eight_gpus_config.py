"""What eight_gpus.py runs: trainers, engines, and the model in Hugging Face's words. No torch: its command and engines'
helpers read it, too.
"""

from typing import Any

__all__ = ["CONFIGURATIONS", "LAYOUTS", "hf_config"]

# name -> Megatron's optimizer, variant, how flat buffers are offloaded
CONFIGURATIONS = {
    "muon-fp8": ("muon", "fp8", "buffer"),
    "adamw-bf16": ("adam", "bf16", "buffer"),
    "adamw-fp8": ("adam", "fp8", "buffer"),
    "adamw-fp8-resize": ("adam", "fp8", "resize"),
}
# An engine's attention: data parallel, or tensor parallel over all ranks.
LAYOUTS = ("dp", "tp")


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
