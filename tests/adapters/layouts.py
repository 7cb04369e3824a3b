"""The engine layouts that the adapter tests plan for, and the golden file with what SGLang makes of each.

The planner's tests must not import SGLang, so they read descriptions from the golden file; SGLang's tests compare that
file with the live models, and rewrite it under `--update-golden`.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from weftpub.receive import EngineDescription

__all__ = ["BASE", "GOLDEN", "LAYOUTS", "Layout", "dump_descriptions", "load_descriptions"]

GOLDEN = Path(__file__).parents[1] / "golden" / "adapters" / "sglang_descriptions.json"

# A Qwen3-MoE that most tested sizes can split: 8 experts of 512, 8 heads over 4 key/value heads, an odd vocabulary.
BASE: Mapping[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "head_dim": 32,
    "hidden_act": "silu",
    "hidden_size": 256,
    "intermediate_size": 512,
    "max_position_embeddings": 128,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 512,
    "norm_topk_prob": True,
    "num_attention_heads": 8,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 2,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 500,
}
_SIXES = {"num_attention_heads": 6, "num_key_value_heads": 3, "num_experts": 6, "moe_intermediate_size": 384}


@dataclass(frozen=True)
class Layout:
    """Sizes of one engine, and what its model changes of `BASE`."""

    tp: int
    ep: int
    attention_dp: int = 1
    format: str = "fp8"
    model: Mapping[str, Any] = field(default_factory=dict)

    @property
    def config(self) -> dict[str, Any]:
        """The model's config.json."""
        return {**BASE, **self.model}


LAYOUTS: Mapping[str, Layout] = {
    "tp1": Layout(1, 1),
    "tp2": Layout(2, 1),
    "tp2-ep2": Layout(2, 2),
    "tp3": Layout(3, 1, model=_SIXES),
    "tp3-ep3": Layout(3, 3, model=_SIXES),
    "tp4": Layout(4, 1),
    "tp4-ep2": Layout(4, 2),
    "tp4-ep4": Layout(4, 4),
    "tp6-ep2": Layout(6, 2, model=_SIXES),  # key/value heads on two ranks each, vocabulary on four of six
    "tp6-ep6": Layout(6, 6, model=_SIXES),
    "tp8-ep2": Layout(8, 2),
    "tp8-ep8": Layout(8, 8),
    "tp4-ep4-dp2": Layout(4, 4, attention_dp=2),
    "tp8-ep4-dp4": Layout(8, 4, attention_dp=4),
    "tp2-ep2-bf16": Layout(2, 2, format="bf16"),
    "tp2-ep2-tied": Layout(2, 2, model={"tie_word_embeddings": True}),
}


def load_descriptions() -> dict[str, list[EngineDescription]]:
    """Layout name to the description of each rank, from the golden file."""
    data = json.loads(GOLDEN.read_text(encoding="utf-8"))
    return {name: [EngineDescription.model_validate(rank) for rank in ranks] for name, ranks in data.items()}


def dump_descriptions(descriptions: Mapping[str, list[EngineDescription]]) -> str:
    """The golden file's text: one line for each rank."""
    blocks = []
    for name, ranks in descriptions.items():
        lines = ",\n".join(json.dumps(rank.model_dump(mode="json"), sort_keys=True) for rank in ranks)
        blocks.append(f"{json.dumps(name)}: [\n{lines}\n]")
    return "{\n" + ",\n".join(blocks) + "\n}\n"
