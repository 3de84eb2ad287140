"""Gemma 3 that reads images too: its text model is trained, what belongs to images is exported as it was."""

from tune.models.config_file import ConfigFile
from tune.models.decoder import DecoderConfig
from tune.models.families import Family, gemma3_text

NAMES = {f"language_model.{theirs}": ours for theirs, ours in gemma3_text.NAMES.items()}


def read_config(file: ConfigFile) -> DecoderConfig:
    file.ignore("vision_config", "mm_tokens_per_image", "boi_token_index", "eoi_token_index", "image_token_index")
    file.ignore("initializer_range")  # the text model has its own
    file.expect(tie_word_embeddings=True)
    text = file.section("text_config")
    text.expect(model_type="gemma3_text")
    return gemma3_text.read_config(text)


FAMILY = Family(read_config, NAMES, ignored=(r"^vision_tower\.", r"^multi_modal_projector\."))
