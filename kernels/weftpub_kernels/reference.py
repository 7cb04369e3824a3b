"""The recipe in plain torch: bit-exact on a CPU for every preset made of IEEE operators, and what the GPU is tested
against.

It imports no Triton, and it writes into the same buffers as the kernel. Subnormals count (te_pow2 stores subnormal
scales), so a thread that flushes them to zero is refused.
"""

import math

import numpy as np
import torch

from .checksum import tile_sums
from .errors import ApproximateOnCpuError, KernelError
from .pair import QuantizedPair, grid_of
from .recipe import BLOCK, FP8_MAX, Recipe

__all__ = ["block_amax", "block_scales", "ceil_log2", "fp8_codes", "quantize_reference", "require_cpu_exact"]

_RECIP_448 = float(np.float32(1) / np.float32(FP8_MAX))
_FLT_MAX = torch.finfo(torch.float32).max


def require_cpu_exact(recipe: Recipe) -> None:
    """Raise unless this CPU thread can make the preset's bytes: ApproximateOnCpuError, or KernelError when it flushes
    subnormals."""
    if not recipe.ieee:
        raise ApproximateOnCpuError(
            f"preset {recipe.name!r} uses Triton's approximate division, which a CPU cannot repeat bit for bit; "
            "move the matrix to a GPU, or use 'te_fp32'"
        )
    if torch.tensor([1e-39]).mul(0.5).item() == 0.0:
        raise KernelError(
            "this thread flushes subnormal numbers to zero; call torch.set_flush_denormal(False) before quantizing"
        )


def block_amax(x: torch.Tensor) -> torch.Tensor:
    """Largest |x| of each block of one float32 matrix [M, N] -> [MB, NB]. NaN propagates; padding counts as zero."""
    return _blocks(x).abs().amax(dim=(1, 3))


def block_scales(amax: torch.Tensor, recipe: Recipe) -> tuple[torch.Tensor, torch.Tensor]:
    """(multiplier m, dequant scale s) of blocks with these float32 amax, by the recipe's operators in order.

    Both are NaN where amax is not finite: such a block is void.
    """
    m, s = _scales(torch.where(amax.isfinite(), amax, torch.ones_like(amax)), recipe)
    void = torch.full_like(amax, math.nan)
    return torch.where(amax.isfinite(), m, void), torch.where(amax.isfinite(), s, void)


def _scales(amax: torch.Tensor, recipe: Recipe) -> tuple[torch.Tensor, torch.Tensor]:
    one = torch.ones_like(amax)
    if recipe.amax_floor:
        amax = amax.clamp_min(recipe.amax_floor)
    if recipe.scale_rule == "rn_448_over_amax":
        m = torch.full_like(amax, FP8_MAX) / amax
    elif recipe.scale_rule == "recip_amax_times_448":
        m = (one / amax) * torch.full_like(amax, FP8_MAX)
    elif recipe.scale_rule == "amax_times_recip":
        return _from_scale(amax * torch.full_like(amax, _RECIP_448), recipe)
    else:
        raise ApproximateOnCpuError(f"{recipe.scale_rule} has no exact form in torch")
    if recipe.overflow == "max_finite":
        m = torch.where(m.isinf(), torch.full_like(m, _FLT_MAX), m)
    if recipe.pow2_rule == "truncate_multiplier":
        m = (m.view(torch.int32) & 0x7F800000).view(torch.float32)
    if recipe.zero_rule == "one":
        m = torch.where(amax == 0, one, m)
    return m, one / m


