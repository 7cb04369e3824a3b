"""Masters: layout, names, hashing, saving and loading, and what tears them."""

import copy
import hashlib
import itertools
from typing import Any

import pytest
import torch

from weftpub.errors import ConfigError, TornError
from weftpub.masters import BlockLayout, ExpertMatrix, MasterSet, find_nonfinite, format_names

STATES = ("exp_avg", "exp_avg_sq")


@pytest.fixture
def weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes: dict[str, tuple[int, ...]] = {"a": (5, 7), "b": (64, 3), "norm": (9,), "scalar": ()}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def test_expert_names_round_trip() -> None:
    matrix = ExpertMatrix(3, 117, "fc2")
    assert matrix.name == "layers.3.experts.117.fc2"
    assert ExpertMatrix.parse(matrix.name) == matrix


@pytest.mark.parametrize(
    "name", ["layers.3.experts.1.fc3", "layers.3.experts.fc1", "layers.-1.experts.0.fc1", "xlayers.3.experts.1.fc1", ""]
)
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="names no expert matrix"):
        ExpertMatrix.parse(name)


@pytest.mark.parametrize("fields", [(-1, 0, "fc1"), (0, -1, "fc1"), (0, 0, "gate")])
def test_bad_expert_fields_are_refused(fields: tuple[int, int, Any]) -> None:
    with pytest.raises(ConfigError):
        ExpertMatrix(*fields)


def test_layout_pads_each_tensor_to_256_bytes() -> None:
    layout = BlockLayout((5, 7), STATES)
    assert (layout.numel, layout.stride, layout.tensors, layout.total) == (35, 64, 3, 192)
    flat = torch.arange(192, dtype=torch.float32)
    weight, state = layout.split(flat)
    assert weight.shape == (5, 7)
    assert [weight[0, 0].item(), state["exp_avg"][0, 0].item(), state["exp_avg_sq"][0, 0].item()] == [0.0, 64.0, 128.0]
    assert weight.data_ptr() == flat.data_ptr()


def test_masters_copy_their_initial_values_and_start_with_zero_state(weights: dict[str, torch.Tensor]) -> None:
    kept = copy.deepcopy(weights)
    masters = MasterSet.from_tensors(weights, STATES)
    assert list(masters) == list(weights)
    for name, master in masters.items():
        assert torch.equal(master.weight, kept[name])
        assert master.weight.shape == kept[name].shape
        assert master.step == 0
        assert set(master.state) == set(STATES)
        assert not any(tensor.any() for tensor in master.state.values())
        weights[name].fill_(7.0)
        assert torch.equal(master.weight, kept[name]), "the caller's tensor is not the master"


def test_all_masters_share_one_arena_without_overlap(weights: dict[str, torch.Tensor]) -> None:
    masters = MasterSet.from_tensors(weights, STATES)
    tensors = [tensor for master in masters.values() for tensor in master.tensors().values()]
    assert len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == 1
    spans = sorted((t.data_ptr(), t.data_ptr() + 4 * t.numel()) for t in tensors)
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
    assert all(start % 4 == 0 for start, _ in spans)
    assert masters.nbytes == 4 * sum(master.layout.total for master in masters.values())


def test_bfloat16_starts_are_exact() -> None:
    start = torch.randn(16, 16).to(torch.bfloat16)
    assert torch.equal(MasterSet.from_tensors({"a": start})["a"].weight, start.float())


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64, torch.float8_e4m3fn, torch.int32])
def test_other_dtypes_are_refused(dtype: torch.dtype) -> None:
    with pytest.raises(ConfigError, match="'a' must start from float32 or bfloat16"):
        MasterSet.from_tensors({"a": torch.zeros(4, 4).to(dtype)})


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_non_finite_starts_are_refused_by_row_and_column(value: float) -> None:
    start = torch.zeros(4, 6)
    start[2, 5] = value
    with pytest.raises(ConfigError, match=rf"master 'a' is {value} at row 2, column 5"):
        MasterSet.from_tensors({"a": start})


