"""Qwen3.5 (dense) as it is released, reading images too: its text model is trained, the rest is exported as it was."""

from tune.models.config_file import ConfigFile
from tune.models.decoder import DecoderConfig
from tune.models.families import Family, qwen3_5_text

NAMES = {theirs.replace("model.", "model.language_model.", 1): ours for theirs, ours in qwen3_5_text.NAMES.items()}


def read_config(file: ConfigFile) -> DecoderConfig:
    file.ignore("vision_config", "image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    text = file.section("text_config")
    text.expect(model_type="qwen3_5_text")
    text.fields |= {"tie_word_embeddings": file.flag("tie_word_embeddings")}  # the outer one counts
    return qwen3_5_text.read_config(text)


FAMILY = Family(read_config, NAMES, ignored=(r"^model\.visual\.", r"^mtp\."))
