"""Build models from config.json: one decoder for all native families (families/ reads each config.json), and hf.py,
which wraps any other causal language model of transformers."""

from tune.models.attention import Choice, capability
from tune.models.build import as_reward_model, build, prepare_scores, set_pad
from tune.models.config_file import ConfigFile, no_folder, read_json
from tune.models.context import KeyValueCache
from tune.models.decoder import Decoder, DecoderConfig, TrainableModel, weight_flops
from tune.models.hf import HuggingFaceModel, hf, is_transformers_model, require_no_peft, without_bars
from tune.models.moe import Dispatch, ExpertLinear, ExpertsConfig, grouped_product
from tune.models.names import Names, OnDisk, disk_names, disk_parts, own_name, peft_name, stored_tensors, without_names
from tune.models.rope import SCALINGS, RopeConfig
from tune.models.routing import Router, Routing

# The other imported names are for the packages of `tune` only.
__all__ = [
    "Decoder",
    "DecoderConfig",
    "HuggingFaceModel",
    "KeyValueCache",
    "Names",
    "TrainableModel",
    "build",
    "hf",
    "prepare_scores",
]
