"""Train with matrix products in 8 bits (Micikevicius et al., 2022), by torchao. Weights and gradients keep their dtype.

GPUs support it from compute capability 8.9; elsewhere it is emulated, with the same results but slowly.
"""

from dataclasses import replace
from typing import Literal

import torch
from torch import nn

from tune import rehearsal
from tune.distributed import current_world
from tune.errors import TuneError
from tune.lookup import needs

MULTIPLE = 16  # GPUs multiply sizes that are multiples of this


Scaling = Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"]
"""Names of torchao's recipes for float8 training."""


def compute_in_float8(model: nn.Module, scaling: Scaling, device: torch.device | None = None) -> None:
    """Make the linear layers in the blocks of `model` multiply in float8, with torchao's recipe `scaling`.

    `device` computes them; None is that of `tune.distributed.current_world()`. Call it before adding adapters, whose
    own products are not changed, and before sharding the model.

    Raises:
        TuneError: torchao is not installed, a layer size is not a multiple of 16, or the model has experts.
    """
    with needs("torchao", "model.float8"):
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    linears = {name: each for name, each in model.named_modules() if isinstance(each, nn.Linear) and "." in name}
    for name, each in linears.items():
        if each.in_features % MULTIPLE or each.out_features % MULTIPLE:
            raise TuneError(
                f"model.float8: {name} is {each.out_features} x {each.in_features}, but sizes must be multiples "
                f"of {MULTIPLE}. Remove model.float8"
            )
    if getattr(model, "routing", None):
        raise TuneError("model.float8: models with experts and routers are not supported. Remove model.float8")
    planning = rehearsal.planning()
    kind = planning.device_type if planning else (device or current_world().device).type
    settings = replace(Float8LinearConfig.from_recipe_name(scaling), emulate=kind != "cuda", pad_inner_dim=True)
    convert_to_float8_training(model, module_filter_fn=lambda _, name: name in linears, config=settings)
