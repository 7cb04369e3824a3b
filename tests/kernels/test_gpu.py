"""The kernel on a GPU: every shape class, preset and dtype, offsets beyond 2^31, streams, and the self-test that
guards it."""

import dataclasses
import itertools

import pytest
import torch

from weftpub_kernels import (
    PRESETS,
    KernelSelfTestError,
    NonFiniteError,
    NonFiniteMonitor,
    QuantizedPair,
    Recipe,
    ShapeError,
    checksum,
    checksum_rows_from_sums,
    dequantize,
    quantize_into,
    quantize_pair,
)
from weftpub_kernels.bench.shapes import ShapeClass, classes_for
from weftpub_kernels.bench.tune import CANDIDATES
from weftpub_kernels.bench.verify import check_shape_class
from weftpub_kernels.reference import quantize_reference
from weftpub_kernels.selftest import awkward_matrix
from weftpub_kernels.tuning import Tuning

pytestmark = pytest.mark.gpu


def equal_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def fresh(recipe: str | Recipe) -> Recipe:
    """A recipe of its own identity, whose plans nobody has made yet."""
    return dataclasses.replace(PRESETS[recipe] if isinstance(recipe, str) else recipe)


PAIRS = [(recipe, shape) for recipe in PRESETS.values() for shape in classes_for(recipe)]


@pytest.mark.parametrize(("recipe", "shape"), PAIRS, ids=[f"{recipe.name}-{shape.name}" for recipe, shape in PAIRS])
def test_shape_classes(recipe: Recipe, shape: ShapeClass) -> None:
    """tl.trans of an 8-bit tile once made 37% of W^T's bytes wrong while W was right; only real hardware shows it."""
    row = check_shape_class(recipe, shape, "cuda")
    assert row == dict.fromkeys(("wt", "scale_t", "reference") if recipe.ieee else ("wt", "scale_t"), 0) | {"ok": True}


@pytest.mark.parametrize("sums", [False, True])
@pytest.mark.parametrize("check", [False, True])
@pytest.mark.parametrize("shape", [(256, 384), (200, 300)])
def test_every_switch_gives_the_same_bytes(shape: tuple[int, int], check: bool, sums: bool) -> None:
    x = torch.randn(shape, device="cuda") * 0.02
    out = QuantizedPair.empty(shape, "cuda", sums=sums)
    quantize_into(x, out, "te_fp32", NonFiniteMonitor("cuda") if check else None)
    want = quantize_pair(x.cpu())
    assert equal_bytes(out.w.cpu(), want.w)
    assert equal_bytes(out.wt.cpu(), want.wt)
    if out.sums is not None:
        assert int(checksum_rows_from_sums(out.sums, shape)) == checksum(out.w) == checksum(want.w)


def test_a_view_of_a_bigger_buffer_leaves_the_rest_alone() -> None:
    memory = torch.full((4, 256, 400), 0xEE, dtype=torch.uint8, device="cuda")
    good = QuantizedPair.empty((2, 200, 300), "cuda").present()
    out = QuantizedPair(**(good | {"w": memory[1:3, 50:250, 8:308].view(torch.float8_e4m3fn)}))
    x = torch.randn(2, 200, 300, device="cuda")
    quantize_pair(x, out=out)
    assert equal_bytes(out.w.contiguous(), quantize_pair(x).w)
    mask = torch.ones_like(memory, dtype=torch.bool)
    mask[1:3, 50:250, 8:308] = False
    assert (memory[mask] == 0xEE).all()


def test_dequantize_on_a_gpu_is_that_of_a_cpu() -> None:
    got = quantize_pair(torch.randn(3, 200, 300, device="cuda"))
    assert torch.equal(dequantize(got.w, got.scale).cpu(), dequantize(got.w.cpu(), got.scale.cpu()))


def test_the_current_stream_is_used() -> None:
    """On any other stream the kernel would read zeros while this one sleeps."""
    stream = torch.cuda.Stream()
    x, out = torch.zeros(512, 512, device="cuda"), QuantizedPair.empty((512, 512), "cuda")
    quantize_into(x, out)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)
        x.fill_(2.0)
        quantize_into(x, out)
    stream.synchronize()
    assert (out.w.float() == 448).all()


