"""Mistral Small 3.1, Ministral 3 and kin that read images: the text model is trained, the rest exported as it was."""

from tune.models.config_file import ConfigFile
from tune.models.decoder import DecoderConfig
from tune.models.families import Family, ministral3, mistral
from tune.models.families.llama import NAMES as LLAMA_NAMES

NAMES = {f"language_model.{theirs}": ours for theirs, ours in LLAMA_NAMES.items()}


def read_config(file: ConfigFile) -> DecoderConfig:
    file.ignore("vision_config", "image_token_index", "multimodal_projector_bias", "projector_hidden_act")
    file.ignore("spatial_merge_size", "vision_feature_layer", "tie_word_embeddings")  # the text model says whether
    text = file.section("text_config")
    readers = {"mistral": mistral.read_config, "ministral3": ministral3.read_config}
    return readers[text.choice("model_type", readers)](text)


FAMILY = Family(read_config, NAMES, ignored=(r"^vision_tower\.", r"^multi_modal_projector\."))
