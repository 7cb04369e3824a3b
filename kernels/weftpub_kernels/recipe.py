"""The numeric contract: each preset is one table row made of named operators.

Block 128x128, codes ``float8_e4m3fn``, and ``value = code * dequant scale`` always. For the elements x of one block the
operators apply in this order, all in float32 with one IEEE rounding each unless the operator's name says otherwise:

1. ``amax``       largest |x|; padding of ragged edges is zero. A block with NaN or Inf is void: scale NaN, all codes
   0x7F.
2. ``amax_floor`` amax = max(amax, floor); 0 means that there is no floor.
3. ``scale_rule`` gives the multiplier m (codes are near x * m) or the dequant scale s:
   ``rn_448_over_amax``  m = 448 / amax        ``recip_amax_times_448``  m = (1 / amax) * 448
   ``amax_times_recip``  s = amax * fp32(1/448) (what CUDA makes of ``amax / 448.0``)
   ``amax_over_448_full``  s = ``div.full.f32``(amax, 448), Triton's approximate ``/``
4. ``overflow``   ``max_finite``: an infinite m becomes the largest finite float32; ``inf``: it stays.
5. ``pow2_rule``  ``none``; ``truncate_multiplier``: m loses its mantissa; ``ceil_bits``: s is rounded up to a power
   of two by its bits, exponent field within 1..254; ``ceil_log2``: s = 2^ceil(fp32(log2 s)), one power lower than
   ``ceil_bits`` when s is so little above a power of two that its log2 rounds down; ``ceil_log2_e8m0``: the same with
   the exponent within -127..127, and s = 1 where it is -127.
6. ``zero_rule``  ``one``: amax 0 gives m = s = 1; ``none``: nothing (a floor keeps amax above 0).
7. ``inverse_rule``  the missing one of m and s is 1 / the other: ``rn`` (IEEE) or ``full`` (``div.full.f32``).
8. ``code_rule``  ``multiply``: x * m; ``divide``: x / s. Then float32 -> e4m3, to nearest even, beyond +-448 to
   +-448, NaN to 0x7F.

Peers that clamp and peers that do not give the same codes for finite blocks: no rule above takes |x * m| past 448 by
more than a few ulp, except where ``recip_amax_times_448`` overflows, and its peers clamp.
"""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal

import torch

from .errors import ShapeError, UnfitPresetError, UnknownPresetError

__all__ = ["BLOCK", "FP8_MAX", "PRESETS", "TILE_PARTS", "Recipe", "get_recipe", "require_publishable"]

BLOCK = 128
TILE_PARTS = 8
"""Checksum sums of a tile: one for each 64 rows x 32 columns, row by row (what one warp of the kernel holds)."""
FP8_MAX = 448.0

ScaleRule = Literal["rn_448_over_amax", "recip_amax_times_448", "amax_times_recip", "amax_over_448_full"]
Overflow = Literal["max_finite", "inf"]
Pow2Rule = Literal["none", "truncate_multiplier", "ceil_bits", "ceil_log2", "ceil_log2_e8m0"]
ZeroRule = Literal["one", "none"]
InverseRule = Literal["rn", "full"]
CodeRule = Literal["multiply", "divide"]


@dataclass(frozen=True, eq=False)
class Recipe:
    """One preset. ``source`` says whose bytes it makes; ``unfit`` and ``ragged`` hold the reason of a refusal, or
    None."""

    name: str
    source: str
    scale_rule: ScaleRule
    amax_floor: float = 0.0
    overflow: Overflow = "inf"
    pow2_rule: Pow2Rule = "none"
    zero_rule: ZeroRule = "none"
    inverse_rule: InverseRule = "rn"
    code_rule: CodeRule = "multiply"
    input_dtype: torch.dtype = torch.float32
    unfit: str | None = None
    ragged: str | None = None
    note: str = ""

    @property
    def ieee(self) -> bool:
        """True when every operator is one IEEE rounding, so that a CPU gives the same bytes."""
        return self.scale_rule != "amax_over_448_full" and self.inverse_rule != "full"

    @property
    def publishable(self) -> bool:
        """True when no finite block is lost."""
        return self.unfit is None

    @property
    def refuses_ragged(self) -> bool:
        """True when both matrix dimensions must be multiples of 128."""
        return self.ragged is not None

    @property
    def operators(self) -> tuple[float, str, str, str, str, str, str]:
        """What the kernel is specialised by; presets with equal operators share a compiled kernel."""
        return (
            self.amax_floor,
            self.scale_rule,
            self.overflow,
            self.pow2_rule,
            self.zero_rule,
            self.inverse_rule,
            self.code_rule,
        )

    def check_shape(self, rows: int, columns: int) -> None:
        """Raise ShapeError for a ragged matrix where the peer's way with ragged edges is not worth having."""
        if self.ragged is not None and (rows % BLOCK or columns % BLOCK):
            raise ShapeError(
                f"preset {self.name!r} takes only matrices whose rows and columns are multiples of {BLOCK}, found "
                f"{rows}x{columns}: {self.ragged}. Use 'te_fp32', or pad the model's dimensions"
            )


_LOSES_BLOCKS = "a block whose amax is below about 1.3e-36 gets dequant scale 0 and is lost"
_NEMO_RAGGED = "the peer pads ragged edges with the last element x[-1, -1], which leaks into the edge blocks' scales"

