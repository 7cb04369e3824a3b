"""The pipeline: every master whole through one slot, in any order that its marks allow, never overwritten early."""

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weftpub.errors import ConfigError, DeadlineError, StateError
from weftpub.masters import MasterSet
from weftpub.staging import Lane, SlotPool, SlotState, StagedMaster, StagingPipeline, Work
from weftpub.staging.lanes import CudaLanes, HostLanes, open_lanes

SHAPES = {"a": (3, 5), "b": (8, 8), "c": (7,), "d": (1, 9), "e": (8, 8), "f": (2, 2), "g": (8, 8)}


def build_masters(shapes: dict[str, tuple[int, ...]] = SHAPES) -> MasterSet:
    generator = torch.Generator().manual_seed(3)
    masters = MasterSet(shapes, ("m",))
    for master in masters.values():
        master.weight.normal_(generator=generator)
    return masters


def build_gradients(masters: MasterSet) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(4)
    return {name: torch.randn(master.layout.shape, generator=generator) for name, master in masters.items()}


def update(staged: StagedMaster, gradient: torch.Tensor) -> None:
    staged.state["m"].mul_(0.5).add_(gradient)
    staged.weight.sub_(staged.state["m"])


def expected_after(masters: MasterSet, gradients: dict[str, torch.Tensor], runs: int = 1) -> dict[str, torch.Tensor]:
    result: dict[str, torch.Tensor] = {}
    for name, master in masters.items():
        staged = StagedMaster(name, master.weight.clone(), {"m": master.state["m"].clone()})
        for _ in range(runs):
            update(staged, gradients[name])
        result[name] = staged.weight
    return result


class Recorder:
    """A writer that keeps what it saw."""

    def __init__(self) -> None:
        self.seen: dict[str, torch.Tensor] = {}

    def __call__(self, name: str, matrix: torch.Tensor) -> None:
        self.seen[name] = matrix.clone()


def works(masters: MasterSet, gradients: dict[str, torch.Tensor], write: Any) -> list[Work]:
    return [Work(master, write, update, gradients[name]) for name, master in masters.items()]


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("slots", [1, 2, 3, 9])
def test_masters_are_updated_and_the_writer_sees_them_complete(slots: int) -> None:
    masters = build_masters()
    gradients = build_gradients(masters)
    expected = expected_after(masters, gradients, runs=2)
    writer = Recorder()
    pipeline = StagingPipeline.for_masters(masters, "cpu", slots=slots)
    for _ in range(2):
        pipeline.run(works(masters, gradients, writer))
    assert same(writer.seen, expected)
    assert same({name: master.weight for name, master in masters.items()}, expected)
    assert all(slot.state is SlotState.FREE for slot in pipeline.pool.slots)


def test_states_are_passed_in_order() -> None:
    masters = build_masters()
    pipeline = StagingPipeline.for_masters(masters, "cpu", slots=2)
    seen: list[tuple[str, str, SlotState]] = []

    def note(stage: str, name: str) -> None:
        (slot,) = [slot for slot in pipeline.pool.slots if slot.holds == name]
        seen.append((stage, name, slot.state))

    pipeline.run(
        Work(
            master,
            lambda name, _: note("write", name),
            lambda staged, _: note("update", staged.name),
            torch.zeros(master.layout.shape),
        )
        for master in masters.values()
    )
    assert seen == [
        row for name in masters for row in (("update", name, SlotState.UPDATING), ("write", name, SlotState.WRITING))
    ]


def test_without_an_update_the_writer_sees_the_master_and_nothing_is_stored() -> None:
    masters = build_masters()
    before = masters.sha256()
    seen: dict[str, torch.Tensor] = {}

    def vandal(name: str, matrix: torch.Tensor) -> None:
        seen[name] = matrix.clone()
        matrix.zero_()

    StagingPipeline.for_masters(masters, "cpu").run(Work(master, vandal) for master in masters.values())
    assert same(seen, {name: master.weight for name, master in masters.items()})
    assert masters.sha256() == before


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_updates_get_contiguous_fp32_gradients(dtype: torch.dtype) -> None:
    masters = build_masters({"a": (4, 6)})
    gradient = torch.randn(6, 4).to(dtype).t()
    got: list[torch.Tensor] = []
    StagingPipeline.for_masters(masters, "cpu").run(
        [Work(masters["a"], Recorder(), lambda _, g: got.append(g), gradient)]
    )
    assert got[0].dtype is torch.float32
    assert got[0].is_contiguous()
    assert torch.equal(got[0], gradient.float())


