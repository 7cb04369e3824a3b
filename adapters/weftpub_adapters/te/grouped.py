"""One layer's TEGroupedMLP on a store: tensors over its bytes, an FP8 region around the experts, token padding inside
it.

Megatron puts FP8 autocast around whole transformer layers and pads tokens only if the model's config asks for FP8.
Here the model's config
does not. The experts module gets a config of its own that does, so its own forward pads and unpads, and its forward
runs inside a region that
ends where the experts end.
"""

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from weftpub.errors import ConfigError
from weftpub.store import ExpertStore
from weftpub_adapters.te.scales import GemmScales
from weftpub_adapters.te.support import require_supported
from weftpub_adapters.te.weights import StoreWeights

__all__ = ["GroupedForward"]

_BUFFERS = {"fc1": "w13", "fc2": "w2"}


class GroupedForward:
    """The bond of one TEGroupedMLP with a store.

    Args:
        experts_module: Megatron's TEGroupedMLP.
        layer: its global layer index.
        experts: global ids, in the module's order.
        parameters: "fc1" and "fc2" to the registered parameters, in the module's order.
        store: sealed, and holding these experts with a W^T of their own.
        power_of_two_activations: rule for the scales of activations and gradients; False uses FP32 scales.

    Raises:
        ConfigError: TransformerEngine or the GPU is not supported, the experts are attached already, or the store
            rebuilds W^T.
    """

    def __init__(
        self,
        experts_module: Any,
        layer: int,
        experts: Sequence[int],
        parameters: Mapping[str, Sequence[torch.nn.Parameter]],
        store: ExpertStore,
        *,
        power_of_two_activations: bool = False,
    ) -> None:
        require_supported()
        if store.wt != "store":
            raise ConfigError(
                "TransformerEngine reads W^T of all layers during backward; build the store with wt='store'"
            )
        if "forward" in vars(experts_module):
            raise ConfigError(f"the experts of layer {layer} are attached already; close that attachment first")
        self._module = experts_module
        self._scales: list[GemmScales] = []
        self._linears = {projection: getattr(experts_module, f"linear_{projection}") for projection in _BUFFERS}
        for projection, linear in self._linears.items():
            tensors = self._tensors(store, layer, projection, experts)
            name = f"layers.{layer}.experts.linear_{projection}"
            linear._get_weight_tensors = StoreWeights(linear, name, parameters[projection], tensors, _alias, store)
        self._enter_region(_recipe(power_of_two_activations))
        self.refresh()

    def refresh(self) -> None:
        """Take over the scales that GEMMs need a padded copy of."""
        for scales in self._scales:
            scales.refresh()

    def disconnect(self) -> None:
        """Let the module compute with its parameters, without FP8."""
        for linear in self._linears.values():
            del linear._get_weight_tensors
        module = self._module
        del module.forward
        del module.quantization_padding, module.quantization_unpadding
        module.config = self._model_config

    def _tensors(self, store: ExpertStore, layer: int, projection: str, experts: Sequence[int]) -> list[torch.Tensor]:
        buffers, name = store.buffers(layer), _BUFFERS[projection]
        scale, scale_t = getattr(buffers, f"{name}_scale"), getattr(buffers, f"{name}_scale_t")
        if scale is None or scale_t is None:
            raise ConfigError("TransformerEngine's FP8 GEMMs need an FP8 store; build it with format='fp8'")
        rowwise, columnwise = GemmScales(scale), GemmScales(scale_t)
        self._scales += [rowwise, columnwise]
        w, wt = getattr(buffers, name), getattr(buffers, f"{name}_t")
        order = [store.layout.experts.index(expert) for expert in experts]
        return [_blockwise_tensor(w[e], rowwise[e], wt[e], columnwise[e]) for e in order]

    def _enter_region(self, recipe: Any) -> None:
        import transformer_engine.pytorch as te

        module, inner = self._module, self._module.forward
        self._model_config = module.config
        module.config = copy.copy(module.config)
        module.config.fp8, module.config.fp8_recipe = "e4m3", "blockwise"
        module.quantization_padding = te.Fp8Padding(module.num_local_experts)
        module.quantization_unpadding = te.Fp8Unpadding(module.num_local_experts)

        def forward(*args: Any, **kwargs: Any) -> Any:
            with te.autocast(enabled=True, recipe=recipe):
                return inner(*args, **kwargs)

        module.forward = forward


def _recipe(power_of_two: bool) -> Any:
    """Block scaling with one rule for the scales of everything that is quantized; weights are not."""
    from transformer_engine.common.recipe import Float8BlockScaling, QParams

    recipe = Float8BlockScaling()
    for name in ("fp8_quant_fwd_inp", "fp8_quant_fwd_weight", "fp8_quant_bwd_grad"):
        setattr(recipe, name, QParams(power_2_scale=power_of_two, amax_epsilon=0.0))
    return recipe


def _blockwise_tensor(w: torch.Tensor, scale: torch.Tensor, wt: torch.Tensor, scale_t: torch.Tensor) -> torch.Tensor:
    """TransformerEngine's tensor over existing bytes; ``w [N, K]`` e4m3, ``wt [K, N]``, scales padded for GEMMs."""
    import transformer_engine_torch as tex
    from transformer_engine.pytorch.tensor.float8_blockwise_tensor import Float8BlockQuantizer, Float8BlockwiseQTensor

    # The quantizer describes the tensor; nothing is quantized with it. Its scale rule says how these scales were made
    # at most.
    quantizer = Float8BlockQuantizer(
        tex.DType.kFloat8E4M3,
        rowwise=True,
        columnwise=True,
        force_pow_2_scales=False,
        amax_epsilon=0.0,
        block_scaling_dim=2,
    )
    return Float8BlockwiseQTensor(
        shape=tuple(w.shape),
        dtype=torch.bfloat16,
        rowwise_data=w.view(torch.uint8),
        rowwise_scale_inv=scale,
        columnwise_data=wt.view(torch.uint8),
        columnwise_scale_inv=scale_t,
        fp8_dtype=tex.DType.kFloat8E4M3,
        quantizer=quantizer,
        is_2D_scaled=True,
        requires_grad=False,
        device=w.device,
    )


def _alias(tensor: torch.Tensor) -> torch.Tensor:
    made: torch.Tensor = type(tensor).make_like(tensor)  # type: ignore[attr-defined]
    return made
