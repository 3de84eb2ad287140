"""Model families: how the config.json of a Hugging Face `model_type` is read, and how its parameters are named.

Each file in this folder registers the families of one lineage. Your own file can register families too.
"""

import importlib
import pkgutil
import re
from collections.abc import Callable
from dataclasses import dataclass

from tune.errors import TuneError
from tune.models.config_file import ConfigFile
from tune.models.decoder import DecoderConfig
from tune.models.names import OnDisk

FAMILIES: dict[str, "Family"] = {}


@dataclass(frozen=True)
class Family:
    """The models of one `model_type`.

    `names` maps names of modules, or of parameters without a module of their own, from disk to ours. `{}` stands for a
    number. If the name on disk has one more `{}` than ours, our parameter is the stack of these tensors.

    `ignored` has patterns of tensors on disk that the model does not use, such as the rotary frequencies of old
    checkpoints. `{num_layers}` in a pattern stands for the number of layers.
    """

    read_config: Callable[[ConfigFile], DecoderConfig]
    names: dict[str, str]
    ignored: tuple[str, ...] = (r"rotary_emb\.inv_freq$",)

    def disk_name(self, name: str, rows: int) -> OnDisk:
        """The name on disk of our parameter `name`, or the names of its `rows` if each is a tensor on disk."""
        on_disk = {ours: theirs for theirs, ours in self.names.items()}
        numbers = re.findall(r"(?<=\.)\d+(?=\.)", name)
        pattern = re.sub(r"(?<=\.)\d+(?=\.)", "{}", name)
        module, _, kind = pattern.rpartition(".")
        template = on_disk.get(pattern) or f"{on_disk[module]}.{kind}"
        if template.count("{}") == len(numbers):
            return template.format(*numbers)
        return [template.format(*numbers, row) for row in range(rows)]


def register(model_type: str, family: Family) -> None:
    """Make `build` read checkpoints of another `model_type`, or replace the reader of a known one."""
    FAMILIES[model_type] = family


def supported() -> list[str]:
    return sorted(FAMILIES)


def family(model_type: str) -> Family:
    """The family of a `model_type`. Raises TuneError, which lists the native ones, if it is not native."""
    if found := FAMILIES.get(model_type):
        return found
    raise TuneError(f"config.json: model_type '{model_type}' is not native. Native families: {', '.join(supported())}")


for each in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{each.name}")
