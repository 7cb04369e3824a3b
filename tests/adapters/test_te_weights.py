"""The TransformerEngine seam as far as it goes without TransformerEngine: GEMM scales, placeholders, gradients,
refusals."""

import types
from typing import Any

import pytest
import torch

from weftpub.errors import ConfigError, GenerationError, StateError
from weftpub.store import ExpertStore
from weftpub_adapters.te import GemmScales, GroupedForward, StoreWeights

HIDDEN, WIDE = 384, 128


@pytest.fixture
def store() -> ExpertStore:
    made = ExpertStore([0, 1], [4, 5], HIDDEN, WIDE)
    fill(made, 0)
    return made


def fill(store: ExpertStore, generation: int) -> None:
    generator = torch.Generator().manual_seed(generation)
    with store.writing(generation):
        for matrix in store.layout.matrices:
            store.writer()(matrix.name, torch.randn(store.layout.shape(matrix.projection), generator=generator))


def test_scale_rows_start_on_sixteen_bytes_and_follow_the_store(store: ExpertStore) -> None:
    """Padding of scales was published once as if it were data; here it exists in the copy for the GEMM alone."""
    source = store.buffers(0).w13_scale
    assert source is not None
    assert source.shape == (2, 2, 3)
    scales = GemmScales(source)
    scales.refresh()
    view = scales[1]
    assert view.shape == (2, 4)
    assert view.stride(0) * view.element_size() % 16 == 0
    assert torch.equal(view[:, :3], source[1])
    fill(store, 1)
    scales.refresh()
    assert torch.equal(view[:, :3], source[1])
    assert not view[:, 3:].any()


def test_rows_that_fit_are_the_stores_own_memory() -> None:
    source = torch.rand(2, 3, 8)
    scales = GemmScales(source)
    assert not scales.copied
    assert scales[1].data_ptr() == source[1].data_ptr()


class Linear:
    """What the seam reads of a grouped linear."""

    def __init__(self, fused: bool) -> None:
        self.fp8 = True
        self.fuse_wgrad_accumulation = fused


class Product(torch.autograd.Function):
    """Like the grouped GEMM's function: fused, it adds to the weight's main_grad, sets the flag and returns a dummy."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, fused: bool) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.weight, ctx.fused = weight, fused
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        gradient = dy.t() @ x
        if ctx.fused:
            ctx.weight.main_grad += gradient
            ctx.weight.grad_added_to_main_grad = True
            gradient = torch.full_like(gradient, float("nan"))
        return dy @ weight, gradient, None


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("microbatches", [1, 3])
def test_gradients_reach_the_placeholder_once_a_microbatch(store: ExpertStore, fused: bool, microbatches: int) -> None:
    """DDP's hook added the GEMM's dummy on top of the fused gradient, because the flag was set on another tensor than
    its own."""
    tensors = [torch.randn(6, 4) for _ in range(2)]
    placeholders = [torch.nn.Parameter(torch.zeros(6, 4)) for _ in range(2)]
    calls = [0, 0]
    for index, placeholder in enumerate(placeholders):
        placeholder.main_grad = torch.zeros(6, 4)
        placeholder.grad_added_to_main_grad = False
        placeholder.untyped_storage().resize_(0)

        def hook(p: torch.nn.Parameter, index: int = index) -> None:  # as Megatron's DDP
            calls[index] += 1
            if p.grad is not None and not p.grad_added_to_main_grad:
                p.main_grad.add_(p.grad)
            p.grad = None

        placeholder.register_post_accumulate_grad_hook(hook)
    weights = StoreWeights(Linear(fused), "layers.0.experts.linear_fc1", placeholders, tensors, torch.clone, store)
    x = torch.randn(5, 4)
    for _ in range(microbatches):
        out = sum(Product.apply(x, weight, fused).sum() for weight in weights())
        out.backward()
    expected = torch.ones(5, 6).t() @ x * microbatches
    # Values first: a failed assert shows its operands, and a parameter without memory cannot be shown.
    right = [torch.allclose(placeholder.main_grad, expected) for placeholder in placeholders]
    assert right == [True, True]
    assert [placeholder.untyped_storage().nbytes() for placeholder in placeholders] == [0, 0]
    assert calls == [microbatches] * 2


def test_without_gradients_the_tensors_come_plain(store: ExpertStore) -> None:
    placeholder = torch.nn.Parameter(torch.zeros(6, 4))
    weights = StoreWeights(Linear(True), "fc1", [placeholder], [torch.randn(6, 4)], torch.clone, store)
    with torch.no_grad():
        (weight,) = weights()
    assert weight.grad_fn is None


def test_a_step_between_forward_and_backward_is_an_error(store: ExpertStore) -> None:
    placeholder = torch.nn.Parameter(torch.zeros(6, 4))
    weights = StoreWeights(
        Linear(False), "layers.0.experts.linear_fc1", [placeholder], [torch.randn(6, 4)], torch.clone, store
    )
    loss = Product.apply(torch.randn(5, 4), weights()[0], False).sum()
    fill(store, 1)
    with pytest.raises(GenerationError, match=r"linear_fc1\.weight0.*generation 0, backward finds 1"):
        loss.backward()


def test_a_call_outside_the_region_or_of_an_empty_store_is_an_error(store: ExpertStore) -> None:
    linear = Linear(False)
    weights = StoreWeights(linear, "layers.0.experts.linear_fc1", [], [], torch.clone, store)
    linear.fp8 = False
    with pytest.raises(StateError, match="outside its FP8 region"):
        weights()
    empty = StoreWeights(Linear(False), "fc1", [], [], torch.clone, ExpertStore([0], [0], HIDDEN, WIDE))
    with pytest.raises(GenerationError):
        empty()


def test_a_machine_without_it_gets_a_clear_message(store: ExpertStore) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine may have it")
    with pytest.raises(ConfigError, match=r"transformer-engine .*moe_grouped_gemm=False|CUDA GPU"):
        GroupedForward(types.SimpleNamespace(), 0, [4, 5], {}, store)
