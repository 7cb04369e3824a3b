"""Matrices on another GPU than the current one."""

import pytest
import torch

from weftpub_kernels import QuantizedPair, checksum, checksum_rows_from_sums, quantize_pair


@pytest.mark.multigpu
def test_a_tensor_on_another_gpu_than_the_current_one() -> None:
    x = torch.randn(256, 256, device="cuda:1")
    out = QuantizedPair.empty(x.shape, "cuda:1", sums=True)
    quantize_pair(x, out=out)
    assert out.sums is not None
    assert torch.cuda.current_device() == 0
    assert torch.equal(out.w.cpu().view(torch.uint8), quantize_pair(x.cpu()).w.view(torch.uint8))
    assert checksum(out.w) == int(checksum_rows_from_sums(out.sums, x.shape))
