"""What a grouped linear computes with instead of its parameters: FP8 tensors over a store, whose gradients go to
placeholders.

The registered parameter keeps its shape, its hooks and its main gradient, and owns no memory. Each forward pass gets
a fresh alias of the
store's tensor, the output of an autograd function of the placeholder, so that autograd ends where DDP's hooks hang:

    placeholder --FromStore--> FP8 tensor --grouped GEMM--> output          wgrad: output --> FP8 tensor --> placeholder
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from weftpub.errors import GenerationError, StateError
from weftpub.store import ExpertStore

__all__ = ["FromStore", "StoreWeights"]


class FromStore(torch.autograd.Function):
    """``(placeholder, tensor) -> tensor``; its gradient is the placeholder's.

    With fused accumulation the GEMM has added the gradient to the main gradient already, and hands back a dummy of
    the right shape: DDP's
    hook, which finds it in ``placeholder.grad``, must be told not to add it again.
    """

    @staticmethod
    def forward(
        ctx: Any, placeholder: torch.nn.Parameter, tensor: torch.Tensor, store: ExpertStore, name: str, fused: bool
    ) -> torch.Tensor:
        ctx.placeholder, ctx.store, ctx.name, ctx.fused = placeholder, store, name, fused
        ctx.generation = store.generation
        return tensor

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        if ctx.store.generation != ctx.generation:
            raise GenerationError(
                f"{ctx.name}: forward used generation {ctx.generation}, backward finds {ctx.store.generation}; "
                "finish every backward pass before the optimizer step"
            )
        if ctx.fused:
            ctx.placeholder.grad_added_to_main_grad = True
        return gradient, None, None, None, None


class StoreWeights:
    """Stands for a grouped linear's `_get_weight_tensors`.

    Args:
        linear: the grouped linear; `fp8` says whether it runs inside an FP8 region, `fuse_wgrad_accumulation` how it
            accumulates.
        name: of the linear, for errors.
        placeholders: registered parameters, expert by expert.
        tensors: the store's bytes as the GEMM's tensors, expert by expert.
        alias: makes a new tensor object over the same bytes.
        store: asked for its generation.
    """

    def __init__(
        self,
        linear: Any,
        name: str,
        placeholders: Sequence[torch.nn.Parameter],
        tensors: Sequence[torch.Tensor],
        alias: Callable[[torch.Tensor], torch.Tensor],
        store: ExpertStore,
    ) -> None:
        self._linear = linear
        self._name = name
        self._pairs = list(zip(placeholders, tensors, strict=True))
        self._alias = alias
        self._store = store

    def __call__(self) -> list[torch.Tensor]:
        """One tensor an expert, for one forward pass.

        Raises:
            GenerationError, StateError, TornError: the store holds nothing to compute with. StateError: outside an
                FP8 region.
        """
        self._store.layer(self._store.layout.layers[0])  # raises for an empty, torn or offloaded store
        if not self._linear.fp8:
            raise StateError(
                f"{self._name} is attached to a store and was called outside its FP8 region; call the experts module, "
                "not the linear"
            )
        fused = bool(self._linear.fuse_wgrad_accumulation)
        weights: list[torch.Tensor] = []
        for index, (placeholder, tensor) in enumerate(self._pairs):
            alias = self._alias(tensor)
            if torch.is_grad_enabled():
                alias = FromStore.apply(placeholder, alias, self._store, f"{self._name}.weight{index}", fused)
                if fused:
                    alias.main_grad = placeholder.main_grad
                    alias.grad_added_to_main_grad = False
                    alias.overwrite_main_grad = False
            weights.append(alias)
        return weights
