"""BF16 experts as something that can be planned and published: Megatron's own parameters behind a store's interface.

The fp8 variant publishes its store. The others compute with BF16 parameters, and their bytes are those.
"""

from collections.abc import Iterator
from typing import Any

from weftpub.canonical import CanonicalTensor
from weftpub.masters import ExpertMatrix
from weftpub.store import MatrixView, StoreLayout
from weftpub_adapters.megatron.attached.published import bf16_canonical, expert_items

__all__ = ["ParameterStore"]


class ParameterStore:
    """Implements `weftpub_adapters.awex.trainer.PublishedStore` over the experts' parameters.

    Args:
        layers: the expert layers of this rank, as `prepare` found them.
    """

    def __init__(self, layers: tuple[Any, ...]) -> None:
        self._layers = layers
        self._parameters = {item.matrix: item.parameter for item in expert_items(layers)}
        hidden, intermediate = next(
            parameter.shape for matrix, parameter in self._parameters.items() if matrix.projection == "fc2"
        )
        numbers = tuple(layer.layer for layer in layers)
        self._layout = StoreLayout(numbers, layers[0].experts, hidden, intermediate, format="bf16")

    @property
    def layout(self) -> StoreLayout:
        """Which matrices there are."""
        return self._layout

    def matrix(self, matrix: ExpertMatrix) -> MatrixView:
        """One matrix, as a view of its parameter."""
        weight = self._parameters[matrix].detach()
        return MatrixView(weight, weight.t(), None, None)

    def canonical(self) -> Iterator[CanonicalTensor]:
        """All matrices by canonical name."""
        return bf16_canonical(self._layers)
