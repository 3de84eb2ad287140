"""How a checkpoint wants to be sampled from."""

from pathlib import Path
from typing import Any

from tune.tokenizers.folder import read_json

SETTINGS = ("temperature", "top_k", "top_p", "min_p")
UNKNOWN = {"repetition_penalty": 1.0, "no_repeat_ngram_size": 0, "num_beams": 1, "typical_p": 1.0}  # and off


def sampling_settings(folder: Path, **given: float | None) -> tuple[dict[str, Any], str]:
    """The sampler's settings: those `given`, and for the others what generation_config.json in the `folder` says, which
    is the most likely token where it does not say do_sample. Also in words."""
    file = read_json(folder / "generation_config.json")
    settings = {name: file.get(name) for name in SETTINGS} if file.get("do_sample") else {"temperature": 0.0}
    settings |= {name: value for name, value in given.items() if value is not None}
    settings = {name: value for name, value in settings.items() if value is not None and (name, value) != ("top_k", 0)}
    temperature = settings.setdefault("temperature", 1.0)
    shown = ", ".join(f"{name} {value:g}" for name, value in settings.items())
    ignored = [f"{name}={file[name]}" for name, off in UNKNOWN.items() if file.get(name, off) not in (off, None)]
    notes = "".join(f"; {each} of generation_config.json is not applied" for each in ignored)
    return settings, (shown if temperature else "the most likely token") + notes
