"""The trainer on a real GPU, without any stand-in: Triton kernels, streams, pinned masters."""

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import write_checkpoint
from megatron_support import batch, dequantized, megatron_ready

from weftpub.optim import AdamWHyperparameters, MuonHyperparameters
from weftpub_kernels import quantize_pair

pytestmark = [pytest.mark.isolated("megatron"), pytest.mark.gpu]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory, hf_config: dict[str, Any]) -> Path:
    megatron_ready()
    directory = tmp_path_factory.mktemp("checkpoint")
    write_checkpoint(directory, hf_config)
    return directory


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("muon", [MuonHyperparameters(lr=0.02), None], ids=["muon", "adamw"])
def test_steps_lower_the_loss_and_the_bytes_are_the_masters(
    checkpoint: Path, muon: MuonHyperparameters | None, recompute: bool
) -> None:
    from weftpub_adapters.megatron import MegatronTrainer, TrainerSettings, probe_layer

    full = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    settings = TrainerSettings(muon=muon, adamw=AdamWHyperparameters(lr=1e-3))
    trainer = MegatronTrainer(checkpoint, settings, overrides=full if recompute else None)
    assert trainer.device.type == "cuda"
    assert trainer.optimizers["adamw"].masters.is_pinned
    tokens, labels = batch(4, 64, 500)
    losses = []
    for _ in range(4):
        losses.append(trainer.forward_backward(tokens, labels, microbatches=2))
        trainer.step()
        assert trainer.attachment.storage_bytes == 0
    assert losses[-1] < losses[0] - 0.5
    for matrix in trainer.store.layout.matrices:
        pair = quantize_pair(trainer.masters[matrix.name], "te_fp32")
        view = trainer.store.matrix(matrix)
        for ours, expected in ((view.w, pair.w), (view.wt, pair.wt), (view.scale, pair.scale)):
            assert torch.equal(ours.contiguous().view(torch.uint8).cpu(), expected.contiguous().view(torch.uint8))
    hidden = torch.randn(6, 256, generator=torch.Generator().manual_seed(4))
    probe = probe_layer(trainer, 1, hidden)
    x = hidden.to(torch.bfloat16).float().cuda()
    expected = torch.zeros(6, 256, device="cuda")
    for token in range(6):
        for expert, weight in zip(probe.expert_ids[token].tolist(), probe.expert_weights[token], strict=True):
            fc1 = dequantized(trainer.store, f"layers.1.experts.{expert}.fc1").float()
            fc2 = dequantized(trainer.store, f"layers.1.experts.{expert}.fc2").float()
            gate, up = (fc1 @ x[token]).chunk(2)
            expected[token] += weight * (fc2 @ (torch.nn.functional.silu(gate) * up))
    assert (probe.output - expected).norm() < 0.02 * expected.norm()
    trainer.close()
    assert trainer.attachment.storage_bytes > 0


def test_expert_parameters_give_their_memory_back(checkpoint: Path) -> None:
    from weftpub.checkpoint import LazyTensors
    from weftpub.store import ExpertStore
    from weftpub_adapters.megatron import (
        ExpertAttachment,
        Qwen3MoeFields,
        build_model,
        fill_parameters,
        read_config,
        read_parameters,
    )

    fields = Qwen3MoeFields.from_hf(read_config(checkpoint))
    model = build_model(fields)
    fill_parameters(model, read_parameters(LazyTensors(checkpoint), fields))
    store = ExpertStore(range(2), range(8), fields.hidden, fields.intermediate, device="cuda")
    before = torch.cuda.memory_allocated()
    attachment = ExpertAttachment(model, store)
    experts = 2 * 8 * 3 * fields.hidden * fields.intermediate
    assert before - torch.cuda.memory_allocated() == experts * 2
    assert attachment.storage_bytes == 0
