"""The test that every compiled variant of a kernel passes on its device before its first real use.

Triton has miscompiled this very kernel's ancestors on sm_90 without a sign, so nothing is taken on trust: on a small
matrix of awkward values W^T must equal W.T, scale_t must equal scale.T, and every byte, tile sum and non-finite note
must be what plain torch says on the CPU. For presets with approximate division, whose bytes a CPU cannot know, each
block's scale must lie within two ulp of the exact one and its codes be those of a multiplier within two ulp of the
exact reciprocal. The transposition must move random bytes exactly, and touch none beside them.
"""

import dataclasses
import math

import numpy as np
import torch

from .errors import KernelSelfTestError, NonFiniteError
from .launch import Variant, launch
from .launch_transpose import Variant as TurnVariant
from .launch_transpose import launch as launch_turn
from .nonfinite import NonFiniteMonitor
from .pair import QuantizedPair
from .recipe import BLOCK, FP8_MAX, Recipe
from .reference import block_amax, block_scales, fp8_codes, quantize_reference

__all__ = ["awkward_matrix", "check_turned", "check_variant", "turned_memory"]


def awkward_matrix(rows: int, columns: int, dtype: torch.dtype, seed: int = 5) -> torch.Tensor:
    """float matrix [rows, columns] on the CPU whose blocks, in turn, are normal, zero, tiny, subnormal, tied, huge
    and one-valued."""
    random = np.random.default_rng(seed)
    x = random.normal(0.0, 0.02, (rows, columns)).astype(np.float32)
    codes = np.arange(0x7E, dtype=np.uint8)
    values = torch.from_numpy(codes).view(torch.float8_e4m3fn).float().numpy()
    ties = (values[:-1] + values[1:]) / 2
    fills = (
        lambda shape: random.normal(0.0, 0.02, shape),
        lambda shape: np.where(random.random(shape) < 0.5, 0.0, -0.0),
        lambda shape: random.normal(0.0, 1e-30, shape),
        lambda shape: random.integers(-(2**23) + 1, 2**23, shape).astype(np.float64) * 2.0**-149,
        lambda shape: random.choice(ties, shape) * random.choice([-1.0, 1.0], shape),
        lambda shape: random.normal(0.0, 5e37, shape),
        lambda shape: np.full(shape, np.float32(448) * (1 + np.float32(2) ** -23)),
    )
    tiles = [(i, j) for i in range(0, rows, BLOCK) for j in range(0, columns, BLOCK)]
    for k, (i, j) in enumerate(tiles):
        tile = x[i : i + BLOCK, j : j + BLOCK]
        tile[...] = np.clip(fills[k % len(fills)](tile.shape), -3e38, 3e38)
        if k % len(fills) == 4:
            tile.flat[0] = FP8_MAX  # with amax 448 the ties stay ties
    return torch.from_numpy(x).to(dtype)


def check_variant(variant: Variant, recipe: Recipe, device: torch.device) -> None:
    """Run the variant on the device and compare. Raises KernelSelfTestError when any byte is wrong."""
    rows, columns = (min(512, variant.strides[2] or 512), 384) if variant.even else (456, 300)
    x = awkward_matrix(rows, columns, variant.dtype)
    got = _run(x.to(device), recipe, variant, None)
    where = f"{recipe.name} ({x.dtype}, {rows}x{columns}) on {torch.cuda.get_device_name(device)}"
    if recipe.ieee:
        want = QuantizedPair.empty(x.shape, "cpu", sums=variant.sums)
        quantize_reference(x, want, recipe)
        _same(f"scale of {where}", got.scale.view(torch.int32), want.scale.view(torch.int32))
        _same(f"W of {where}", got.w.view(torch.uint8), want.w.view(torch.uint8))
    else:
        _near(where, x, got, recipe)
    _same(f"W^T of {where}", got.wt.view(torch.uint8), got.w.view(torch.uint8).t())
    _same(f"scale_t of {where}", got.scale_t.view(torch.int32), got.scale.view(torch.int32).t())
    if got.sums is not None:
        from .checksum import tile_sums

        _same(f"tile sums of {where}", got.sums.flatten(1), tile_sums(got.w.view(torch.uint8)).flatten(1))
    if variant.check:
        _finds_non_finite(where, x, recipe, variant, device)


def _run(x: torch.Tensor, recipe: Recipe, variant: Variant, monitor: NonFiniteMonitor | None) -> QuantizedPair:
    """Quantize on the device into poisoned buffers, whose rows start off alignment or lie as far apart as the variant
    is for; back to the CPU."""
    shift = 0 if variant.aligned else 1
    x_row, w_row, wt_row = variant.strides
    if x_row:
        x = torch.empty(x.shape[0], x_row, dtype=x.dtype, device=x.device)[:, : x.shape[1]].copy_(x)
    shape, turned = x.shape, x.shape[::-1]
    fresh = QuantizedPair.empty(shape, x.device, sums=variant.sums)

    def codes(size: tuple[int, ...], row: int) -> torch.Tensor:
        padded = (size[0], row or size[1])
        flat = torch.full((math.prod(padded) + shift,), 0xEE, dtype=torch.uint8, device=x.device)
        return flat[shift:].view(padded)[:, : size[1]].view(torch.float8_e4m3fn)

    out = dataclasses.replace(fresh, w=codes(shape, w_row), wt=codes(turned, wt_row))
    out.scale.fill_(-1.0)
    out.scale_t.fill_(-1.0)
    if monitor is None and variant.check:
        monitor = NonFiniteMonitor(x.device)
        launch(x, out, recipe, monitor, None, variant.tuning)
        monitor.raise_if_set()
    else:
        launch(x, out, recipe, monitor, None, variant.tuning)
    return QuantizedPair(**{name: tensor.cpu() for name, tensor in out.present().items()})


