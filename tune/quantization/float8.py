"""Train with matrix products in 8 bits (Micikevicius et al., 2022), by torchao. Weights and gradients keep their dtype.

GPUs support it from compute capability 8.9; elsewhere it is emulated, with the same results but slowly.
"""

from dataclasses import replace
from typing import Literal

import torch
from torch import nn

from tune import rehearsal
from tune.errors import TuneError
from tune.lookup import needs

MULTIPLE = 16  # GPUs multiply sizes that are multiples of this


Scaling = Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"]  # names of torchao's recipes


def compute_in_float8(model: nn.Module, scaling: Scaling, device: torch.device) -> None:
    """Make the linear layers in the blocks of `model` multiply in float8, with torchao's recipe `scaling`.

    Call it before adding adapters, whose own products are not changed, and before sharding the model.

    Raises:
        TuneError: torchao is not installed, a layer size is not a multiple of 16, or the model has experts.
    """
    with needs("torchao", "quantization.float8"):
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    linears = {name: each for name, each in model.named_modules() if isinstance(each, nn.Linear) and "." in name}
    for name, each in linears.items():
        if each.in_features % MULTIPLE or each.out_features % MULTIPLE:
            raise TuneError(
                f"quantization.float8: {name} is {each.out_features} x {each.in_features}, but sizes must be multiples "
                f"of {MULTIPLE}. Remove quantization.float8"
            )
    if getattr(model, "routing", None):
        raise TuneError(
            "quantization.float8: models with experts and routers are not supported. Remove quantization.float8"
        )
    planning = rehearsal.planning()
    kind = planning.device_type if planning else device.type
    settings = replace(Float8LinearConfig.from_recipe_name(scaling), emulate=kind != "cuda", pad_inner_dim=True)
    convert_to_float8_training(model, module_filter_fn=lambda _, name: name in linears, config=settings)
