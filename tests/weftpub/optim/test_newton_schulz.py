"""Newton-Schulz against emerging-optimizers 0.3.0, bit for bit: same operators in the same order on the same device."""

import pytest
import torch
from emerging_optimizers.orthogonalized_optimizers import get_muon_scale_factor, muon_utils
from emerging_optimizers.utils import fp32_matmul_precision

from weftpub.errors import ConfigError
from weftpub.optim.newton_schulz import COEFFICIENTS, SCALE_MODES, newton_schulz, scale_factor

SHAPES = [(64, 64), (48, 128), (128, 48), (1, 7), (33, 65)]


def random_matrix(shape: tuple[int, int], device: str = "cpu") -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(5)).to(device)


def test_the_coefficient_sets_are_theirs() -> None:
    assert {name: list(known.triples) for name, known in COEFFICIENTS.items()} == muon_utils._COEFFICIENT_SETS


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("coefficients", COEFFICIENTS)
@pytest.mark.parametrize("steps", [1, 5, 12])
def test_bfloat16_iterations_agree_bit_for_bit(shape: tuple[int, int], coefficients: str, steps: int) -> None:
    matrix = random_matrix(shape)
    kept = matrix.clone()
    with fp32_matmul_precision("medium"):
        expected = muon_utils.newton_schulz(matrix, steps, coefficients)
    found = newton_schulz(matrix, steps=steps, coefficients=coefficients)
    # As bits: "cans" overflows to NaN when its last triple is repeated long enough, there as here.
    assert torch.equal(found.view(torch.int32), expected.view(torch.int32))
    assert torch.equal(matrix, kept)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("precision", ["high", "highest"])
def test_fp32_iterations_agree_bit_for_bit_and_restore_the_setting(shape: tuple[int, int], precision: str) -> None:
    before = torch.get_float32_matmul_precision()
    matrix = random_matrix(shape)
    with fp32_matmul_precision(precision):
        expected = muon_utils.newton_schulz(matrix, 5, "quintic")
    assert torch.equal(newton_schulz(matrix, precision=precision), expected)
    assert torch.get_float32_matmul_precision() == before


def test_the_result_is_nearly_orthogonal() -> None:
    values = torch.linalg.svdvals(newton_schulz(random_matrix((64, 192)), steps=5, precision="highest"))
    assert 0.6 < values.min().item() < values.max().item() < 1.3


def test_a_zero_matrix_stays_zero() -> None:
    assert not newton_schulz(torch.zeros(16, 32)).any()


@pytest.mark.parametrize("mode", SCALE_MODES)
@pytest.mark.parametrize("shape", SHAPES)
def test_scale_factors_are_theirs(mode: str, shape: tuple[int, int]) -> None:
    assert scale_factor(*shape, mode) == get_muon_scale_factor(*shape, mode=mode)


def test_an_unknown_scale_mode_is_refused() -> None:
    with pytest.raises(ConfigError, match="'rms'; choose one of spectral, shape_scaling, unit_rms_norm"):
        scale_factor(4, 4, "rms")


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(1024, 2048), (2048, 1024), (333, 777)])
@pytest.mark.parametrize("precision", ["medium", "high", "highest"])
def test_gpu_iterations_agree_bit_for_bit(shape: tuple[int, int], precision: str) -> None:
    matrix = random_matrix(shape, "cuda")
    with fp32_matmul_precision(precision):
        expected = muon_utils.newton_schulz(matrix, 5, "quintic")
    assert torch.equal(newton_schulz(matrix, precision=precision), expected)
