"""What a model is made of, as the model itself says: language, projector and tower.

A model of images and text has `tower`, the module that reads pictures, `language`, the module that reads tokens, and
`part_of(name)`, the part of a module or parameter. Every other model is all language.
"""

from collections.abc import Iterator
from typing import Any, Literal

from torch import nn

ModelPart = Literal["language", "projector", "tower"]
"""The layers that read tokens, with embedding and head; those that turn a tower's features into embeddings; and those
that read pictures."""


def language_of(model: Any) -> nn.Module:
    """Return the part of `model` that reads tokens: the model itself unless it has a tower."""
    return model if getattr(model, "tower", None) is None else model.language


def part_of(model: Any, name: str) -> ModelPart:
    """Return the part of `model` to which the module or parameter `name` belongs."""
    return "language" if getattr(model, "tower", None) is None else model.part_of(name)


def tower_blocks(model: Any) -> list[nn.Module]:
    """Return the members of the outermost nn.ModuleLists of the tower; nothing for a model without a tower."""
    tower = getattr(model, "tower", None)
    return [] if tower is None else [*_blocks(tower)]


def _blocks(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        if isinstance(child, nn.ModuleList):
            yield from (block for block in child if any(True for _ in block.parameters()))
        else:
            yield from _blocks(child)
