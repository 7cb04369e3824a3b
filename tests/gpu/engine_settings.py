"""How the GPU scripts start SGLang engines: dummy weights, Triton kernels, no radix cache (its library is built for
another torch), no sampling or grammar library, and memory that can be released."""

from typing import Any

__all__ = ["ENGINE", "GRAPHS"]

ENGINE: dict[str, Any] = {
    "attention_backend": "triton",
    "context_length": 2048,
    "disable_radix_cache": True,
    "enable_memory_saver": True,
    "fp8_gemm_runner_backend": "triton",
    "grammar_backend": "none",
    "load_format": "dummy",
    "log_level": "error",
    "max_running_requests": 16,
    "max_total_tokens": 32768,
    "mem_fraction_static": 0.3,
    "moe_runner_backend": "triton",
    "random_seed": 1,
    "sampling_backend": "pytorch",
    "skip_tokenizer_init": True,
}

# Decoding only: SGLang captures prefills of 42 lengths by default, for a minute.
GRAPHS: dict[str, Any] = {"cuda_graph_max_bs_decode": 4, "disable_prefill_cuda_graph": True}
