"""Models, described by their checkpoint folder alone."""

from tune.models.build import build
from tune.models.context import KeyValueCache
from tune.models.decoder import Decoder, DecoderConfig
from tune.models.hf import HuggingFaceModel, hf

__all__ = ["Decoder", "DecoderConfig", "HuggingFaceModel", "KeyValueCache", "build", "hf"]
