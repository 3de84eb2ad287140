"""Models, described by their checkpoint folder alone."""

from tune.models.build import build
from tune.models.context import KeyValueCache
from tune.models.decoder import Decoder, DecoderConfig
from tune.models.hf import HuggingFaceModel, hf
from tune.models.routing import balance_loss

__all__ = ["Decoder", "DecoderConfig", "HuggingFaceModel", "KeyValueCache", "balance_loss", "build", "hf"]
