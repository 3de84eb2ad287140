"""Copied recipes that update each parameter in the backward, with the change from docs/changes.md."""

import shutil
from pathlib import Path

from docs_reader import BLOCK, ROOT, change

from tune import config

PAGE = (ROOT / "docs" / "changes.md").read_text()
SECTION = PAGE.split("\n## Update each parameter in the backward\n")[1].split("\n## ")[0]
DIFFS = [block for language, block in BLOCK.findall(SECTION) if language == "diff"]


def in_backward(recipe: str, folder: Path) -> str:
    """Return the path of a changed copy of the recipe without `max_grad_norm`; its settings are next to it."""
    place = folder / recipe
    place.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(config.find_recipe(recipe), place / "mine.py")
    shutil.copyfile(config.find_config(recipe), place / "mine.yaml")
    for diff in DIFFS:
        change(diff, place)
    return str(place / "mine.py")
