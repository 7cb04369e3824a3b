"""Makes expert layers compute with the store: TEGroupedMLP through the TransformerEngine seam, SequentialMLP through
`StoreLinear`."""

from collections.abc import Sequence
from typing import Any, Protocol

from weftpub.errors import ConfigError
from weftpub.store import ExpertStore
from weftpub_adapters.megatron.attached.selection import ExpertLayer
from weftpub_adapters.megatron.attached.variants import AttachSettings
from weftpub_adapters.megatron.experts import StoreProduct
from weftpub_adapters.megatron.linear import StoreMatrix

__all__ = ["ExpertForward", "connect_experts"]


class ExpertForward(Protocol):
    """The bond of one layer's forward and backward with a store."""

    def refresh(self) -> None:
        """Take over what is not a view of the store, after a generation was sealed or reloaded."""
        ...

    def disconnect(self) -> None:
        """Let the layer compute with its parameters again."""
        ...


def connect_experts(layers: Sequence[ExpertLayer], store: ExpertStore, settings: AttachSettings) -> list[ExpertForward]:
    """Connect every layer; all of them or, if one raises, none.

    Raises:
        ConfigError: TransformerEngine is missing for a TEGroupedMLP, or cannot compute with these scales.
    """
    connected: list[ExpertForward] = []
    try:
        for layer in layers:
            connected.append(_connect(layer, store, settings))
    except BaseException:
        for forward in connected:
            forward.disconnect()
        raise
    return connected


def _connect(layer: ExpertLayer, store: ExpertStore, settings: AttachSettings) -> ExpertForward:
    if not layer.grouped:
        return _SequentialForward(layer, store)
    from weftpub_adapters.te import GroupedForward

    parameters = {
        projection: [item.parameter for item in layer.parameters if item.matrix.projection == projection]
        for projection in ("fc1", "fc2")
    }
    return GroupedForward(
        layer.module,
        layer.layer,
        layer.experts,
        parameters,
        store,
        power_of_two_activations=settings.activation_scales == "power_of_two",
    )


class _SequentialForward:
    """Each expert's linears call `StoreLinear` instead of their own product."""

    def __init__(self, layer: ExpertLayer, store: ExpertStore) -> None:
        self._linears: list[Any] = []
        for item in layer.parameters:
            if "_forward_impl" in vars(item.linear) and isinstance(item.linear._forward_impl, StoreProduct):
                raise ConfigError(f"{item.matrix.name}: already attached to a store; close that attachment first")
        for item in layer.parameters:
            self._linears.append((item.linear, vars(item.linear).get("_forward_impl")))
            item.linear._forward_impl = StoreProduct(StoreMatrix(store, item.matrix))

    def refresh(self) -> None:
        """Nothing is kept: every product reads the store."""

    def disconnect(self) -> None:
        for linear, before in self._linears:
            if before is None:
                del linear._forward_impl
            else:
                linear._forward_impl = before