def _from_scale(s: torch.Tensor, recipe: Recipe) -> tuple[torch.Tensor, torch.Tensor]:
    one = torch.ones_like(s)
    if recipe.pow2_rule == "ceil_bits":
        bits = s.view(torch.int32)
        exponent = (bits >> 23) + ((bits & 0x7FFFFF) != 0).to(torch.int32)
        s = (exponent.clamp(1, 254) << 23).view(torch.float32)
    elif recipe.pow2_rule == "ceil_log2":
        s = torch.ldexp(one, ceil_log2(s).clamp(-126, 127))
    elif recipe.pow2_rule == "ceil_log2_e8m0":
        exponent = ceil_log2(s).clamp(-127, 127)
        s = torch.where(exponent == -127, one, torch.ldexp(one, exponent.clamp_min(-126)))
    return one / s, s


def ceil_log2(s: torch.Tensor) -> torch.Tensor:
    """ceil(fp32(log2 s)) of non-negative float32, as int32; -150 for 0.

    With s = 2^e (1 + k 2^-23), log2 s = e + k 2^-23 / ln 2 to within the float32 grid, and it rounds to e while it is
    less than half a step past e, that is while k <= ln 2 * 2^(p-1), where 2^p is the binade of |log2 s| just above e.
    Only integers decide, so any log2 routine that rounds this sum once agrees; CUDA's does.
    """
    subnormal = s < 2.0**-126
    bits = torch.where(subnormal, s * 2.0**23, s).view(torch.int32)
    e = (bits >> 23) - 127 - 23 * subnormal.to(torch.int32)
    # |log2 s| just above e lies just below |e| when e < 0: one step down from a power of two it is in the lower binade.
    size = e.abs().to(torch.float32).view(torch.int32) - (e < 0).to(torch.int32)
    half_step = torch.ldexp(torch.full_like(s, math.log(2) / 2), (size >> 23) - 127).to(torch.int32)
    half_step = torch.where(e == 0, torch.zeros_like(half_step), half_step)
    result = e + ((bits & 0x7FFFFF) > half_step).to(torch.int32)
    return torch.where(s == 0, torch.full_like(result, -150), result)


def fp8_codes(x: torch.Tensor, m: torch.Tensor, s: torch.Tensor, recipe: Recipe) -> torch.Tensor:
    """Codes uint8 [M, N] of one float32 matrix, given the multiplier and dequant scale of each block [MB, NB]."""
    blocks = _blocks(x)
    divide = recipe.code_rule == "divide"
    scaled = blocks / s[:, None, :, None] if divide else blocks * m[:, None, :, None]
    codes = scaled.clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn).view(torch.uint8)
    nan = scaled.isnan()
    if nan.any():  # the GPU's conversion drops the sign of NaN, torch keeps it
        codes = torch.where(nan, torch.full_like(codes, 0x7F), codes)
    mb, nb = m.shape
    return codes.reshape(mb * BLOCK, nb * BLOCK)[: x.shape[0], : x.shape[1]]


@torch.no_grad()
def quantize_reference(x: torch.Tensor, out: QuantizedPair, recipe: Recipe) -> None:
    """Write W, W^T, scales and, where wanted, tile sums of ``x [..., M, N]`` on its device. Nothing is checked."""
    codes, turned = out.w.view(torch.uint8), out.wt.view(torch.uint8)
    for index in np.ndindex(*x.shape[:-2]):
        matrix = x[index].float()
        amax = block_amax(matrix)
        m, s = block_scales(amax, recipe)
        q = fp8_codes(matrix, m, s, recipe)
        codes[index].copy_(q)
        turned[index].copy_(q.t())
        out.scale[index].copy_(s)
        out.scale_t[index].copy_(s.t())
        if out.sums is not None:
            out.sums[index].copy_(tile_sums(q))


def _blocks(x: torch.Tensor) -> torch.Tensor:
    """[M, N] -> [MB, 128, NB, 128], ragged edges padded with zeros."""
    (rows, columns), (mb, nb) = x.shape, grid_of(x.shape)
    if rows % BLOCK or columns % BLOCK:
        x = torch.nn.functional.pad(x, (0, nb * BLOCK - columns, 0, mb * BLOCK - rows))
    return x.reshape(mb, BLOCK, nb, BLOCK)
