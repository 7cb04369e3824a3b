"""Gradients before a step: fit, finite, norms, clipping."""

import math
import re
from typing import Any

import pytest
import torch

from weftpub.errors import ConfigError, NonFiniteGradientError
from weftpub.masters import MasterSet
from weftpub.optim import check_gradients, clip_grad_norm, gradient_norms


def gradients() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(31)
    shapes: dict[str, tuple[int, ...]] = {"a": (40, 30), "b": (16, 64), "norm": (12,), "scalar": ()}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


@pytest.fixture
def masters() -> MasterSet:
    return MasterSet({name: grad.shape for name, grad in gradients().items()})


def test_matching_gradients_pass(masters: MasterSet) -> None:
    check_gradients(masters, gradients())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"a": None}, "missing 'a', unknown none.*without tokens has a zero gradient"),
        ({"z": torch.zeros(2)}, "missing none, unknown 'z'"),
        ({"a": torch.zeros(30, 40)}, r"gradient of 'a' has shape \[30, 40\], its master \[40, 30\]"),
        ({"a": torch.zeros(1200)}, r"gradient of 'a' has shape \[1200\]"),
        ({"a": torch.zeros(1, 40, 30)}, r"gradient of 'a' has shape \[1, 40, 30\]"),
        ({"a": torch.zeros(0, 30)}, r"gradient of 'a' has shape \[0, 30\]"),
        ({"b": torch.zeros(16, 64, dtype=torch.int32)}, "gradient of 'b' is torch.int32"),
        ({"b": torch.zeros(16, 64).to(torch.float8_e4m3fn)}, "'b' is torch.float8_e4m3fn.*dequantize"),
        ({"b": torch.zeros(16, 64).to_sparse()}, "'b' must be dense"),
        ({"b": torch.zeros(16, 64, device="meta")}, "'b' must be dense on a CPU or GPU, got .* on meta"),
        ({"b": [0.0]}, "'b' must be a tensor, got list"),
    ],
)
def test_gradients_that_do_not_fit_are_refused(change: dict[str, Any], message: str, masters: MasterSet) -> None:
    changed = {name: grad for name, grad in {**gradients(), **change}.items() if grad is not None}
    with pytest.raises(ConfigError, match=message):
        check_gradients(masters, changed)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_norms_match_a_reference(dtype: torch.dtype) -> None:
    grads = {name: grad.to(dtype) for name, grad in gradients().items()}
    for name, norm in gradient_norms(grads).items():
        assert norm == pytest.approx(math.sqrt(float((grads[name].double() ** 2).sum())), rel=1e-6)
    assert list(gradient_norms(grads)) == list(grads)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_a_non_finite_element_is_named(value: float, dtype: torch.dtype) -> None:
    grads = {name: grad.to(dtype) for name, grad in gradients().items()}
    grads["b"][3, 61] = value
    with pytest.raises(NonFiniteGradientError, match=rf"gradient of 'b' is {value} at row 3, column 61; nothing"):
        gradient_norms(grads)


def test_other_non_finite_gradients_are_counted() -> None:
    grads = gradients()
    grads["a"][0, 7] = grads["norm"][2] = grads["scalar"][()] = float("nan")
    with pytest.raises(NonFiniteGradientError, match=r"'a' is nan at row 0, column 7 \(2 other gradients"):
        gradient_norms(grads)


def test_huge_finite_gradients_are_not_called_infinite() -> None:
    """A norm that overflowed in FP32 was taken for an Inf in the gradient, and a good step was skipped."""
    norms = gradient_norms({"a": torch.full((64, 64), 3e37)})
    assert norms["a"] == pytest.approx(64 * 3e37, rel=1e-6)


def test_tiny_gradients_are_not_called_zero() -> None:
    """The square of 1e-30 is zero in FP32; a gradient is zero only when every element is."""
    norms = gradient_norms({"a": torch.full((4, 4), 1e-30), "zero": torch.zeros(4, 4), "b": torch.full((4, 4), -1e-40)})
    assert norms["a"] == pytest.approx(4e-30, rel=1e-6)
    assert norms["zero"] == 0.0
    assert norms["b"] > 0.0


