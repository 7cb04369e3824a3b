"""Save and resume with the real staged optimizers: the next step's bytes are the same, and damage is noticed before
anything changes.
"""

import json
import math
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from store_support import make_store, published, same_bytes

from weftpub.checkpoint import load_state, save_state
from weftpub.checkpoint.state import _seal_document
from weftpub.checkpoint.tree import flatten, unflatten
from weftpub.errors import CheckpointError, ChecksumError, ConfigError, DeadlineError, GenerationError, TornError
from weftpub.masters import MasterSet
from weftpub.optim import AdamWHyperparameters, MuonHyperparameters, StagedAdamW, StagedMuon, StagedOptimizer
from weftpub.staging import SlotPool, StagingPipeline
from weftpub.store import ExpertStore, StoreState


@dataclass
class Trainer:
    """A store and the optimizer that writes into it."""

    store: ExpertStore
    optimizer: StagedOptimizer[Any]
    generation: int = 0

    def step(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        grads = {n: torch.randn(m.weight.shape, generator=generator) * 0.01 for n, m in self.optimizer.masters.items()}
        self.generation += 1
        with self.store.writing(self.generation, on_torn=self.optimizer.masters.mark_torn):
            self.optimizer.step(grads)

    def save(self, directory: Path, version: int = 7, **settings: Any) -> Any:
        return save_state(
            directory, optimizers={"experts": self.optimizer}, store=self.store, version=version, **settings
        )

    def load(self, directory: Path) -> Any:
        saved = load_state(directory, optimizers={"experts": self.optimizer}, store=self.store)
        self.generation = saved.generation
        return saved

    def bytes(self) -> dict[str, torch.Tensor]:
        """Everything a resume must bring back: published bytes, masters and optimizer state."""
        state = {
            f"{name}.{key}": tensor.clone().view(torch.uint8)
            for name, master in self.optimizer.masters.items()
            for key, tensor in master.tensors().items()
        }
        return {**published(self.store), **state}


def make_trainer(kind: str = "muon", seed: int = 0, **settings: Any) -> Trainer:
    store = make_store(layers=[0], experts=[4, 5], **settings)
    generator = torch.Generator().manual_seed(seed)
    weights = {
        m.name: torch.randn(store.layout.shape(m.projection), generator=generator) * 0.02 for m in store.layout.matrices
    }
    pool = SlotPool("cpu", 2, numel=256 * 256, tensors_per_slot=3)
    pipeline = StagingPipeline("cpu", pool)
    if kind == "muon":
        masters = MasterSet.from_tensors(weights, StagedMuon.STATES)
        optimizer: StagedOptimizer[Any] = StagedMuon(masters, pipeline, store.writer(), MuonHyperparameters(lr=0.02))
    else:
        masters = MasterSet.from_tensors(weights, StagedAdamW.STATES)
        optimizer = StagedAdamW(masters, pipeline, store.writer(), AdamWHyperparameters(lr=0.001))
    with store.writing(0):
        optimizer.write_all()
    return Trainer(store, optimizer)


@pytest.mark.parametrize("kind", ["muon", "adamw"])
@pytest.mark.parametrize(
    "settings", [{"preset": "te_fp32"}, {"preset": "te_pow2"}, {"format": "bf16"}, {"wt": "rebuild"}]
)
def test_next_step_after_a_resume_gives_the_same_bytes(tmp_path: Path, kind: str, settings: dict) -> None:
    """Save, load and publish once changed the bytes, because FP8 to BF16 to FP8 does not give them back."""
    trainer = make_trainer(kind, **settings)
    for seed in range(3):
        trainer.step(seed)
    trainer.save(tmp_path / "state")
    at_save = trainer.bytes()
    trainer.step(3)
    expected = trainer.bytes()

    other = make_trainer(kind, seed=1, **settings)
    saved = other.load(tmp_path / "state")
    assert (saved.version, saved.generation) == (7, 3)
    assert same_bytes(other.bytes(), at_save)
    assert other.store.generation == 3
    other.store.check_wt()
    other.step(3)
    assert same_bytes(other.bytes(), expected)
    assert not same_bytes(expected, at_save)


def test_one_call_recovers_torn_masters_and_store(tmp_path: Path) -> None:
    """After a NaN in a master the trainer used to be lost. It is declared torn, and load_state alone opens it again."""
    trainer = make_trainer()
    trainer.step(0)
    trainer.save(tmp_path / "state")
    before = trainer.bytes()
    trainer.step(1)
    trainer.optimizer.masters["layers.0.experts.5.fc1"].weight[3, 4] = math.inf
    with pytest.raises(ValueError, match=r"layers\.0\.experts\.5\.fc1"):
        trainer.step(2)
    assert trainer.store.state is StoreState.TORN
    assert trainer.optimizer.masters.torn
    with pytest.raises(TornError):
        trainer.save(tmp_path / "bad")
    assert not (tmp_path / "bad").exists()
    trainer.load(tmp_path / "state")
    assert same_bytes(trainer.bytes(), before)
    trainer.step(1)


def test_extra_comes_back_as_it_was(tmp_path: Path) -> None:
    trainer = make_trainer()
    extra = {
        "step": 12,
        "lr": 0.1 + 0.2,
        "rng": torch.get_rng_state(),
        "nested": [1, (2.5, None, True), {"deep": torch.arange(3, dtype=torch.int16)}],
        "odd": {0: "zero", "$tensor": "not a tensor", "nan": math.nan, "inf": -math.inf},
        "scalar": torch.tensor(3.0),
        "dense": {"model.norm.weight": torch.ones(4, dtype=torch.bfloat16).t()},
    }
    trainer.save(tmp_path / "state", extra=extra)
    loaded = trainer.load(tmp_path / "state").extra
    assert loaded["step"] == 12
    assert loaded["lr"] == 0.1 + 0.2
    assert torch.equal(loaded["rng"], extra["rng"])
    assert loaded["nested"][:2] == [1, (2.5, None, True)]
    assert torch.equal(loaded["nested"][2]["deep"], torch.arange(3, dtype=torch.int16))
    assert loaded["odd"].keys() == extra["odd"].keys()
    assert loaded["odd"][0] == "zero"
    assert loaded["odd"]["$tensor"] == "not a tensor"
    assert math.isnan(loaded["odd"]["nan"])
    assert loaded["odd"]["inf"] == -math.inf
    assert loaded["scalar"].shape == ()
    assert loaded["dense"]["model.norm.weight"].dtype == torch.bfloat16


def test_nothing_is_pickled(tmp_path: Path) -> None:
    trainer = make_trainer()
    trainer.save(tmp_path / "state")
    names = {path.name for path in (tmp_path / "state").iterdir()}
    assert names == {"state.json", "trainer.safetensors", "experts.safetensors"}
    with pytest.raises(ConfigError, match=r"extra/lock: .*found lock"):
        trainer.save(tmp_path / "two", extra={"lock": threading.Lock()})
    assert not (tmp_path / "two").exists()


def test_many_files_are_one_state(tmp_path: Path) -> None:
    trainer = make_trainer()
    trainer.save(tmp_path / "state", max_shard_bytes=300_000)
    assert len(list((tmp_path / "state").glob("trainer-*.safetensors"))) > 2
    before = trainer.bytes()
    trainer.step(0)
    trainer.load(tmp_path / "state")
    assert same_bytes(trainer.bytes(), before)


# One version.


def test_a_save_during_a_step_waits_for_its_seal(tmp_path: Path) -> None:
    """A checkpoint once held half of the old and half of the new weights, because it was taken while a step ran."""
    trainer = make_trainer()
    started, go_on = threading.Event(), threading.Event()
    write = trainer.store._writer._write

    def slow(name: str, matrix: torch.Tensor) -> None:
        started.set()
        go_on.wait(30)
        write(name, matrix)

    trainer.store._writer._write = slow
    step = threading.Thread(daemon=True, target=trainer.step, args=(0,))
    step.start()
    started.wait(30)
    results: list[Any] = []
    save = threading.Thread(daemon=True, target=lambda: results.append(trainer.save(tmp_path / "state", timeout=30)))
    save.start()
    save.join(0.2)
    assert save.is_alive()
    assert not (tmp_path / "state").exists()
    go_on.set()
    step.join(60)
    save.join(60)
    assert results[0].generation == 1
    other = make_trainer(seed=1)
    other.load(tmp_path / "state")
    assert same_bytes(other.bytes(), trainer.bytes())


def test_a_step_that_begins_during_a_save_waits_for_its_end(tmp_path: Path) -> None:
    trainer = make_trainer()
    trainer.step(0)
    reading, go_on = threading.Event(), threading.Event()

    class SlowOptimizer:
        def state_dict(self, *, copy: bool) -> Any:
            reading.set()
            go_on.wait(30)
            return trainer.optimizer.state_dict(copy=copy)

        def load_state_dict(self, state: Any) -> None:
            trainer.optimizer.load_state_dict(state)

    before = trainer.bytes()
    save = threading.Thread(
        daemon=True,
        target=save_state,
        args=(tmp_path / "state",),
        kwargs={"optimizers": {"experts": SlowOptimizer()}, "store": trainer.store, "version": 3},
    )
    save.start()
    reading.wait(30)
    with pytest.raises(DeadlineError, match="save of version 3"):
        trainer.store.begin(2, timeout=0.05)
    step = threading.Thread(daemon=True, target=trainer.step, args=(1,))
    step.start()
    go_on.set()
    save.join(60)
    step.join(60)
    assert trainer.store.generation == 2
    other = make_trainer(seed=1)
    other.load(tmp_path / "state")
    assert same_bytes(other.bytes(), before)


def test_save_and_publish_may_read_at_the_same_time(tmp_path: Path) -> None:
    trainer = make_trainer()
    with trainer.store.reading(purpose="publish of version 1") as generation:
        saved = trainer.save(tmp_path / "state", version=1)
        assert saved.generation == generation
        assert next(trainer.store.canonical()) is not None


def test_an_empty_store_is_not_saved(tmp_path: Path) -> None:
    trainer = make_trainer()
    trainer.store = make_store(layers=[0], experts=[4, 5])
    with pytest.raises(GenerationError, match="empty"):
        trainer.save(tmp_path / "state")


def test_memory_that_changed_since_the_seal_is_not_saved(tmp_path: Path) -> None:
    trainer = make_trainer()
    next(trainer.store.canonical()).tensor.view(torch.uint8)[0, 0] ^= 1
    with pytest.raises(ChecksumError, match=r"experts\.4\.gate_proj\.weight"):
        trainer.save(tmp_path / "state")
    assert not (tmp_path / "state").exists()


# Damage.


def _flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 0x40
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda d: _flip(d / "experts.safetensors", -5), r"checksum .*, saved .*damaged"),
        (lambda d: _flip(d / "trainer.safetensors", -500), r"optimizers/experts/masters.*checksum"),
        (lambda d: _flip(d / "trainer.safetensors", 9), "not a whole safetensors file"),
        (lambda d: (d / "experts.safetensors").unlink(), r"experts\.safetensors: no such file"),
        (
            lambda d: (d / "experts.safetensors").write_bytes((d / "experts.safetensors").read_bytes()[:-8]),
            "not a whole",
        ),
        (lambda d: (d / "state.json").unlink(), r"state\.json: not a state that save_state wrote: No such file"),
        (lambda d: (d / "state.json").write_text("{"), "not a state"),
        (lambda d: (d / "state.json").write_text("{}"), "not a state"),
        (lambda d: (d / "state.json").write_text("[]"), "not a state"),
        (lambda d: (d / "state.json").write_text("[" * 100_000), "not a state"),
        (lambda d: (d / "state.json").write_bytes(b"\xff\xfe{}"), "not a state"),
        (lambda d: (d / "state.json").write_text('{"sha256":"0","state":[]}'), "not a state"),
        (lambda d: (d / "state.json").write_text('{"sha256":"0","state":{"x":NaN}}'), "SHA-256 does not match"),
        (lambda d: (d / "state.json").write_bytes(_seal_document({"x": 1})), "format None"),
        (
            lambda d: (d / "state.json").write_text((d / "state.json").read_text().replace('"step":2', '"step":3', 1)),
            "SHA-256 does not match",
        ),
        (
            lambda d: (d / "state.json").write_text(
                (d / "state.json").read_text().replace('"version":7', '"version":8', 1)
            ),
            "SHA-256 does not match",
        ),
    ],
)
def test_damage_is_named_before_anything_changes(tmp_path: Path, damage: Callable[[Path], Any], message: str) -> None:
    trainer = make_trainer()
    trainer.step(0)
    trainer.step(1)
    trainer.save(tmp_path / "state")
    trainer.step(2)
    before = trainer.bytes()
    damage(tmp_path / "state")
    with pytest.raises(CheckpointError, match=message):
        trainer.load(tmp_path / "state")
    assert same_bytes(trainer.bytes(), before)
    assert trainer.store.generation == 3


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"preset": "te_pow2"}, "preset te_fp32, this store has te_pow2"),
        ({"format": "bf16"}, "format fp8, this store has bf16"),
        ({"hidden": 128}, "hidden 256, this store has 128"),
    ],
)
def test_state_of_another_store_is_refused(tmp_path: Path, settings: dict, message: str) -> None:
    make_trainer().save(tmp_path / "state")
    other = make_trainer(**settings)
    before = other.bytes()
    with pytest.raises(CheckpointError, match=message):
        other.load(tmp_path / "state")
    assert same_bytes(other.bytes(), before)


