"""Megatron's distributed checkpoint of an attached trainer: same keys as unattached, either loads the other, next
bytes identical.
"""

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from weftpub.errors import StateError, TornError

pytestmark = pytest.mark.isolated("megatron")

OPTIMIZERS = ("muon", "adam")


@pytest.fixture(scope="module", autouse=True)
def _megatron() -> None:
    from attach_support import start

    start()


def metadata() -> dict[str, Any]:
    from megatron.core import parallel_state

    return {
        "distrib_optim_sharding_type": "fully_reshardable",
        "chained_optim_avoid_prefix": True,
        "singleton_local_shards": False,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }


def sharded(ddp: Any, opt: Any, *, loading: bool = False) -> dict[str, Any]:
    if loading and not opt.chained_optimizers[0].optimizer.state:
        train_once(ddp, opt)  # without TransformerEngine, Megatron asks for a step count before it has loaded one
    model = ddp.module.module.sharded_state_dict(metadata=metadata())
    return {"model": model, "optimizer": opt.sharded_state_dict(model, is_loading=loading, metadata=metadata())}


def train_once(ddp: Any, opt: Any) -> None:
    from attach_support import train

    train(ddp, opt)


def save(ddp: Any, opt: Any, path: Path) -> None:
    from megatron.core import dist_checkpointing

    path.mkdir()
    dist_checkpointing.save(sharded(ddp, opt), str(path))


def load(ddp: Any, opt: Any, path: Path) -> None:
    from megatron.core import dist_checkpointing

    state = dist_checkpointing.load(sharded(ddp, opt, loading=True), str(path))
    ddp.module.module.load_state_dict(state["model"])
    opt.load_state_dict(state["optimizer"])


def tensor_keys(path: Path) -> dict[str, tuple[Any, tuple[int, ...]]]:
    from megatron.core import dist_checkpointing

    found = dist_checkpointing.load_tensors_metadata(str(path))
    return {key: (tensor.dtype, tuple(tensor.global_shape)) for key, tensor in found.items()}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_resumed_training_publishes_the_bytes_of_an_uninterrupted_run(optimizer: str, tmp_path: Path) -> None:
    """FP8 -> BF16 -> FP8 is not idempotent, and a resumed run published other bytes: masters decide here."""
    from attach_support import build, train

    from weftpub_adapters.megatron.attached import attach

    straight, straight_opt = build(optimizer, "fp8")
    with attach(straight, straight_opt) as attachment:
        for _ in range(2):
            train(straight, straight_opt)
        with attachment.saving() as generation:
            assert generation == 2
            save(straight, straight_opt, tmp_path / "step2")
        assert attachment.expert_storage_bytes == 0
        at_save, after = attachment.store.sha256(), []
        for _ in range(2):
            after.append((train(straight, straight_opt), attachment.store.sha256()))
    resumed, resumed_opt = build(optimizer, "fp8", seed=7)
    with attach(resumed, resumed_opt) as attachment:
        assert attachment.store.sha256() != at_save
        with attachment.loading():
            load(resumed, resumed_opt, tmp_path / "step2")
        assert attachment.store.sha256() == at_save
        assert attachment.expert_storage_bytes == 0
        for expected in after:
            assert (train(resumed, resumed_opt), attachment.store.sha256()) == expected


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_torn_trainer_is_whole_again_after_one_load(optimizer: str, tmp_path: Path) -> None:
    """Recovery from a step that failed half-way is one call. With AdamW it was none: Megatron's distributed optimizer
    hands the tensors over one by one, nobody noticed that all of them had come, and the masters stayed torn.
    """
    from attach_support import build, gradients, train

    from weftpub_adapters.megatron.attached import attach

    ddp, opt = build(optimizer, "fp8")
    attachment = attach(ddp, opt)
    train(ddp, opt)
    with attachment.saving():
        save(ddp, opt, tmp_path / "step1")
    before = attachment.store.sha256()
    fail_half_way(attachment, ddp, opt, gradients)
    with attachment.loading():
        load(ddp, opt, tmp_path / "step1")
    assert attachment.store.sha256() == before
    train(ddp, opt)

    fail_half_way(attachment, ddp, opt, gradients)
    if optimizer == "muon":
        return  # it loads its masters in one piece
    with pytest.raises(TornError, match="half-way"), attachment.loading():
        load_all_but_one(attachment, ddp, opt, tmp_path / "step1")


def load_all_but_one(attachment: Any, ddp: Any, opt: Any, path: Path) -> None:
    """A loader that leaves out one tensor, whose bytes are then of the step that failed."""
    load(ddp, opt, path)
    attachment._children[0].units[-1].replaced.remove("exp_avg")