@pytest.mark.parametrize("max_norm", [0.01, 1.0, 1e6])
def test_clipping_is_pytorchs(max_norm: float) -> None:
    """To one rounding: the factor is computed in FP64 here, in FP32 there."""
    grads = gradients()
    params = [torch.nn.Parameter(torch.zeros_like(grad)) for grad in grads.values()]
    for param, grad in zip(params, grads.values(), strict=True):
        param.grad = grad.clone()
    expected = float(torch.nn.utils.clip_grad_norm_(params, max_norm))
    assert clip_grad_norm(grads, max_norm) == pytest.approx(expected, rel=1e-6)
    for param, grad in zip(params, grads.values(), strict=True):
        torch.testing.assert_close(grad, param.grad, rtol=1e-6, atol=0.0)


def test_small_gradients_are_not_scaled() -> None:
    grads = gradients()
    kept = {name: grad.clone() for name, grad in grads.items()}
    clip_grad_norm(grads, 1e6)
    assert all(torch.equal(grads[name], kept[name]) for name in grads)


def test_clipping_refuses_non_finite_gradients_and_scales_nothing() -> None:
    grads = gradients()
    grads["scalar"].fill_(float("inf"))
    kept = {name: grad.clone() for name, grad in grads.items()}
    with pytest.raises(NonFiniteGradientError, match="'scalar' is inf at row 0, column 0"):
        clip_grad_norm(grads, 1.0)
    assert all(torch.equal(grads[name], kept[name]) for name in grads)


@pytest.mark.parametrize("max_norm", [0.0, -1.0, float("nan"), float("inf")])
def test_clipping_wants_a_positive_norm(max_norm: float) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"max_norm={max_norm}")):
        clip_grad_norm(gradients(), max_norm)


@pytest.mark.gpu
def test_gpu_norms_and_non_finite_elements() -> None:
    grads = {name: grad.cuda() for name, grad in gradients().items()}
    grads["short"] = torch.randn(300, 500, device="cuda").to(torch.bfloat16)
    grads["host"] = torch.randn(30, 50)
    grads["huge"] = torch.full((64, 64), 3e37, device="cuda")
    grads["tiny"] = torch.full((64, 64), 1e-30, device="cuda")
    for name, norm in gradient_norms(grads).items():
        assert norm == pytest.approx(float(torch.linalg.vector_norm(grads[name].double())), rel=1e-5), name
    grads["short"][123, 456] = float("nan")
    with pytest.raises(NonFiniteGradientError, match="'short' is nan at row 123, column 456"):
        gradient_norms(grads)


def test_a_gradient_whose_memory_was_released_is_refused(masters: MasterSet) -> None:
    """Gradients had been offloaded with their buffer, and the step read them all the same: a segmentation fault."""
    grads = gradients()
    grads["b"].untyped_storage().resize_(0)
    with pytest.raises(ConfigError, match=r"gradient of 'b' .* has no memory behind it"):
        check_gradients(masters, grads)


def test_an_fp64_gradient_beyond_fp32_is_not_finite_for_a_step() -> None:
    """FP64 gradients of 1e300 passed as finite, became Inf on their way into the FP32 update, and every master with
    them. Clipping in FP64 first is legitimate, so only a step asks."""
    grads = {name: grad.double() for name, grad in gradients().items()}
    grads["b"][3, 5] = -1e300
    with pytest.raises(NonFiniteGradientError, match="gradient of 'b' is -inf at row 3, column 5"):
        gradient_norms(grads, in_fp32=True)
    grads["b"][3, 5] = torch.finfo(torch.float32).max
    grads["b"][3, 6] = torch.finfo(torch.float32).max
    gradient_norms(grads, in_fp32=True)
    assert gradient_norms(grads)["b"] > torch.finfo(torch.float32).max
