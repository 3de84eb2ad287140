"""Compare the settings in an artifact's files with the run's. The results of short texts and of greedy answers do not
depend on all of them."""

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tune.convert import metadata_of
from tune.errors import TuneError, explained
from tune.files import ADAPTER_CONFIG, is_adapter
from tune.lookup import needs
from tune.models import Decoder, read_json
from tune.verify.comparison import Check

# Keys of generation_config.json that do not change answers. Tokens that end an answer are a check of their own.
IGNORED = re.compile(r"_|transformers_version|(bos|eos|pad)_token_id|output_|return_dict|.*(cache|compile|assistant)")
SAMPLING = ("temperature", "top_k", "top_p", "min_p", "typical_p", "top_h", "epsilon_cutoff", "eta_cutoff")
# Fields of config.json with which short texts give the same results.
FIELDS = (
    "max_position_embeddings", "sliding_window", "layer_types", "rope_parameters", "rms_norm_eps", "layer_norm_eps",
    "layer_norm_epsilon",
)  # fmt: skip
# The same in GGUF, which llama.cpp's converter and `tune export` write alike.
KEYS = (
    "context_length", "attention.sliding_window", "attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon",
    "rope.freq_base", "rope.freq_base_swa", "rope.scaling.type", "rope.scaling.factor",
)  # fmt: skip


def compare_settings(artifact: Path, program: str, base: Path, model: Any) -> list[Check]:
    """Compare the settings of an artifact, which `program` opens, with the run's: those in the folder `base` or, for
    GGUF, those of `model`."""
    if artifact.is_file():
        family = str(read_json(base / "config.json", "--against").get("model_type"))
        try:
            expected = metadata_of(model.config, family) if isinstance(model, Decoder) else {}
        except TuneError:  # only llama.cpp's converter exports this model
            return []
        return [_settings("config", *_of_gguf(artifact, expected))]
    folder = artifact
    if is_adapter(artifact):
        folder = Path(str(read_json(artifact / ADAPTER_CONFIG, "ARTIFACT").get("base_model_name_or_path")))
    read = [(_generation(each, program), _config(each)) for each in (base, folder)]
    return [_settings(name, *both) for name, *both in zip(("generation", "config"), *read, strict=True)]


def _settings(name: str, own: Mapping[str, Any], theirs: Mapping[str, Any]) -> Check:
    names = sorted({*own, *theirs})
    differing = [each for each in names if not _equal(own.get(each), theirs.get(each))]
    said = [f"{each} is {_shown(theirs, each)}, in the run {_shown(own, each)}" for each in differing]
    same, count = f"{len(names) - len(differing)} the same", f"{len(differing)} settings"
    return Check(name, f"{len(names)} settings", same, count, "0", not differing, "; ".join(said))


def _shown(settings: Mapping[str, Any], name: str) -> str:
    value = settings.get(name, "not set")
    return f"{value:.6g}" if isinstance(value, float) else str(value)[:200]


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, float) and isinstance(other, float):  # GGUF has fp32
        return math.isclose(one, other, rel_tol=1e-6)
    return bool(one == other)


def _generation(folder: Path, program: str) -> dict[str, Any]:
    """Return the settings with which `program` samples an answer by default, except for those at the library's default.
    vLLM samples whether or not do_sample is set."""
    import transformers

    config_class = transformers.GenerationConfig
    with explained(f"the generation settings of {folder} cannot be read", Exception):
        try:
            found = config_class.from_pretrained(folder)
        except OSError:  # no such file: transformers takes them from config.json
            found = config_class.from_model_config(
                transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
            )
    defaults = config_class._get_default_generation_params()
    fields = {
        name: value
        for name, value in found.to_dict().items()
        if value is not None and value != defaults.get(name) and not IGNORED.match(name)
    }
    if program == "vllm":
        return {name: value for name, value in fields.items() if name != "do_sample"}
    is_greedy = not fields.get("do_sample")
    return {name: value for name, value in fields.items() if not (is_greedy and name in SAMPLING)}


def _config(folder: Path) -> dict[str, Any]:
    """Return `FIELDS` of config.json in transformers' present spelling."""
    with needs("hf", "tune verify"):
        import transformers
    with explained(f"{folder / 'config.json'} cannot be read", Exception):
        config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False).get_text_config()
    fields = {name: getattr(config, name, None) for name in FIELDS}
    if isinstance(rope := fields["rope_parameters"], dict):  # "type" is an old name of "rope_type"
        fields["rope_parameters"] = {name: each for name, each in rope.items() if name != "type" and each is not None}
    return {name: value for name, value in fields.items() if value is not None}


def _of_gguf(file: Path, expected: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return those of `KEYS` that are both in the file and `expected`: expected values, and the file's."""
    with needs("hf", "GGUF"):
        import gguf
    with explained(f"{file} is not a GGUF file", Exception):
        fields = gguf.GGUFReader(file).fields
        found = {name.partition(".")[2]: field.contents() for name, field in fields.items()}
    both = [name for name in KEYS if name in found and name in expected]
    return {name: expected[name] for name in both}, {name: found[name] for name in both}
