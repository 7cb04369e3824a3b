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

__all__ = ["BASE", "GOLDEN", "HYBRID", "LAYOUTS", "MULTIMODAL", "Layout", "dump_descriptions", "load_descriptions"]

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
# A Qwen3.5-MoE: three gated delta nets and a gated attention, shared experts; its smallest count of heads is 2.
HYBRID: Mapping[str, Any] = {
    "architectures": ["Qwen3_5MoeForCausalLM"],
    "attention_bias": False,
    "attn_output_gate": True,
    "full_attention_interval": 4,
    "head_dim": 32,
    "hidden_act": "silu",
    "hidden_size": 256,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 16,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_value_head_dim": 32,
    "max_position_embeddings": 128,
    "model_type": "qwen3_5_moe_text",
    "moe_intermediate_size": 256,
    "num_attention_heads": 8,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
    "shared_expert_intermediate_size": 128,
    "tie_word_embeddings": False,
    "vocab_size": 500,
}
# The same as the language model of a multimodal checkpoint, served without its vision tower.
MULTIMODAL: Mapping[str, Any] = {
    "architectures": ["Qwen3_5MoeForConditionalGeneration"],
    "image_token_id": 1,
    "language_model_only": True,
    "model_type": "qwen3_5_moe",
    "text_config": {key: value for key, value in HYBRID.items() if key not in ("architectures", "tie_word_embeddings")},
    "tie_word_embeddings": False,
    "video_token_id": 2,
    "vision_config": {"depth": 1, "hidden_size": 64, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 256},
    "vision_end_token_id": 4,
    "vision_start_token_id": 3,
}
_HYBRID_SIXES = {
    "linear_num_key_heads": 6,
    "linear_num_value_heads": 12,
    "moe_intermediate_size": 384,
    "num_attention_heads": 6,
    "num_experts": 6,
    "num_key_value_heads": 3,
    "shared_expert_intermediate_size": 384,
}
# What worlds of 1, 2, 3, 4, 6 and 8 ranks can share.
_WORLDS = {
    "head_dim": 16,
    "hidden_size": 128,
    "moe_intermediate_size": 128,
    "num_attention_heads": 24,
    "num_experts": 24,
    "num_hidden_layers": 1,
    "num_key_value_heads": 24,
}
_SIXES = {"num_attention_heads": 6, "num_key_value_heads": 3, "num_experts": 6, "moe_intermediate_size": 384}


@dataclass(frozen=True)
class Layout:
    """Sizes of one engine, its model, and where its experts are.

    Attributes:
        model: what the model changes of `base`.
        redundant: slots beyond the experts in each layer.
        slots: for each layer the expert of every slot of all ranks; None deals them in order.
        draft: whether a draft model predicts further tokens.
    """

    tp: int
    ep: int
    attention_dp: int = 1
    format: str = "fp8"
    model: Mapping[str, Any] = field(default_factory=dict)
    base: Mapping[str, Any] = field(default_factory=lambda: BASE)
    redundant: int = 0
    slots: tuple[tuple[int, ...], ...] | None = None
    draft: bool = False

    @property
    def config(self) -> dict[str, Any]:
        """The model's config.json."""
        return {**self.base, **self.model}

    @property
    def text(self) -> dict[str, Any]:
        """The language model's part of it, which is all of it unless the model is multimodal."""
        return {**self.config, **self.config.get("text_config", {})}

    def request(self, rank: int) -> dict[str, Any]:
        """What `build_model` takes for one rank."""
        return {
            "tp_size": self.tp,
            "ep_size": self.ep,
            "rank": rank,
            "attention_dp": self.attention_dp,
            "format": self.format,
            "redundant_experts": self.redundant,
            "physical_to_logical": self.slots,
            "draft": self.draft,
        }


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
    # Hot expert 5 on three ranks, another order in every layer.
    "tp4-ep4-eplb": Layout(
        4, 4, redundant=4, slots=((5, 0, 1, 2, 5, 3, 4, 6, 7, 5, 0, 1), (7, 6, 5, 4, 3, 2, 1, 0, 5, 6, 5, 7))
    ),
    # Split experts, and one of them twice on one rank.
    "tp4-ep2-eplb": Layout(4, 2, redundant=2, slots=((0, 1, 2, 3, 3, 4, 5, 6, 7, 0), (7, 3, 1, 5, 0, 2, 4, 6, 7, 7))),
    "tp2-redundant": Layout(2, 1, redundant=2),
    **{f"world-{n}": Layout(n, n, model=_WORLDS) for n in (1, 2, 3, 4, 6, 8)},
    "hybrid-tp1": Layout(1, 1, base=HYBRID),
    "hybrid-tp2-ep2": Layout(2, 2, base=HYBRID),
    "hybrid-tp4-ep2-dp2": Layout(4, 2, attention_dp=2, base=HYBRID),
    "hybrid-tp4-ep4": Layout(4, 4, base=HYBRID),  # two ranks to each key/value head
    "hybrid-tp3": Layout(3, 1, base=HYBRID, model=_HYBRID_SIXES),
    "hybrid-tp6-ep6": Layout(6, 6, base=HYBRID, model=_HYBRID_SIXES),
    "hybrid-tp8-ep8-dp4": Layout(8, 8, attention_dp=4, base=HYBRID),
    "hybrid-tp2-ep2-multimodal": Layout(2, 2, base=MULTIMODAL),
    "hybrid-tp4-ep2-dp2-mtp": Layout(4, 2, attention_dp=2, base=HYBRID, model={"mtp_num_hidden_layers": 1}, draft=True),
    "hybrid-tp2-bf16-tied": Layout(2, 1, format="bf16", base=HYBRID, model={"tie_word_embeddings": True}),
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
