"""Run a recipe, or a copy of one, several times in one process group: `run_variants.py RECIPE OUTPUT COMMON_JSON
VARIANTS_JSON`. Variants may have edits, see `edited_recipes`."""

import functools
import json
import sys
from pathlib import Path

import torch

from tune import config


def run_variants(recipe: str, output: Path, common: list[str], variants: dict[str, list[str]]) -> None:
    """Run each variant: its overrides follow the common ones, and its run folder is `output`/name."""
    sys.path[:0] = [str(config.find_recipe(recipe).parent), str(Path(__file__).parents[1])]  # with the tests' functions
    from edited_recipes import run_edited

    torch.compile = functools.partial(torch.compile, backend="aot_eager")
    for name, overrides in variants.items():
        is_compiled = "compute.compile=" in " ".join(overrides)  # otherwise torchao's optimizers compile
        with torch.compiler.set_stance("default" if is_compiled else "force_eager"):
            run_edited(recipe, [*common, *overrides, f"output_dir={output / name}"])


if __name__ == "__main__":
    run_variants(sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3]), json.loads(sys.argv[4]))
