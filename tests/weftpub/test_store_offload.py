"""Memory that goes away and comes back: the same Tensor objects, the same views, the same bytes."""

import gc

import pytest
import torch
from store_support import fill, make_masters, make_store, published, same_bytes

from weftpub.errors import ChecksumError, ConfigError, StateError, TornError
from weftpub.masters import ExpertMatrix
from weftpub.memory import Allocator, TorchAllocator
from weftpub.store import StoreState


class BookkeepingAllocator(TorchAllocator):
    """Counts bytes in use; its restored memory is NaN until written."""

    def __init__(self) -> None:
        super().__init__(poison=True)
        self.used: dict[str, int] = {}
        self.trimmed = 0

    def allocate(self, name, shape, dtype, device):
        tensor = super().allocate(name, shape, dtype, device)
        assert name not in self.used
        self.used[name] = tensor.nbytes
        return tensor

    def release(self, name, tensor):
        super().release(name, tensor)
        self.used[name] -= tensor.nbytes

    def restore(self, name, tensor):
        super().restore(name, tensor)
        self.used[name] += tensor.nbytes

    def trim(self):
        super().trim()
        self.trimmed += 1


@pytest.mark.parametrize("form", ["fp8", "bf16"])
@pytest.mark.parametrize("wt", ["store", "rebuild"])
def test_bytes_objects_and_views_survive_three_offloads(form: str, wt: str) -> None:
    """A view from before an offload was used after it, and read dead memory. Views must stay the views they were."""
    allocator = BookkeepingAllocator()
    store = make_store(format=form, wt=wt, allocator=allocator)
    fill(store, 0)
    bytes_before, sums = published(store), store.checksums
    layer, matrix = store.layer(3), store.matrix(ExpertMatrix(3, 5, "fc1"))
    own_view = layer.w13[1, 128:].narrow(1, 3, 5)
    expected = own_view.clone()
    for _ in range(3):
        store.offload()
        assert not store.resident
        store.reload()
        assert store.layer(3) is layer
        assert store.matrix(ExpertMatrix(3, 5, "fc1")) is matrix
        assert same_bytes(published(store), bytes_before)
        assert torch.equal(own_view.view(torch.uint8), expected.view(torch.uint8))
        assert store.checksums == sums
        store.check_wt()
    fill(store, 1)


def test_offload_frees_all_but_the_scratch_of_the_change_count() -> None:
    allocator = BookkeepingAllocator()
    store = make_store(allocator=allocator)
    fill(store, 0)
    resident = dict(allocator.used)
    store.offload()
    assert {name for name, used in allocator.used.items() if used} == {"change.scratch"}
    assert allocator.trimmed == 1
    store.reload()
    assert allocator.used == resident
    assert sum(resident.values()) == sum(store.footprint().values()) + resident["change.scratch"]


def test_all_memory_comes_from_the_given_allocator() -> None:
    allocator = BookkeepingAllocator()
    store = make_store(allocator=allocator)
    assert isinstance(allocator, Allocator)
    assert set(allocator.used) == {
        *(f"layers.{layer}.{name}{suffix}{t}" for layer in (1, 3) for name in ("w13", "w2")
          for suffix in ("", "_scale") for t in ("", "_t")),
        "change.scratch",
    }  # fmt: skip
    assert torch.isnan(store.buffers(1).w13.float()).all()


@pytest.mark.parametrize("form", ["fp8", "bf16"])
def test_dropped_bytes_are_made_again_from_the_masters(form: str) -> None:
    store = make_store(format=form, allocator=TorchAllocator(poison=True))
    masters = make_masters(store)
    fill(store, 0, masters)
    before = published(store)
    store.offload(keep=False)
    with pytest.raises(ConfigError, match="reload needs the masters"):
        store.reload()
    store.reload(masters.__getitem__)
    assert same_bytes(published(store), before)
    store.check_wt()


