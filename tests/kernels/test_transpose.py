"""Transposes are exact whatever the layout, touch no other byte, and are refused before a byte is written where they
cannot work; a GPU's kernel does not run unless it passed its self-test."""

import itertools
import math

import pytest
import torch

from weftpub_kernels import DtypeError, KernelSelfTestError, ShapeError, quantize_pair, transpose
from weftpub_kernels.bench.transpose import CANDIDATES
from weftpub_kernels.launch_transpose import Variant, launch, strides_of, variant_of
from weftpub_kernels.pair import grid_of
from weftpub_kernels.selftest import check_turned, turned_memory
from weftpub_kernels.tuning import BYTEWISE, TURN, Turn

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
FP8 = torch.float8_e4m3fn

SHAPES = [
    (1, 1), (1, 300), (300, 1), (16, 16), (127, 129), (128, 128), (200, 304), (333, 257), (256, 384), (2048, 128),
    (3, 200, 300), (3, 208, 304), (5, 256, 384), (2, 3, 130, 272), (32, 64, 16),
]  # fmt: skip


def memory(shape: tuple[int, ...], layout: str, device: str) -> torch.Tensor:
    """Random bytes [..., M, N], laid out in one of several ways."""
    *lead, rows, columns = shape

    def make(*size: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(math.prod(size))
        return torch.randint(0, 256, size, dtype=torch.uint8, generator=generator).to(device)

    made = {
        "dense": lambda: make(*shape),
        "padded": lambda: make(*lead, rows, columns + 16)[..., :columns],
        "odd": lambda: make(math.prod(shape) + 1)[1:].view(shape),
        "part": lambda: make(*lead, rows + 3, columns + 32)[..., 3:, 16 : 16 + columns],
        "columns": lambda: make(*lead, columns, rows).transpose(-1, -2),
        "every third": lambda: make(*lead, rows, 3 * columns)[..., ::3],
        "last dimension first": lambda: make(columns, *lead, rows).permute(*range(1, len(shape)), 0),
    }
    return made[layout]()


LAYOUTS = ["dense", "padded", "odd", "part", "columns", "every third", "last dimension first"]


def everything(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_byte_and_no_other(shape: tuple[int, ...], device: str) -> None:
    for source, target in itertools.product(LAYOUTS, repeat=2):
        w = memory(shape, source, device)
        wt = memory((*shape[:-2], *shape[:-3:-1]), target, device)
        want = everything(wt).clone()
        want.as_strided(wt.shape, wt.stride(), wt.storage_offset()).copy_(w.transpose(-1, -2))
        scale = torch.rand(*shape[:-2], *grid_of(shape), device=device)
        scale_t = torch.full((*shape[:-2], *grid_of(shape)[::-1]), -1.0, device=device)
        assert transpose(w, wt, scale, scale_t) is wt
        assert torch.equal(everything(wt), want), (source, target)
        assert torch.equal(scale_t, scale.transpose(-1, -2)), (source, target)


@pytest.mark.parametrize("device", DEVICES)
def test_fresh_memory_and_codes(device: str) -> None:
    pair = quantize_pair(torch.randn(2, 200, 300, device=device))
    scale_t = torch.empty_like(pair.scale_t)
    wt = transpose(pair.w, scale=pair.scale, scale_t=scale_t)
    assert wt.dtype == FP8
    assert wt.is_contiguous()
    assert torch.equal(wt.view(torch.uint8), pair.wt.view(torch.uint8))
    assert torch.equal(scale_t, pair.scale_t)
    assert torch.equal(transpose(wt.view(torch.uint8)), pair.w.view(torch.uint8))


def _offloaded(shape: tuple[int, ...], device: str) -> torch.Tensor:
    tensor = torch.zeros(shape, dtype=torch.uint8, device=device)
    tensor.untyped_storage().resize_(0)
    return tensor


@pytest.mark.parametrize("device", DEVICES)
def test_what_cannot_work_is_refused(device: str) -> None:
    w, wt = (torch.zeros(shape, dtype=torch.uint8, device=device) for shape in ((200, 300), (300, 200)))
    scale, scale_t = (torch.zeros(shape, device=device) for shape in ((2, 3), (3, 2)))
    square, whole = torch.zeros(300, 300, dtype=torch.uint8, device=device), torch.zeros(3, 3, device=device)
    refused = [
        (DtypeError, "both be uint8", (w.view(torch.int8),)),
        (DtypeError, "uint8 and torch.float8", (w, wt.view(FP8))),
        (DtypeError, "scale must be float32", (w, wt, scale.double(), scale_t)),
        (ShapeError, "not empty", (w[:0], wt[:, :0])),
        (ShapeError, "not empty", (w[0],)),
        (ShapeError, r"wt must be \[300, 200\]", (w, w.clone())),
        (ShapeError, r"scale_t must be \[3, 2\]", (w, wt, scale, scale.clone())),
        (ShapeError, "go together", (w, wt, scale)),
        (ShapeError, "wt shares memory with w", (square[:200], square[:, 100:])),
        (ShapeError, "wt shares memory with w", (square, square)),
        (ShapeError, "scale_t shares memory with scale", (square, square.clone(), whole, whole)),
        (ShapeError, "elements at one address", (w, wt[:1].expand(300, 200))),
        (ShapeError, "storage", (_offloaded((200, 300), device), wt)),
        (ShapeError, "storage", (w, _offloaded((300, 200), device))),
    ]
    for error, message, arguments in refused:
        with pytest.raises(error, match=message):
            transpose(*arguments)


@pytest.mark.parametrize("device", DEVICES)
def test_memory_that_goes_away_is_noticed_at_the_next_call(device: str) -> None:
    w, wt = (torch.zeros(256, 256, dtype=torch.uint8, device=device) for _ in range(2))
    transpose(w, wt)
    size = wt.untyped_storage().nbytes()
    wt.untyped_storage().resize_(0)
    with pytest.raises(ShapeError, match=r"wt on .* storage"):
        transpose(w, wt)
    wt.untyped_storage().resize_(size)
    w[3, 5] = 7
    transpose(w, wt)
    assert wt[5, 3] == 7


# Which kernel, and its self-test.

VARIANTS = [
    Variant(even, read, write, scales, turn if read and write else BYTEWISE)
    for even, read, write, scales in itertools.product((False, True), repeat=4)
    for turn in ((TURN, Turn(8, 4, True, ".cs")) if read and write else (TURN,))
]


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_the_self_test_asks_for_the_variant_that_it_is_to_test(variant: Variant) -> None:
    w, wt = turned_memory(variant, torch.device("cpu"))
    strides = strides_of(w, wt, None, None)
    assert strides is not None
    assert variant_of(w, wt, strides, variant.scales, variant.turn) == variant


def test_words_are_for_memory_that_allows_them() -> None:
    def words(w: torch.Tensor, wt: torch.Tensor) -> tuple[bool, bool]:
        strides = strides_of(w, wt, None, None)
        assert strides is not None
        return variant_of(w, wt, strides, False, TURN)[1:3]

    def room(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.uint8)

    assert words(room(3, 256, 384), room(3, 384, 256)) == (True, True)
    assert words(room(16, 48), room(48, 16)) == (True, True)
    assert words(room(16, 40), room(40, 16)) == (False, True)  # rows end within a word
    assert words(room(24, 48), room(48, 24)) == (True, False)
    assert words(room(16, 49)[:, 1:], room(48, 16)) == (False, True)  # rows begin within a word
    assert words(room(2, 16 * 48 + 8)[:, : 16 * 48].view(2, 16, 48), room(2, 48, 16)) == (False, True)  # matrices do
    assert words(room(16 * 48 + 1)[1:].view(16, 48), room(48, 16)) == (False, True)
    assert words(room(48, 16).t(), room(48, 16)) == (False, True)


def _on_the_cpu(spoil: str) -> object:
    def run(
        w: torch.Tensor, wt: torch.Tensor, scale: torch.Tensor | None, scale_t: torch.Tensor | None, turn: Turn
    ) -> None:
        wt.copy_(w.transpose(-1, -2))
        if scale is not None and scale_t is not None:
            scale_t.copy_(scale.transpose(-1, -2))
            if spoil == "scale_t":
                scale_t[1, 0, 0] += 1
        if spoil == "byte":
            wt[1, 5, 6] ^= 4
        if spoil == "beside":
            everything(wt)[wt.storage_offset() + wt[0, 0].numel() * wt.stride(-1)] = 0

    return run


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_the_self_test_finds_faults(variant: Variant, monkeypatch: pytest.MonkeyPatch) -> None:
    from weftpub_kernels import selftest

    monkeypatch.setattr(selftest, "launch_turn", _on_the_cpu("nothing"))
    check_turned(variant, torch.device("cpu"))
    spoils = ["byte", "beside"] + ["scale_t"] * variant.scales
    for spoil in spoils:
        monkeypatch.setattr(selftest, "launch_turn", _on_the_cpu(spoil))
        with pytest.raises(KernelSelfTestError, match=r"1 of .* values are wrong"):
            check_turned(variant, torch.device("cpu"))


@pytest.mark.gpu
def test_a_kernel_that_turns_wrongly_refuses_to_run(monkeypatch: pytest.MonkeyPatch) -> None:
    from weftpub_kernels import launch_transpose, selftest

    def turning_wrongly(*arguments: object) -> None:
        launch(*arguments)  # type: ignore[arg-type]
        arguments[1][1, 5, 6] ^= 4  # type: ignore[index]

    monkeypatch.setattr(selftest, "launch_turn", turning_wrongly)
    monkeypatch.setattr(launch_transpose, "_tested", set())
    monkeypatch.setattr(launch_transpose, "_plans", {})
    w = torch.zeros(128, 128, dtype=torch.uint8, device="cuda")
    for _ in range(2):
        with pytest.raises(KernelSelfTestError, match=r"W\^T .* 1 of .* values are wrong, the first at row 133, col"):
            transpose(w)


@pytest.mark.gpu
@pytest.mark.parametrize("turn", dict.fromkeys((TURN, *CANDIDATES, BYTEWISE)), ids=str)
def test_no_byte_depends_on_the_tuning(turn: Turn) -> None:
    for shape in ((3, 256, 384), (2, 208, 272)):
        w = memory(shape, "dense", "cuda")
        wt = torch.full((shape[0], shape[2], shape[1]), 0xEE, dtype=torch.uint8, device="cuda")
        launch(w, wt, None, None, turn)
        assert torch.equal(wt, w.transpose(1, 2))


@pytest.mark.gpu
def test_the_current_stream_is_used_and_can_be_captured() -> None:
    """On any other stream the kernel would read before the sleep is over, and be missing from the graph. Whether the
    sleep is still going on is not asked: a busy host may get there after it."""
    w, wt = (torch.zeros(512, 512, dtype=torch.uint8, device="cuda") for _ in range(2))
    transpose(w, wt)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)
        w[3, 5] = 9
        transpose(w, wt)
    stream.synchronize()
    assert wt[5, 3] == 9
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        transpose(w, wt)
    w[4, 6] = 8
    graph.replay()
    torch.cuda.synchronize()
    assert wt[6, 4] == 8


@pytest.mark.gpu
def test_a_call_waits_for_nothing() -> None:
    """A backward pass asks for W^T layer by layer; a wait in each would leave the GPU idle."""
    w, wt = memory((4, 256, 384), "dense", "cuda"), torch.empty(4, 384, 256, dtype=torch.uint8, device="cuda")
    transpose(w, wt)
    torch.cuda.set_sync_debug_mode("error")
    try:
        transpose(w, wt)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(wt, w.transpose(1, 2))


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("columns", [32768, 32768 - 77])
def test_offsets_beyond_two_to_the_31(columns: int) -> None:
    """One matrix of more than 2^31 bytes: 32-bit offsets would put its last rows elsewhere."""
    rows = 65536 + 304
    w = torch.empty(rows, columns, dtype=torch.uint8, device="cuda").random_(0, 256)
    wt = transpose(w)
    for start in range(0, rows, 8192):
        assert torch.equal(wt[:, start : start + 8192], w[start : start + 8192].t()), start


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("far", ["w", "wt"])
@pytest.mark.parametrize("step", [(1 << 24) + 16, (1 << 24) + 1])
def test_tiles_that_span_more_than_two_to_the_31(far: str, step: int) -> None:
    room = torch.zeros(272 * step, dtype=torch.uint8, device="cuda").as_strided((272, 256), (step, 1))
    values = memory((272, 256), "dense", "cuda")
    if far == "w":
        room.copy_(values)
        assert torch.equal(transpose(room), values.t())
    else:
        transpose(values.t().contiguous(), room)
        assert torch.equal(room, values)
