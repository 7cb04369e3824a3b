"""Quantizers that make blockwise FP8 W, W^T and dequant scales, byte for byte as their peers do, and the checksum of
any bytes.

One convention rules here: blocks of 128x128, codes in float8_e4m3fn, ``value = code * dequant scale``. The numeric
contract is recipe.py, the plain-torch reference (bit-exact on a CPU) reference.py, the GPU kernels triton_quantize.py,
triton_transpose.py, triton_checksum.py and triton_copy.py. Importing this package imports no Triton.
"""

from .checksum import SpanChecksums, checksum, checksum_many, checksum_rows_from_sums, checksum_spans
from .copies import SpanCopies, copy_spans
from .entry import dequantize, quantize_into, quantize_pair
from .errors import (
    ApproximateOnCpuError,
    DtypeError,
    KernelError,
    KernelSelfTestError,
    NonFiniteError,
    ShapeError,
    UnfitPresetError,
    UnknownPresetError,
)
from .nonfinite import NonFiniteMonitor
from .pair import QuantizedPair
from .recipe import BLOCK, PRESETS, Recipe, require_publishable
from .transposes import transpose

__all__ = [
    "BLOCK",
    "PRESETS",
    "ApproximateOnCpuError",
    "DtypeError",
    "KernelError",
    "KernelSelfTestError",
    "NonFiniteError",
    "NonFiniteMonitor",
    "QuantizedPair",
    "Recipe",
    "ShapeError",
    "SpanChecksums",
    "SpanCopies",
    "UnfitPresetError",
    "UnknownPresetError",
    "checksum",
    "checksum_many",
    "checksum_rows_from_sums",
    "checksum_spans",
    "copy_spans",
    "dequantize",
    "quantize_into",
    "quantize_pair",
    "require_publishable",
    "transpose",
]
