"""GLM-4.5, 4.6 and 4.7: experts as in DeepSeek-V3, plain attention that rotates half of each head."""

from tune.models.config_file import ConfigFile
from tune.models.decoder import DecoderConfig
from tune.models.families import Family, read
from tune.models.families.deepseek_v3 import CORRECTED_EXPERT_NAMES, NOT_WEIGHTS, read_layers
from tune.models.families.qwen3 import NAMES as QWEN3_NAMES


def read_config(file: ConfigFile) -> DecoderConfig:
    file.assume(
        max_position_embeddings=131072, rms_norm_eps=1e-5, partial_rotary_factor=0.5, first_k_dense_replace=1,
    )  # fmt: skip
    norm = read.rms_norm(file)
    attention = read.attention(
        file, read.rope(file, partial=True), bias=file.flag("attention_bias"),
        query_key_norm=norm if file.flag("use_qk_norm") else None,
    )  # fmt: skip
    return read.decoder(file, read_layers(file, attention), norm)


FAMILY = Family(read_config, QWEN3_NAMES | CORRECTED_EXPERT_NAMES, NOT_WEIGHTS)
