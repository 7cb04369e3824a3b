"""Shared memory on a GPU: the driver's calls, two processes, a store, and a mapping that refuses."""

from collections.abc import Generator
from pathlib import Path

import pytest
import torch
from memory_support import CATALOGUE, Partner
from store_support import fill, make_masters, make_store, published, same_bytes

from weftpub.memory import Access, SharedAllocation, SharedAllocator, sharing_obstacle, vmm
from weftpub.store.shared import verify_shared

pytestmark = pytest.mark.gpu

W13 = "layers.1.w13"


@pytest.fixture
def partner() -> Generator[Partner]:
    started = Partner()
    yield started
    started.stop()


def test_the_driver_allows_it(tmp_path: Path) -> None:
    assert sharing_obstacle("cuda", tmp_path / "m") is None


def test_memory_is_freed_with_its_last_tensor(tmp_path: Path) -> None:
    before = torch.cuda.mem_get_info()[0]
    with SharedAllocation.join(tmp_path, "experts", "cuda", CATALOGUE) as memory:
        assert memory.nbytes % vmm.granularity(0) == 0
        assert torch.cuda.mem_get_info()[0] <= before - memory.nbytes
        kept = memory.tensor(W13)
    kept.view(torch.uint8).fill_(3)
    assert int(kept.view(torch.uint8).sum(dtype=torch.int64)) == 3 * kept.numel()
    del kept, memory
    assert torch.cuda.mem_get_info()[0] == before


def test_the_quantizer_writes_where_another_process_reads(tmp_path: Path, partner: Partner) -> None:
    with SharedAllocation.join(tmp_path, "experts", "cuda", CATALOGUE) as memory:
        store, other = make_store(device="cuda", allocator=SharedAllocator(memory)), make_store(device="cuda")
        masters = make_masters(store, 1)
        assert fill(store, 1, masters).checksums == fill(other, 1, masters).checksums
        assert same_bytes(published(store), published(other))
        memory.commit(1)
        assert partner("join", str(tmp_path), "experts", False, False, "cuda") == (memory.id, False)
        assert partner("verify") == verify_shared(memory) == 1
        assert partner("read", W13, 0, 8) == store.layer(1).w13.view(torch.uint8).reshape(-1)[:8].tolist()
        address = store.layer(1).w13.data_ptr()
        store.offload()
        store.reload()
        store.check_wt()
        assert store.layer(1).w13.data_ptr() == address
        assert partner("verify") == 1


def test_memory_outlives_its_maker_on_the_gpu(tmp_path: Path, partner: Partner) -> None:
    partner("join", str(tmp_path), "experts", True, False, "cuda")
    partner("write", W13, 0, 9)
    with SharedAllocation.join(tmp_path, "experts", "cuda", CATALOGUE, create=False) as memory:
        partner.kill()
        assert int(memory.tensor(W13).view(torch.uint8).reshape(-1)[0]) == 9
        third = Partner()
        try:
            assert third("join", str(tmp_path), "experts", False, False, "cuda") == (memory.id, False)
            third("write", W13, 0, 8)
            assert int(memory.tensor(W13).view(torch.uint8).reshape(-1)[0]) == 8
        finally:
            third.stop()


def test_a_protected_mapping_refuses_a_kernel_and_spares_the_others(tmp_path: Path, partner: Partner) -> None:
    with SharedAllocation.join(tmp_path, "experts", "cuda", CATALOGUE) as memory:
        memory.tensor(W13).view(torch.uint8).fill_(4)
        torch.cuda.synchronize()
        partner("join", str(tmp_path), "experts", False, False, "cuda")
        partner("protect", int(Access.READ))
        assert partner("read", W13, 0, 2) == [4, 4]
        with pytest.raises(AssertionError, match=r"CUDA error|illegal"):
            partner("write", W13, 0, 5)
        assert int(memory.tensor(W13).view(torch.uint8).reshape(-1)[0]) == 4
