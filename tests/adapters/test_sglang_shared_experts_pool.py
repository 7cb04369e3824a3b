"""Experts beside the memory saver's pool, by the allocator's own rules: two ways that ended real processes, and the
way that is taken."""

from collections.abc import Generator

import pytest
import torch
from pool_rules import ABORTS, SAVER_EXITS, HookMode, Rules

from weftpub_adapters.sglang.shared_experts_pool import inside_a_region, pool_apart, trimmed

GPU = torch.device("cuda", 0)
BIG, SMALL = 1 << 20, 1 << 12


@pytest.fixture(params=["preload", "torch"])
def rules(request: pytest.FixtureRequest) -> Generator[tuple[Rules, list[str]]]:
    ended: list[str] = []
    mode: HookMode = request.param
    with Rules(mode, ended.append).installed() as made:
        yield made, ended


def test_experts_made_apart_come_free_and_the_rest_is_released(rules: tuple[Rules, list[str]]) -> None:
    gpu, ended = rules
    start = gpu.free
    with pool_apart() as apart:
        with gpu.saver.region("weights"):
            experts = torch.nn.Parameter(torch.empty(0), requires_grad=False)
            for _ in range(2):  # each layer enters the pool again
                with apart():
                    assert not inside_a_region()
                    experts.data = gpu.empty(BIG)
                assert inside_a_region()
            rest = gpu.empty(SMALL)
        assert gpu.free == start - 2 * BIG - SMALL  # the pool has ended nowhere yet, and keeps what was freed
    assert gpu.free == start - BIG - SMALL
    before = trimmed(GPU)
    experts.data = torch.zeros(BIG, dtype=torch.uint8)
    assert gpu.free == before  # a freed block is the pool's
    assert trimmed(GPU) - before == BIG
    for _ in range(2):
        gpu.saver.pause("weights")
        assert trimmed(GPU) == start
        gpu.saver.resume("weights")
        assert trimmed(GPU) == start - SMALL
    del rest
    assert trimmed(GPU) == start - SMALL  # the saver's pool gives nothing back
    assert ended == []


def test_a_free_after_the_pool_has_ended_is_given_back_later(rules: tuple[Rules, list[str]]) -> None:
    gpu, ended = rules
    with pool_apart() as apart, gpu.saver.region("weights"), apart():
        held = gpu.empty(BIG)
    before = trimmed(GPU)
    with gpu.saver.region("kv_cache"):
        del held  # another pool is in use
        assert gpu.free == before
    assert trimmed(GPU) - before == BIG
    assert ended == []


def test_outside_of_a_region_the_pool_changes_nothing(rules: tuple[Rules, list[str]]) -> None:
    gpu, ended = rules
    start = gpu.free
    with pool_apart() as apart, apart():
        plain = gpu.empty(BIG)
    del plain
    assert gpu.free == start - BIG  # PyTorch's own cache has it
    assert trimmed(GPU) == start
    assert ended == []


def test_a_pool_that_ends_inside_of_a_region_ends_the_process(rules: tuple[Rules, list[str]]) -> None:
    """As the saver's own `disable` does, seen on an H200 when the first layer of experts had been made: "terminate
    called after throwing an instance of 'c10::Error' what(): captures_underway.empty() INTERNAL ASSERT FAILED"."""
    gpu, ended = rules
    with gpu.saver.region("weights"), gpu.saver.disable():
        held = gpu.empty(BIG)
    assert ended == [ABORTS]
    del held


def test_a_savers_pool_that_is_given_back_ends_the_process(rules: tuple[Rules, list[str]]) -> None:
    """Seen on an H200 when the experts had been made in the saver's pool and another one was put in its place, so that
    their memory would come free: "[torch_memory_saver.cpp] only support interesting region"."""
    gpu, ended = rules
    with gpu.saver.region("weights"):
        experts = gpu.empty(BIG)
    del experts
    gpu.saver._impl._primary_mem_pool = torch.cuda.MemPool(gpu.saver._impl._hook_util.get_allocator())
    assert ended == ([SAVER_EXITS] if gpu.mode == "torch" else [])
