"""Models, described by their checkpoint folder alone."""

from tune.models.build import build
from tune.models.decoder import Decoder, DecoderConfig, KeyValueCache

__all__ = ["Decoder", "DecoderConfig", "KeyValueCache", "build"]
