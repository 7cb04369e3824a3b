"""From the masters to served bytes: optimizer, store and publisher together, into engines of plain parameters."""

from collections.abc import Generator
from pathlib import Path

import pytest
import torch
from publish_room import Room, open_room
from publish_world import World

from weftpub.errors import ChecksumError
from weftpub.masters import ExpertMatrix, MasterSet
from weftpub.optim import (
    AdamWHyperparameters,
    MuonHyperparameters,
    StagedAdamW,
    StagedMuon,
    StagedOptimizer,
)
from weftpub.staging import StagingPipeline
from weftpub.store import ExpertStore
from weftpub_kernels import quantize_pair

WORLD = World(experts=2, ep=2, extra=(("model.norm.weight", (256,), torch.float32),))
KINDS = {
    "muon": (StagedMuon, MuonHyperparameters(lr=0.02)),
    "adamw": (StagedAdamW, AdamWHyperparameters(lr=0.001, weight_decay=0.1)),
}


class Trainer:
    """Masters, a staged optimizer and a store of WORLD's experts."""

    def __init__(self, kind: str, preset: str = "te_fp32") -> None:
        self.store = ExpertStore(
            range(WORLD.layers), range(WORLD.experts), WORLD.hidden, WORLD.intermediate, preset=preset
        )
        generator = torch.Generator().manual_seed(5)
        shapes = {matrix.name: self.store.layout.shape(matrix.projection) for matrix in self.store.layout.matrices}
        start = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
        optimizer, hyperparameters = KINDS[kind]
        self.masters = MasterSet.from_tensors(start, optimizer.STATES)
        pipeline = StagingPipeline.for_masters(self.masters, "cpu")
        self.optimizer: StagedOptimizer = optimizer(self.masters, pipeline, self.store.writer(), hyperparameters)
        with self.store.writing(0):
            self.optimizer.write_all()

    def step(self, lr: float | None = None) -> None:
        """One generation, from gradients that follow from its number."""
        assert self.store.generation is not None
        generation = self.store.generation + 1
        generator = torch.Generator().manual_seed(generation)
        gradients = {name: torch.randn(m.weight.shape, generator=generator) for name, m in self.masters.items()}
        with self.store.writing(generation, on_torn=self.masters.mark_torn):
            self.optimizer.step(gradients, lr=lr)

    def sources(self) -> dict[str, torch.Tensor]:
        """What is published: views of the store, and the rest of the world."""
        experts = {item.name: item.tensor for item in self.store.canonical()}
        return {**experts, "model.norm.weight": WORLD.value("model.norm.weight", 1)}


@pytest.fixture
def room(tmp_path: Path) -> Generator[Room]:
    with open_room(WORLD, tmp_path, version=None) as opened:
        yield opened


@pytest.mark.parametrize("preset", ["te_fp32", "te_pow2", "sglang_ue8m0"])
@pytest.mark.parametrize("kind", KINDS)
def test_served_bytes_are_those_that_the_trainer_computes_with(room: Room, kind: str, preset: str) -> None:
    """The trainer quantized its masters and the rollout got BF16 exports, quantized again: 2-3% of the bytes differed.
    Here there is one quantization for each version, and each publish compares both sides by sha256."""
    trainer, publisher = Trainer(kind, preset), room.publisher()
    for version in (1, 2, 3):
        trainer.step()
        report = publisher.publish(version, trainer.sources(), trainer.store.checksums, verify_sha256=True)
        assert {name: report.sha256[name] for name in trainer.store.checksums} == trainer.store.sha256()


@pytest.mark.parametrize("part", ["weight", "weight_scale_inv"])
def test_a_detour_through_bf16_trips_the_check(room: Room, part: str) -> None:
    """The same story: someone exports an expert in BF16 and quantizes it once more. Every shape and dtype is right and
    each value is as good as before, but these are not the bytes that the trainer computes with."""
    trainer, publisher = Trainer("muon"), room.publisher()
    publisher.publish(1, trainer.sources(), trainer.store.checksums)
    matrix = ExpertMatrix(0, 1, "fc2")
    detour = quantize_pair(trainer.masters[matrix.name].weight.bfloat16().float())
    name = f"model.layers.0.mlp.experts.1.down_proj.{part}"
    wrong = {**trainer.sources(), name: detour.w if part == "weight" else detour.scale}
    with pytest.raises(ChecksumError, match=rf"1 of 7 pieces differ from what was sent: {name} "):
        publisher.publish(2, wrong, trainer.store.checksums)
    assert not any(engine.serving for engine in room.engines)
    assert room.recorded() == 1
    publisher.publish(2, trainer.sources(), trainer.store.checksums)
    assert all(engine.serving for engine in room.engines)


@pytest.mark.parametrize("kind", KINDS)
def test_thirty_publishes_at_learning_rate_zero_serve_the_same_bytes(room: Room, kind: str) -> None:
    """The difference of log-probabilities grew over 30 publishes although the learning rate was 0. Momentum fills up,
    weight decay is on and the engine loses its memory each time: not one served byte may change."""
    trainer, publisher = Trainer(kind), room.publisher()
    masters = trainer.masters.sha256()
    served = []
    for version in range(1, 31):
        trainer.step(lr=0.0)
        if version > 1:
            publisher.pause()
            for engine in room.engines:
                engine.offload()
        publisher.publish(version, trainer.sources(), trainer.store.checksums)
        served.append([engine.served() for engine in room.engines])
    assert trainer.masters.sha256() == masters
    for engines in served[1:]:
        for first, now in zip(served[0], engines, strict=True):
            assert all(torch.equal(first[name], now[name]) for name in first)
