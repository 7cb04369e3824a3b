"""Staged Muon against emerging-optimizers 0.3.0 and Megatron-core, on the same gradients over several steps.

Masters are compared in host memory after each step, bit for bit: the staged update runs the stock operators in the
stock order on the same device, so there is nothing that rounding could do differently.
"""

from typing import Any

import pytest
import torch
from emerging_optimizers.orthogonalized_optimizers import Muon

from weftpub.errors import ConfigError
from weftpub.masters import MasterSet
from weftpub.optim import MuonHyperparameters, Override, StagedMuon
from weftpub.staging import StagingPipeline

STEPS = 4

VARIANTS: list[dict[str, Any]] = [
    {},
    {"nesterov": True, "weight_decay": 0.1},
    {"momentum": 0.8, "weight_decay": 0.0},
    {"scale_mode": "shape_scaling", "extra_scale_factor": 0.2},
    {"scale_mode": "unit_rms_norm"},
    {"weight_decay_method": "independent", "weight_decay": 1e-3},
    {"weight_decay_method": "l2", "weight_decay": 0.1, "nesterov": True},
    {"weight_decay_method": "palm", "weight_decay": 0.3},
    {"coefficient_type": "polar_express", "num_ns_steps": 9},
    {"coefficient_type": "simple", "num_ns_steps": 3},
    {"fp32_matmul_prec": "high"},
    {"fp32_matmul_prec": "highest", "nesterov": True},
]


def build(weights: dict[str, torch.Tensor], writer: Any, device: str = "cpu", **settings: Any) -> StagedMuon:
    masters = MasterSet.from_tensors(weights, StagedMuon.STATES)
    pipeline = StagingPipeline.for_masters(masters, device, slots=2)
    return StagedMuon(masters, pipeline, writer, MuonHyperparameters(**settings))


def parameters(weights: dict[str, torch.Tensor], device: str = "cpu") -> dict[str, torch.nn.Parameter]:
    return {name: torch.nn.Parameter(w.to(device, copy=True)) for name, w in weights.items()}


def assert_follows(
    staged: StagedMuon, params: dict[str, torch.nn.Parameter], stock: torch.optim.Optimizer, make: Any, writer: Any
) -> None:
    """Steps both, and compares masters, momentum and what the writer saw after every step."""
    start = staged.masters.sha256()
    for step in range(STEPS):
        grads = {name: grad.to(params[name].device) for name, grad in make(params, step).items()}
        kept = {name: grad.clone() for name, grad in grads.items()}
        for name, param in params.items():
            param.grad = grads[name].clone()
        stock.step()
        report = staged.step(grads)
        assert report.updated == len(params)
        for name, param in params.items():
            master, expected = staged.masters[name], param.detach().cpu()
            assert torch.equal(master.weight, expected), f"{name}, step {step}"
            assert torch.equal(master.state["momentum_buffer"], stock.state[param]["momentum_buffer"].cpu())
            assert torch.equal(writer.seen[name].cpu(), expected)
            assert torch.equal(grads[name], kept[name]), "the caller's gradient was changed"
    assert not set(start.values()) & set(staged.masters.sha256().values())


@pytest.mark.parametrize("settings", VARIANTS, ids=lambda s: "-".join(f"{k}={v}" for k, v in s.items()) or "defaults")
def test_agrees_with_emerging_optimizers_bit_for_bit(
    settings: dict[str, Any], weights: Any, gradients_of: Any, writer: Any
) -> None:
    staged = build(weights, writer, lr=0.02, **settings)
    params = parameters(weights)
    stock = Muon(params.values(), lr=0.02, **settings)
    assert_follows(staged, params, stock, gradients_of, writer)


@pytest.mark.parametrize("nesterov", [False, True])
def test_agrees_with_megatron_core_bit_for_bit(nesterov: bool, weights: Any, gradients_of: Any, writer: Any) -> None:
    """fc1 [gate; up] is one matrix in both."""
    from megatron.core.optimizer.emerging_optimizers import TensorParallelMuon

    staged = build(weights, writer, lr=0.02, nesterov=nesterov)
    params = parameters(weights)
    stock = TensorParallelMuon(list(params.values()), lr=0.02, nesterov=nesterov)
    assert_follows(staged, params, stock, gradients_of, writer)


