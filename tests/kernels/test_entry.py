"""Bad input is refused with a clear error before anything is written; out= buffers may be views of bigger ones."""

import copy
import io
import threading

import pytest
import torch

import weftpub_kernels.pair as pair_module
from weftpub_kernels import (
    DtypeError,
    KernelError,
    NonFiniteError,
    NonFiniteMonitor,
    QuantizedPair,
    ShapeError,
    dequantize,
    quantize_into,
    quantize_pair,
)
from weftpub_kernels.bench.shapes import SHAPE_CLASSES, ShapeClass


def poisoned(shape: tuple[int, ...], sums: bool = True) -> QuantizedPair:
    out = QuantizedPair.empty(shape, "cpu", sums=sums)
    for tensor in out.present().values():
        tensor.view(torch.uint8).fill_(0xEE)
    return out


def untouched(out: QuantizedPair) -> bool:
    return all((tensor.view(torch.uint8) == 0xEE).all() for tensor in out.present().values())


@pytest.mark.parametrize(
    ("x", "preset", "error", "message"),
    [
        (torch.ones(128, 128, dtype=torch.float64), "te_fp32", DtypeError, "takes torch.float32, found torch.float64"),
        (torch.ones(128, 128, dtype=torch.bfloat16), "te_fp32", DtypeError, "FP32 master"),
        (torch.ones(128, 128), "sglang_ue8m0_bf16", DtypeError, "takes torch.bfloat16, found torch.float32"),
        (torch.ones(128), "te_fp32", ShapeError, r"\[\.\.\., M, N\].*found \[128\]"),
        (torch.tensor(1.0), "te_fp32", ShapeError, r"found \[\]"),
        (torch.ones(0, 128), "te_fp32", ShapeError, r"found \[0, 128\]"),
        (torch.ones(3, 0, 128, 128), "te_fp32", ShapeError, "not empty"),
        (torch.ones(100, 128), "hf", ShapeError, "multiples of 128"),
    ],
)
def test_bad_matrices_are_refused(x: torch.Tensor, preset: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        quantize_pair(x, preset)


def test_errors_are_builtin_errors_too() -> None:
    with pytest.raises(TypeError):
        quantize_pair(torch.ones(128, 128).double())
    with pytest.raises(ValueError, match="not empty"):
        quantize_pair(torch.ones(0, 128))
    with pytest.raises(KeyError, match="no preset"):
        quantize_pair(torch.ones(1, 1), "nothing")


def test_nothing_is_written_on_refusal() -> None:
    out = poisoned((128, 256))
    nan = torch.ones(128, 256)
    nan[5, 6] = float("nan")
    for x, preset in (
        (torch.ones(256, 128), "te_fp32"),
        (torch.ones(128, 256).double(), "te_fp32"),
        (torch.ones(128, 256), "slime"),
        (torch.ones(128, 256), "unknown"),
        (nan, "te_fp32"),
    ):
        with pytest.raises(KernelError):
            quantize_pair(x, preset, out)
        assert untouched(out)


def test_wrong_buffers_are_refused() -> None:
    good = QuantizedPair.empty((128, 256), "cpu").present()
    for name, bad, error in (
        ("w", good["w"].view(torch.uint8), DtypeError),
        ("scale", good["scale"].double(), DtypeError),
        ("wt", good["w"], ShapeError),
        ("scale_t", good["scale"], ShapeError),
        ("wt", good["wt"].view(torch.uint8)[:, :1].view(torch.float8_e4m3fn).expand(256, 128), ShapeError),
        ("w", torch.empty(128, 0).to(torch.float8_e4m3fn), ShapeError),
    ):
        with pytest.raises(error):
            QuantizedPair(**(good | {name: bad}))
    with pytest.raises(ShapeError, match="not empty"):
        QuantizedPair.empty((0, 4), "cpu")
    with pytest.raises(ShapeError, match="no batch dimension"):
        QuantizedPair(**good)[0]


def test_buffers_that_share_bytes_are_refused() -> None:
    good = QuantizedPair.empty((128, 128), "cpu").present()
    with pytest.raises(ShapeError, match="w and wt share memory"):
        QuantizedPair(**(good | {"wt": good["w"]}))
    flat = torch.empty(2 * 128 * 128, dtype=torch.uint8)
    inside = flat[: 128 * 128].view(128, 128).view(torch.float8_e4m3fn)
    shifted = flat[100 : 100 + 128 * 128].view(128, 128).view(torch.float8_e4m3fn)
    with pytest.raises(ShapeError, match="share memory"):
        QuantizedPair(**(good | {"w": inside, "wt": shifted}))
    # Interleaved rows share no byte and are fine.
    rows = flat.view(128, 256)
    left, right = (rows[:, i * 128 : (i + 1) * 128].view(torch.float8_e4m3fn) for i in range(2))
    QuantizedPair(**(good | {"w": left, "wt": right}))


def test_input_and_output_may_not_share_bytes() -> None:
    memory = torch.zeros(4 * 128 * 128, dtype=torch.uint8)
    x = memory.view(torch.float32).view(128, 128)
    good = QuantizedPair.empty((128, 128), "cpu").present()
    out = QuantizedPair(**(good | {"w": memory[: 128 * 128].view(128, 128).view(torch.float8_e4m3fn)}))
    with pytest.raises(ShapeError, match=r"out\.w shares memory with x"):
        quantize_pair(x, out=out)


def test_offloaded_buffers_are_refused() -> None:
    out = QuantizedPair.empty((128, 128), "cpu")
    size = out.wt.untyped_storage().nbytes()
    out.wt.untyped_storage().resize_(0)
    with pytest.raises(ShapeError, match=r"out\.wt has no storage.*reload"):
        quantize_pair(torch.ones(128, 128), out=out)
    out.wt.untyped_storage().resize_(size)
    quantize_pair(torch.ones(128, 128), out=out)


@pytest.mark.parametrize("shape", SHAPE_CLASSES, ids=lambda shape: shape.name)
def test_every_layout_gives_the_bytes_of_a_contiguous_one(shape: ShapeClass) -> None:
    x, out = shape.input(torch.float32, "cpu"), shape.output("cpu")
    plain = QuantizedPair.empty(shape.shape, "cpu", sums=True)
    assert quantize_pair(x, out=out) is out
    quantize_pair(x.contiguous(), out=plain)
    for name, tensor in out.present().items():
        kind = {1: torch.uint8, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
        assert torch.equal(tensor.contiguous().view(kind), plain.present()[name].view(kind)), name
    assert torch.equal(out.wt.view(torch.uint8), out.w.view(torch.uint8).mT)
    assert torch.equal(out.scale_t, out.scale.mT)


def test_a_view_of_a_bigger_buffer_leaves_the_rest_alone() -> None:
    memory = torch.full((4, 256, 400), 0xEE, dtype=torch.uint8)
    good = QuantizedPair.empty((2, 128, 384), "cpu").present()
    out = QuantizedPair(**(good | {"w": memory[1:3, 64:192, 8:392].view(torch.float8_e4m3fn)}))
    x = torch.randn(2, 128, 384)
    quantize_pair(x, out=out)
    mask = torch.ones_like(memory, dtype=torch.bool)
    mask[1:3, 64:192, 8:392] = False
    assert (memory[mask] == 0xEE).all()
    assert torch.equal(memory[1:3, 64:192, 8:392], quantize_pair(x).w.view(torch.uint8))


def test_one_matrix_of_a_batch_by_index() -> None:
    out = poisoned((3, 128, 128))
    quantize_into(torch.ones(128, 128), out[1])
    assert (out.w[1].float() == 448).all()
    assert (out.w[0].view(torch.uint8) == 0xEE).all()
    assert (out.w[2].view(torch.uint8) == 0xEE).all()


def test_quantize_into_waits_for_raise_if_set() -> None:
    monitor = NonFiniteMonitor("cpu", names=["a", "b"])
    x = torch.ones(130, 140)
    quantize_into(x, QuantizedPair.empty(x.shape, "cpu"), nonfinite=monitor)
    monitor.raise_if_set()
    x[129, 3] = float("-inf")
    quantize_into(x, QuantizedPair.empty(x.shape, "cpu"), nonfinite=monitor)
    with pytest.raises(NonFiniteError, match="b holds -inf at row 129, column 3"):
        monitor.raise_if_set()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dequantize_multiplies_codes_by_scales(dtype: torch.dtype) -> None:
    x = torch.randn(2, 200, 300, generator=torch.Generator().manual_seed(0))
    got = quantize_pair(x)
    wide = got.scale.repeat_interleave(128, -2)[:, :200].repeat_interleave(128, -1)[..., :300]
    assert torch.equal(dequantize(got.w, got.scale, dtype), (got.w.float() * wide).to(dtype))
    assert torch.equal(dequantize(got.wt, got.scale_t), dequantize(got.w, got.scale).mT)


def test_dequantize_refuses_what_does_not_fit() -> None:
    got = quantize_pair(torch.ones(200, 300))
    with pytest.raises(ShapeError, match=r"\[2, 3\]"):
        dequantize(got.w, got.scale_t)
    with pytest.raises(DtypeError):
        dequantize(got.w, got.scale.to(torch.bfloat16))
    with pytest.raises(DtypeError):
        dequantize(got.w.view(torch.uint8), got.scale)
    with pytest.raises(DtypeError, match="found Tensor and NoneType"):
        dequantize(got.w, None)


def test_a_parameter_leaves_no_graph_in_the_buffers() -> None:
    """A trainer quantized its nn.Parameter straight into a store: autograd followed the scales, so the store's scales
    required gradients, and every further step hung the graph of the last one behind them."""
    x = torch.nn.Parameter(torch.randn(256, 128))
    out = QuantizedPair.empty((256, 128), "cpu", sums=True)
    for _ in range(2):
        quantize_into(x, out)
    for pair in (out, quantize_pair(x)):
        assert not any(tensor.requires_grad for tensor in pair.present().values())


def released(tensor: torch.Tensor) -> torch.Tensor:
    tensor.untyped_storage().resize_(0)
    return tensor


def test_released_memory_is_refused_and_not_read() -> None:
    """An offloaded master was quantized, its storage resized to zero: the process died of a segmentation fault."""
    with pytest.raises(ShapeError, match="no storage behind it"):
        quantize_pair(released(torch.ones(128, 128)))
    with pytest.raises(ShapeError, match="no storage behind it"):
        quantize_pair(released(torch.ones(256, 128)[128:]))
    pair = quantize_pair(torch.ones(256, 256))
    with pytest.raises(ShapeError, match=r"codes .* reload"):
        dequantize(released(pair.w.clone()), pair.scale)
    with pytest.raises(ShapeError, match=r"scales .* reload"):
        dequantize(pair.w, released(pair.scale.clone()))
    with pytest.raises(ShapeError, match=r"scales .* on meta must be on cpu"):
        dequantize(pair.w, pair.scale.to("meta"))


def test_what_is_no_dense_tensor_is_refused() -> None:
    with pytest.raises(ShapeError, match="dense"):
        quantize_pair(torch.eye(128).to_sparse())
    with pytest.raises(DtypeError, match="found list"):
        quantize_pair([[1.0]])  # pyright: ignore[reportArgumentType]


def test_a_saved_pair_takes_the_layout_number_of_the_process_that_loads_it() -> None:
    """A pair carries the number of its layout, by which launches find their compiled plan. Saved and loaded, it kept
    the number of the process that had saved it, which names another layout elsewhere."""
    pair = quantize_pair(torch.randn(128, 256))
    object.__setattr__(pair, "layout", 10**9)  # as if another process had given it
    file = io.BytesIO()
    torch.save(pair, file)
    file.seek(0)
    own = QuantizedPair.empty((128, 256), "cpu").layout
    for found in (torch.load(file, weights_only=False), copy.deepcopy(pair)):
        assert found.layout == own
        assert torch.equal(found.w.view(torch.uint8), pair.w.view(torch.uint8))


def test_no_two_layouts_share_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layout's number was the size of the table, read before the entry went in: two threads that came at once gave
    two layouts one number, and the second launch ran with the strides of the first."""
    barrier = threading.Barrier(2, timeout=10)

    class Slow(dict[tuple[object, ...], int]):
        def __len__(self) -> int:
            size = super().__len__()
            barrier.wait()
            return size

    monkeypatch.setattr(pair_module, "_layouts", Slow())
    found: list[int] = []

    def make(rows: int) -> None:
        found.append(QuantizedPair.empty((rows, 7), "cpu").layout)

    threads = [threading.Thread(target=make, args=(rows,)) for rows in (3, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert len(set(found)) == 2
