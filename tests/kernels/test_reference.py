"""The torch reference against other arithmetic: numpy float32 scales, brute-force rounding, Python's log2."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weftpub_kernels import PRESETS, KernelError, dequantize, quantize_pair
from weftpub_kernels.pair import QuantizedPair
from weftpub_kernels.reference import ceil_log2, quantize_reference
from weftpub_kernels.selftest import awkward_matrix

E4M3 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double().numpy()
POSITIVE = E4M3[:0x7F]


def nearest_code(value: float) -> int:
    """e4m3 of a float32 value by search: nearest, ties to the even code, beyond 448 to 448, sign kept."""
    size = min(abs(value), 448.0)
    distance = np.abs(POSITIVE - size)
    near = np.flatnonzero(distance == distance.min())
    code = int(near[near % 2 == 0][0]) if len(near) > 1 else int(near[0])
    return code | 0x80 if math.copysign(1.0, value) < 0 else code


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    exponent=st.integers(-126, 120),
    rows=st.integers(1, 9),
    columns=st.integers(1, 9),
)
def test_te_fp32_is_its_formula(seed: int, exponent: int, rows: int, columns: int) -> None:
    random = np.random.default_rng(seed)
    x = (random.standard_normal((rows, columns)) * 2.0**exponent).astype(np.float32)
    got = quantize_pair(torch.from_numpy(x), "te_fp32")
    amax = np.abs(x).max()
    with np.errstate(over="ignore", divide="ignore"):
        m = np.float32(448) / amax
        m = np.float32(1) if amax == 0 else np.float32(np.finfo(np.float32).max) if np.isinf(m) else m
    assert got.scale.item() == float(np.float32(1) / m)
    scaled = x * m
    assert got.w.view(torch.uint8).tolist() == [[nearest_code(float(v)) for v in row] for row in scaled]


@pytest.mark.parametrize("preset", [name for name, recipe in PRESETS.items() if recipe.ieee and recipe.publishable])
def test_dequantized_values_are_within_half_a_step(preset: str) -> None:
    recipe = PRESETS[preset]
    shape = (256, 384) if recipe.refuses_ragged else (200, 300)
    x = (torch.randn(shape, generator=torch.Generator().manual_seed(3)) * 0.02).to(recipe.input_dtype)
    got = quantize_pair(x, preset)
    scale = got.scale.repeat_interleave(128, 0)[: shape[0]].repeat_interleave(128, 1)[:, : shape[1]].double()
    error = (dequantize(got.w, got.scale).double() - x.double()).abs() / scale
    step = 2.0 ** (torch.floor(torch.log2((x.double().abs() / scale).clamp_min(2.0**-6))) - 3)
    assert (error <= step / 2 * (1 + 1e-5)).all()


def test_a_huge_corner_changes_only_its_own_block() -> None:
    """Padding rows or columns once leaked into the edge block's amax."""
    x = torch.randn(200, 200, generator=torch.Generator().manual_seed(1)) * 0.02
    plain = quantize_pair(x)
    x[-1, -1] = 1e4
    corner = quantize_pair(x)
    assert torch.equal(plain.scale.flatten()[:3], corner.scale.flatten()[:3])
    assert corner.scale[1, 1] > 1000 * plain.scale[1, 1]
    same = plain.w.view(torch.uint8) == corner.w.view(torch.uint8)
    assert same[:128].all()
    assert same[:, :128].all()


def test_ragged_equals_zero_padding() -> None:
    x = torch.randn(200, 300, generator=torch.Generator().manual_seed(2))
    padded = torch.zeros(256, 384)
    padded[:200, :300] = x
    small, big = quantize_pair(x), quantize_pair(padded)
    assert torch.equal(small.scale, big.scale)
    assert torch.equal(small.w.view(torch.uint8), big.w.view(torch.uint8)[:200, :300])
    assert torch.equal(small.wt.view(torch.uint8), big.w.view(torch.uint8)[:200, :300].t())


