"""What a model is made of, as the model itself says: language, projector and tower.

A model of images and text has `tower`, the module that reads pictures, `language`, the module that reads tokens, and
`part_of(name)`, the part of a module or parameter. Every other model is all language.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Literal

from torch import nn

ModelPart = Literal["language", "projector", "tower"]
"""The layers that read tokens, with embedding and head; those that turn a tower's features into embeddings; and those
that read pictures."""


def language_of(model: Any) -> nn.Module:
    """Return the part of `model` that reads tokens: the model itself unless it has a tower."""
    return model.language if _says_its_parts(model) else model


def part_of(model: Any, name: str) -> ModelPart:
    """Return the part of `model` to which the module or parameter `name` belongs."""
    return model.part_of(name) if _says_its_parts(model) else "language"


def tower_blocks(model: Any) -> list[nn.Module]:
    """Return the members of the outermost nn.ModuleLists of the tower; nothing for a model without a tower."""
    return [*_blocks(model.tower)] if _says_its_parts(model) else []


def chosen_parts(model: Any) -> Sequence[ModelPart] | None:
    """Return the parts that are trained or adapted, if the caller of `tune.models.hf` chose them."""
    return model.parts if _says_its_parts(model) else None


def _says_its_parts(model: Any) -> bool:
    """Whether the model has a tower; other modules may use these names for something else."""
    return hasattr(model, "part_of") and model.tower is not None


def _blocks(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        if isinstance(child, nn.ModuleList):
            yield from (block for block in child if any(True for _ in block.parameters()))
        else:
            yield from _blocks(child)
