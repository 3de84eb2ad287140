"""Recipes as verbs name them: their files, their settings, their data, and how one is run."""

import ast
import re
import runpy
import signal
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from tune import config
from tune.errors import TuneError
from tune.launchers import launcher
from tune.lookup import did_you_mean
from tune.rules import Facts


def find(name: str) -> Path:
    """The file of a recipe, or of a config: its name may lack .yaml where no recipe has that name."""
    is_config = name.endswith(".yaml") or name in {*config.list_configs()} - {*config.list_recipes()}
    try:
        return config.find_config(name) if is_config else config.find_recipe(name)
    except TuneError as error:
        others = ", ".join(config.list_recipes() if is_config else [f"{each}.yaml" for each in config.list_configs()])
        raise TuneError(f"{error} The {'recipes' if is_config else 'configs'} are {others}.") from error


def run_recipe(arguments: Sequence[str]) -> None:
    """Run what `arguments` name as `tune run` does: a launcher and its options, the recipe, its settings."""
    name, others = parted([*arguments])
    if others in (["-h"], ["--help"]):
        launcher(name)(others, Path(), [], Path())
    options, recipe, settings = split(arguments)
    sys.path.insert(0, str(recipe.resolve().parent))  # as `python` does: components beside the recipe can be named
    default = default_config(recipe)
    if default and {"-h", "--help"} & set(settings):
        print(
            ast.get_docstring(ast.parse(recipe.read_text(encoding="utf-8"))) or "",
            Path(default).read_text(encoding="utf-8"),
            sep="\n\n",
        )
        return
    if default:
        check(default, settings)
    if options:
        name, others = parted(options)
        launcher(name)(others, recipe, *with_folder(default, recipe, settings))
        return
    sys.argv = [str(recipe), *settings]
    if default and signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # a shell may have it ignored
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # until `main(cfg)`: others' imports may swallow KeyboardInterrupt
    runpy.run_path(str(recipe), run_name="__main__")


def split(arguments: Sequence[str]) -> tuple[list[str], Path, list[str]]:
    """The launcher's options, the recipe and the recipe's own arguments."""
    if not arguments[0].startswith("-"):
        return [], config.find_recipe(arguments[0]), list(arguments[1:])
    names = config.list_recipes()
    for position, argument in enumerate(arguments):
        if argument in names or argument.endswith(".py"):
            return list(arguments[:position]), config.find_recipe(argument), list(arguments[position + 1 :])
    raise TuneError(
        f"no recipe stands behind the launcher's options: name one of {', '.join(names)}, or a file that ends with .py."
    )


def check(default: str, settings: list[str]) -> None:
    """Report wrong keys at once, then all else that is wrong with the settings, for which imports take seconds."""
    _, found = config.read(default, settings, imports=False)
    if found:
        print("\n  ".join(["error: in the configuration:", *found]), file=sys.stderr, flush=True)
        told = {each.partition(": ")[0] for each in found}
        cfg, found = config.read(default, settings)
        facts = Facts(cfg, defaults=config.read_file(config.find_config(default)))
        for each in config.all_problems(facts, found):
            if each.partition(": ")[0] not in told:
                print(f"  {each}", file=sys.stderr)
        sys.exit(2)


def parted(options: list[str], default: str = "torchrun") -> tuple[str, list[str]]:
    """The launcher that `--launcher` names, and the other options, which are its own."""
    parser = ArgumentParser("tune run", add_help=False, allow_abbrev=False)
    parser.add_argument("--launcher", default=default)
    chosen, others = parser.parse_known_args(options)
    return chosen.launcher, others


def parse_options(parser: ArgumentParser, arguments: list[str]) -> tuple[Namespace, list[str]]:
    """The options of a verb, and the settings of a recipe beside them. Raises TuneError if an option is unknown."""
    options, rest = parser.parse_known_args(arguments)
    if unknown := [each for each in rest if re.match("-(?!-(config|debug)(=|$))", each)]:
        known = [each for each in parser._option_string_actions if each.startswith("--")]
        name, _, value = unknown[0].partition("=")
        setting = f"Settings are given without dashes: {name.lstrip('-')}={value or '...'}"
        raise TuneError(f"{name}: is not an option.{did_you_mean(name, known)} --help lists them. {setting}")
    return options, rest


def with_folder(default: str | None, recipe: Path, settings: list[str]) -> tuple[list[str], Path]:
    """The settings with an `output_dir`, so that every attempt of a launcher has the same, and that folder."""
    cfg = config.read(default, settings, imports=False)[0] if default else {}
    if default and not isinstance(cfg.get("output_dir"), str | None):  # a name that looks like a number
        cfg = config.read(default, settings)[0]
    if folder := cfg.get("output_dir"):
        return settings, config.local_folder(folder)
    new = f"runs/{recipe.stem}-{datetime.now():%Y%m%d-%H%M%S}"
    return ([*settings, f"output_dir={new}"] if "output_dir" in cfg else settings), Path(new)


def default_config(recipe: Path) -> str | None:
    """The default of the recipe's `@config.entrypoint("default")`, read without running it; None without one. Raises
    TuneError if the file is no Python."""
    try:
        tree = ast.parse(recipe.read_text(encoding="utf-8"))
    except SyntaxError as error:
        raise TuneError(f"{recipe}:{error.lineno}: {error.msg}") from error
    functions = [each for each in tree.body if isinstance(each, ast.FunctionDef)]
    for decorator in (each for function in functions for each in function.decorator_list):
        match decorator:
            case ast.Call(
                func=ast.Attribute(attr="entrypoint") | ast.Name(id="entrypoint"),
                args=[ast.Constant(value=str(default))],
            ):
                return str(config.find_default(recipe, default))
    return None


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