@pytest.mark.parametrize(
    ("shapes", "states", "message"),
    [
        ({}, (), "needs at least one"),
        ({"a": (2, 3, 4)}, (), "give a matrix"),
        ({"a": (0, 4)}, (), "it is empty"),
        ({"a": (4, 0)}, (), "it is empty"),
        ({"a": (0,)}, (), "it is empty"),
        ({"a": (4, 4)}, ("m", "m"), "unique"),
        ({"a": (4, 4)}, ("weight",), "not 'weight'"),
    ],
)
def test_impossible_sets_are_refused(shapes: dict[str, tuple[int, ...]], states: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        MasterSet(shapes, states)


def test_sha256_is_of_the_weight_bytes(weights: dict[str, torch.Tensor]) -> None:
    masters = MasterSet.from_tensors(weights, STATES)
    digests = masters.sha256()
    assert digests == {name: hashlib.sha256(w.numpy().tobytes()).hexdigest() for name, w in weights.items()}
    masters["a"].state["exp_avg"].fill_(1.0)
    assert masters.sha256() == digests
    masters["a"].weight.view(torch.int32)[0, 0] ^= 1
    changed = masters.sha256()
    assert changed["a"] != digests["a"]
    assert {name for name in digests if changed[name] != digests[name]} == {"a"}


def test_reading_and_exporting_leave_masters_untouched(weights: dict[str, torch.Tensor]) -> None:
    """A trainer overwrote its FP32 masters from dequantized FP8 weights at start-up, and lost what they had gained.

    Only a step and a load may change a master; here everything else is done to a set, and to a second set beside it.
    """
    masters = MasterSet.from_tensors(weights, STATES)
    before = masters.sha256()
    state = masters.state_dict()
    for saved in state.values():
        saved["weight"].zero_()
    other = MasterSet.from_tensors({name: master.weight for name, master in masters.items()}, STATES)
    for master in other.values():
        master.weight.zero_()
    masters.sha256()
    repr(masters["a"])
    assert masters.sha256() == before


def test_save_and_load_round_trip_bytes(weights: dict[str, torch.Tensor]) -> None:
    masters = MasterSet.from_tensors(weights, STATES)
    masters["a"].state["exp_avg"].normal_()
    masters["b"].step = 12
    other = MasterSet({name: w.shape for name, w in weights.items()}, STATES)
    other.load_state_dict(masters.state_dict())
    for name, master in masters.items():
        assert other[name].step == master.step
        for key, tensor in master.tensors().items():
            assert torch.equal(other[name].tensors()[key].view(torch.int32), tensor.view(torch.int32))


def test_state_without_copies_is_the_live_memory(weights: dict[str, torch.Tensor]) -> None:
    masters = MasterSet.from_tensors(weights)
    assert masters.state_dict(copy=False)["a"]["weight"].data_ptr() == masters["a"].weight.data_ptr()
    assert masters.state_dict()["a"]["weight"].data_ptr() != masters["a"].weight.data_ptr()


def _drop(state: Any) -> None:
    del state["a"]


def _add(state: Any) -> None:
    state["z"] = state["a"]


def _drop_state(state: Any) -> None:
    del state["norm"]["exp_avg"]


def _wrong_shape(state: Any) -> None:
    state["norm"]["exp_avg"] = torch.zeros(10)


def _wrong_dtype(state: Any) -> None:
    state["norm"]["exp_avg"] = torch.zeros(9, dtype=torch.bfloat16)


def _no_tensor(state: Any) -> None:
    state["norm"]["exp_avg"] = [0.0] * 9


def _bad_step(state: Any) -> None:
    state["scalar"]["step"] = -1


def _nan(state: Any) -> None:
    state["norm"]["weight"][4] = float("nan")


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (_drop, "missing 'a', unknown none"),
        (_add, "missing none, unknown 'z'"),
        (_drop_state, r"saved master 'norm' holds .*expected .*exp_avg"),
        (_wrong_shape, r"'exp_avg' of master 'norm' is torch.float32 \[10\], expected torch.float32 \[9\]"),
        (_wrong_dtype, "torch.bfloat16"),
        (_no_tensor, "must be a tensor"),
        (_bad_step, "'scalar': step must be an int from 0"),
        (_nan, "'norm' is nan at row 0, column 4"),
    ],
)
def test_a_state_that_does_not_fit_changes_nothing(spoil: Any, message: str, weights: dict[str, torch.Tensor]) -> None:
    masters = MasterSet.from_tensors(weights, STATES)
    before = masters.sha256()
    state = masters.state_dict()
    state["b"]["weight"].fill_(3.0)
    spoil(state)
    with pytest.raises(ConfigError, match=message):
        masters.load_state_dict(state)
    assert masters.sha256() == before
    assert masters.torn is None


