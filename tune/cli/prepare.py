"""Tokenise the datasets of a run into the cache (dataset.cache_dir, else $TUNE_CACHE, else ~/.cache/tune) and print
what becomes of their rows. A run with the same data, tokenizer and settings then starts from there. Needs no weights
and no GPU. The arguments are those of `tune run`; RECIPE may be a config: then the recipe is the one that has its
keys."""

import sys
from argparse import ArgumentParser
from collections.abc import Sequence
from pathlib import Path

from omegaconf import DictConfig

from tune import config
from tune.cli.run import default_config
from tune.errors import TuneError
from tune.secrets import without_secrets


def main(parser: ArgumentParser, arguments: Sequence[str]) -> None:
    parser.usage = "tune prepare RECIPE [--config FILE_OR_NAME] [key=value ...]"
    if not arguments or arguments[0] in ("-h", "--help"):
        parser.print_help()
        return
    cfg = settings(arguments)

    from tune.datasets import Stream
    from tune.datasets.display import parts_of
    from tune.datasets.warnings import warnings_about

    tokenizer = config.instantiate(cfg.tokenizer)
    dataset, validation = config.instantiate_data(cfg, tokenizer)
    for part in filter(None, (dataset, validation)):
        if isinstance(part, Stream):
            print(without_secrets(f"{part.name} is streamed: nothing of it is kept. Its first rows:"))
        print(part.accounting.table(), flush=True)
    found = warnings_about(parts_of(dataset, "training"), parts_of(validation, "validation"), tokenizer)
    print("\n  ".join(["warnings", *found] if found else ["no warnings"]))


def settings(arguments: Sequence[str]) -> DictConfig:
    """The settings of a run, given its recipe or its config and what stands behind it on the command line."""
    first, *rest = arguments
    is_config = first.endswith((".yaml", ".yml"))
    recipe = Path(first).with_suffix(".py") if is_config else config.find_recipe(first)
    default = default_config(recipe) if recipe.is_file() else None
    if default and (not is_config or Path(default) == Path(first)):
        sys.path.insert(0, str(recipe.resolve().parent))  # components beside the recipe can be named
        return config.load(default, rest)
    if not is_config:
        raise TuneError(f"{recipe} does not name its settings: @config.entrypoint(...) is not in it")
    rest = ["--config", first, *rest]
    return config.load(min(config.list_recipes(), key=lambda name: _count_unknown(name, rest)), rest)


def _count_unknown(recipe: str, arguments: Sequence[str]) -> int:
    """Settings that are none of this recipe's."""
    _, findings = config.read(recipe, arguments, imports=False)
    return len(findings)
