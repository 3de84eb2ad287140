"""Add adapters, small trainable weights, to the layers of any frozen `nn.Module`.

A new kind of adapter is a class like `LoRALinear`; `adding.py` chooses the layers, and `files.py` reads and writes
PEFT's format.
"""

from tune.peft.adapters import adapted_modules, initialize, switched_off, trained_in_full
from tune.peft.adding import add_adapters
from tune.peft.dropout import set_dropout_keys
from tune.peft.files import (
    CONFIG,
    adapter,
    adapter_state_dict,
    digest,
    export_adapter,
    export_trained,
    load_adapter,
    load_or_initialize,
    read_adapter,
    read_adapter_config,
)
from tune.peft.lora import LoRA, LoRALinear, LowRank
from tune.peft.merged import average, merge
from tune.peft.merging import merge_in_place
from tune.peft.named import adapter_folder, exported_folder, resolve_model, step_of
from tune.peft.opened import OpenedModel, open_model
from tune.peft.reference import Reference
from tune.peft.tokens import untrained_tokens

# The other imported names are for the packages of `tune` only.
__all__ = [
    "LoRA",
    "LoRALinear",
    "OpenedModel",
    "Reference",
    "adapted_modules",
    "adapter",
    "adapter_state_dict",
    "add_adapters",
    "average",
    "digest",
    "export_adapter",
    "export_trained",
    "initialize",
    "load_adapter",
    "load_or_initialize",
    "merge",
    "merge_in_place",
    "open_model",
    "read_adapter",
    "resolve_model",
    "set_dropout_keys",
    "switched_off",
    "untrained_tokens",
]