def test_masters_of_another_generation_are_noticed() -> None:
    store = make_store()
    masters = make_masters(store)
    fill(store, 0, masters)
    store.offload(keep=False)
    masters["layers.3.experts.4.fc2"][0, 0] += 1.0
    with pytest.raises(ChecksumError, match=r"layers\.3\.mlp\.experts\.4\.down_proj"):
        store.reload(masters.__getitem__)
    assert store.state is StoreState.TORN


def test_host_copy_that_was_damaged_is_noticed() -> None:
    store = make_store()
    fill(store, 0)
    store.offload()
    store._memory._host[0]["w2"].view(torch.uint8)[2, 5, 5] ^= 1  # type: ignore[index]
    with pytest.raises(ChecksumError, match=r"layers\.1\.mlp\.experts\.7\.down_proj\.weight"):
        store.reload()
    with pytest.raises(TornError):
        next(store.canonical())


def test_a_store_whose_host_copy_was_damaged_can_be_loaded_into() -> None:
    """The error said to load a checkpoint. A load was refused, because the memory counted as away, and another reload,
    because it was there: only a new process helped.
    """
    store = make_store()
    fill(store, 0)
    saved = {item.name: item.tensor.clone() for item in store.canonical()}
    sums = dict(store.checksums)
    store.offload()
    store._memory._host[0]["w2"].view(torch.uint8)[2, 5, 5] ^= 1  # type: ignore[index]
    with pytest.raises(ChecksumError):
        store.reload()
    assert store.resident
    with pytest.raises(StateError, match="already on the device"):
        store.reload()
    store.load(0, saved, sums)
    assert dict(store.checksums) == sums
    store.check_wt()
    store.offload()
    store.reload()


def test_twice_in_one_direction_is_refused() -> None:
    """Releasing a tag twice, or resuming one never released, killed an engine. A state machine refuses first."""
    store = make_store()
    fill(store, 0)
    with pytest.raises(StateError, match="already on the device"):
        store.reload()
    store.offload()
    with pytest.raises(StateError, match="already offloaded"):
        store.offload()
    store.reload()
    store.verify()


def test_offloaded_store_refuses_every_use() -> None:
    store = make_store()
    fill(store, 0)
    saved = {item.name: item.tensor.clone() for item in store.canonical()}
    store.offload()
    for use in (
        lambda: next(store.canonical()),
        lambda: store.layer(1),
        lambda: store.begin(1),
        lambda: store.load(1, saved),
        store.verify,
        store.rebuild_wt,
        lambda: store.reading().__enter__(),
    ):
        with pytest.raises(StateError, match="call reload first"):
            use()
    assert store.generation == 0


def test_offload_in_the_middle_of_a_step_is_refused() -> None:
    store = make_store()
    fill(store, 0)
    store.begin(1)
    with pytest.raises(StateError, match="generation 1 is being written"):
        store.offload()


def test_empty_store_can_be_offloaded_before_its_first_generation() -> None:
    store = make_store()
    store.offload()
    store.reload()
    fill(store, 0)


def test_allocator_refuses_to_release_or_restore_twice() -> None:
    allocator = TorchAllocator()
    tensor = allocator.allocate("w", (4, 4), torch.float32, torch.device("cpu"))
    with pytest.raises(StateError, match="w: its memory was never released"):
        allocator.restore("w", tensor)
    allocator.release("w", tensor)
    with pytest.raises(StateError, match="w: its memory was released before"):
        allocator.release("w", tensor)
    with pytest.raises(ConfigError, match="no elements"):
        allocator.allocate("none", (0, 4), torch.float32, torch.device("cpu"))


def test_host_memory_really_goes_back_to_the_system() -> None:
    def resident_bytes() -> int:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * 4096

    allocator = TorchAllocator(poison=True)
    tensor = allocator.allocate("w", (256 << 20,), torch.uint8, torch.device("cpu"))
    tensor.numpy()  # torch refuses to resize memory that numpy has seen
    gc.collect()
    full = resident_bytes()
    allocator.release("w", tensor)
    assert full - resident_bytes() > 200 << 20
    allocator.restore("w", tensor)
    assert tensor[17] == 0xFF
