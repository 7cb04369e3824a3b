"""The store on a GPU: the CPU's bytes and checksums, memory that is really given back, views that survive it, no hidden
waits.
"""

from pathlib import Path

import pytest
import torch
from checkpoint_support import CONFIG, other_tensors
from safetensors.torch import load_file
from store_support import fill, make_masters, make_store, published, same_bytes

from weftpub.checkpoint import export_hf, load_state, save_state
from weftpub.masters import ExpertMatrix, MasterSet
from weftpub.memory import TorchAllocator
from weftpub.optim import MuonHyperparameters, StagedMuon
from weftpub.staging import SlotPool, StagingPipeline
from weftpub.store import StoreState
from weftpub_kernels import PRESETS, NonFiniteError

pytestmark = pytest.mark.gpu

SETTINGS = [{"preset": name} for name in ("te_fp32", "te_pow2")] + [{"format": "bf16"}, {"wt": "rebuild"}]


def _to_cpu(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.cpu() for name, tensor in tensors.items()}


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("hidden", [256, 200])
def test_gpu_and_cpu_make_the_same_bytes_and_checksums(settings: dict, hidden: int) -> None:
    gpu, cpu = make_store(device="cuda", hidden=hidden, **settings), make_store(hidden=hidden, **settings)
    for generation in range(3):
        masters = make_masters(cpu, seed=generation)
        reports = fill(gpu, generation, {n: m.cuda() for n, m in masters.items()}), fill(cpu, generation, masters)
        assert same_bytes(_to_cpu(published(gpu)), published(cpu))
        assert reports[0].checksums == reports[1].checksums
        assert reports[0].changed_bytes == reports[1].changed_bytes
        gpu.check_wt()
        gpu.verify()
        assert gpu.sha256() == cpu.sha256()


@pytest.mark.parametrize("preset", [name for name, recipe in PRESETS.items() if recipe.publishable and not recipe.ieee])
def test_presets_with_approximate_operators_run_here(preset: str) -> None:
    store = make_store(device="cuda", preset=preset)
    fill(store, 0)
    store.check_wt()
    store.verify()


@pytest.mark.parametrize("settings", SETTINGS)
def test_offload_gives_memory_back_and_views_survive(settings: dict) -> None:
    """Colocated engines need the memory, and layers built over the store's memory must work when it comes back
    elsewhere.
    """
    store = make_store(device="cuda", hidden=2048, intermediate=1024, allocator=TorchAllocator(poison=True), **settings)
    fill(store, 0)
    before = published(store)
    view, layer = store.matrix(ExpertMatrix(3, 5, "fc1")), store.layer(3)
    part = layer.w13[1, 1024:].narrow(1, 128, 256)
    expected = part.contiguous().view(torch.uint8).clone()
    addresses = []
    for _ in range(3):
        addresses.append(layer.w13.data_ptr())
        resident = torch.cuda.memory_allocated()
        store.offload()
        assert resident - torch.cuda.memory_allocated() >= sum(store.footprint().values())
        squatter = torch.empty(resident, dtype=torch.uint8, device="cuda")  # the old addresses are taken meanwhile
        store.reload()
        del squatter
        assert store.matrix(ExpertMatrix(3, 5, "fc1")) is view
        assert same_bytes(published(store), before)
        assert torch.equal(part.contiguous().view(torch.uint8), expected)
        store.check_wt()
    fill(store, 1)
    assert len(set(addresses)) >= 1


def test_dropped_bytes_come_back_from_the_masters() -> None:
    store = make_store(device="cuda")
    masters = make_masters(store)
    fill(store, 0, masters)
    before = published(store)
    store.offload(keep=False)
    store.reload(masters.__getitem__)
    assert same_bytes(published(store), before)


@pytest.mark.parametrize("form", ["fp8", "bf16"])
def test_writing_never_waits_for_the_device(form: str) -> None:
    """A writer that waits serialises the three streams of the staging pipeline."""
    store = make_store(device="cuda", format=form)
    masters = make_masters(store)
    fill(store, 0, masters)  # compiles and self-tests the kernel
    store.begin(1)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for name, master in masters.items():
            store.writer()(name, master)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert store.seal().changed_bytes == 0


@pytest.mark.parametrize("wt", ["store", "rebuild"])
def test_making_wt_never_waits_for_the_device(wt: str) -> None:
    """A backward pass asks for W^T layer by layer; a wait in each would leave the GPU idle."""
    store = make_store(device="cuda", wt=wt)
    fill(store, 0)
    store.rebuild_wt()
    store.check_wt()  # has compiled and tested the kernel
    torch.cuda.set_sync_debug_mode("error")
    try:
        store.rebuild_wt()
        for layer in reversed(store.layout.layers):
            store.layer(layer)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    store.check_wt()


@pytest.mark.parametrize("form", ["fp8", "bf16"])
@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_nan_is_found_at_the_seal(form: str, value: float) -> None:
    store = make_store(device="cuda", format=form)
    masters = make_masters(store)
    masters["layers.3.experts.5.fc2"][200, 77] = value
    masters["layers.3.experts.7.fc1"][0, 0] = value
    with pytest.raises(NonFiniteError) as caught:
        fill(store, 0, masters)
    assert (caught.value.matrix, caught.value.row, caught.value.column) == ("layers.3.experts.5.fc2", 200, 77)
    assert store.state is StoreState.TORN


def test_export_streams_from_the_device(tmp_path: Path) -> None:
    store = make_store(device="cuda", layers=range(2), experts=range(4))
    fill(store, 0)
    others = {name: tensor.cuda() for name, tensor in other_tensors().items()}
    export_hf(tmp_path / "out", store, others, CONFIG, version=1)
    found = load_file(tmp_path / "out" / "model.safetensors")
    experts = {name: tensor.view(torch.uint8) for name, tensor in found.items() if ".experts." in name}
    assert same_bytes(experts, _to_cpu(published(store)))
    assert torch.equal(found["lm_head.weight"], others["lm_head.weight"].cpu())


def test_a_staged_step_writes_the_store_and_resumes_byte_for_byte(tmp_path: Path) -> None:
    """Masters in pinned memory, three streams, the store on the GPU: the step after a resume gives the same bytes."""

    def trainer(seed: int):
        store = make_store(device="cuda")
        weights = _to_cpu(make_masters(store, seed))
        masters = MasterSet.from_tensors(weights, StagedMuon.STATES)
        pool = SlotPool("cuda", 3, numel=256 * 256, tensors_per_slot=2)
        optimizer = StagedMuon(masters, StagingPipeline("cuda", pool), store.writer(), MuonHyperparameters(lr=0.02))
        with store.writing(0):
            optimizer.write_all()
        return store, optimizer

    def step(store, optimizer, generation: int) -> None:
        generator = torch.Generator().manual_seed(generation)
        grads = {n: torch.randn(m.weight.shape, generator=generator) * 0.01 for n, m in optimizer.masters.items()}
        with store.writing(generation, on_torn=optimizer.masters.mark_torn):
            optimizer.step(grads)
        store.check_wt()

    store, optimizer = trainer(0)
    for generation in (1, 2):
        step(store, optimizer, generation)
    save_state(tmp_path / "state", optimizers={"experts": optimizer}, store=store, version=2)
    step(store, optimizer, 3)
    expected = published(store)

    other, resumed = trainer(1)
    load_state(tmp_path / "state", optimizers={"experts": resumed}, store=other)
    step(other, resumed, 3)
    assert same_bytes(published(other), expected)
    assert resumed.masters.sha256() == optimizer.masters.sha256()
