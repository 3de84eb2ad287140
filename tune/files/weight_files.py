"""Choose the weight files of a checkpoint folder, and tell models from adapters."""

import json
from contextlib import suppress
from pathlib import Path

from tune.errors import TuneError

ADAPTER_CONFIG = "adapter_config.json"
WHOLE = ("model.safetensors", "pytorch_model.bin")


def weight_files(folder: Path) -> list[Path]:
    """Return the weight files of a checkpoint folder, or the index that lists them; empty if there are none.

    They are chosen like in transformers: model.safetensors, else its index, else pytorch_model.bin, else its index.
    Files that transformers does not read come last: shards without an index, other `*.safetensors`.
    """
    for whole in WHOLE:
        for file in (folder / whole, folder / f"{whole}.index.json"):
            if file.exists():
                return [file]
    for pattern in ("model-*.safetensors", "*.safetensors", "pytorch_model-*.bin"):
        if files := [file for file in sorted(folder.glob(pattern)) if not file.name.startswith("adapter_")]:
            return files
    return []


def is_adapter(folder: Path) -> bool:
    """Return whether a folder is an adapter in PEFT's layout; it may have a copy of its base's config.json.

    Raises TuneError if the folder also has a model's weights: some programs read these, others the
    adapter and the base that its config names.
    """
    if not (folder / ADAPTER_CONFIG).exists():
        return False
    weights = [file.name for file in weight_files(folder)]
    if not weights or not (folder / "config.json").exists():
        return True
    base = None
    with suppress(ValueError, AttributeError):  # whoever reads the adapter reports a broken file
        base = json.loads((folder / ADAPTER_CONFIG).read_text(encoding="utf-8")).get("base_model_name_or_path")
    raise TuneError(
        f"{folder} has the files of two models: a model's own weights ({weights[0]}), and an adapter "
        f"({ADAPTER_CONFIG}) of {base or 'a base that it does not name'}. Move adapter_* to another folder. Then "
        f"give {folder} for the weights, or the other folder for the adapter"
    )
