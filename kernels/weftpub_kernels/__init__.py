"""Quantizers that make blockwise FP8 W, W^T and dequant scales, byte for byte as their peers do."""
