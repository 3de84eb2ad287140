"""Builds the decoder that a checkpoint's config.json describes."""

from dataclasses import replace
from pathlib import Path

from tune.errors import TuneError
from tune.models.config_file import ConfigFile
from tune.models.decoder import Decoder
from tune.models.families import family
from tune.models.names import Names
from tune.types import NonNegativeFloat


def build(path: str, router_loss: NonNegativeFloat | None = None) -> Decoder:
    """The decoder that `path`/config.json describes. Under `torch.device("meta")` it takes no memory.

    `router_loss` is the weight of the load-balancing loss of experts (see `RoutingStats`); None: the file's
    `router_aux_loss_coef` if its `output_router_logits` is true, else 0.

    Raises:
        TuneError: the folder does not exist, config.json is unreadable or has an unsupported architecture or field, or
            there is a `router_loss` for a model without experts.
    """
    file = ConfigFile(Path(path))
    architecture = family(str(file.get("model_type", "(none)")))
    config = architecture.read_config(file)
    file.finish()
    if router_loss is not None:
        config = replace(config, router_loss=router_loss)
    model = Decoder(config)
    if config.router_loss and model.routing is None:
        raise TuneError(f"model.router_loss: {path} has no experts to balance; leave it out")
    tensors = [*model.named_parameters(), *model.named_buffers()]
    head = architecture.disk_name("head.weight", 0)
    model.names = Names(
        {name: architecture.disk_name(name, len(tensor)) for name, tensor in tensors},
        copies={head: "embedding.weight"} if config.tied_head and isinstance(head, str) else {},
        ignored=tuple(pattern.replace("{num_layers}", str(len(config.layers))) for pattern in architecture.ignored),
    )
    return model