def _finds_non_finite(where: str, x: torch.Tensor, recipe: Recipe, variant: Variant, device: torch.device) -> None:
    """NaN and Inf at odd places are named, and the first of them is."""
    x = x.clone()
    for row, column, value in ((x.shape[0] - 1, x.shape[1] - 1, math.nan), (201, 257, -math.inf), (130, 131, math.inf)):
        x[row, column] = value
        monitor = NonFiniteMonitor(device)
        _run(x.to(device), recipe, variant, monitor)
        try:
            monitor.raise_if_set()
        except NonFiniteError as error:
            same = error.value == value or (math.isnan(error.value) and math.isnan(value))
            if (error.row, error.column) == (row, column) and same:
                continue
            raise KernelSelfTestError(f"{where}: {value} at {row}, {column} was found as: {error}") from error
        raise KernelSelfTestError(f"{where}: {value} at row {row}, column {column} was not found")


def turned_memory(variant: TurnVariant, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Two matrices [2, M, N] of random bytes and poisoned room for their transposes, whose sizes and strides ask for
    just this variant of the transposition."""
    if variant.even:
        rows, columns = 256, 128
    else:
        rows, columns = 144 if variant.write_words else 131, 176 if variant.read_words else 157
    random = torch.from_numpy(np.random.default_rng(11).integers(0, 256, (2, rows, columns), dtype=np.uint8))
    w = _room(random.shape, variant.read_words, device)
    w.copy_(random)
    return w, _room((2, columns, rows), variant.write_words, device)


def _room(shape: tuple[int, ...] | torch.Size, words: bool, device: torch.device) -> torch.Tensor:
    """Bytes 0xEE, rows apart by whole words, or every other one of them, off alignment."""
    count, rows, columns = shape
    step, shift, row = (1, 0, columns + 32) if words else (2, 1, 2 * columns + 3)
    memory = torch.full((count * rows * row + shift,), 0xEE, dtype=torch.uint8, device=device)
    return memory[shift:].view(count, rows, row)[:, :, : step * columns : step]


def check_turned(variant: TurnVariant, device: torch.device) -> None:
    """Run the variant of the transposition on the device and compare. Raises KernelSelfTestError when any byte is
    wrong."""
    w, wt = turned_memory(variant, device)
    scale = scale_t = None
    if variant.scales:
        blocks = (2, -(-w.shape[1] // BLOCK), -(-w.shape[2] // BLOCK))
        scale = torch.arange(math.prod(blocks), dtype=torch.float32, device=device).view(blocks)
        scale_t = torch.full_like(scale.transpose(1, 2), -1.0, memory_format=torch.contiguous_format)
    want = _everything(wt)
    _inside(want, wt).copy_(w.cpu().transpose(1, 2))
    launch_turn(w, wt, scale, scale_t, variant.turn)
    where = f"{w.shape[1]}x{w.shape[2]} on {device}"
    _same(f"W^T of {where}", _inside(_everything(wt), wt).flatten(0, 1), _inside(want, wt).flatten(0, 1))
    _same(f"what lies around W^T of {where}", _everything(wt)[None], want[None])
    if scale is not None and scale_t is not None:
        _same(f"scale_t of {where}", scale_t.flatten(0, 1), scale.transpose(1, 2).flatten(0, 1))


def _everything(tensor: torch.Tensor) -> torch.Tensor:
    """A copy on the CPU of all bytes behind the tensor."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage()).to("cpu", copy=True)


def _inside(memory: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The part of such a copy that is the tensor."""
    return memory.as_strided(like.shape, like.stride(), like.storage_offset())


def _near(where: str, x: torch.Tensor, got: QuantizedPair, recipe: Recipe) -> None:
    """Approximate division may be two ulp off the exact one, and must be used consistently within a block."""
    exact = dataclasses.replace(recipe, scale_rule="amax_times_recip", inverse_rule="rn")
    matrix = x.float()
    _, s = block_scales(block_amax(matrix), exact)
    distance = (got.scale.view(torch.int32) - s.view(torch.int32)).abs()
    if distance.max() > 2:
        raise KernelSelfTestError(
            f"scale of {where}: {int(distance.max())} ulp from the exact quotient; the kernel may not run here"
        )
    codes = got.w.view(torch.uint8)
    explained = torch.zeros_like(s, dtype=torch.bool)
    for ulp in range(-2, 3):
        m = ((1 / got.scale).view(torch.int32) + ulp).view(torch.float32)
        wrong = (fp8_codes(matrix, m, got.scale, exact) != codes).to(torch.float32)
        explained |= block_amax(wrong) == 0
    if not explained.all():
        i, j = (~explained).nonzero()[0].tolist()
        raise KernelSelfTestError(
            f"W of {where}: block {i}, {j} holds codes of no multiplier near 1 / scale; the kernel may not run here"
        )


def _same(what: str, got: torch.Tensor, want: torch.Tensor) -> None:
    """Raise naming the first difference: place, found, expected, and how many there are."""
    wrong = got != want
    if wrong.any():
        i, j = wrong.nonzero()[0].tolist()
        found = f"{int(wrong.sum())} of {wrong.numel()} values are wrong, the first at row {i}, column {j}"
        raise KernelSelfTestError(
            f"{what}: {found} is {int(got[i, j])}, not {int(want[i, j])}; this GPU, driver or Triton release "
            "miscompiles the kernel, so it may not run here"
        )
