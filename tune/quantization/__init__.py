"""Quantize weights: NF4 under adapters, formats of vLLM and transformers, quantization-aware training, and float8."""

from tune.quantization.compressed import FP4, Compressor
from tune.quantization.float8 import Scaling, compute_in_float8
from tune.quantization.nf4 import (
    NF4Linear,
    NF4Weight,
    block_linears,
    call_all_layers,
    count_parameters,
    dequantize,
    quantize,
    quantize_linears,
    uncalled_linears,
    whole_weights,
)
from tune.quantization.rounding import Rounding, quantized_linears, round_linears