_te_fp32 = Recipe(
    name="te_fp32",
    source="TransformerEngine 2.20.2 Float8BlockQuantizer, force_pow_2_scales=False",
    scale_rule="rn_448_over_amax",
    overflow="max_finite",
    zero_rule="one",
    note="codes are x * (448 / amax): they cannot be made again from the stored scale",
)
_slime = Recipe(
    name="slime",
    source="slime 624b824 blockwise_cast_to_fp8_triton",
    scale_rule="amax_over_448_full",
    amax_floor=1e-10,
    inverse_rule="full",
    note="Triton's approximate division: runs on a GPU only",
)
_deepgemm_fp32 = Recipe(
    name="deepgemm_fp32",
    source="DeepGEMM 54e2261 per_block_cast_to_fp8, use_ue8m0=False, on CUDA",
    scale_rule="amax_times_recip",
    amax_floor=1e-4,
)
_awex = replace(
    _deepgemm_fp32,
    name="awex",
    source="AWEX 4e19c60 per_block_cast_to_fp8, scale_ue8m0=False, on CUDA",
    code_rule="divide",
)
_sglang_ue8m0 = replace(
    _deepgemm_fp32,
    name="sglang_ue8m0",
    source="SGLang 0.5.23 per_block_cast_to_fp8",
    pow2_rule="ceil_bits",
)
_nemo_fp32 = Recipe(
    name="nemo_fp32",
    source="NeMo-RL 7ea279a cast_tensor_to_fp8_blockwise, use_weight_pow2_scale=False",
    scale_rule="recip_amax_times_448",
    zero_rule="one",
    unfit=_LOSES_BLOCKS,
    ragged=_NEMO_RAGGED,
)

_ROWS = (
    _te_fp32,
    replace(
        _te_fp32,
        name="te_pow2",
        source="TransformerEngine 2.20.2 Float8BlockQuantizer, its default",
        pow2_rule="truncate_multiplier",
        note="the dequant scale of a subnormal block is 2^-127, itself subnormal",
    ),
    _slime,
    replace(
        _slime, name="areal", source="AReaL 4aef98d blockwise_cast_to_fp8_triton, before its cast of scales to BF16"
    ),
    replace(_slime, name="miles", source="miles 31f1ca9 blockwise_cast_to_fp8_triton"),
    replace(_slime, name="verl", source="verl 1dda039 scaled_fp8_blockwise, its Triton path"),
    _deepgemm_fp32,
    replace(_sglang_ue8m0, name="deepgemm_ue8m0", source="DeepGEMM 54e2261 per_block_cast_to_fp8, use_ue8m0=True"),
    _sglang_ue8m0,
    _awex,
    replace(
        _awex,
        name="awex_ue8m0",
        source="AWEX 4e19c60 per_block_cast_to_fp8, scale_ue8m0=True",
        pow2_rule="ceil_log2",
    ),
    _nemo_fp32,
    replace(
        _nemo_fp32,
        name="nemo_pow2",
        source="NeMo-RL 7ea279a cast_tensor_to_fp8_blockwise, use_weight_pow2_scale=True",
        scale_rule="amax_times_recip",
        pow2_rule="ceil_log2_e8m0",
        zero_rule="none",
        unfit="a block whose amax is below about 2.6e-36 gets dequant scale 1 and zero codes, and is lost",
    ),
    replace(
        _nemo_fp32,
        name="hf",
        source="transformers 5.17.0 Fp8Quantize",
        ragged="the peer leaves ragged matrices unquantized",
    ),
    Recipe(
        name="torchao",
        source="torchao 0.18.0 triton_fp8_blockwise_weight_quant_rhs",
        scale_rule="rn_448_over_amax",
        amax_floor=1e-12,
        ragged="the peer refuses ragged matrices",
        note="the peer divides in float64 and rounds to float32, which gives the float32 quotient",
    ),
    replace(_awex, name="slime_convert", source="slime 624b824 convert_hf_to_fp8.block_fp8, on CUDA", amax_floor=1e-12),
    replace(
        _sglang_ue8m0,
        name="areal_ue8m0_bf16",
        source="AReaL 4aef98d quant_weight_ue8m0",
        input_dtype=torch.bfloat16,
    ),
    replace(
        _sglang_ue8m0,
        name="sglang_ue8m0_bf16",
        source="SGLang 0.5.23 quant_weight_ue8m0",
        input_dtype=torch.bfloat16,
    ),
)

PRESETS: Mapping[str, Recipe] = MappingProxyType({row.name: row for row in _ROWS})
"""All presets by name. Those with ``ieee`` False run on a GPU only; those with ``publishable`` False may not be
published."""


def get_recipe(preset: str | Recipe) -> Recipe:
    """The recipe of this name. Raises UnknownPresetError, which suggests near names."""
    if isinstance(preset, Recipe):
        return preset
    recipe = PRESETS.get(preset) if isinstance(preset, str) else None
    if recipe is None:
        near = difflib.get_close_matches(str(preset), PRESETS, n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(map(repr, near))}?" if near else f"known: {', '.join(PRESETS)}"
        raise UnknownPresetError(f"no preset is named {preset!r}; {hint}")
    return recipe


def require_publishable(preset: str | Recipe) -> Recipe:
    """The recipe, if its bytes may be published. Raises UnfitPresetError where it loses blocks, UnknownPresetError."""
    recipe = get_recipe(preset)
    if recipe.unfit is not None:
        remedy = "Use 'te_fp32', or 'te_pow2' for power-of-two scales"
        raise UnfitPresetError(f"preset {recipe.name!r} may not be published: {recipe.unfit}. {remedy}")
    return recipe
