"""The whole trainer on real Megatron modules: steps, generations, clipping, faults, resume, closing."""

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import write_checkpoint
from megatron_support import batch, dequantized, megatron_ready

from weftpub.checkpoint import save_state
from weftpub.errors import ConfigError, NonFiniteGradientError, StateError, TornError
from weftpub.optim import AdamWHyperparameters, MuonHyperparameters
from weftpub_kernels import NonFiniteError

pytestmark = pytest.mark.isolated("megatron")

SMALL = {"moe_intermediate_size": 128, "intermediate_size": 128}
MUON = MuonHyperparameters(lr=0.02)
ADAMW = AdamWHyperparameters(lr=1e-3)


@pytest.fixture(scope="module", autouse=True)
def _ready() -> None:
    megatron_ready()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory, hf_config: dict[str, Any]) -> Path:
    directory = tmp_path_factory.mktemp("checkpoint")
    write_checkpoint(directory, {**hf_config, **SMALL})
    return directory


def make(checkpoint: Path, **settings: Any) -> Any:
    from weftpub_adapters.megatron import MegatronTrainer, TrainerSettings

    overrides = settings.pop("overrides", None)
    return MegatronTrainer(
        checkpoint, TrainerSettings(**{"muon": MUON, "adamw": ADAMW, **settings}), overrides=overrides
    )


def train(trainer: Any, steps: int, seed: int = 0) -> list[float]:
    tokens, labels = batch(2, 24, 500, seed)
    losses = []
    for _ in range(steps):
        losses.append(trainer.forward_backward(tokens, labels, microbatches=2))
        trainer.step()
    return losses


@pytest.mark.parametrize("format", ["fp8", "bf16"])
@pytest.mark.parametrize("muon", [MUON, None], ids=["muon", "adamw"])
def test_training_lowers_the_loss_and_every_step_is_a_generation(
    checkpoint: Path, muon: MuonHyperparameters | None, format: str
) -> None:
    trainer = make(checkpoint, muon=muon, format=format)
    assert trainer.store.generation == 0
    losses = train(trainer, 4)
    assert losses[-1] < losses[0] - 0.5
    assert trainer.store.generation == 4
    assert trainer.attachment.storage_bytes == 0


def test_masters_start_as_the_checkpoint_and_the_store_as_its_quantization(checkpoint: Path) -> None:
    """A peer overwrote FP32 masters with dequantized FP8 at start-up."""
    from weftpub.checkpoint import LazyTensors

    trainer, tensors = make(checkpoint), LazyTensors(checkpoint)
    gate = tensors["model.layers.1.mlp.experts.5.gate_proj.weight"]
    up = tensors["model.layers.1.mlp.experts.5.up_proj.weight"]
    assert torch.equal(trainer.masters["layers.1.experts.5.fc1"], torch.cat([gate, up]).float())
    assert torch.equal(
        trainer.masters["embedding.word_embeddings.weight"], tensors["model.embed_tokens.weight"].float()
    )
    close = dequantized(trainer.store, "layers.1.experts.5.fc1").float()
    assert (close - torch.cat([gate, up]).float()).norm() < 0.04 * gate.float().norm()
    before = {name: optimizer.masters.sha256() for name, optimizer in trainer.optimizers.items()}
    trainer.forward_backward(*batch(2, 8, 500))
    trainer.store.sha256()
    assert before == {name: optimizer.masters.sha256() for name, optimizer in trainer.optimizers.items()}


def test_matrices_go_to_muon_as_megatron_says(checkpoint: Path) -> None:
    trainer = make(checkpoint)
    muon, adamw = (set(trainer.optimizers[name].masters) for name in ("muon", "adamw"))
    assert {"embedding.word_embeddings.weight", "output_layer.weight"} <= adamw
    assert {"decoder.layers.0.mlp.router.weight", "decoder.layers.0.self_attention.linear_qkv.weight"} <= muon
    assert {"layers.0.experts.0.fc1", "layers.1.experts.7.fc2"} <= muon
    assert all("norm" in name or name.startswith(("embedding", "output")) for name in adamw)
    decayed = {n for n, override in trainer.optimizers["adamw"].overrides.items() if override.weight_decay == 0.0}
    assert decayed == {name for name in adamw if "norm" in name}


