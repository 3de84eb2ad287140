"""Run a recipe, or a copy of one, several times in one process group: `run_variants.py RECIPE OUTPUT COMMON_JSON
VARIANTS_JSON`."""

import functools
import importlib
import json
import runpy
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from tune import config


def main_of(recipe: str) -> tuple[Callable[..., None], str]:
    """Return a recipe's `main` and the name or path of its settings; `recipe` is a name or a copy's path."""
    if recipe.endswith(".py"):
        return runpy.run_path(recipe)["main"], str(Path(recipe).with_suffix(".yaml"))
    return importlib.import_module(recipe).main, recipe


def run_variants(recipe: str, output: Path, common: list[str], variants: dict[str, list[str]]) -> None:
    """Run each variant: its overrides follow the common ones, and its run folder is `output`/name."""
    sys.path[:0] = [str(config.find_recipe(recipe).parent), str(Path(__file__).parents[1])]  # with the tests' functions
    main, default = main_of(recipe)
    torch.compile = functools.partial(torch.compile, backend="aot_eager")
    for name, overrides in variants.items():
        is_compiled = "compile=" in " ".join(overrides)  # otherwise torchao's optimizers compile
        with torch.compiler.set_stance("default" if is_compiled else "force_eager"):
            main(config.load(default, [*common, *overrides, f"output_dir={output / name}"]))


if __name__ == "__main__":
    run_variants(sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3]), json.loads(sys.argv[4]))