def test_a_launch_can_be_captured_in_a_graph() -> None:
    x, out, monitor = (
        torch.ones(256, 256, device="cuda"),
        QuantizedPair.empty((256, 256), "cuda"),
        NonFiniteMonitor("cuda"),
    )
    quantize_into(x, out, "te_fp32", monitor)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        quantize_into(x, out, "te_fp32", monitor)
    x.copy_(torch.randn(256, 256))
    graph.replay()
    assert equal_bytes(out.w.cpu(), quantize_pair(x.cpu()).w)


def test_offloaded_buffers_are_refused_before_a_launch() -> None:
    x, out = torch.ones(2, 256, 256, device="cuda"), QuantizedPair.empty((2, 256, 256), "cuda")
    second = out[1]
    quantize_into(x[1], second)
    size = out.w.untyped_storage().nbytes()
    out.w.untyped_storage().resize_(0)
    with pytest.raises(ShapeError, match=r"out\.w has no storage"):
        quantize_into(x[1], second)
    out.w.untyped_storage().resize_(size)
    quantize_into(x[1], second)
    assert (second.w.float() == 448).all()


def test_wrong_devices_are_refused() -> None:
    x = torch.ones(128, 128, device="cuda")
    with pytest.raises(ShapeError, match="out is on cpu"):
        quantize_pair(x, out=QuantizedPair.empty((128, 128), "cpu"))
    with pytest.raises(ShapeError, match="monitor is on cpu"):
        quantize_into(x, QuantizedPair.empty((128, 128), "cuda"), nonfinite=NonFiniteMonitor("cpu"))


def test_a_block_with_nan_is_void_on_a_gpu_too() -> None:
    x = torch.ones(256, 256)
    x[3, 4], x[200, 200] = float("nan"), float("inf")
    for preset in ("te_fp32", "slime", "awex", "nemo_pow2"):
        out = QuantizedPair.empty(x.shape, "cuda")
        quantize_into(x.cuda(), out, preset)
        assert out.scale.isnan().tolist() == [[True, False], [False, True]]
        assert (out.w[:128, :128].view(torch.uint8) == 0x7F).all()
        assert out.w[:128, 128:].float().isfinite().all()


def test_a_miscompiled_kernel_refuses_to_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """The self-test compares real launches with the reference: when they part, the first use raises, and so does the
    next."""
    from weftpub_kernels import launch, selftest

    def other(x: torch.Tensor, out: QuantizedPair, recipe: Recipe) -> None:
        honest(x, out, recipe)
        out.w.view(torch.uint8)[17, 33] ^= 1

    honest = selftest.quantize_reference
    monkeypatch.setattr(selftest, "quantize_reference", other)
    monkeypatch.setattr(launch, "_tested", set())
    recipe = fresh("te_fp32")
    for _ in range(2):
        with pytest.raises(KernelSelfTestError, match=r"W of te_fp32.*1 of 196608.*row 17, column 33"):
            quantize_pair(torch.ones(128, 128, device="cuda"), recipe)


def test_a_wrong_transpose_refuses_to_run(monkeypatch: pytest.MonkeyPatch) -> None:
    from weftpub_kernels import launch, selftest

    def transposing_wrongly(*arguments: object, **options: object) -> None:
        honest(*arguments, **options)  # type: ignore[arg-type]
        arguments[1].wt.view(torch.uint8)[5, 6] ^= 4  # type: ignore[attr-defined]

    honest = selftest.launch
    monkeypatch.setattr(selftest, "launch", transposing_wrongly)
    monkeypatch.setattr(launch, "_tested", set())
    for preset in ("te_fp32", "slime"):
        with pytest.raises(KernelSelfTestError, match=rf"W\^T of {preset}.*row 5, column 6"):
            quantize_pair(torch.ones(128, 128, device="cuda"), fresh(preset))


