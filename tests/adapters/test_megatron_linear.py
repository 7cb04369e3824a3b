"""StoreLinear against an ordinary linear layer that has the dequantized weight."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from weftpub.errors import GenerationError
from weftpub.masters import ExpertMatrix
from weftpub.store import ExpertStore
from weftpub_adapters.megatron.linear import StoreLinear, StoreMatrix

HIDDEN, WIDE = 256, 128
FC1 = ExpertMatrix(0, 3, "fc1")

Run = Callable[[torch.Tensor], torch.Tensor]


def write(store: ExpertStore, generation: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with store.writing(generation):
        for matrix in store.layout.matrices:
            store.writer()(matrix.name, torch.randn(store.layout.shape(matrix.projection), generator=generator))


@pytest.fixture(params=["fp8", "bf16"])
def store(request: pytest.FixtureRequest) -> ExpertStore:
    made = ExpertStore([0], [2, 3], HIDDEN, WIDE, format=request.param)
    write(made, 0, seed=1)
    return made


@pytest.fixture
def placeholder() -> torch.nn.Parameter:
    parameter = torch.nn.Parameter(torch.empty(2 * WIDE, HIDDEN, dtype=torch.bfloat16))
    parameter.untyped_storage().resize_(0)
    return parameter


def plain_weight(store: ExpertStore) -> torch.Tensor:
    """value = code * scale, written out."""
    view = store.matrix(FC1)
    if view.scale is None:
        return view.w.clone()
    scale = view.scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
    return (view.w.float() * scale).to(torch.bfloat16)


RECOMPUTE: dict[str, Callable[[Run, torch.Tensor], torch.Tensor]] = {
    "kept": lambda run, x: run(x),
    "recomputed, reentrant": lambda run, x: checkpoint(run, x, use_reentrant=True),
    "recomputed": lambda run, x: checkpoint(run, x, use_reentrant=False),
}


@pytest.mark.parametrize("mode", RECOMPUTE)
@pytest.mark.parametrize("target", ["main_grad", "grad"])
def test_outputs_and_gradients_are_those_of_a_plain_linear(
    store: ExpertStore, placeholder: torch.nn.Parameter, mode: str, target: str
) -> None:
    """Three microbatches, one of them without tokens; gradients add up in FP32 where there is a main gradient."""
    if target == "main_grad":
        placeholder.main_grad = torch.zeros(2 * WIDE, HIDDEN)
    plain = torch.nn.Parameter(plain_weight(store))
    expected_wgrad = torch.zeros(2 * WIDE, HIDDEN)
    weight = StoreMatrix(store, FC1)
    for tokens in (5, 0, 7):
        x = torch.randn(tokens, HIDDEN, generator=torch.Generator().manual_seed(tokens)).to(torch.bfloat16)
        ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
        y = RECOMPUTE[mode](lambda z: StoreLinear.apply(z, placeholder, weight), ours)
        reference = F.linear(theirs, plain)
        assert torch.equal(y, reference)
        grad = torch.randn(y.shape, generator=torch.Generator().manual_seed(9)).to(torch.bfloat16)
        y.backward(grad)
        reference.backward(grad)
        assert ours.grad is not None
        assert torch.equal(ours.grad, theirs.grad)
        expected_wgrad += grad.float().t() @ x.float()
    if target == "main_grad":
        assert torch.allclose(placeholder.main_grad, expected_wgrad, rtol=1e-6, atol=1e-5)
        assert placeholder.grad is None
    else:
        assert placeholder.grad is not None
        assert plain.grad is not None
        assert torch.allclose(placeholder.grad.float(), expected_wgrad, rtol=0.02, atol=0.05)  # BF16 sums
        assert torch.equal(placeholder.grad, plain.grad)
    assert placeholder.untyped_storage().nbytes() == 0


def test_the_main_gradient_keeps_what_bf16_would_lose(store: ExpertStore, placeholder: torch.nn.Parameter) -> None:
    placeholder.main_grad = torch.full((2 * WIDE, HIDDEN), 1000.0)
    x = torch.full((1, HIDDEN), 0.125, dtype=torch.bfloat16)
    StoreLinear.apply(x, placeholder, StoreMatrix(store, FC1)).backward(torch.ones(1, 2 * WIDE, dtype=torch.bfloat16))
    assert torch.all(placeholder.main_grad == 1000.125)


def test_ddp_is_told_that_the_gradient_is_added_already(store: ExpertStore, placeholder: torch.nn.Parameter) -> None:
    """DDP adds `.grad` to the main gradient unless told not to: then every expert gradient would count twice."""
    placeholder.main_grad = torch.zeros(2 * WIDE, HIDDEN)
    placeholder.grad_added_to_main_grad = False
    seen: list[tuple[bool, int]] = []
    node = _accumulator(placeholder)
    node.register_hook(
        lambda *_: seen.append((placeholder.grad_added_to_main_grad, placeholder.grad.untyped_storage().nbytes()))
    )
    x = torch.ones(2, HIDDEN, dtype=torch.bfloat16)
    StoreLinear.apply(x, placeholder, StoreMatrix(store, FC1)).sum().backward()
    assert seen == [(True, 2)]  # hook ran once, and the gradient that satisfies it owns one element
    assert torch.all(placeholder.main_grad == 2)


def test_dgrad_reads_the_transposed_copy(placeholder: torch.nn.Parameter) -> None:
    """W^T is the store's own second copy; what is in it is what the gradient is multiplied with."""
    store = ExpertStore([0], [3], HIDDEN, WIDE)
    write(store, 0, seed=1)
    store.matrix(FC1).wt.view(torch.uint8).zero_()
    x = torch.ones(1, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
    y = StoreLinear.apply(x, placeholder, StoreMatrix(store, FC1))
    assert y.abs().sum() > 0
    y.sum().backward()
    assert x.grad is not None
    assert torch.all(x.grad == 0)


def test_a_step_between_forward_and_backward_is_an_error(store: ExpertStore, placeholder: torch.nn.Parameter) -> None:
    """The update of a trainer overtook a late backward pass: gradients of new weights for outputs of old ones."""
    x = torch.ones(1, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
    y = StoreLinear.apply(x, placeholder, StoreMatrix(store, FC1))
    write(store, 1, seed=2)
    with pytest.raises(GenerationError, match=r"layers\.0\.experts\.3\.fc1: forward used generation 0.*finds 1"):
        y.sum().backward()


def test_an_empty_store_cannot_be_computed_with(placeholder: torch.nn.Parameter) -> None:
    store = ExpertStore([0], [3], HIDDEN, WIDE)
    with pytest.raises(GenerationError):
        StoreLinear.apply(torch.ones(1, HIDDEN, dtype=torch.bfloat16), placeholder, StoreMatrix(store, FC1))


def test_a_frozen_placeholder_gets_no_gradient(store: ExpertStore, placeholder: torch.nn.Parameter) -> None:
    placeholder.requires_grad_(False)
    x = torch.ones(1, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
    StoreLinear.apply(x, placeholder, StoreMatrix(store, FC1)).sum().backward()
    assert x.grad is not None
    assert placeholder.grad is None


@pytest.mark.gpu
@pytest.mark.parametrize("mode", RECOMPUTE)
def test_on_a_gpu_gradients_are_those_of_a_plain_linear(mode: str) -> None:
    store = ExpertStore([0], [3], HIDDEN, WIDE, device="cuda")
    generator = torch.Generator().manual_seed(1)
    with store.writing(0):
        for matrix in store.layout.matrices:
            shape = store.layout.shape(matrix.projection)
            store.writer()(matrix.name, torch.randn(shape, generator=generator).cuda())
    parameter = torch.nn.Parameter(torch.empty(2 * WIDE, HIDDEN, dtype=torch.bfloat16, device="cuda"))
    parameter.untyped_storage().resize_(0)
    parameter.main_grad = torch.zeros(2 * WIDE, HIDDEN, device="cuda")
    x = torch.randn(64, HIDDEN, device="cuda").to(torch.bfloat16).requires_grad_()
    y = RECOMPUTE[mode](lambda z: StoreLinear.apply(z, parameter, StoreMatrix(store, FC1)), x)
    weight = plain_weight(store)
    assert torch.equal(y, F.linear(x, weight))
    grad = torch.randn_like(y)
    y.backward(grad)
    assert x.grad is not None
    assert torch.allclose(x.grad.float(), grad.float() @ weight.float(), rtol=0.02, atol=0.5)
    assert torch.allclose(parameter.main_grad, grad.float().t() @ x.detach().float(), rtol=1e-3, atol=1e-2)


def _accumulator(parameter: torch.nn.Parameter) -> torch.autograd.graph.Node:
    """The autograd node that DDP hangs its hook on."""
    parameter.untyped_storage().resize_(parameter.numel() * parameter.element_size())
    view = parameter.expand_as(parameter)
    assert view.grad_fn is not None
    node = view.grad_fn.next_functions[0][0]
    parameter.untyped_storage().resize_(0)
    assert node is not None
    return node
