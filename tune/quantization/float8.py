"""Training whose matrix products are in 8 bits (Micikevicius et al., 2022), by torchao; weights and gradients stay as
they are. GPUs have units for it from compute capability 8.9; elsewhere it is emulated: the same, and slow."""

from dataclasses import replace
from typing import Literal

import torch
from torch import nn

from tune import rehearsal
from tune.errors import TuneError
from tune.lookup import needs

MULTIPLE = 16  # of the sizes that GPUs multiply


Scaling = Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"]  # recipes of torchao


def compute_in_float8(model: nn.Module, scaling: Scaling, device: torch.device) -> None:
    """Have the linear layers of the blocks of `model` multiply in float8, with the scales of torchao's recipe of that
    name. Call it before adapters are added, whose own products stay as they are, and before the model is sharded.

    Raises:
        TuneError: torchao is not installed, a layer has a size that is no multiple of 16, or there are experts.
    """
    with needs("torchao", "quantization.float8"):
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    linears = {name: each for name, each in model.named_modules() if isinstance(each, nn.Linear) and "." in name}
    for name, each in linears.items():
        if each.in_features % MULTIPLE or each.out_features % MULTIPLE:
            raise TuneError(
                f"quantization.float8: {name} is {each.out_features} x {each.in_features}, and sizes must be multiples "
                f"of {MULTIPLE}. Leave it out"
            )
    if getattr(model, "routing", None):
        raise TuneError("quantization.float8: the model has experts, which stay as they are, and routers. Leave it out")
    planning = rehearsal.planning()
    kind = planning.device_type if planning else device.type
    settings = replace(Float8LinearConfig.from_recipe_name(scaling), emulate=kind != "cuda", pad_inner_dim=True)
    convert_to_float8_training(model, module_filter_fn=lambda _, name: name in linears, config=settings)
