"""OLMo 3: OLMo 2 with windows in three of four layers; a scaled rotation is that of the others only."""

from tune.models.config_file import ConfigFile
from tune.models.decoder import DecoderConfig
from tune.models.families import Family, read
from tune.models.families.olmo2 import NAMES, read_olmo2_layer


def read_config(file: ConfigFile) -> DecoderConfig:
    file.assume(rms_norm_eps=1e-5, sliding_window=4096, rope_theta=500000.0)
    norm = read.rms_norm(file)
    full, sliding = read.two_ropes(file, sliding_theta=file.number("rope_theta"))
    windows = read.windows(file, lambda index: (index + 1) % 4 != 0)
    return read.decoder(file, read.with_windows(read_olmo2_layer(file, full, norm), windows, sliding), norm)


FAMILY = Family(read_config, NAMES)