def test_state_of_other_optimizers_is_refused(tmp_path: Path) -> None:
    trainer = make_trainer()
    trainer.save(tmp_path / "state")
    with pytest.raises(CheckpointError, match=r"holds optimizers \['experts'\], expected \['dense', 'experts'\]"):
        load_state(
            tmp_path / "state",
            optimizers={"experts": trainer.optimizer, "dense": trainer.optimizer},
            store=trainer.store,
        )
    adamw = make_trainer("adamw")
    before = adamw.bytes()
    with pytest.raises(ConfigError, match="muon"):
        adamw.load(tmp_path / "state")
    assert same_bytes(adamw.bytes(), before)  # refused before anything changed


def test_a_failure_between_optimizers_and_store_tears_the_store(tmp_path: Path) -> None:
    trainer = make_trainer()
    trainer.save(tmp_path / "state")

    class Broken:
        def state_dict(self, *, copy: bool) -> Any: ...

        def load_state_dict(self, state: Any) -> None:
            raise RuntimeError("bus error")

    with pytest.raises(RuntimeError, match="bus error"):
        load_state(tmp_path / "state", optimizers={"experts": Broken()}, store=trainer.store)
    assert trainer.store.state is StoreState.TORN
    trainer.load(tmp_path / "state")


def test_a_newer_format_is_refused(tmp_path: Path) -> None:
    trainer = make_trainer()
    trainer.save(tmp_path / "state")
    from weftpub.checkpoint.state import _seal_document

    path = tmp_path / "state" / "state.json"
    path.write_bytes(_seal_document({**json.loads(path.read_text())["state"], "format": 2}))
    with pytest.raises(CheckpointError, match="format 2, this release reads 1"):
        trainer.load(tmp_path / "state")


def test_tree_refuses_what_it_did_not_make() -> None:
    with pytest.raises(CheckpointError, match="no file of the checkpoint holds it"):
        unflatten({"a": {"$tensor": "gone"}}, {})
    with pytest.raises(CheckpointError, match="unknown mark"):
        unflatten({"$object": "os.system"}, {})
    with pytest.raises(ConfigError, match=r"root: keys are strings or integers, found float"):
        flatten({1.5: 2}, "root")


def test_tensors_of_equal_paths_stay_apart() -> None:
    """The second of two tensors with one path got a number behind it, which a third could have in its own name: it was
    replaced, and one of the two states came back as the other."""
    tree = {"a/b~2": torch.tensor(0), "a/b~": torch.tensor(3), "a/b": torch.tensor(1), "a": {"b": torch.tensor(2)}}
    data, tensors = flatten(tree, "root")
    assert len(tensors) == 4
    again = unflatten(json.loads(json.dumps(data)), tensors)
    assert again == tree
