"""Offload and reload of an attached trainer, through both ways of moving buffers."""

from typing import Any

import pytest
import torch

from weftpub.errors import ChecksumError, ConfigError, StateError, TornError

pytestmark = pytest.mark.isolated("megatron")

CASES = [("muon", "buffer"), ("muon", "resize"), ("adam", "buffer"), ("adam", "resize")]


@pytest.fixture(scope="module", autouse=True)
def _megatron() -> None:
    from attach_support import start

    start()


@pytest.mark.parametrize(("optimizer", "api"), CASES)
@pytest.mark.parametrize("keep", [True, False])
def test_offload_and_reload_give_the_same_trainer(optimizer: str, api: str, keep: bool) -> None:
    """After a wake-up, weights that were not in the stream stayed garbage: here every byte is back, and training
    goes on the same.
    """
    from attach_support import build, parameters, train

    from weftpub_adapters.megatron.attached import attach

    straight, straight_opt = build(optimizer, "fp8")
    moved, moved_opt = build(optimizer, "fp8")
    with attach(straight, straight_opt) as one, attach(moved, moved_opt) as other:
        train(straight, straight_opt)
        train(moved, moved_opt)
        before = parameters_without_experts(moved)
        identities = {name: (id(p), p.untyped_storage()._cdata) for name, p in moved.named_parameters()}
        hashes = other.store.sha256()
        for _ in range(2):
            other.offload(api=api, keep=keep)
            assert all(p.untyped_storage().nbytes() == 0 for p in moved.parameters())
            assert all(p.main_grad.untyped_storage().nbytes() == 0 for p in moved.parameters())
            with pytest.raises(StateError, match="offloaded"):
                moved_opt.step()
            with pytest.raises(StateError):
                other.store.matrix(other.store.layout.matrices[0])
            other.reload()
        assert {name: (id(p), p.untyped_storage()._cdata) for name, p in moved.named_parameters()} == identities
        assert other.expert_storage_bytes == 0
        assert other.store.sha256() == hashes
        assert all(torch.equal(p, before[n]) for n, p in parameters_without_experts(moved).items())
        assert train(straight, straight_opt) == train(moved, moved_opt)
        assert one.store.sha256() == other.store.sha256()
    found = parameters(moved)
    assert all(torch.equal(p, found[n]) for n, p in parameters(straight).items())


@pytest.mark.parametrize("optimizer", ["muon", "adam"])
def test_code_that_moves_buffers_by_itself_finds_nothing_of_the_experts(optimizer: str) -> None:
    """Both styles of other projects: the buffers' methods, and storages resized by hand with the copy on the tensor."""
    from attach_support import build, train

    from weftpub_adapters.megatron.attached import attach

    ddp, opt = build(optimizer, "fp8")
    with attach(ddp, opt) as attachment:
        train(ddp, opt)
        hashes = attachment.store.sha256()
        for buffer in ddp.buffers + ddp.expert_parallel_buffers:
            buffer.offload_to_cpu()
        for buffer in ddp.buffers + ddp.expert_parallel_buffers:
            buffer.reload_from_cpu()
        assert attachment.expert_storage_bytes == 0
        flat = [b for b in ddp.buffers if b.param_data is not None]
        for buffer in flat:
            if buffer.param_data.storage().size() > 0:
                buffer.param_data.cpu_data = buffer.param_data.data.clone()
                buffer.param_data_size = buffer.param_data.storage().size()
                buffer.param_data.storage().resize_(0)
        for buffer in flat:
            if buffer.param_data.storage().size() == 0:
                buffer.param_data.storage().resize_(buffer.param_data_size)
                buffer.param_data.copy_(buffer.param_data.cpu_data)
        assert attachment.expert_storage_bytes == 0
        assert attachment.store.sha256() == hashes
        train(ddp, opt)


@pytest.mark.parametrize("optimizer", ["muon", "adam"])
def test_megatrons_optimizer_offload_leaves_host_masters_where_they_are(optimizer: str) -> None:
    from attach_support import build, train

    from weftpub_adapters.megatron.attached import attach

    ddp, opt = build(optimizer, "fp8")
    with attach(ddp, opt) as attachment:
        train(ddp, opt)
        where = {name: m.data_ptr() for name, m in attachment.masters().items() if not name.startswith("embedding")}
        values = {name: m.clone() for name, m in attachment.masters().items()}
        opt.offload_to_cpu()
        opt.restore_from_cpu()
        after = attachment.masters()
        assert all(after[name].data_ptr() == pointer for name, pointer in where.items() if after[name].numel() < 65536)
        assert all(torch.equal(after[name], value) for name, value in values.items())
        train(ddp, opt)


