"""Map the names of tensors and modules: ours, a checkpoint's (on disk), and PEFT's."""

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from tune.quantization import NF4Weight

# The name on disk of one of our tensors. If ours is a stack along a new first dimension, the names of its members. If
# each member is a concatenation of equal parts along its own first dimension, the names of the parts.
OnDisk = str | list[str] | list[list[str]]


OLD_BLOCK = "block_sparse_moe", "mlp"  # names of a block's experts: on disk, and in transformers


@dataclass
class Names:
    """The names of a model's tensors. "Name" without qualification means ours.

    - `on_disk` maps each parameter and persistent buffer to its names on disk, `alternatives` to its names in some
      other checkpoints.
    - `copies` maps names on disk of tensors that repeat one of ours, such as a tied head, to our name.
    - `ignored` has patterns of tensors on disk that the model does not use.
    - `in_peft` maps them to their names in PEFT's files, for a model whose names on disk do not show them.
    - `replaced` maps tensors of ours that a checkpoint may lack, and that are then initialized, to the pattern of the
      tensors on disk that they replace, which are neither loaded nor exported.
    """

    on_disk: dict[str, OnDisk]
    alternatives: dict[str, OnDisk] = field(default_factory=dict)
    copies: dict[str, str] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()
    replaced: dict[str, str] = field(default_factory=dict)
    in_peft: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, model: nn.Module) -> "Names":
        """`model.names`. For a module without `names`, the names on disk are its own."""
        names = getattr(model, "names", None)
        return names if isinstance(names, cls) else cls({name: name for name in stored_tensors(model)})

    def in_checkpoint(self, found: Collection[str]) -> dict[str, OnDisk]:
        """`on_disk` for a checkpoint with the tensors `found`: of this model, of its body alone (without `model.`), or
        of a larger model that contains it."""
        by_own = {own_name(name): name for name in found}

        def there(on_disk: Any) -> Any:
            if not isinstance(on_disk, str):
                return [there(each) for each in on_disk]
            own = own_name(on_disk)
            return by_own.get(own) or by_own.get(own.partition(".")[2], on_disk)

        chosen: dict[str, OnDisk] = {}
        for ours, usual in self.on_disk.items():
            ways = [there(usual), there(self.alternatives.get(ours, usual))]
            chosen[ours] = next((way for way in ways if disk_names(way)[0] in found), usual)
        return chosen

    def is_ignored(self, on_disk: str) -> bool:
        return any(re.search(pattern, on_disk) for pattern in self.ignored) or self.is_replaced(on_disk)

    def is_replaced(self, on_disk: str) -> bool:
        return any(re.search(pattern, on_disk) for pattern in self.replaced.values())

    def module(self, name: str) -> str:
        """The name on disk of the module `name`; `name` itself if it is a stack or not on disk."""
        on_disk = self.on_disk.get(f"{name}.weight")
        return on_disk.removesuffix(".weight") if isinstance(on_disk, str) else name

    def members(self, name: str) -> list[str]:
        """The names on disk of the module `name`: one name, or one for each expert of a stack."""
        on_disk = self.on_disk.get(f"{name}.weight")
        if not isinstance(on_disk, list):
            return [self.module(name)]
        return [each.removesuffix(".weight") for each in on_disk if isinstance(each, str)]

    def peft_module(self, name: str) -> str:
        """PEFT's name of the module `name`; `name` itself if it is a stack or not on disk."""
        known = self.in_peft.get(f"{name}.weight")
        return peft_name(self.module(name)) if known is None else known.removesuffix(".weight")

    def peft_members(self, name: str) -> list[str]:
        """PEFT's names of the module `name`: one name, or one for each expert of a stack."""
        if f"{name}.weight" in self.in_peft:
            return [self.peft_module(name)]
        return [peft_name(each) for each in self.members(name)]

    def peft_parameter(self, name: str) -> str:
        """PEFT's name of the parameter `name`, which is trained in full."""
        return self.in_peft.get(name) or peft_name(str(self.on_disk.get(name, name)))

    def is_joined(self, name: str) -> bool:
        """Whether the experts `name` are one tensor on disk that is not a module's weight, as in transformers."""
        on_disk = self.on_disk.get(f"{name}.weight")
        return isinstance(on_disk, str) and not on_disk.endswith(".weight")

    def parameter(self, name: str) -> str:
        """The name in transformers of the weight of the module `name`, by which PEFT's `target_parameters`
        find it. Experts are one parameter there, which joins gate and up.
        """
        on_disk = self.on_disk.get(f"{name}.weight", f"{name}.weight")
        if isinstance(on_disk, str):
            return on_disk.replace(*OLD_BLOCK)
        owner = disk_names(on_disk)[0].partition(".experts.")[0].replace(*OLD_BLOCK)
        return f"{owner}.experts.{'down_proj' if name.endswith('.down') else 'gate_up_proj'}"

    def is_parameter(self, name: str, wanted: Collection[str]) -> bool:
        """Whether the weight of the module `name` is one of the `target_parameters` `wanted`, as in PEFT."""
        known = spellings(self.parameter(name))
        return any(f".{each}".endswith(f".{end}") for each in known for end in wanted)

    def patterned(self, name: str) -> list[str]:
        """The names of the module `name` that patterns of rank and alpha match."""
        return [*self.spellings(name), *spellings(self.parameter(name))]

    def stacked_modules(self) -> set[str]:
        """The modules on disk that are members of a stack of ours: the projections of experts."""
        stacks = [on_disk for on_disk in self.on_disk.values() if isinstance(on_disk, list)]
        return {name.removesuffix(".weight") for stack in stacks for name in disk_names(stack)}

    def spellings(self, name: str) -> list[str]:
        """All names of the module `name` that settings accept: ours, on disk, PEFT's; for experts, of each expert."""
        known = [*self.members(name), self.peft_module(name)] if self.in_peft else self.members(name)
        return [name, *dict.fromkeys(spelling for each in known for spelling in spellings(each))]


