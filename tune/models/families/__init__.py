"""A family is what shares a Hugging Face `model_type`: how its config.json is read and how its parameters are named.

Each is a file in this folder, named for its model_type. `register` adds one from elsewhere.
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

REGISTERED: dict[str, "Family"] = {}


@dataclass(frozen=True)
class Family:
    """`names` pairs modules, or parameters that no module of their own holds, on disk with ours; `{}` stands for a
    number. A `{}` on disk that ours has not numbers the tensors whose stack is our parameter.

    `ignored` are patterns of tensors that a checkpoint may carry and the model does without: old ones have the
    rotary frequencies. `{num_layers}` in them is the number of layers.
    """

    read_config: Callable[[ConfigFile], DecoderConfig]
    names: dict[str, str]
    ignored: tuple[str, ...] = (r"rotary_emb\.inv_freq$",)

    def disk_name(self, name: str, rows: int) -> OnDisk:
        """The name on disk of our parameter `name`, or those of its `rows` if each is a tensor there."""
        on_disk = {ours: theirs for theirs, ours in self.names.items()}
        numbers = re.findall(r"(?<=\.)\d+(?=\.)", name)
        pattern = re.sub(r"(?<=\.)\d+(?=\.)", "{}", name)
        if pattern in on_disk:
            template = on_disk[pattern]
        else:
            module, _, kind = pattern.rpartition(".")
            template = f"{on_disk[module]}.{kind}"
        if template.count("{}") == len(numbers):
            return template.format(*numbers)
        return [template.format(*numbers, row) for row in range(rows)]


def register(model_type: str, family: Family) -> None:
    """Make `build` read checkpoints of another `model_type`, or read one of ours in another way."""
    REGISTERED[model_type] = family


def supported() -> list[str]:
    ours = {module.name for module in pkgutil.iter_modules(__path__)} - {"read"}
    return sorted(ours | REGISTERED.keys())


def family(model_type: str) -> Family:
    """The family of a `model_type`.

    Raises:
        TuneError: it is not supported; the message lists those that are.
    """
    if model_type in REGISTERED:
        return REGISTERED[model_type]
    if model_type not in supported():
        raise TuneError(
            f"config.json: model_type '{model_type}' has no family here; there are {', '.join(supported())}. Any "
            "other model of transformers is trained by model._component_=tune.models.hf"
        )
    return importlib.import_module(f"tune.models.families.{model_type}").FAMILY
