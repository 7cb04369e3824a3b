"""Every preset against the bytes that its peer's own code returned on an H200 (tests/golden/quantizers)."""

import hashlib

import pytest
import torch

from weftpub_kernels import PRESETS, ShapeError, quantize_pair
from weftpub_kernels.bench.golden import GOLDEN, INPUTS, load_case

CASES = [(preset, name) for preset in PRESETS for name in INPUTS if load_case(preset, name) is not None]
TAKEN = [(preset, name) for preset, name in CASES if not (PRESETS[preset].refuses_ragged and name == "ragged")]


def first_difference(what: str, got: torch.Tensor, want: torch.Tensor) -> str:
    """Where two tensors of one dtype differ first, or an empty string."""
    wrong = (got != want).nonzero()
    if not len(wrong):
        return ""
    place = tuple(wrong[0].tolist())
    found = f"{got[place]:#x}, the peer has {want[place]:#x}"
    return f"{what}: {len(wrong)} of {got.numel()} differ, first at {place}: {found}"


def check(preset: str, name: str, device: str) -> None:
    case = load_case(preset, name)
    assert case is not None
    got = quantize_pair(case.x.to(PRESETS[preset].input_dtype).to(device), preset)
    w, wt = got.w.view(torch.uint8).cpu(), got.wt.view(torch.uint8).cpu()
    scale, scale_t = got.scale.view(torch.int32).cpu(), got.scale_t.view(torch.int32).cpu()
    assert not first_difference("w", w, case.w)
    assert not first_difference("scale", scale, case.scale.view(torch.int32))
    assert not first_difference("wt", wt, case.w.t() if case.wt is None else case.wt)
    peers = case.scale.t().contiguous() if case.scale_t is None else case.scale_t
    assert not first_difference("scale_t", scale_t, peers.view(torch.int32))


@pytest.mark.parametrize(("preset", "name"), [c for c in TAKEN if PRESETS[c[0]].ieee])
def test_reference_makes_the_peers_bytes_on_a_cpu(preset: str, name: str) -> None:
    check(preset, name, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize(("preset", "name"), TAKEN)
def test_kernel_makes_the_peers_bytes_on_a_gpu(preset: str, name: str) -> None:
    check(preset, name, "cuda")


def test_every_preset_has_golden_cases_and_every_case_a_preset() -> None:
    stored = {path.name.split("__")[0] for path in GOLDEN.glob("*.safetensors")} - {"input"}
    assert stored == set(PRESETS)
    assert {preset for preset, _ in CASES} == set(PRESETS)


@pytest.mark.parametrize(("preset", "name"), CASES)
def test_golden_files_are_intact(preset: str, name: str) -> None:
    case = load_case(preset, name)
    assert case is not None
    for key in ("x", "w", "scale"):
        data = getattr(case, key).contiguous().view(torch.uint8).numpy().tobytes()
        assert hashlib.sha256(data).hexdigest() == case.metadata[f"{key}_sha256"]
    assert case.w.shape == case.x.shape


@pytest.mark.parametrize("preset", ["nemo_fp32", "nemo_pow2", "hf", "torchao"])
@pytest.mark.parametrize("shape", [(200, 300), (256, 300), (200, 256), (3, 200, 256)])
def test_ragged_matrices_are_refused_where_the_peer_is_wrong(preset: str, shape: tuple[int, ...]) -> None:
    """A peer pads ragged edges with the matrix's last element, which leaks into four blocks' scales: 24064 codes
    moved."""
    with pytest.raises(ShapeError, match=r"multiples of 128, found .*te_fp32"):
        quantize_pair(torch.ones(shape), preset)


def test_a_peers_padding_shows_in_its_golden_bytes() -> None:
    """The refusal above is for a reason: with zero padding, nemo's ragged bytes would have been te_fp32's."""
    ours, theirs = load_case("te_fp32", "ragged"), load_case("nemo_fp32", "ragged")
    assert ours is not None
    assert theirs is not None
    assert int((ours.w != theirs.w).sum()) == 24064