def stored_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The tensors of `model` in a checkpoint: parameters (tied ones once) and persistent buffers.

    Tensors that adapters have added to a module, listed in its `added`, are left out. A quantized weight is a tensor of
    its shape on the meta device.
    """
    persistent = model.state_dict().keys()
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in persistent}
    added = {f"{name}.{each}" for name, module in model.named_modules() for each in getattr(module, "added", ())}
    tensors = dict(model.named_parameters()) | buffers
    for name, module in model.named_modules():
        if isinstance(module, NF4Weight):
            added |= {f"{name}.{part}" for part, _ in module.named_parameters()}
            tensors[name] = torch.empty(module.shape, device="meta")
    return {name: tensor for name, tensor in tensors.items() if name not in added}


def without_names(model: nn.Module) -> list[str]:
    """The trained parameters of `model` without a name on disk, such as your own head, which exports leave out."""
    known = Names.of(model).on_disk
    return [name for name, each in stored_tensors(model).items() if each.requires_grad and name not in known]


def disk_names(on_disk: Any) -> list[str]:
    """All names in `on_disk`, an `OnDisk` or a part of one."""
    return [on_disk] if isinstance(on_disk, str) else [name for each in on_disk for name in disk_names(each)]


def disk_parts(on_disk: OnDisk, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield (name on disk, view of `tensor`) for each part."""
    if isinstance(on_disk, str):
        yield on_disk, tensor
        return
    for names, member in zip(on_disk, tensor, strict=True):
        parts = [names] if isinstance(names, str) else names
        yield from zip(parts, member.chunk(len(parts)), strict=True)


def own_name(on_disk: str) -> str:
    """`on_disk` without the prefix of a larger model that contains the language model."""
    return on_disk.replace("language_model.", "", 1)


def spellings(on_disk: str) -> list[str]:
    """PEFT's names of the module `on_disk`: in the language model alone, and in a larger model that contains it."""
    own = own_name(on_disk)
    return [on_disk, own, own.replace("model.", "model.language_model.", 1)]


def peft_name(on_disk: str) -> str:
    """PEFT's name of the module or parameter `on_disk`: in some checkpoints, language_model comes before model."""
    return spellings(on_disk)[2] if on_disk != own_name(on_disk) else on_disk
