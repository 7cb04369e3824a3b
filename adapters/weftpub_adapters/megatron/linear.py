"""A linear layer that computes with the store's bytes while autograd, DDP and optimizers keep seeing the registered
parameter.

    forward   y  = x  @ dequant(W)^T        W   [N, K]  from the store
    dgrad     dx = dy @ dequant(W)          through W^T [K, N], the second copy that the store holds for this
    wgrad     dW = dy^T @ x                 FP32, to the placeholder

W is read when it is used and never kept: under full recomputation the second forward reads it again, and a store
that moved on to another generation between forward and backward is an error instead of a wrong gradient.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F

from weftpub.errors import GenerationError
from weftpub.masters import ExpertMatrix
from weftpub.store import MatrixView, StoreLayout
from weftpub_kernels import dequantize

__all__ = ["StoreLinear", "StoreMatrix", "StoreReader"]


class StoreReader(Protocol):
    """The part of `weftpub.store.ExpertStore` that a forward pass needs."""

    @property
    def layout(self) -> StoreLayout:
        """Which matrices it holds, and their shapes."""
        ...

    @property
    def generation(self) -> int | None:
        """The sealed generation, or None."""
        ...

    def matrix(self, matrix: ExpertMatrix) -> MatrixView:
        """Views of one sealed matrix; raises when nothing is sealed."""
        ...


@dataclass(frozen=True)
class StoreMatrix:
    """One expert matrix of a store, read anew at every use."""

    store: StoreReader
    matrix: ExpertMatrix

    def forward_weight(self, dtype: torch.dtype) -> tuple[torch.Tensor, int | None]:
        """W ``[N, K]`` in `dtype`, and the generation it belongs to."""
        view = self.store.matrix(self.matrix)
        weight = view.w.to(dtype) if view.scale is None else dequantize(view.w, view.scale, dtype)
        return weight, self.store.generation

    def dgrad_weight(self, dtype: torch.dtype, generation: int | None) -> torch.Tensor:
        """W^T ``[K, N]`` in `dtype`; GenerationError if the store holds another generation than the forward pass
        used.
        """
        view = self.store.matrix(self.matrix)
        if self.store.generation != generation:
            raise GenerationError(
                f"{self.matrix.name}: forward used generation {generation}, backward finds {self.store.generation}; "
                "finish every backward pass before the optimizer step"
            )
        return view.wt.to(dtype) if view.scale_t is None else dequantize(view.wt, view.scale_t, dtype)


class StoreLinear(torch.autograd.Function):
    """``x [..., K] -> y [..., N]``; gradients to x and to the placeholder parameter.

    The weight gradient goes to ``placeholder.main_grad`` (FP32, accumulated) where there is one, and
    ``placeholder.grad_added_to_main_grad`` then says so, as Megatron's fused accumulation does; else to
    ``placeholder.grad``.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, placeholder: torch.nn.Parameter, weight: StoreMatrix) -> torch.Tensor:
        w, generation = weight.forward_weight(x.dtype)
        ctx.save_for_backward(x)
        ctx.placeholder, ctx.weight, ctx.generation = placeholder, weight, generation
        return F.linear(x, w)

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        grad_x = grad_w = None
        if ctx.needs_input_grad[0]:
            grad_x = F.linear(grad_output, ctx.weight.dgrad_weight(grad_output.dtype, ctx.generation))
        if ctx.needs_input_grad[1]:
            grad_w = _hand_over(ctx.placeholder, _weight_gradient(grad_output, x))
        return grad_x, grad_w, None


def _weight_gradient(grad_output: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """dy^T @ x ``[N, K]``, products and sums in FP32."""
    rows_y, rows_x = grad_output.flatten(0, -2), x.flatten(0, -2)
    if rows_y.is_cuda:
        return torch.mm(rows_y.t(), rows_x, out_dtype=torch.float32)
    return rows_y.float().t() @ rows_x.float()


def _hand_over(placeholder: torch.nn.Parameter, gradient: torch.Tensor) -> torch.Tensor | None:
    """Give the gradient to the placeholder; returns what autograd shall accumulate into `.grad`, if anything."""
    main_grad = getattr(placeholder, "main_grad", None)
    if main_grad is None:
        return gradient
    main_grad.add_(gradient)
    if hasattr(placeholder, "grad_added_to_main_grad"):
        # DDP's hook wants to find a gradient, and drops it at once. One element, expanded, satisfies it without a
        # matrix of memory.
        placeholder.grad_added_to_main_grad = True
        placeholder.grad = torch.zeros((), dtype=placeholder.dtype, device=placeholder.device).expand(placeholder.shape)
    return None