def fail_half_way(attachment: Any, ddp: Any, opt: Any, gradients: Any) -> None:
    """A step whose device is lost before the last master of the first inner optimizer."""
    core, calls = attachment._children[0].core, []
    last = len(attachment._children[0].masters) - 1

    def failing(*arguments: Any) -> None:
        calls.append(1)
        if len(calls) == last:
            raise RuntimeError("device lost")
        type(core).run_one(core, *arguments)

    core.run_one = failing
    gradients(ddp, opt)
    with pytest.raises(RuntimeError, match="device lost"):
        opt.step()
    del core.run_one


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_attached_and_unattached_trainers_load_each_others_checkpoints(optimizer: str, tmp_path: Path) -> None:
    from attach_support import build, parameters, train

    from weftpub_adapters.megatron.attached import attach

    plain, plain_opt = build(optimizer)
    staged, staged_opt = build(optimizer, "bf16")
    with attach(staged, staged_opt) as attachment:
        train(plain, plain_opt)
        train(staged, staged_opt)
        save(plain, plain_opt, tmp_path / "plain")
        with attachment.saving():
            save(staged, staged_opt, tmp_path / "staged")
        assert tensor_keys(tmp_path / "staged") == tensor_keys(tmp_path / "plain")

        trainers = [(plain, plain_opt), (staged, staged_opt)]
        if (
            optimizer == "muon"
        ):  # Megatron's own loader cannot load torch's Adam, which has a step tensor; the GPU script checks it
            trainers.append(build(optimizer, seed=3))
            load(*trainers[-1], tmp_path / "staged")
            expected, found = parameters(plain), parameters(trainers[-1][0])
            assert all(torch.equal(found[name], value) for name, value in expected.items())
        with attachment.loading():
            load(staged, staged_opt, tmp_path / "plain")
        assert len({train(*trainer)[0] for trainer in trainers}) == 1
        expected, found = parameters(plain), parameters(staged)
        close = {
            name: torch.allclose(found[name].float(), value.float(), rtol=1e-2) for name, value in expected.items()
        }
        assert all(close.values())
        if optimizer == "muon":
            assert all(torch.equal(found[name], value) for name, value in expected.items())


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_fp8_saves_the_keys_of_unattached_megatron(optimizer: str, tmp_path: Path) -> None:
    from attach_support import build, train

    from weftpub_adapters.megatron.attached import attach

    plain, plain_opt = build(optimizer)
    train(plain, plain_opt)
    save(plain, plain_opt, tmp_path / "plain")
    staged, staged_opt = build(optimizer, "fp8")
    with attach(staged, staged_opt) as attachment:
        train(staged, staged_opt)
        with attachment.saving():
            save(staged, staged_opt, tmp_path / "fp8")
        masters = {name: master.clone() for name, master in attachment.masters().items()}
    assert tensor_keys(tmp_path / "fp8") == tensor_keys(tmp_path / "plain")
    if optimizer == "adam":
        return
    other, other_opt = build(optimizer, seed=5)
    load(other, other_opt, tmp_path / "fp8")
    weight = other.module.module.decoder.layers[1].mlp.experts.local_experts[2].linear_fc2.weight
    assert torch.equal(weight, masters["layers.1.experts.2.fc2"].bfloat16())


def test_masters_and_moments_are_given_as_the_host_memory_that_they_are() -> None:
    from attach_support import build, train
    from megatron.core.dist_checkpointing.dict_utils import nested_values

    from weftpub_adapters.megatron.attached import attach

    ddp, opt = build("muon", "fp8")
    with attach(ddp, opt) as attachment:
        train(ddp, opt)
        arenas = {child.masters._arena.untyped_storage().data_ptr() for child in attachment._children}
        with attachment.saving():
            live = [
                v.data
                for v in nested_values(sharded(ddp, opt)["optimizer"])
                if torch.is_tensor(getattr(v, "data", None))
            ]
        assert live
        assert sum(t.untyped_storage().data_ptr() in arenas for t in live) > len(live) // 2
        assert all(t.device.type == "cpu" for t in live)


def test_an_asynchronous_save_is_a_snapshot() -> None:
    from attach_support import build, train
    from megatron.core.dist_checkpointing.dict_utils import nested_values

    from weftpub_adapters.megatron.attached import attach

    ddp, opt = build("muon", "fp8")
    with attach(ddp, opt) as attachment:
        train(ddp, opt)
        with attachment.saving(asynchronous=True):
            state = sharded(ddp, opt)["optimizer"]
        kept = [v.data for v in nested_values(state) if torch.is_tensor(getattr(v, "data", None))]
        before = [tensor.clone() for tensor in kept]
        train(ddp, opt)
        assert all(torch.equal(a, b) for a, b in zip(kept, before, strict=True))


def test_saving_during_a_publish_gives_one_version(tmp_path: Path) -> None:
    from attach_support import build, gradients, train

    from weftpub_adapters.megatron.attached import attach

    ddp, opt = build("muon", "fp8", lease_timeout=20.0)
    with attach(ddp, opt) as attachment:
        train(ddp, opt)
        gradients(ddp, opt)
        order: list[str] = []
        with attachment.saving() as saved, attachment.reading("publish") as published:
            step = threading.Thread(target=lambda: _step_elsewhere(opt, order))
            step.start()
            save(ddp, opt, tmp_path / "one")
            step.join(0.3)
            order.append("saved")
            assert saved == published == attachment.generation == 1
        step.join(20)
        assert order == ["saved", "step"]
        assert attachment.generation == 2


def test_weights_alone_can_be_loaded() -> None:
    from attach_support import build, make_model, train

    from weftpub_adapters.megatron.attached import attach

    for optimizer in OPTIMIZERS:
        ddp, opt = build(optimizer, "fp8")
        with attach(ddp, opt) as attachment:
            with attachment.loading(masters_from="model"):
                ddp.module.load_state_dict(make_model(seed=9).state_dict())
            fresh, fresh_opt = build(optimizer, "fp8", seed=9)
            with attach(fresh, fresh_opt) as other:
                assert attachment.store.sha256() == other.store.sha256()
                assert train(ddp, opt) == train(fresh, fresh_opt)


def test_saving_while_something_is_offloaded_is_refused() -> None:
    from attach_support import build

    from weftpub_adapters.megatron.attached import attach

    ddp, opt = build("muon", "fp8")
    with attach(ddp, opt) as attachment:
        attachment.offload("weights")
        with pytest.raises(StateError, match="weights offloaded"), attachment.saving():
            pass
        attachment.reload()


def _step_elsewhere(opt: Any, order: list[str]) -> None:
    from weftpub_demo.cpu_megatron import _CudaMeansCpu

    with _CudaMeansCpu():  # torch function modes belong to a thread
        opt.step()
    order.append("step")
