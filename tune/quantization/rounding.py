"""Quantization-aware training: each forward uses the trained weights as `tune quantize` will round them.

Gradients pass straight through the rounding (Bengio et al., 2013), also at the ends of the range.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tune.distributed import Dtype, as_dtype
from tune.errors import TuneError
from tune.quantization.compressed import dequantize, group_size, quantize
from tune.quantization.nf4 import block_linears
from tune.types import checked


@torch.library.custom_op("tune::rounded", mutates_args=())
def _rounded(weight: Tensor, kind: str, group: int, dtype: torch.dtype) -> Tensor:
    """Quantize and dequantize, as an operation of its own: compiled code keeps more digits between the steps."""
    return dequantize(*quantize(weight.to(dtype), kind, group, dtype)).to(weight.dtype)


_rounded.register_fake(lambda weight, *_: torch.empty_like(weight))
_rounded.register_autograd(lambda _, gradient: (gradient, None, None, None))


@dataclass(frozen=True)
class Rounding:
    """Round a weight `[rows, columns]` as if it were exported as `dtype` and then quantized."""

    kind: str
    group: int | None
    dtype: torch.dtype

    def __call__(self, weight: Tensor) -> Tensor:
        return _rounded(weight, self.kind, self.group or weight.shape[1], self.dtype)


class RoundedLinear(nn.Linear):
    """A linear layer that computes with its rounded weight."""

    rounding: Rounding

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, self.rounding(self.weight), self.bias)


@checked
def round_linears(
    model: nn.Module, kind: Literal["int8", "int4", "fp8", "mxfp4"], exported: Mapping[str, torch.dtype], dtype: Dtype
) -> None:
    """Make the linear layers in the blocks of `model` compute with weights (adapters merged) quantized to `kind`.

    `exported` maps names of weights to the dtypes of the export; `dtype` is the dtype of the computation. Call it after
    adding adapters and before sharding the model: weights are rounded when they are gathered.

    Raises:
        TuneError: the model is not native, or has experts; a weight is already quantized, or multiplied in float8; an
            adapter has dropout, which would give each token another merged weight; or `dtype` is not precise enough.
    """
    linears = quantized_linears(model)
    if not isinstance(getattr(model, "blocks", None), nn.ModuleList):
        raise TuneError("model: only models of tune.models.build can be rounded, because names of others differ")
    group = group_size(kind, {name: linear.in_features for name, linear in linears.items()})
    for name, linear in linears.items():
        if not isinstance(linear.weight, Tensor):
            raise TuneError(f"kind: {name} is already quantized. Set model.quantization=null")
        if (base := getattr(linear, "base", type(linear))) not in (nn.Linear, RoundedLinear):
            raise TuneError(f"kind: {name} is a {base.__name__}, which cannot be rounded. Set model.float8=null")
        if getattr(getattr(linear, "settings", None), "dropout", 0):
            raise TuneError(f"adapter.dropout: {name} cannot be rounded under dropout. Set it to 0")
        stored = exported[f"{name}.weight"]
        if torch.promote_types(stored, as_dtype(dtype)) != as_dtype(dtype):
            kept = str(stored).removeprefix("torch.")
            raise TuneError(
                f"kind: {name} is exported as {kept}, but a computation in {dtype} is not precise enough to round it "
                "as `tune quantize` does. Set compute.dtype=fp32, or export in bf16 if all parameters are trained"
            )
        if type(linear) is nn.Linear:
            linear.__class__ = RoundedLinear
        linear.rounding = Rounding(kind, group, stored)  # type: ignore[assignment]


def quantized_linears(model: Any) -> dict[str, nn.Linear]:
    """The layers to quantize, by name: the linear layers in blocks. Raises TuneError for models with experts or without
    such layers."""
    linears = block_linears(model)
    if getattr(model, "routing", None) or any(hasattr(module, "activated_share") for module in model.modules()):
        raise TuneError(
            "only dense models can be quantized, but this one has experts, for which readers use different formats"
        )
    if not linears:
        raise TuneError("only linear layers can be quantized, but this model has none in its blocks")
    return linears
