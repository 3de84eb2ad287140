"""Tokenise the data of a run ahead of time: into the cache (dataset.cache_dir, else $TUNE_CACHE, else ~/.cache/tune).
It prints what becomes of their rows. A run with the same data, tokenizer and settings then starts from there. Needs
no weights and no GPU, unless `teacher.top_k` is given: then the teacher's predictions are kept there too. The
arguments are those of `tune run`; RECIPE may be a config: then the recipe is the one that has its keys."""

import runpy
import sys
from argparse import ArgumentParser
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from tune import config
from tune.cli.run import default_config, parse_options
from tune.errors import TuneError
from tune.secrets import without_secrets


def main(parser: ArgumentParser, arguments: list[str]) -> None:
    parser.usage = "tune prepare RECIPE [--config FILE_OR_NAME] [key=value ...]"
    parser.add_argument("recipe", metavar="RECIPE")
    options, rest = parse_options(parser, arguments)
    cfg = settings(options.recipe, rest)

    from tune.datasets import Stream, parts_of, warnings_about

    tokenizer = config.instantiate(cfg.tokenizer)
    if "max_prompt_len" in cfg:
        print("prompts are read anew by each run: nothing is kept")
        for name, prompts in prompts_of(cfg, tokenizer).items():
            print(f"{name}: {prompts.table()}")
        return
    dataset, validation = data_of(cfg, tokenizer)
    for part in filter(None, (dataset, validation)):
        if isinstance(part, Stream):
            print(without_secrets(f"{part.name} is streamed: nothing of it is kept. Its first rows:"))
        print(part.accounting.table(), flush=True)
    found = warnings_about(parts_of(dataset, "training"), parts_of(validation, "validation"), tokenizer)
    print("\n  ".join(["warnings", *found] if found else ["no warnings"]), flush=True)
    if "teacher" in cfg and cfg.teacher.top_k:
        from tune import distributed

        tokenizer.require_same_ids(type(tokenizer)(cfg.teacher.path), "teacher.path")
        recipe = runpy.run_path(str(config.find_recipe("distill")))
        recipe["store_predictions"](cfg, distributed.init(cfg.device), tokenizer, dataset, validation)
        print(f"the teacher's {cfg.teacher.top_k} most probable tokens are stored")


def data_of(cfg: DictConfig, tokenizer: Any, vocab_size: int | None = None) -> tuple[Any, Any]:
    """The datasets that a recipe makes of its settings, to train and to validate on."""
    return config.instantiate_data(
        cfg.dataset, cfg.validation_dataset, tokenizer, vocab_size=vocab_size, max_seq_len=cfg.max_seq_len,
        packed=cfg.packed,
    )  # fmt: skip


def prompts_of(cfg: DictConfig, tokenizer: Any) -> dict[str, Any]:
    """The training and validation prompts of a recipe that samples."""
    parts = {"training": cfg.dataset, "validation": cfg.validation_dataset}
    return {
        name: config.instantiate(part, tokenizer, max_prompt_len=cfg.max_prompt_len)
        for name, part in parts.items()
        if part.get("path", True)
    }


def settings(name: str, arguments: list[str]) -> DictConfig:
    """The settings of a run, given its recipe or its config and what stands behind it on the command line."""
    return config.load(*recipe_of(name, arguments))


def recipe_of(name: str, arguments: list[str]) -> tuple[str, list[str]]:
    """The default of that recipe, and the arguments with the config."""
    is_config = name.endswith((".yaml", ".yml"))
    recipe = Path(name).with_suffix(".py") if is_config else config.find_recipe(name)
    default = default_config(recipe) if recipe.is_file() else None
    if default and (not is_config or Path(default) == Path(name)):
        sys.path.insert(0, str(recipe.resolve().parent))  # components beside the recipe can be named
        return default, arguments
    if not is_config:
        raise TuneError(f"{recipe} does not name its settings: @config.entrypoint(...) is not in it")
    arguments = ["--config", name, *arguments]
    names = config.list_recipes()
    names = [recipe.stem] if recipe.stem in names else names
    findings = {each: config.read(each, arguments, imports=False)[1] for each in names}
    return min(findings, key=lambda each: len(findings[each])), arguments
