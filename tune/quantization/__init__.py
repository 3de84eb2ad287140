"""Weights in few bits: NF4 for training on, and the formats of vLLM and transformers for use."""

from tune.quantization.compressed import Compressor
from tune.quantization.nf4 import NF4Weight, dequantize, quantize, quantize_linears

__all__ = ["Compressor", "NF4Weight", "dequantize", "quantize", "quantize_linears"]