@settings(deadline=None, max_examples=150)
@given(randoms=st.randoms(use_true_random=False), slots=st.integers(1, 4))
def test_any_order_of_the_lanes_gives_the_same_bytes(
    simulated_lanes: Callable[..., Any], randoms: random.Random, slots: int
) -> None:
    """What CUDA may interleave, simulated: three queues whose operations run in an order drawn at random."""
    masters = build_masters()
    gradients = build_gradients(masters)
    expected = expected_after(masters, gradients)
    writer = Recorder()
    pool = SlotPool.for_masters(masters, "cpu", slots)
    StagingPipeline("cpu", pool, lanes=simulated_lanes(randoms.choice)).run(works(masters, gradients, writer))
    assert same(writer.seen, expected)
    assert same({name: master.weight for name, master in masters.items()}, expected)


@pytest.mark.parametrize("deaf", [Lane.IN, Lane.COMPUTE, Lane.OUT])
def test_each_wait_is_needed(simulated_lanes: Any, deaf: Lane) -> None:
    """The random orders can tell: with the waits of any one lane left out, some of them give wrong bytes."""
    wrong = 0
    for seed in range(40):
        masters = build_masters()
        gradients = build_gradients(masters)
        expected = expected_after(masters, gradients)
        writer = Recorder()
        lanes = simulated_lanes(random.Random(seed).choice, deaf={deaf})
        pool = SlotPool.for_masters(masters, "cpu", 2)
        StagingPipeline("cpu", pool, lanes=lanes).run(works(masters, gradients, writer))
        stored = {name: master.weight for name, master in masters.items()}
        wrong += not (same(writer.seen, expected) and same(stored, expected))
    assert wrong > 0


def test_a_slow_writer_holds_its_slot(simulated_lanes: Any) -> None:
    """A writer was still reading its slot when the next matrix was loaded into it, and published a mix of both.

    Here the compute lane runs only when no other lane can: whatever may overtake the writer does.
    """
    masters = build_masters()
    gradients = build_gradients(masters)
    expected = expected_after(masters, gradients)
    writer = Recorder()

    def writer_last(ready: list[Lane]) -> Lane:
        return next((lane for lane in ready if lane is not Lane.COMPUTE), Lane.COMPUTE)

    pool = SlotPool.for_masters(masters, "cpu", 2)
    StagingPipeline("cpu", pool, lanes=simulated_lanes(writer_last)).run(works(masters, gradients, writer))
    assert same(writer.seen, expected)


def test_a_failing_writer_stops_the_run_and_frees_the_slots() -> None:
    masters = build_masters()
    gradients = build_gradients(masters)
    before = {name: master.weight.clone() for name, master in masters.items()}

    def write(name: str, matrix: torch.Tensor) -> None:
        if name == "c":
            raise OSError("no space left in the store")

    pipeline = StagingPipeline.for_masters(masters, "cpu", slots=2)
    with pytest.raises(OSError, match="no space left"):
        pipeline.run(works(masters, gradients, write))
    assert pipeline.progress == "latest enqueued: matrix 'c' WRITING in slot 0"
    changed = [name for name, master in masters.items() if not torch.equal(master.weight, before[name])]
    assert changed == ["a", "b"], "masters before the failure are new, the others old"
    assert all(slot.state is SlotState.FREE for slot in pipeline.pool.slots)
    pipeline.run(works(masters, gradients, Recorder()))


def test_a_device_that_never_finishes_is_reported_and_the_pipeline_refuses_more() -> None:
    class HungLanes(HostLanes):
        def drain(self, seconds: float) -> None:
            raise DeadlineError(f"cuda:0, lane 'compute': not finished, allowed {seconds} s")

    masters = build_masters()
    pool = SlotPool.for_masters(masters, "cpu")
    pipeline = StagingPipeline("cpu", pool, lanes=HungLanes(), drain_seconds=1.5)
    with pytest.raises(DeadlineError, match=r"lane 'compute'.*1\.5 s"):
        pipeline.run(works(masters, build_gradients(masters), Recorder()))
    with pytest.raises(StateError, match=r"never finished \(latest enqueued: matrix 'g' STORING"):
        pipeline.run([])


def test_a_writer_cannot_run_its_own_pipeline() -> None:
    masters = build_masters()
    pipeline = StagingPipeline.for_masters(masters, "cpu")
    with pytest.raises(StateError, match="called from one of its own writers"):
        pipeline.run(Work(master, lambda *_: pipeline.run([])) for master in masters.values())
    pipeline.run([])


def test_a_matrix_that_fits_no_slot_is_refused_before_anything_moves() -> None:
    masters = build_masters()
    pipeline = StagingPipeline("cpu", SlotPool("cpu", 2, numel=16))
    with pytest.raises(ConfigError, match=r"'b' \[8, 8\] has 64 elements.*SlotPool\(numel=64\)"):
        pipeline.require_fit(masters)
    with pytest.raises(ConfigError, match=r"SlotPool\(numel=64\)"):
        pipeline.run([Work(masters["b"], Recorder())])


