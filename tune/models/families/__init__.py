"""A family is what shares a Hugging Face `model_type`: how its config.json is read and how its parameters are named."""

import importlib
import re
from collections.abc import Callable
from dataclasses import dataclass

from tune.errors import TuneError
from tune.models.config_file import ConfigFile
from tune.models.decoder import DecoderConfig

SUPPORTED = ("llama", "qwen3")


@dataclass(frozen=True)
class Family:
    """`names` pairs module names on disk with ours; `{}` stands for the number of a layer.

    `not_weights` are endings of tensors that a checkpoint may carry and the model may do without.
    """

    read_config: Callable[[ConfigFile], DecoderConfig]
    names: dict[str, str]
    not_weights: tuple[str, ...] = ()

    def disk_name(self, name: str) -> str:
        """The name on disk of our parameter `name`."""
        module, _, kind = name.rpartition(".")
        layers = re.findall(r"\d+", module)
        on_disk = {ours: theirs for theirs, ours in self.names.items()}[re.sub(r"\d+", "{}", module)]
        return f"{on_disk.format(*layers)}.{kind}"


def family(model_type: str) -> Family:
    """The family of a `model_type`.

    Raises:
        TuneError: it is not supported; the message lists those that are.
    """
    if model_type not in SUPPORTED:
        raise TuneError(f"config.json: model_type '{model_type}' is not supported; supported: {', '.join(SUPPORTED)}")
    return importlib.import_module(f"tune.models.families.{model_type}").FAMILY
