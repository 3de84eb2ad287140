"""What the tensors and modules of a model are called: here, in a checkpoint, and by PEFT."""

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

# How a checkpoint holds a tensor of ours: one name; or those of the tensors that it is the stack of, along a new first
# dimension; or for each member of the stack, those of equal parts that it is joined from along its own first dimension.
OnDisk = str | list[str] | list[list[str]]


@dataclass
class Names:
    """The names of a model. Names without further word are ours.

    `on_disk` has how a checkpoint holds each parameter and persistent buffer, `alternatives` how some checkpoints do
    instead; `copies` are tensors that a checkpoint may have and that repeat one of ours, as a tied head does (name on
    disk -> ours); `ignored` are patterns of tensors on disk that the model does without.
    """

    on_disk: dict[str, OnDisk]
    alternatives: dict[str, OnDisk] = field(default_factory=dict)
    copies: dict[str, str] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()

    @classmethod
    def of(cls, model: nn.Module) -> "Names":
        """`model.names`; of a module that has none, its own names are those on disk."""
        names = getattr(model, "names", None)
        return names if isinstance(names, cls) else cls({name: name for name in stored_tensors(model)})

    def in_checkpoint(self, found: Collection[str]) -> dict[str, OnDisk]:
        """`on_disk`, as a checkpoint has it that holds the tensors `found`: that of this model, of its body alone, or
        of a larger model that it is a part of."""
        by_own = {own_name(name): name for name in found}

        def there(on_disk: Any) -> Any:
            if not isinstance(on_disk, str):
                return [there(each) for each in on_disk]
            own = own_name(on_disk)
            return by_own.get(own) or by_own.get(own.partition(".")[2], on_disk)

        def first(on_disk: Any) -> str:
            return on_disk if isinstance(on_disk, str) else first(on_disk[0])

        chosen: dict[str, OnDisk] = {}
        for ours, usual in self.on_disk.items():
            ways = [there(usual), there(self.alternatives.get(ours, usual))]
            chosen[ours] = next((way for way in ways if first(way) in found), usual)
        return chosen

    def is_ignored(self, on_disk: str) -> bool:
        return any(re.search(pattern, on_disk) for pattern in self.ignored)

    def module(self, name: str) -> str:
        """How a checkpoint calls the module `name`: PEFT files, and most users, name it so. A stack of several there,
        or what it does not have, keeps its name."""
        on_disk = self.on_disk.get(f"{name}.weight")
        return on_disk.removesuffix(".weight") if isinstance(on_disk, str) else name

    def members(self, name: str) -> list[str]:
        """How a checkpoint calls the module `name`, or if that holds several experts, each of them."""
        on_disk = self.on_disk.get(f"{name}.weight")
        if not isinstance(on_disk, list):
            return [self.module(name)]
        return [each.removesuffix(".weight") for each in on_disk if isinstance(each, str)]

    def is_stack(self, name: str) -> bool:
        """Whether the module `name` holds several modules of a checkpoint."""
        return isinstance(self.on_disk.get(f"{name}.weight"), list)

    def is_joined(self, name: str) -> bool:
        """Whether the experts `name` are one tensor on disk, called there as in transformers: no module's weight."""
        on_disk = self.on_disk.get(f"{name}.weight")
        return isinstance(on_disk, str) and not on_disk.endswith(".weight")

    def stacked_modules(self) -> set[str]:
        """The modules of a checkpoint of which several are one tensor of ours: the projections of experts."""
        stacks = [on_disk for on_disk in self.on_disk.values() if isinstance(on_disk, list)]
        members = [member for stack in stacks for member in stack]
        flat = [name for member in members for name in ([member] if isinstance(member, str) else member)]
        return {name.removesuffix(".weight") for name in flat}

    def spellings(self, name: str) -> list[str]:
        """All that the module `name` may be called in settings: by us, in a checkpoint, by PEFT; of experts, each."""
        return [name, *(spelling for known in self.members(name) for spelling in spellings(known))]


def stored_tensors(model: nn.Module) -> dict[str, Tensor]:
    """What of `model` belongs into a checkpoint: parameters, tied ones once, and persistent buffers."""
    persistent = model.state_dict().keys()
    return dict(model.named_parameters()) | {
        name: buffer for name, buffer in model.named_buffers() if name in persistent
    }


def disk_parts(on_disk: OnDisk, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """(name, view of `tensor`) of what is on disk for it."""
    if isinstance(on_disk, str):
        yield on_disk, tensor
        return
    for names, member in zip(on_disk, tensor, strict=True):
        if isinstance(names, str):
            yield names, member
        else:
            yield from zip(names, member.chunk(len(names)), strict=True)


def own_name(on_disk: str) -> str:
    """How a language model by itself names what is called `on_disk` where it is a part of a larger one."""
    return on_disk.replace("language_model.", "", 1)


def spellings(on_disk: str) -> list[str]:
    """What PEFT calls the module that a checkpoint calls `on_disk`, be its model a part of a larger one or not."""
    own = own_name(on_disk)
    return [on_disk, own, own.replace("model.", "model.language_model.", 1)]


def peft_name(on_disk: str) -> str:
    """What PEFT calls the module or parameter that a checkpoint calls so: some put language_model before model."""
    return spellings(on_disk)[2] if on_disk != own_name(on_disk) else on_disk
