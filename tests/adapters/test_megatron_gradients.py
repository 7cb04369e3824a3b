"""The global norm and clipping on one rank; several ranks are tested with the expert-parallel trainer."""

import pytest
import torch

from weftpub.errors import NonFiniteGradientError
from weftpub_adapters.megatron.gradients import clip_global_norm


def gradients() -> dict[str, torch.Tensor]:
    return {"dense": torch.full((2, 2), 3.0), "expert": torch.full((4,), 4.0)}


def test_the_norm_is_over_everything_and_clips_like_megatron() -> None:
    grads = gradients()
    report = clip_global_norm(grads, {"expert"}, max_norm=1.0)
    assert report.norm == pytest.approx(10.0)
    assert report.factor == pytest.approx(1.0 / (10.0 + 1e-6), rel=1e-9)
    assert torch.allclose(grads["dense"], torch.full((2, 2), 0.3))
    assert torch.allclose(grads["expert"], torch.full((4,), 0.4))


@pytest.mark.parametrize("limit", [None, 11.0])
def test_below_the_limit_nothing_changes(limit: float | None) -> None:
    grads = gradients()
    assert clip_global_norm(grads, {"expert"}, limit).factor == 1.0
    assert torch.equal(grads["dense"], gradients()["dense"])


def test_a_gradient_that_is_not_finite_is_named_and_nothing_is_scaled() -> None:
    grads = gradients()
    grads["dense"][1, 0] = float("nan")
    with pytest.raises(NonFiniteGradientError, match="'dense' is nan at row 1, column 0"):
        clip_global_norm(grads, {"expert"}, max_norm=1.0)
    assert torch.equal(grads["expert"], gradients()["expert"])
