"""Quantisation-aware training: each forward sees the weights that `tune quantize` will make of those that are trained.

Gradients pass straight through the rounding (Bengio et al., 2013), at the ends of the range too.
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


@torch.library.custom_op("tune::rounded", mutates_args=())
def _rounded(weight: Tensor, kind: str, group: int, dtype: torch.dtype) -> Tensor:
    """An operation of its own, as compilers keep more digits between the steps of what they compile."""
    return dequantize(*quantize(weight.to(dtype), kind, group, dtype)).to(weight.dtype)


_rounded.register_fake(lambda weight, *_: torch.empty_like(weight))
_rounded.register_autograd(lambda _, gradient: (gradient, None, None, None))


@dataclass(frozen=True)
class Rounding:
    """What is made of a weight `[rows, columns]` that is exported as `dtype` and then quantised."""

    kind: str
    group: int | None
    dtype: torch.dtype

    def __call__(self, weight: Tensor) -> Tensor:
        return _rounded(weight, self.kind, self.group or weight.shape[1], self.dtype)


class RoundedLinear(nn.Linear):
    """A linear layer that computes with its weight rounded."""

    rounding: Rounding

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, self.rounding(self.weight), self.bias)


def round_linears(
    model: nn.Module, kind: Literal["int8", "int4", "fp8", "mxfp4"], exported: Mapping[str, torch.dtype], dtype: Dtype
) -> None:
    """Have the linear layers of the blocks of `model`, adapters merged, compute with weights quantised to `kind`.

    `exported` has the types in which weights are exported, by their names; `dtype` is that of the computation. Call it
    after adapters are added, and before the model is sharded: weights are rounded when they are gathered.
    """
    linears = quantised_linears(model)
    group = group_size(kind, {name: linear.in_features for name, linear in linears.items()})
    for name, linear in linears.items():
        if not isinstance(linear.weight, Tensor):
            raise TuneError(f"quantization.qat: {name} is quantised already. Set quantization.weights=null")
        stored = exported[f"{name}.weight"]
        if torch.promote_types(stored, as_dtype(dtype)) != as_dtype(dtype):
            kept = str(stored).removeprefix("torch.")
            raise TuneError(
                f"quantization.qat: {name} is exported as {kept}, of which dtype={dtype} sees too little to round as "
                "`tune quantize` does. Set dtype=fp32, or export.dtype=bf16 if all parameters are trained"
            )
        if type(linear) is nn.Linear:
            linear.__class__ = RoundedLinear
        linear.rounding = Rounding(kind, group, stored)  # type: ignore[assignment]


def quantised_linears(model: Any) -> dict[str, nn.Linear]:
    """The layers that are quantised, by name: those in blocks. Raises TuneError if there are experts, or no layers."""
    linears = block_linears(model)
    if getattr(model, "routing", None) or any(hasattr(module, "activated_share") for module in model.modules()):
        raise TuneError("only dense models are quantised: this one has experts, which each reader stores otherwise")
    if not linears:
        raise TuneError("only linear layers are quantised, and this model has none in its blocks")
    return linears