def test_lanes_and_pool_must_share_a_device() -> None:
    class OtherLanes(HostLanes):
        device = torch.device("meta")

    with pytest.raises(ConfigError, match="runs on meta, its slots are on cpu"):
        StagingPipeline("cpu", SlotPool("cpu", numel=4), lanes=OtherLanes())


def test_the_cpu_has_host_lanes() -> None:
    assert isinstance(open_lanes("cpu"), HostLanes)


GPU_SHAPES = {f"m{i}": (512, 1024) for i in range(8)}


def run_on_gpu(
    slots: int, gradients_on: str, cycles: int = 20_000_000
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], MasterSet]:
    """A run whose writer sleeps on the stream before it reads, 10 ms if nothing else is said; returns what it saw, what
    was expected."""
    masters = build_masters(GPU_SHAPES)
    gradients = build_gradients(masters)
    expected = expected_after(masters, gradients)
    seen: dict[str, torch.Tensor] = {name: torch.empty(512, 1024, device="cuda") for name in masters}

    def slow_writer(name: str, matrix: torch.Tensor) -> None:
        torch.cuda._sleep(cycles)
        seen[name].copy_(matrix)

    placed = {name: gradient.to(gradients_on) for name, gradient in gradients.items()}
    StagingPipeline.for_masters(masters, "cuda", slots=slots).run(works(masters, placed, slow_writer))
    return {name: tensor.cpu() for name, tensor in seen.items()}, expected, masters


@pytest.mark.gpu
@pytest.mark.parametrize("gradients_on", ["cuda", "cpu"])
@pytest.mark.parametrize("slots", [1, 2, 3])
def test_gpu_a_slow_writer_holds_its_slot(slots: int, gradients_on: str) -> None:
    """The same story on the device: loads take far less than the writer's sleep, so a missing wait shows."""
    seen, expected, masters = run_on_gpu(slots, gradients_on)
    assert same(seen, expected)
    assert same({name: master.weight for name, master in masters.items()}, expected)


@pytest.mark.gpu
def test_gpu_the_slow_writer_test_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the lanes deaf to every mark, the slow writer reads a later matrix: the test above sees races. The sleeps
    together are more than a second, in which even a busy host has enqueued the next loads."""
    monkeypatch.setattr(CudaLanes, "wait", lambda self, lane, mark: None)
    seen, expected, _ = run_on_gpu(2, "cuda", cycles=400_000_000)
    assert not same(seen, expected)


@pytest.mark.gpu
def test_gpu_bfloat16_host_gradients_travel_with_the_load() -> None:
    masters = build_masters(GPU_SHAPES)
    gradients = {name: g.to(torch.bfloat16) for name, g in build_gradients(masters).items()}
    expected = expected_after(masters, {name: g.float() for name, g in gradients.items()})
    StagingPipeline.for_masters(masters, "cuda").run(works(masters, gradients, Recorder()))
    assert same({name: master.weight for name, master in masters.items()}, expected)


@pytest.mark.gpu
def test_gpu_lanes_wait_for_the_callers_stream() -> None:
    """Gradients still being computed on the caller's stream must be complete when the update reads them."""
    masters = build_masters(GPU_SHAPES)
    gradients = build_gradients(masters)
    expected = expected_after(masters, gradients)
    pipeline = StagingPipeline.for_masters(masters, "cuda")
    late = {name: torch.zeros_like(g, device="cuda") for name, g in gradients.items()}
    source = {name: g.cuda() for name, g in gradients.items()}
    torch.cuda._sleep(50_000_000)
    for name, gradient in late.items():
        gradient.copy_(source[name])
    pipeline.run(works(masters, late, Recorder()))
    assert same({name: master.weight for name, master in masters.items()}, expected)


@pytest.mark.gpu
def test_gpu_pageable_masters_are_refused() -> None:
    masters = MasterSet({"a": (8, 8)}, ("m",), pin=False)
    with pytest.raises(ConfigError, match="must lie in pinned memory"):
        StagingPipeline.for_masters(masters, "cuda").require_fit(masters)


@pytest.mark.gpu
def test_gpu_a_hung_kernel_meets_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel ends after all; that it has not yet is said by its stream, whatever the host's speed."""
    lanes = CudaLanes(torch.device("cuda", torch.cuda.current_device()))
    lanes.enqueue(Lane.COMPUTE, lambda: torch.cuda._sleep(200_000_000))
    with monkeypatch.context() as patch:
        patch.setitem(lanes._streams, Lane.COMPUTE, SimpleNamespace(query=lambda: False))
        with pytest.raises(DeadlineError, match=r"cuda:\d+, lane 'compute'.*allowed 0.1 s.*likely"):
            lanes.drain(0.1)
    lanes.drain(60.0)
