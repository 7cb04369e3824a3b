"""The preset table: what may be published, what a CPU can do, and that no publishable preset loses a block."""

from pathlib import Path

import pytest
import torch

from weftpub_kernels import (
    PRESETS,
    ApproximateOnCpuError,
    KernelError,
    UnfitPresetError,
    UnknownPresetError,
    dequantize,
    quantize_pair,
    require_publishable,
)

EXACT = [name for name, recipe in PRESETS.items() if recipe.ieee]
APPROXIMATE = [name for name, recipe in PRESETS.items() if not recipe.ieee]


def test_presets_are_the_documented_ones() -> None:
    assert list(PRESETS) == [
        "te_fp32", "te_pow2", "slime", "areal", "miles", "verl", "deepgemm_fp32", "deepgemm_ue8m0", "sglang_ue8m0",
        "awex", "awex_ue8m0", "nemo_fp32", "nemo_pow2", "hf", "torchao", "slime_convert",
        "areal_ue8m0_bf16", "sglang_ue8m0_bf16",
    ]  # fmt: skip
    assert APPROXIMATE == ["slime", "areal", "miles", "verl"]
    page = (Path(__file__).parents[2] / "docs" / "reference" / "presets.md").read_text()
    for name, recipe in PRESETS.items():
        row = next(line for line in page.splitlines() if line.startswith(f"| {name} |"))
        assert recipe.scale_rule in row
        assert recipe.code_rule in row
        assert ("no" if recipe.unfit else "yes") in row.split("|")[-3]


def test_unknown_preset_names_the_nearest() -> None:
    with pytest.raises(UnknownPresetError, match=r"no preset is named 'te_fp23'; did you mean 'te_fp32'"):
        quantize_pair(torch.ones(128, 128), "te_fp23")
    with pytest.raises(UnknownPresetError, match=r"known: te_fp32, te_pow2"):
        require_publishable("zzz")
    with pytest.raises(KernelError):
        quantize_pair(torch.ones(128, 128), None)  # type: ignore[arg-type]


@pytest.mark.parametrize("preset", APPROXIMATE)
def test_approximate_presets_say_so_on_a_cpu(preset: str) -> None:
    with pytest.raises(ApproximateOnCpuError, match="GPU"):
        quantize_pair(torch.ones(128, 128), preset)


def test_unfit_presets_may_not_be_published() -> None:
    unfit = {name for name, recipe in PRESETS.items() if not recipe.publishable}
    assert unfit == {"nemo_fp32", "nemo_pow2", "hf"}
    for name in PRESETS:
        if name in unfit:
            with pytest.raises(UnfitPresetError, match=r"lost.*te_fp32"):
                require_publishable(name)
        else:
            assert require_publishable(name) is PRESETS[name]


@pytest.mark.parametrize("preset", EXACT)
def test_zero_and_tiny_blocks_survive(preset: str) -> None:
    """An all-zero block once gave 0/0 = NaN, and one with amax 1e-30 saturated to +-448 under a scale rule without a
    floor."""
    x = torch.zeros(256, 256)
    x[0, 0] = 1.0
    x[128:, 128:] = 1e-30
    got = quantize_pair(x.to(PRESETS[preset].input_dtype), preset)
    value = dequantize(got.w, got.scale)
    assert got.scale.isfinite().all()
    assert (got.scale > 0).all()
    assert value.isfinite().all()
    assert value[0, 0].item() == pytest.approx(1.0, rel=0.07)
    assert (value[:128, 128:] == 0).all()
    assert (value[128:, 128:].abs() <= 1.1e-30).all()


@pytest.mark.parametrize("preset", EXACT)
def test_unfit_means_that_some_finite_block_is_lost(preset: str) -> None:
    """A subnormal block: a publishable preset keeps scale > 0 and values in range, an unfit one visibly does not."""
    x = torch.full((128, 128), 2.0**-140).to(PRESETS[preset].input_dtype)
    got = quantize_pair(x, preset)
    lost = got.scale.item() == 0.0 or (got.scale.item() == 1.0)
    assert lost == (PRESETS[preset].unfit is not None)


def test_importing_and_using_a_cpu_needs_no_triton(tmp_path: Path) -> None:
    import subprocess
    import sys

    program = (
        "import sys; sys.modules['triton'] = None\n"
        "import torch, weftpub_kernels as k\n"
        "k.checksum(k.quantize_pair(torch.ones(128, 128)).w)\n"
        "assert not [m for m in sys.modules if m.startswith('weftpub_kernels.triton')]\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=300, cwd=tmp_path)
