"""Whether the files of a checkpoint are those that were written."""

import json
from pathlib import Path

from tune.checkpointers.disk import sampled_digest

NAME = "digests.json"


def write_digests(folder: Path) -> None:
    """Keep a digest of the size and of samples of each file in `folder`: 256 KB of a file are read."""
    digests = {file.name: sampled_digest([], [file]) for file in sorted(folder.iterdir())}
    (folder / NAME).write_text(json.dumps(digests, indent=2) + "\n")


def found_damage(folder: Path) -> str:
    """What is not as it was written, or nothing. Checkpoints of earlier versions have no digests."""
    if not (folder / NAME).exists():
        return ""
    try:
        digests = json.loads((folder / NAME).read_text())
    except ValueError:
        return f"{NAME} cannot be read"
    for name, digest in digests.items():
        if not (folder / name).exists():
            return f"{name} is missing"
        if sampled_digest([], [folder / name]) != digest:
            return f"{name} is not as it was written"
    return ""
