"""Choose the weight files of a checkpoint folder."""

from pathlib import Path

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
