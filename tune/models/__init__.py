"""Models, built from config.json. One decoder for all families; families/ has how each config.json is read; hf.py
wraps any other causal language model of transformers."""

from tune.models.build import build, prepare_scores
from tune.models.context import KeyValueCache
from tune.models.decoder import Decoder, DecoderConfig, TrainableModel
from tune.models.hf import HuggingFaceModel, hf
from tune.models.names import Names
from tune.models.routing import balance_loss
