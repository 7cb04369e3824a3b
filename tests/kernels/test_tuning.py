"""Which tuning a launch gets, and where it has strides compiled in."""

import pytest
import torch

from weftpub_kernels import QuantizedPair
from weftpub_kernels.launch import fixed_strides
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
    x, out = torch.empty(shape, device="meta"), QuantizedPair.empty(shape, "meta")
    assert fixed_strides(x, out, Tuning(fixed=True)) == fixed
    assert fixed_strides(x, out, Tuning()) == (0, 0, 0)
    turned = torch.empty(shape[::-1], device="meta").permute(*reversed(range(len(shape))))
    assert fixed_strides(turned, out, Tuning(fixed=True)) == (0, 0, 0)
