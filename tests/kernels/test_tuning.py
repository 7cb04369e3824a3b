"""Which tuning a launch gets, and where it has strides compiled in."""

import pytest
import torch

from weftpub_kernels import PRESETS, QuantizedPair, selftest
from weftpub_kernels.launch import Variant, fixed_strides, settle
from weftpub_kernels.reference import quantize_reference
from weftpub_kernels.tuning import ROWS, Tuning, choose


def test_rows_ascend_and_take_every_launch() -> None:
    limits = [most for most, _ in ROWS]
    assert limits == sorted(set(limits))
    assert choose(1, 132) is ROWS[0][1]
    assert choose(10**9, 132) is ROWS[-1][1]
    for most, tuning in ROWS[:-1]:
        assert choose(int(most * 132), 132) is tuning
        assert choose(int(most * 132) + 1, 132) is not tuning


@pytest.mark.parametrize(
    ("shape", "fixed"),
    [
        ((512, 1024), (1024, 1024, 512)),
        ((3, 256, 384), (384, 384, 256)),
        ((500, 1024), (0, 0, 0)),  # ragged
        ((128, 1024), (0, 0, 0)),  # the self-test's W^T is longer
        ((256, 256), (0, 0, 0)),
        ((256, 65536), (0, 0, 0)),  # too much memory for the self-test
    ],
)
def test_strides_are_compiled_in_where_the_self_test_can_follow(shape: tuple[int, ...], fixed: tuple[int, ...]) -> None:
    x, out = torch.empty(shape), QuantizedPair.empty(shape, "cpu")
    assert fixed_strides(x, out, Tuning(fixed=True)) == fixed
    assert fixed_strides(x, out, Tuning()) == (0, 0, 0)
    turned = torch.empty(shape[::-1]).permute(*reversed(range(len(shape))))
    assert fixed_strides(turned, out, Tuning(fixed=True)) == (0, 0, 0)


def test_the_self_test_runs_with_the_strides_that_are_compiled_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or the launch would compile, and so test, another kernel than the one to be used."""
    recipe, tuning, strides = PRESETS["te_fp32"], Tuning(fixed=True), (2048, 1024, 512)

    def launch(x: torch.Tensor, out: QuantizedPair, *_: object) -> None:
        assert fixed_strides(x, out, tuning) == strides
        quantize_reference(x, out, recipe)

    monkeypatch.setattr(selftest, "launch", launch)
    variant = Variant(torch.float32, recipe.operators, True, True, False, True, tuning, strides)
    x = selftest.awkward_matrix(512, 384, torch.float32)
    got, want = selftest._run(x, recipe, variant, None), QuantizedPair.empty(x.shape, "cpu", sums=True)
    quantize_reference(x, want, recipe)
    for name, tensor in got.present().items():
        assert torch.equal(tensor.contiguous().view(torch.uint8), want.present()[name].view(torch.uint8)), name


def test_few_layouts_are_compiled_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each costs a compilation; a process that sees layouts without end would do little else."""
    from weftpub_kernels import launch

    monkeypatch.setattr(launch, "_MOST_LAYOUTS", 2)
    known: set[tuple[int, int, int]] = set()
    pairs = [(torch.empty(256, n), QuantizedPair.empty((256, n), "cpu")) for n in (384, 512, 640, 384)]
    settled = [settle(*pair, Tuning(fixed=True), known) for pair in pairs]
    assert [tuning.fixed for tuning, _ in settled] == [True, True, False, True]
    assert [strides for _, strides in settled] == [(384, 384, 256), (512, 512, 256), (0, 0, 0), (384, 384, 256)]


def test_a_launch_without_compiled_in_strides_is_tested_without_them() -> None:
    """The self-test's matrix is of a layout that may be compiled in, so a tuning that asks for it tested another
    kernel than a ragged or small launch then used."""
    x, out = torch.empty(128, 1024), QuantizedPair.empty((128, 1024), "cpu")
    tuning, strides = settle(x, out, Tuning(fixed=True), set())
    assert (tuning, strides) == (Tuning(), (0, 0, 0))
    matrix = torch.empty(512, 384)
    assert settle(matrix, QuantizedPair.empty(matrix.shape, "cpu"), tuning, None) == (tuning, strides)
