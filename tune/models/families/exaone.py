"""EXAONE 4: norms after the parts, normalised queries and keys; full layers do not rotate if others slide."""

from tune.models.config_file import ConfigFile
from tune.models.decoder import DecoderConfig, LayerConfig
from tune.models.families import Family, read
from tune.models.families.olmo import NAMES


def read_exaone4(file: ConfigFile) -> DecoderConfig:
    file.assume(sliding_window=4096, sliding_window_pattern=4, rms_norm_eps=1e-5)
    every = file.get("sliding_window_pattern")
    if isinstance(every, str):
        file.expect(sliding_window_pattern="L" * (len(every) - 1) + "G")
        every = len(every)
    windows = read.windows(file, lambda index: bool(every) and (index + 1) % every != 0)
    norm, rope = read.rms_norm(file), read.rope(file)
    attention = read.attention(file, None if file.get("sliding_window") else rope, query_key_norm=norm)
    layer = LayerConfig(attention, read.mlp(file), norm_before=False, norm_after=True)
    return read.decoder(file, read.with_windows(layer, windows, sliding_rope=rope))


FAMILIES = {"exaone4": Family(read_exaone4, NAMES)}