def test_tags_move_alone_and_never_twice() -> None:
    from attach_support import build, train

    from weftpub_adapters.megatron.attached import attach

    ddp, opt = build("muon", "fp8")
    with attach(ddp, opt) as attachment:
        attachment.offload("optimizer")
        with pytest.raises(StateError, match="'optimizer' is offloaded already"):
            attachment.offload("optimizer", "weights")
        assert attachment.offloaded == {"optimizer"}
        attachment.offload("weights")
        with pytest.raises(StateError, match="'gradients' is not offloaded"):
            attachment.reload("gradients")
        attachment.reload("weights")
        attachment.offload()  # what is still there: a step gives it up in parts
        assert attachment.offloaded == {"weights", "optimizer", "gradients"}
        attachment.reload()
        assert not attachment.offloaded
        with pytest.raises(ConfigError, match="unknown tags"):
            attachment.offload("kv_cache")
        train(ddp, opt)


def test_what_a_captured_graph_reads_is_not_moved() -> None:
    """A CUDA graph holds the addresses that weights and gradients had when it was captured, and after a wake-up it read
    memory that was somebody else's. FP8 experts refuse graphs when they are prepared; dense weights of the other
    variants move as well, and there the offload refuses, before anything has moved.
    """
    from attach_support import build, train

    from weftpub_adapters.megatron.attached import attach

    for variant in ("bf16", "baseline"):
        ddp, opt = build("muon", variant)
        attachment = attach(ddp, opt, prepared=None if variant == "bf16" else prepared_baseline(ddp))
        ddp.config.cuda_graph_impl = "local"
        try:
            for tags in (["weights"], ["gradients"], ["optimizer", "weights"], []):
                with pytest.raises(ConfigError, match="cuda_graph_impl='local'"):
                    attachment.offload(*tags)
                assert not attachment.offloaded
        finally:
            ddp.config.cuda_graph_impl = "none"
        if variant == "bf16":
            train(ddp, opt)


def prepared_baseline(ddp: Any) -> Any:
    """What `prepare` gives for a model that it leaves alone."""
    from weftpub_adapters.megatron.attached import prepare

    return prepare(ddp.module, variant="baseline")


def test_new_slots_run_on_the_streams_of_the_old_ones() -> None:
    """Every reload of the slots opened three streams, cuBLAS gave each one that it met a workspace of 32 MiB, and a
    trainer of 50 colocated steps held a gigabyte more than at its first."""
    from attach_support import build, train

    from weftpub_adapters.megatron.attached import attach

    ddp, opt = build("muon", "fp8")
    with attach(ddp, opt) as attachment:
        pipelines: list[Any] = []
        for _ in range(3):
            train(ddp, opt)
            pipelines.append([child.core.pipeline for child in attachment._children])
            attachment.offload("optimizer")
            attachment.reload("optimizer")
        first = pipelines[0][0]
        assert all(one._lanes is first._lanes for some in pipelines for one in some)
        assert pipelines[1][0].pool is not first.pool


def test_bytes_changed_on_the_host_are_noticed_at_reload() -> None:
    """What heals is a load, and the masters are whole. It was refused: half of the tags were back, the weights' memory
    counted as away, and another reload found it there.
    """
    from attach_support import build, train

    from weftpub_adapters.megatron.attached import attach

    ddp, opt = build("muon", "fp8")
    attachment = attach(ddp, opt)
    before = attachment.store.sha256()
    attachment.offload()
    attachment.store._memory._host[0]["w13"].view(torch.uint8).view(-1)[7] ^= 1
    with pytest.raises(ChecksumError):
        attachment.reload()
    assert not attachment.offloaded
    with pytest.raises(TornError), attachment.reading():
        pass
    saved = [part.state_dict() for part in opt.chained_optimizers]
    with attachment.loading():
        for part, state in zip(opt.chained_optimizers, saved, strict=True):
            part.load_state_dict(state)
    assert attachment.store.sha256() == before
    train(ddp, opt)


def parameters_without_experts(ddp: Any) -> dict[str, torch.Tensor]:
    """Copies of the parameters that own memory."""
    return {n: p.detach().clone() for n, p in ddp.named_parameters() if ".experts." not in n}
