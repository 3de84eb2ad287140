"""Copies of recipes with edits of docs/changes.md, where a test needs one as it needs a setting.

A test writes `edit=NAME` among its settings: `edit=random`, `edit=bf16`, `edit=trace`, or a kind of quantization
(`edit=int8`) in which the weights are rounded in training.
"""

import hashlib
import importlib
import os
import runpy
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import cast

from tune import config

PARALLELIZE = "    distributed.parallelize(model, world, "
STEPS = "run.steps(data, checkpointer, evaluator, seed=cfg.seed)"
EXPORT = 'run.path / "model", source=cfg.model.path, card=card'
ROUND = """
    types = checkpointers.exported_types(model, cfg.model.path{dtype})
    quantization.round_linears(model, "{kind}", types, cfg.compute.dtype)
"""
REPLACED: dict[str, list[tuple[str, str]]] = {
    "random": [("checkpointers.Pretrained(cfg.model.path, model)", "checkpointers.Random(cfg.seed)")],
    "bf16": [(EXPORT, f'{EXPORT}, dtype="bf16"')],
    "trace": [
        ("from tune.run import Run\n", "from tune.run import Run, profile\n"),
        (STEPS, f'profile({STEPS}, run.path / "profile", world, start=1, steps=1)'),
    ],
}
EDIT = "edit="


def separated(settings: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the edits among the settings, and the other settings."""
    edits = {setting.removeprefix(EDIT): None for setting in settings if setting.startswith(EDIT)}
    return [*edits], [setting for setting in settings if not setting.startswith(EDIT)]


def with_edits(recipe: str, settings: Sequence[str]) -> tuple[str, list[str]]:
    """Return the recipe and settings to run: with edits, a copy's path. `recipe` is a name or the path of a copy."""
    edits, others = separated(settings)
    return edited(recipe, *edits) if edits else recipe, others


def edited(recipe: str, *edits: str) -> str:
    """Return the path of a copy of the recipe with these edits, in the cache folder of the tests. Its settings are
    next to it."""
    text = config.find_recipe(recipe).read_text(encoding="utf-8")
    settings = config.find_config(settings_of(recipe)).read_text(encoding="utf-8")
    for old, new in (pair for edit in edits for pair in _replaced(edit, edits)):
        assert text.count(old) == 1, (recipe, old)
        text = text.replace(old, new)
    digest = hashlib.sha256((text + settings).encode()).hexdigest()[:16]
    folder = Path(os.environ["TUNE_CACHE"]) / "edited" / digest
    folder.mkdir(parents=True, exist_ok=True)
    for file, content in (folder / "mine.yaml", settings), (folder / "mine.py", text):
        written = file.with_name(uuid.uuid4().hex)  # other processes may write or read the same copy
        written.write_text(content, encoding="utf-8")
        written.replace(file)
    return str(folder / "mine.py")


def _replaced(edit: str, edits: Sequence[str]) -> list[tuple[str, str]]:
    """Return the texts that an edit replaces, and what replaces them."""
    if edit in REPLACED:
        return REPLACED[edit]
    lines = ROUND.format(kind=edit, dtype=', "bf16"' if "bf16" in edits else "").removeprefix("\n")
    return [
        ("\nfrom tune.config import", "\nfrom tune import quantization\nfrom tune.config import"),
        (PARALLELIZE, f"{lines}{PARALLELIZE}"),
    ]


def settings_of(recipe: str) -> str:
    """Return the name or path of a recipe's settings; `recipe` is a name or a copy's path."""
    return str(Path(recipe).with_suffix(".yaml")) if recipe.endswith(".py") else recipe


def main_of(recipe: str) -> Callable[..., None]:
    """Return a recipe's `main`; `recipe` is a name or a copy's path."""
    if recipe.endswith(".py"):
        return cast(Callable[..., None], runpy.run_path(recipe)["main"])
    return cast(Callable[..., None], importlib.import_module(recipe).main)


def run_edited(recipe: str, settings: Sequence[str]) -> None:
    """Run a recipe, or a copy of one, in this process. The settings may have edits."""
    recipe, settings = with_edits(recipe, settings)
    main_of(recipe)(config.load(settings_of(recipe), settings))