@pytest.mark.parametrize("split", [True, False])
def test_muon_updates_as_megatrons_own_optimizer_does(checkpoint: Path, split: bool) -> None:
    """Query, key and value rows are orthogonalized apart; masters agree bit for bit on the same gradients."""
    from megatron.core.optimizer.emerging_optimizers import TensorParallelMuon, _get_qkv_split_shapes

    trainer = make(checkpoint, split_qkv=split, clip_grad=None)
    optimizer = trainer.optimizers["muon"]
    names = ["decoder.layers.0.self_attention.linear_qkv.weight", "layers.0.experts.2.fc1", "layers.1.experts.7.fc2"]
    reference = {name: torch.nn.Parameter(trainer.masters[name].clone()) for name in names}
    shapes = _get_qkv_split_shapes(trainer.model_config)
    stock = TensorParallelMuon(
        list(reference.values()),
        lr=MUON.lr,
        momentum=MUON.momentum,
        nesterov=MUON.nesterov,
        weight_decay=MUON.weight_decay,
        fp32_matmul_prec=MUON.fp32_matmul_prec,
        num_ns_steps=MUON.num_ns_steps,
        scale_mode=MUON.scale_mode,
        extra_scale_factor=MUON.extra_scale_factor,
        split_qkv=split,
        is_qkv_fn=lambda parameter: parameter is reference[names[0]],
        qkv_split_shapes=shapes,
        pg_collection=None,
    )
    for seed in range(2):
        trainer.forward_backward(*batch(2, 16, 500, seed))
        gradients = trainer.gradients()
        for name in names:
            reference[name].grad = gradients[name].clone()
        stock.step()
        trainer.step()
    for name in names:
        assert torch.equal(optimizer.masters[name].weight, reference[name]), name