def test_defaults_are_the_stock_defaults() -> None:
    param = torch.nn.Parameter(torch.zeros(2, 2))
    stock = Muon([param])
    ours = MuonHyperparameters()
    assert (ours.lr, ours.momentum, ours.weight_decay) == tuple(
        stock.defaults[key] for key in ("lr", "momentum", "weight_decay")
    )
    assert (ours.nesterov, ours.weight_decay_method, ours.fp32_matmul_prec) == (
        stock.nesterov,
        stock.weight_decay_method,
        stock.fp32_matmul_prec,
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_short_gradients_count_as_their_fp32_values(
    dtype: torch.dtype, weights: Any, gradients_of: Any, writer: Any
) -> None:
    short = {name: grad.to(dtype) for name, grad in gradients_of(weights, 0).items()}
    one, two = build(weights, writer), build(weights, writer)
    one.step(short)
    two.step({name: grad.float() for name, grad in short.items()})
    assert one.masters.sha256() == two.masters.sha256()


def test_overrides_act_as_parameter_groups(weights: Any, gradients_of: Any, writer: Any) -> None:
    first, *rest = weights
    staged = StagedMuon(
        masters := MasterSet.from_tensors(weights, StagedMuon.STATES),
        StagingPipeline.for_masters(masters, "cpu"),
        writer,
        MuonHyperparameters(lr=0.02, weight_decay=0.1),
        overrides={first: Override(lr=0.005, weight_decay=0.0)},
    )
    params = parameters(weights)
    groups = [
        {"params": [params[first]], "lr": 0.005, "weight_decay": 0.0},
        {"params": [params[name] for name in rest]},
    ]
    assert_follows(staged, params, Muon(groups, lr=0.02, weight_decay=0.1), gradients_of, writer)


@pytest.mark.parametrize("shape", [(16,), (), (1, 16), (16, 1)])
def test_vectors_and_scalars_are_refused_by_name(shape: tuple[int, ...], writer: Any) -> None:
    masters = MasterSet({"matrix": (4, 4), "norm": shape}, StagedMuon.STATES)
    with pytest.raises(ConfigError, match="vectors or scalars: 'norm'; give them to a StagedAdamW"):
        StagedMuon(masters, StagingPipeline.for_masters(masters, "cpu"), writer, MuonHyperparameters())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lr": -1.0}, "lr must be"),
        ({"lr": float("nan")}, "lr must be"),
        ({"weight_decay": float("inf")}, "weight_decay must be"),
        ({"momentum": 1.0}, "momentum must be .* below 1.0"),
        ({"num_ns_steps": 0}, "num_ns_steps must be at least 1"),
        ({"coefficient_type": "cubic"}, "coefficient_type='cubic' is unknown; choose one of simple, quintic"),
        ({"scale_mode": "rms"}, "scale_mode='rms' is unknown"),
        ({"weight_decay_method": "l1"}, "weight_decay_method='l1' is unknown"),
        ({"fp32_matmul_prec": "low"}, "fp32_matmul_prec='low' is unknown"),
    ],
)
def test_impossible_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        MuonHyperparameters(**settings)


@pytest.mark.gpu
@pytest.mark.parametrize("settings", [{}, {"nesterov": True, "weight_decay": 0.1}, {"fp32_matmul_prec": "highest"}])
def test_gpu_agrees_with_emerging_optimizers_bit_for_bit(
    settings: dict[str, Any], weights: Any, gradients_of: Any, writer: Any
) -> None:
    """Masters travel through the slots and are compared in pinned memory with stock Muon on the same GPU."""
    generator = torch.Generator().manual_seed(12)
    weights = weights | {f"large.{i}": torch.randn(1024, 2048, generator=generator) * 0.02 for i in range(6)}
    staged = build(weights, writer, "cuda", lr=0.02, **settings)
    assert staged.masters.is_pinned
    params = parameters(weights, "cuda")
    stock = Muon(params.values(), lr=0.02, **settings)
    assert_follows(staged, params, stock, gradients_of, writer)