def test_noise_in_approximate_codes_refuses_to_run(monkeypatch: pytest.MonkeyPatch) -> None:
    from weftpub_kernels import launch, selftest

    def scaling_wrongly(*arguments: object, **options: object) -> None:
        honest(*arguments, **options)  # type: ignore[arg-type]
        w = arguments[1].w.view(torch.uint8)  # type: ignore[attr-defined]
        w[:128, :128] = torch.where(w[:128, :128] & 0x7F == 0x50, w[:128, :128] + 1, w[:128, :128])

    honest = selftest.launch
    monkeypatch.setattr(selftest, "launch", scaling_wrongly)
    monkeypatch.setattr(launch, "_tested", set())
    with pytest.raises(KernelSelfTestError, match="codes of no multiplier"):
        quantize_pair(torch.ones(128, 128, device="cuda"), fresh("slime"))


@pytest.mark.parametrize("tuning", itertools.chain(*CANDIDATES.values()), ids=str)
def test_no_byte_depends_on_the_tuning(tuning: Tuning) -> None:
    from weftpub_kernels.launch import launch

    x = awkward_matrix(640, 384, torch.float32).expand(2, 640, 384).contiguous()
    out, want = (QuantizedPair.empty(x.shape, device, sums=True) for device in ("cuda", "cpu"))
    launch(x.cuda(), out, PRESETS["te_fp32"], None, None, tuning)
    quantize_reference(x, want, PRESETS["te_fp32"])
    for name, tensor in out.present().items():
        assert torch.equal(tensor.cpu().view(torch.uint8), want.present()[name].view(torch.uint8)), name


@pytest.mark.slow
@pytest.mark.parametrize("columns", [32768, 32768 - 77])
def test_offsets_beyond_two_to_the_31(columns: int) -> None:
    """One matrix of more than 2^31 elements: the last rows, which 32-bit offsets would put elsewhere."""
    rows = 65536 + 300
    x = torch.empty(rows, columns, device="cuda").normal_()
    out = QuantizedPair.empty(x.shape, "cuda", sums=True)
    quantize_pair(x, out=out)
    for start in (0, 65408, rows - rows % 128):
        part = quantize_pair(x[start : start + 128].cpu())
        assert equal_bytes(out.w[start : start + 128].cpu(), part.w)
        assert equal_bytes(out.wt[:, start : start + 128].cpu(), part.wt)
        assert torch.equal(out.scale[start // 128].cpu(), part.scale[0])
        assert torch.equal(out.scale_t[:, start // 128].cpu(), part.scale[0])
    assert out.sums is not None
    assert checksum(out.w) == int(checksum_rows_from_sums(out.sums, x.shape))
    x[rows - 1, columns - 1] = float("nan")
    with pytest.raises(NonFiniteError, match=f"row {rows - 1}, column {columns - 1}"):
        quantize_pair(x, out=out)


@pytest.mark.slow
def test_tiles_that_span_more_than_two_to_the_31() -> None:
    """Rows 2^24 + 16 elements apart: within one tile the offset passes 2^31."""
    memory = torch.zeros(256 * ((1 << 24) + 16), device="cuda")
    x = memory.as_strided((256, 256), ((1 << 24) + 16, 1))
    values = torch.randn(256, 256)
    x.copy_(values)
    got, want = quantize_pair(x), quantize_pair(values)
    assert equal_bytes(got.w.cpu(), want.w)
    assert equal_bytes(got.wt.cpu(), want.wt)


@pytest.mark.slow
def test_checksum_of_more_than_two_to_the_32_bytes() -> None:
    data = torch.empty((1 << 32) + 12345, dtype=torch.uint8, device="cuda").random_(0, 256)
    before = checksum(data[1:])
    data[-1] ^= 1
    assert checksum(data[1:]) != before
    data[-1] ^= 1
    assert checksum(data[1:]) == before
    # Linear, so the whole follows from its halves; the finish hides that, and the sums show it.
    import numpy as np

    from weftpub_kernels.checksum import power
    from weftpub_kernels.triton_checksum import sums_on_device

    cut = (1 << 31) + 7
    address, count = data.data_ptr(), data.numel()
    sums = sums_on_device(
        np.array([address, address, address + cut]), np.array([count, cut, count - cut]), data.device
    ).tolist()
    assert (sums[1] + sums[2] * power(cut) - sums[0]) % (1 << 64) == 0