def test_updates_that_never_reach_the_masters_are_an_error(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Muon updated a copy and the new weights never reached the forward pass; the loss just stopped falling. A learning
    rate of zero changes nothing either, and is no error."""
    from weftpub_adapters.megatron.muon import QkvSplitMuon

    trainer = make(checkpoint)
    trainer.forward_backward(*batch(2, 16, 500))
    assert trainer.step(lr_scale=0.0).seal.changed_bytes == 0
    monkeypatch.setattr(QkvSplitMuon, "run_one", lambda self, staged, gradient, settings: None)
    trainer.forward_backward(*batch(2, 16, 500))
    with pytest.raises(StateError, match=r"generation 2: not one master byte of muon changed"):
        trainer.step()
    monkeypatch.undo()
    train(trainer, 1)
    assert trainer.store.generation == 3


def test_one_norm_over_all_parameters_clips_them_all(checkpoint: Path) -> None:
    trainer = make(checkpoint, clip_grad=0.25)
    trainer.forward_backward(*batch(2, 16, 500))
    gradients = {name: gradient.clone() for name, gradient in trainer.gradients().items()}
    norm = torch.stack([g.double().square().sum() for g in gradients.values()]).sum().sqrt().item()
    step = trainer.step()
    assert step.clip.norm == pytest.approx(norm, rel=1e-5)
    assert step.clip.factor == pytest.approx(0.25 / norm, rel=1e-4)
    for name, gradient in trainer.gradients().items():
        assert torch.allclose(gradient, gradients[name] * step.clip.factor, rtol=1e-5, atol=0)


def test_dense_parameters_are_their_masters_rounded(checkpoint: Path) -> None:
    trainer = make(checkpoint)
    train(trainer, 1)
    masters = trainer.masters
    for name, parameter in trainer._trained().items():
        if "experts" not in name:
            assert torch.equal(parameter, masters[name].to(torch.bfloat16)), name


def test_a_gradient_that_is_not_finite_changes_nothing(checkpoint: Path) -> None:
    trainer = make(checkpoint)
    train(trainer, 1)
    before = {name: optimizer.masters.sha256() for name, optimizer in trainer.optimizers.items()}
    bytes_before = trainer.store.sha256()
    trainer.forward_backward(*batch(2, 16, 500))
    trainer.gradients()["layers.1.experts.3.fc2"][7, 5] = float("inf")
    with pytest.raises(NonFiniteGradientError, match=r"layers\.1\.experts\.3\.fc2.*row 7, column 5"):
        trainer.step()
    assert before == {name: optimizer.masters.sha256() for name, optimizer in trainer.optimizers.items()}
    assert (trainer.store.generation, trainer.store.sha256()) == (1, bytes_before)
    train(trainer, 1)
    assert trainer.store.generation == 2


def test_a_master_that_is_not_finite_tears_all_and_a_checkpoint_recovers(checkpoint: Path, tmp_path: Path) -> None:
    trainer = make(checkpoint)
    train(trainer, 1)
    save_state(tmp_path / "state", optimizers=trainer.optimizers, store=trainer.store, version=1)
    expected = trainer.store.sha256()
    trainer.masters["layers.0.experts.6.fc1"][3, 4] = float("nan")
    trainer.forward_backward(*batch(2, 16, 500))
    with pytest.raises(NonFiniteError, match=r"layers\.0\.experts\.6\.fc1"):
        trainer.step()
    with pytest.raises(TornError):
        trainer.forward_backward(*batch(2, 16, 500))
    with pytest.raises(TornError):
        trainer.close()
    trainer.load(tmp_path / "state")
    assert trainer.store.sha256() == expected
    train(trainer, 1)
    assert trainer.store.generation == 2


@pytest.mark.parametrize(
    ("name", "value"),
    [("embedding.word_embeddings.weight", float("nan")), ("decoder.layers.0.mlp.router.weight", 3.4e38)],
    ids=["nan", "beyond-bf16"],
)
def test_a_dense_master_that_is_not_finite_is_never_published(
    checkpoint: Path, tmp_path: Path, name: str, value: float
) -> None:
    """A NaN in a master was ignored by amax and became a silent -448. An embedding or a router is not even quantized:
    rounded to BF16 it would go out as it is, and the engine would answer nonsense."""
    trainer = make(checkpoint, clip_grad=None)
    train(trainer, 1)
    save_state(tmp_path / "state", optimizers=trainer.optimizers, store=trainer.store, version=1)
    expected = trainer.store.sha256()
    trainer.forward_backward(*batch(2, 16, 500))
    trainer.masters[name][3, 4] = value
    with pytest.raises(NonFiniteError, match=rf"{name} holds \S+ at row 3, column 4"):
        trainer.step()
    with pytest.raises(TornError):
        next(trainer.store.canonical())
    trainer.load(tmp_path / "state")
    assert trainer.store.sha256() == expected
    train(trainer, 1)
    assert trainer.store.generation == 2


@pytest.mark.parametrize("muon", [MUON, None], ids=["muon", "adamw"])
def test_a_resumed_trainer_makes_the_same_bytes(
    checkpoint: Path, tmp_path: Path, muon: MuonHyperparameters | None
) -> None:
    first = make(checkpoint, muon=muon)
    train(first, 2)
    save_state(tmp_path / "state", optimizers=first.optimizers, store=first.store, version=2)
    train(first, 2, seed=1)
    second = make(checkpoint, muon=muon)
    assert second.load(tmp_path / "state").version == 2
    train(second, 2, seed=1)
    assert second.store.generation == first.store.generation == 4
    assert second.store.sha256() == first.store.sha256()
    for name, parameter in second._trained().items():
        if "experts" not in name:
            assert torch.equal(parameter, first._trained()[name]), name


def test_closing_leaves_a_model_that_megatron_updates_as_usual(checkpoint: Path) -> None:
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    trainer = make(checkpoint)
    train(trainer, 1)
    masters = {name: weight.clone() for name, weight in trainer.masters.items()}
    model = trainer.close()
    with pytest.raises(StateError, match="closed"):
        trainer.step()
    with pytest.raises(StateError, match="closed"):
        trainer.forward_backward(*batch(2, 8, 500))
    experts = {
        name: parameter for name, parameter in trainer.attachment.placeholders.items() if name.startswith("layers.0")
    }
    for name, parameter in experts.items():
        assert torch.equal(parameter, masters[name].to(torch.bfloat16))
    optimizer = get_megatron_optimizer(
        OptimizerConfig(optimizer="adam", lr=1e-3, bf16=True, params_dtype=torch.bfloat16, clip_grad=1.0), [trainer.ddp]
    )
    trainer.ddp.zero_grad_buffer()
    tokens, labels = batch(2, 16, 500)
    mask = torch.ones(16, 16, dtype=torch.bool).triu(1)[None, None]
    trainer.ddp(tokens, torch.arange(16).expand_as(tokens), mask, labels=labels).float().mean().backward()
    finalize_model_grads([trainer.ddp], None)
    done, _, _ = optimizer.step()
    assert done
    visited = [name for name, parameter in experts.items() if parameter.main_grad.any()]
    assert len(visited) > 4
    for name in visited:
        assert not torch.equal(experts[name], masters[name].to(torch.bfloat16)), name
    assert model is trainer.model


@pytest.mark.parametrize(
    ("tokens", "labels", "microbatches"), [((2, 8), (2, 9), 1), ((3, 8), (3, 8), 2), ((8,), (8,), 1)]
)
def test_a_batch_that_does_not_fit_is_refused(
    checkpoint: Path, tokens: tuple[int, ...], labels: tuple[int, ...], microbatches: int
) -> None:
    trainer = make(checkpoint)
    zeros = torch.zeros(tokens, dtype=torch.long), torch.zeros(labels, dtype=torch.long)
    with pytest.raises(ConfigError, match=r"batch, sequence"):
        trainer.forward_backward(*zeros, microbatches=microbatches)


def test_the_learning_rate_of_a_schedule_scales_both_optimizers(checkpoint: Path) -> None:
    trainer = make(checkpoint)
    trainer.forward_backward(*batch(2, 16, 500))
    step = trainer.step(lr_scale=0.5)
    assert set(step.updates["muon"].learning_rates.values()) == {0.01}
    assert set(step.updates["adamw"].learning_rates.values()) == {0.0005}
    trainer.forward_backward(*batch(2, 16, 500))
    frozen = trainer.step(lr_scale=0.0)
    assert frozen.seal.changed_bytes == 0
    assert frozen.generation == 2


def test_the_probe_is_the_layer_that_trains(checkpoint: Path) -> None:
    """Output and weights of the real MoE layer, rebuilt here from the store by hand."""
    import hashlib

    from weftpub_adapters.megatron import probe_layer

    trainer = make(checkpoint)
    train(trainer, 1)
    hidden = torch.randn(6, 256, generator=torch.Generator().manual_seed(4))
    probe = probe_layer(trainer, 1, hidden)
    x = hidden.to(torch.bfloat16).float()
    expected = torch.zeros(6, 256)
    for token in range(6):
        for expert, weight in zip(probe.expert_ids[token].tolist(), probe.expert_weights[token], strict=True):
            fc1 = dequantized(trainer.store, f"layers.1.experts.{expert}.fc1").float()
            fc2 = dequantized(trainer.store, f"layers.1.experts.{expert}.fc2").float()
            gate, up = (fc1 @ x[token]).chunk(2)
            expected[token] += weight * (fc2 @ (torch.nn.functional.silu(gate) * up))
    assert (probe.output - expected).norm() < 0.02 * expected.norm()
    fc2 = dequantized(trainer.store, "layers.1.experts.4.fc2")
    raw = fc2.contiguous().view(torch.uint8).numpy().tobytes()
    assert probe.sha256["layers.1.experts.4.fc2"] == hashlib.sha256(raw).hexdigest()
    assert len(probe.sha256) == 16
    with pytest.raises(ConfigError, match="layer 2"):
        probe_layer(trainer, 2, hidden)