def test_signs_of_zero_are_kept() -> None:
    x = torch.tensor([[0.0, -0.0, 1.0]])
    assert quantize_pair(x).w.view(torch.uint8).tolist() == [[0x00, 0x80, 0x7E]]


def test_power_of_two_scales_are_powers_of_two() -> None:
    x = awkward_matrix(512, 384, torch.float32)
    for preset in ("te_pow2", "deepgemm_ue8m0", "awex_ue8m0"):
        scale = quantize_pair(x, preset).scale.double()
        assert (torch.frexp(scale).mantissa == 0.5).all()


def test_a_block_with_nan_or_inf_is_void() -> None:
    """Without a monitor nothing is raised, but the bytes cannot pass for weights: scale NaN, all codes NaN."""
    x = torch.ones(256, 256)
    x[3, 4], x[200, 200] = math.nan, math.inf
    for preset in ("te_fp32", "te_pow2", "awex", "deepgemm_ue8m0", "nemo_pow2"):
        out = QuantizedPair.empty(x.shape, "cpu")
        quantize_reference(x, out, PRESETS[preset])
        assert out.scale.isnan().tolist() == [[True, False], [False, True]]
        codes = out.w.view(torch.uint8)
        assert (codes[:128, :128] == 0x7F).all()
        assert (codes[128:, 128:] == 0x7F).all()
        assert dequantize(out.w, out.scale)[:128, 128:].isfinite().all()


def test_ceil_log2_is_that_of_a_rounded_log2() -> None:
    """Exhaustive around every power of two: Python's log2 is right to 1e-15, far finer than the float32 rounding."""
    steps = np.arange(-40, 200)
    bits = ((np.arange(-126, 128)[:, None] + 127 << 23) + steps[None, :]).astype(np.int32).reshape(-1)
    subnormal = np.concatenate([np.arange(1, 400), (1 << np.arange(9, 23))[:, None].repeat(40, 1).reshape(-1)])
    subnormal[399:] += np.tile(np.arange(-20, 20), 14)
    values = np.concatenate([bits[(bits > 0) & (bits < 0x7F800000)], subnormal.astype(np.int32)]).view(np.float32)
    expected = [math.ceil(np.float32(math.log2(float(v)))) for v in values]
    assert ceil_log2(torch.from_numpy(values)).tolist() == expected
    assert ceil_log2(torch.tensor([0.0])).item() == -150


def test_the_two_power_of_two_rules_part_one_ulp_above() -> None:
    """awex_ue8m0 rounds one power lower than the bit trick when amax is one ulp above 448 * 2^j."""
    amax = torch.full((1, 1), 448 * 2.0**-10).view(torch.int32).add(1).view(torch.float32)
    assert quantize_pair(amax, "awex_ue8m0").scale.item() == 2.0**-10
    assert quantize_pair(amax, "deepgemm_ue8m0").scale.item() == 2.0**-9


def test_a_thread_that_flushes_subnormals_is_refused() -> None:
    """te_pow2 stores subnormal scales; a CPU thread set to flush them would publish zeros."""
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU cannot flush subnormals")
    try:
        with pytest.raises(KernelError, match="set_flush_denormal"):
            quantize_pair(torch.ones(128, 128), "te_pow2")
    finally:
        torch.set_flush_denormal(False)
    assert quantize_pair(torch.full((1, 1), 2.0**-140), "te_pow2").scale.item() == 2.0**-127


@pytest.mark.parametrize("preset", ["te_fp32", "te_pow2", "awex", "deepgemm_ue8m0"])
def test_batches_are_their_matrices(preset: str) -> None:
    x = torch.stack([awkward_matrix(200, 300, torch.float32, seed) for seed in range(4)]).view(2, 2, 200, 300)
    whole = quantize_pair(x, preset)
    for i in range(2):
        for j in range(2):
            one = quantize_pair(x[i, j], preset)
            for name, tensor in one.present().items():
                kind = torch.uint8 if tensor.element_size() == 1 else torch.int32
                assert torch.equal(whole.present()[name][i, j].view(kind), tensor.view(kind)), name
