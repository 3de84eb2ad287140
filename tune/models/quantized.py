"""Store the weights of a model's blocks in 4 bits, or multiply in 8: arguments of the functions that build a model."""

from typing import Any, Literal

from tune.quantization import Scaling, compute_in_float8, quantize_linears


def quantized(model: Any, quantization: Literal["nf4"] | None, double: bool, float8: Scaling | None) -> Any:
    """Return `model`, changed in place as the arguments say (see `tune.models.build`)."""
    if quantization:
        quantize_linears(model, quantization, double=double)
    if float8:
        compute_in_float8(model, float8)
    return model
