"""What a trained model costs to compute, from the fields of its checkpoint."""

from weftmoe.telemetry import ModelShape
from weftpub_adapters.megatron import Qwen3MoeFields, Qwen35MoeFields

__all__ = ["shape_of"]


def shape_of(fields: Qwen3MoeFields) -> ModelShape:
    """Sizes that count FLOPs."""
    common = {
        "layers": fields.layers,
        "hidden": fields.hidden,
        "heads": fields.heads,
        "kv_heads": fields.kv_heads,
        "head_dim": fields.head_dim,
        "experts": fields.experts,
        "top_k": fields.top_k,
        "intermediate": fields.intermediate,
        "vocabulary": fields.vocab,
    }
    if not isinstance(fields, Qwen35MoeFields):
        return ModelShape(**common)
    keys, values = fields.key_heads * fields.key_dim, fields.value_heads * fields.value_dim
    projections = fields.hidden * (2 * keys + 3 * values + 2 * fields.value_heads)
    convolution = (2 * keys + values) * fields.kernel
    state = fields.value_heads * fields.key_dim * fields.value_dim
    return ModelShape(
        **common,
        shared_intermediate=fields.shared,
        gated=True,
        linear_layers=fields.full.count(False),
        linear_active=projections + convolution + 3 * state,
    )
