"""Models, described by their checkpoint folder alone."""

from tune.models.build import build
from tune.models.context import KeyValueCache
from tune.models.decoder import Decoder, DecoderConfig

__all__ = ["Decoder", "DecoderConfig", "KeyValueCache", "build"]
