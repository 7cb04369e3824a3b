"""Slots: the legal moves and no others, and what fits."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from weftpub.errors import ConfigError, StateError
from weftpub.masters import BlockLayout, MasterSet
from weftpub.staging import Slot, SlotPool, SlotState

FREE, LOADING, UPDATING, WRITING, STORING = SlotState
LEGAL = {(FREE, LOADING), (LOADING, UPDATING), (UPDATING, WRITING), (WRITING, STORING), (STORING, FREE)}


def slot_in(state: SlotState) -> Slot:
    slot = Slot(0, torch.zeros(128), 64)
    for passed in (LOADING, UPDATING, WRITING, STORING):
        if slot.state is state:
            break
        slot.move(passed)
    return slot


@pytest.mark.parametrize("start", SlotState)
@pytest.mark.parametrize("to", SlotState)
def test_every_move_is_legal_or_refused(start: SlotState, to: SlotState) -> None:
    slot = slot_in(start)
    assert slot.state is start
    if (start, to) in LEGAL:
        slot.move(to)
        assert slot.state is to
    else:
        with pytest.raises(StateError, match=f"slot 0 is {start.name} and cannot become {to.name}"):
            slot.move(to)
        assert slot.state is start


@given(st.lists(st.sampled_from(SlotState), max_size=30))
def test_any_sequence_of_moves_follows_the_ring(moves: list[SlotState]) -> None:
    slot = slot_in(FREE)
    expected = FREE
    for to in moves:
        try:
            slot.move(to)
        except StateError:
            assert (expected, to) not in LEGAL
        else:
            assert (expected, to) in LEGAL
            expected = to
        assert slot.state is expected


def test_a_refusal_names_what_the_slot_holds_and_free_forgets_it() -> None:
    slot = slot_in(LOADING)
    slot.holds = "layers.0.experts.3.fc1"
    with pytest.raises(StateError, match=r"holding 'layers.0.experts.3.fc1'.*only UPDATING may follow"):
        slot.move(FREE)
    for state in (UPDATING, WRITING, STORING, FREE):
        slot.move(state)
    assert slot.holds is None


def test_views_are_laid_out_as_a_masters_block() -> None:
    masters = MasterSet({"a": (3, 5)}, ("m", "v"))
    block = masters["a"].block
    block.copy_(torch.arange(block.numel(), dtype=torch.float32))
    pool = SlotPool.for_masters(masters, "cpu", count=1)
    slot = pool.turn()
    slot.flat[: block.numel()].copy_(block)
    weight, state = slot.views(masters["a"].layout)
    assert torch.equal(weight, masters["a"].weight)
    assert all(torch.equal(state[key], masters["a"].state[key]) for key in ("m", "v"))


def test_inbox_holds_any_gradient_that_fits_and_never_moves() -> None:
    slot = SlotPool("cpu", 1, numel=100).slots[0]
    first = slot.inbox(torch.zeros(2, 3, dtype=torch.bfloat16))
    assert (first.shape, first.dtype) == ((2, 3), torch.bfloat16)
    whole = slot.inbox(torch.zeros(10, 10))
    assert (whole.shape, whole.dtype) == ((10, 10), torch.float32)
    assert slot.inbox(torch.zeros(10, 10, dtype=torch.float64)).dtype is torch.float32
    assert first.data_ptr() == whole.data_ptr()


def test_slots_take_turns() -> None:
    pool = SlotPool("cpu", 3, numel=8)
    assert [pool.turn().index for _ in range(7)] == [0, 1, 2, 0, 1, 2, 0]


def test_pool_fits_the_largest_master_with_all_states() -> None:
    masters = MasterSet({"small": (2, 2), "large": (64, 65), "norm": (9,)}, ("m", "v"))
    pool = SlotPool.for_masters(masters, "cpu")
    assert (pool.numel, pool.tensors_per_slot, len(pool.slots)) == (64 * 65, 3, 3)
    for name, master in masters.items():
        pool.require_fit(name, master.layout)


def test_a_matrix_that_fits_no_slot_is_told_the_size_to_set() -> None:
    pool = SlotPool("cpu", 3, numel=1024 * 1024, tensors_per_slot=2)
    with pytest.raises(ConfigError) as failure:
        pool.require_fit("layers.0.experts.1.fc1", BlockLayout((2048, 3072), ("momentum_buffer",)))
    message = str(failure.value)
    assert "'layers.0.experts.1.fc1' [2048, 3072] has 6291456 elements (24.0 MiB in FP32)" in message
    assert "a slot takes 1048576 (4.0 MiB)" in message
    assert "set SlotPool(numel=6291456), 144.0 MiB of device memory for 3 slots" in message


def test_too_many_states_name_the_setting() -> None:
    pool = SlotPool("cpu", 2, numel=1024 * 1024, tensors_per_slot=2)
    with pytest.raises(ConfigError, match=r"3 tensors \(weight, m, v\).*tensors_per_slot=3\), 24.0 MiB"):
        pool.require_fit("a", BlockLayout((16, 16), ("m", "v")))


@pytest.mark.parametrize("settings", [{"count": 0}, {"numel": 0}, {"tensors_per_slot": 0}])
def test_empty_pools_are_refused(settings: dict[str, int]) -> None:
    (name,) = settings
    with pytest.raises(ConfigError, match=f"{name}=0"):
        SlotPool("cpu", **{"count": 2, "numel": 8, **settings})