def test_a_failed_change_tears_the_set_and_a_load_heals_it(weights: dict[str, torch.Tensor]) -> None:
    masters = MasterSet.from_tensors(weights)
    saved = masters.state_dict()

    def fail() -> None:
        with masters.changing("a change", lambda: "half-way"):
            masters["a"].weight.fill_(1.0)
            raise RuntimeError("boom")

    with pytest.raises(RuntimeError, match="boom"):
        fail()
    assert masters.torn == "a change failed, half-way: RuntimeError: boom"
    with pytest.raises(TornError, match=r"saving masters refused.*boom.*load_state_dict"):
        masters.state_dict()
    masters.load_state_dict(saved)
    assert masters.torn is None
    assert torch.equal(masters["a"].weight, weights["a"])


def test_masters_are_torn_while_they_change(weights: dict[str, torch.Tensor]) -> None:
    masters = MasterSet.from_tensors(weights)
    with masters.changing("a change"), pytest.raises(TornError, match="has begun and not ended"):
        masters.state_dict()
    assert masters.torn is None


def test_torn_memory_does_not_heal_itself(weights: dict[str, torch.Tensor]) -> None:
    """Recovering from a state that only refers to the torn memory would declare half-written bytes good."""
    masters = MasterSet.from_tensors(weights)
    live = masters.state_dict(copy=False)
    masters.mark_torn("the store found NaN")
    with pytest.raises(TornError, match="view of the torn memory itself"):
        masters.load_state_dict(live)
    assert masters.torn == "the store found NaN"


@pytest.mark.parametrize(
    ("shape", "index", "spot"),
    [
        ((3, 4), (1, 2), (1, 2)),
        ((3, 4), (0, 0), (0, 0)),
        ((12,), (7,), (0, 7)),
        ((), (), (0, 0)),
        ((3, 4), (2, 3), (2, 3)),
    ],
)
def test_find_nonfinite(shape: tuple[int, ...], index: tuple[int, ...], spot: tuple[int, int]) -> None:
    tensor = torch.zeros(shape)
    assert find_nonfinite(tensor) is None
    tensor[index] = float("inf")
    assert find_nonfinite(tensor) == (*spot, float("inf"))


def test_find_nonfinite_takes_any_stride() -> None:
    tensor = torch.zeros(4, 6).t()
    tensor[5, 1] = float("-inf")
    assert find_nonfinite(tensor) == (5, 1, float("-inf"))


def test_format_names() -> None:
    assert format_names([]) == "none"
    assert format_names({"b", "a"}) == "'a', 'b'"
    assert format_names([str(i) for i in range(8)], limit=2) == "'0', '1' and 6 more"


@pytest.mark.gpu
def test_gpu_masters_lie_in_pinned_memory(weights: dict[str, torch.Tensor]) -> None:
    masters = MasterSet.from_tensors({name: w.cuda() for name, w in weights.items()}, STATES)
    assert masters.is_pinned
    for name, master in masters.items():
        assert all(tensor.is_pinned() for tensor in master.tensors().values())
        assert torch.equal(master.weight, weights[name])
    assert not MasterSet.from_tensors(weights, pin=False).is_pinned
