"""Staged AdamW against torch.optim.AdamW on the same gradients over several steps.

Bit for bit against PyTorch's single-tensor form, whose operators it runs in order. On a GPU, PyTorch's default
(foreach) groups the bias corrections differently: there the masters agree within a unit in the last place per step.
"""

from typing import Any

import pytest
import torch

from weftpub.errors import ConfigError
from weftpub.masters import MasterSet
from weftpub.optim import AdamWHyperparameters, Override, StagedAdamW
from weftpub.staging import StagingPipeline

STEPS = 6

VARIANTS: list[dict[str, Any]] = [
    {},
    {"weight_decay": 0.0},
    {"weight_decay": 0.3, "lr": 0.05},
    {"beta1": 0.5, "beta2": 0.95, "eps": 1e-5},
    {"beta1": 0.0, "beta2": 0.0},
]


@pytest.fixture
def weights(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Also what Muon does not take."""
    generator = torch.Generator().manual_seed(21)
    shapes: dict[str, tuple[int, ...]] = {"norm": (77,), "gate": (1, 96), "temperature": ()}
    return weights | {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def build(weights: dict[str, torch.Tensor], writer: Any, device: str = "cpu", **settings: Any) -> StagedAdamW:
    masters = MasterSet.from_tensors(weights, StagedAdamW.STATES)
    return StagedAdamW(masters, StagingPipeline.for_masters(masters, device), writer, AdamWHyperparameters(**settings))


def stock_settings(settings: dict[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in settings.items() if not key.startswith("beta")}
    return kept | {"betas": (settings.get("beta1", 0.9), settings.get("beta2", 0.999))}


def parameters(weights: dict[str, torch.Tensor], device: str = "cpu") -> dict[str, torch.nn.Parameter]:
    return {name: torch.nn.Parameter(w.to(device, copy=True)) for name, w in weights.items()}


def assert_follows(
    staged: StagedAdamW, params: dict[str, torch.nn.Parameter], stock: torch.optim.Optimizer, make: Any, writer: Any
) -> None:
    start = staged.masters.sha256()
    for step in range(STEPS):
        grads = {name: grad.to(params[name].device) for name, grad in make(params, step).items()}
        kept = {name: grad.clone() for name, grad in grads.items()}
        for name, param in params.items():
            param.grad = grads[name].clone()
        stock.step()
        staged.step(grads)
        for name, param in params.items():
            master, expected = staged.masters[name], param.detach().cpu()
            assert torch.equal(master.weight, expected), f"{name}, step {step}"
            for key in StagedAdamW.STATES:
                assert torch.equal(master.state[key], stock.state[param][key].cpu()), f"{key} of {name}, step {step}"
            assert master.step == int(stock.state[param]["step"])
            assert torch.equal(writer.seen[name].cpu(), expected)
            assert torch.equal(grads[name], kept[name]), "the caller's gradient was changed"
    assert not set(start.values()) & set(staged.masters.sha256().values())


@pytest.mark.parametrize("settings", VARIANTS, ids=lambda s: "-".join(f"{k}={v}" for k, v in s.items()) or "defaults")
def test_agrees_with_pytorch_bit_for_bit(
    settings: dict[str, Any], weights: Any, gradients_of: Any, writer: Any
) -> None:
    params = parameters(weights)
    stock = torch.optim.AdamW(params.values(), foreach=False, **stock_settings(settings))
    assert_follows(build(weights, writer, **settings), params, stock, gradients_of, writer)


def test_defaults_are_the_stock_defaults() -> None:
    stock = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(2))]).defaults
    ours = AdamWHyperparameters()
    assert (ours.lr, (ours.beta1, ours.beta2), ours.eps, ours.weight_decay) == (
        stock["lr"],
        stock["betas"],
        stock["eps"],
        stock["weight_decay"],
    )


def test_overrides_act_as_parameter_groups(weights: Any, gradients_of: Any, writer: Any) -> None:
    staged = StagedAdamW(
        masters := MasterSet.from_tensors(weights, StagedAdamW.STATES),
        StagingPipeline.for_masters(masters, "cpu"),
        writer,
        AdamWHyperparameters(lr=1e-2, weight_decay=0.1),
        overrides={"norm": Override(weight_decay=0.0), "gate": Override(lr=1e-4)},
    )
    params = parameters(weights)
    rest = [param for name, param in params.items() if name not in ("norm", "gate")]
    groups = [
        {"params": [params["norm"]], "weight_decay": 0.0},
        {"params": [params["gate"]], "lr": 1e-4},
        {"params": rest},
    ]
    stock = torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.1, foreach=False)
    assert_follows(staged, params, stock, gradients_of, writer)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lr": -1.0}, "lr must be"),
        ({"beta1": 1.0}, "beta1 must be .* below 1.0"),
        ({"beta2": -0.1}, "beta2 must be"),
        ({"eps": 0.0}, "eps must be above 0"),
        ({"weight_decay": float("nan")}, "weight_decay must be"),
    ],
)
def test_impossible_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        AdamWHyperparameters(**settings)


@pytest.mark.gpu
@pytest.mark.parametrize("settings", [{}, {"weight_decay": 0.3, "lr": 0.05}])
def test_gpu_agrees_with_pytorch_bit_for_bit(
    settings: dict[str, Any], weights: Any, gradients_of: Any, writer: Any
) -> None:
    generator = torch.Generator().manual_seed(22)
    weights = weights | {f"large.{i}": torch.randn(1024, 2048, generator=generator) * 0.02 for i in range(6)}
    params = parameters(weights, "cuda")
    stock = torch.optim.AdamW(params.values(), foreach=False, **stock_settings(settings))
    staged = build(weights, writer, "cuda", **settings)
    assert staged.masters.is_pinned
    assert_follows(staged, params, stock, gradients_of, writer)


@pytest.mark.gpu
def test_gpu_stays_within_rounding_of_pytorchs_foreach_form(weights: Any, gradients_of: Any, writer: Any) -> None:
    """Each step may round the update (lr * ~1) in its last bits, and then the sum by one unit in the last place.

    Over six steps that stays under 6 * 1e-3 * 2^-20 and 2^-20 of the weight, far under one update.
    """
    params = parameters(weights, "cuda")
    stock = torch.optim.AdamW(params.values(), lr=1e-3, foreach=True)
    staged = build(weights, writer, "cuda", lr=1e-3)
    for step in range(STEPS):
        grads = {name: grad.cuda() for name, grad in gradients_of(weights, step).items()}
        for name, param in params.items():
            param.grad = grads[name].clone()
        stock.step()
        staged.step(grads)
    for name, param in params.items():
        torch.testing.assert_close(staged.masters[name].weight, param.detach().cpu(), rtol=2**-20, atol=6e-3 * 2**-20)
