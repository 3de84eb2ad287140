"""From a checkpoint folder to a model: its shape from config.json alone."""

from pathlib import Path

from tune.models.config_file import ConfigFile
from tune.models.decoder import Decoder
from tune.models.families import family


def build(path: str) -> Decoder:
    """The decoder that `path`/config.json describes. Under `torch.device("meta")` it takes no memory.

    Raises:
        TuneError: no such folder, an unreadable config.json, an architecture or a field of it that is not supported.
    """
    file = ConfigFile(Path(path))
    architecture = family(file.get("model_type", "(none)"))
    config = architecture.read_config(file)
    file.finish()
    model = Decoder(config)
    tensors = [*model.named_parameters(), *model.named_buffers()]
    model.disk_names = {name: architecture.disk_name(name, len(tensor)) for name, tensor in tensors}
    if config.tied_head and isinstance(head := architecture.disk_name("head.weight", 0), str):
        model.disk_copies = {head: "embedding.weight"}
    model.not_weights = architecture.not_weights
    return model
