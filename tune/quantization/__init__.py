"""Weights in 4 bits (NF4)."""

from tune.quantization.nf4 import NF4Weight, dequantize, quantize, quantize_linears

__all__ = ["NF4Weight", "dequantize", "quantize", "quantize_linears"]
