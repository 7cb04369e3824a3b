"""Estimated training FLOPs of a decoder, counted as model FLOPs: recomputation does not count.

Source: PaLM, arXiv 2204.02311, appendix B, for routed experts and causal attention:

    6 * N * tokens  +  6 * layers * heads * head_dim * sum of squared sequence lengths

N counts the weights that multiply a token: attention projections, router, the experts that one token visits, and the
output layer; not the embedding. The second term is attention itself, halved because a token sees only earlier ones; it
is over the layers that have attention. A gated delta net has none of it: its state ``[heads, key width, value width]``
meets a token three times (it is read by the key, changed, and read by the query), and counts as so many weights.
"""

from collections.abc import Iterable
from dataclasses import dataclass

__all__ = ["FLOPS_SOURCE", "ModelShape", "training_flops"]

FLOPS_SOURCE = "6 N tokens + 6 layers heads head_dim sum(length^2), N active weights (arXiv 2204.02311, appendix B)"


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a mixture-of-experts decoder, as in its `config.json`.

    Attributes:
        gated: whether each query head comes with a gate of its width.
        linear_layers: how many of `layers` have a gated delta net in the place of attention.
        linear_active: what counts as weights in one of those.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    experts: int
    top_k: int
    intermediate: int
    vocabulary: int
    shared_intermediate: int = 0
    gated: bool = False
    linear_layers: int = 0
    linear_active: int = 0

    @property
    def full_layers(self) -> int:
        """Layers with attention."""
        return self.layers - self.linear_layers

    @property
    def active(self) -> int:
        """Weights that multiply one token."""
        attention = self.hidden * self.head_dim * ((3 if self.gated else 2) * self.heads + 2 * self.kv_heads)
        experts = 3 * self.hidden * (self.top_k * self.intermediate + self.shared_intermediate)
        gate = self.hidden if self.shared_intermediate and self.gated else 0  # of the shared expert
        mixers = self.full_layers * attention + self.linear_layers * self.linear_active
        return mixers + self.layers * (experts + gate + self.hidden * self.experts) + self.hidden * self.vocabulary


def training_flops(shape: ModelShape, lengths: Iterable[int]) -> float:
    """FLOPs of forward and backward over sequences of these lengths, in tokens."""
    tokens = squares = 0
    for length in lengths:
        tokens += length
        squares += length * length
    return 6.0 * shape.active * tokens + 6.0 * shape.full_layers * shape.heads * shape.head_dim * squares
