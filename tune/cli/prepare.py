"""Tokenize the data of a run ahead of time. The cache is dataset.cache_dir, else $TUNE_CACHE, else ~/.cache/tune.
It prints how many rows were kept, cut and dropped. A run with the same data, tokenizer and settings starts from the
cache. It needs no weights and no GPU, except with `teacher.top_k`, which also stores the teacher's predictions. It
takes the arguments of `tune run`. RECIPE may be a config; the recipe with its keys is then used."""

import runpy
from argparse import ArgumentParser

from tune import config
from tune.cli.recipes import data_of, parse_options, prompts_of, settings
from tune.secrets import without_secrets
from tune.terminal import visible


def main(parser: ArgumentParser, arguments: list[str]) -> None:
    parser.usage = "tune prepare RECIPE [--config FILE_OR_NAME] [key=value ...]"
    parser.add_argument("recipe", metavar="RECIPE")
    options, rest = parse_options(parser, arguments)
    cfg = settings(options.recipe, rest)

    from tune.datasets import Stream, parts_of, warnings_about

    tokenizer = config.instantiate(cfg.tokenizer)
    if "max_prompt_len" in cfg:
        for name, prompts in prompts_of(cfg, tokenizer).items():
            print(visible(f"{name}: {prompts.table()}"))
        return
    dataset, validation = data_of(cfg, tokenizer)
    for part in filter(None, (dataset, validation)):
        if isinstance(part, Stream):
            print(visible(without_secrets(f"{part.name} is streamed: only its first rows are cached:")))
        print(visible(part.accounting.table()), flush=True)
    found = warnings_about(parts_of(dataset, "training"), parts_of(validation, "validation"), tokenizer)
    print(visible("\n  ".join(["warnings", *found] if found else ["no warnings"])), flush=True)
    if "teacher" in cfg and cfg.teacher.top_k:
        from tune import distributed, peft

        teacher = peft.open_model(cfg.teacher.path, setting="teacher.path")
        tokenizer.require_same_ids(teacher.tokenizer(), "teacher.path")
        recipe = runpy.run_path(str(config.find_recipe("distill")))
        recipe["store_predictions"](cfg, distributed.init(cfg.device), tokenizer, dataset, validation)
        print(f"the teacher's {cfg.teacher.top_k} most probable tokens are stored")
