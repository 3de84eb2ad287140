"""Recipes for verbs: find their files, settings and data, and run them."""

import ast
import re
import runpy
import signal
import sys
import traceback
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
from tune.terminal import visible


def find(name: str) -> Path:
    """Return the file of a recipe or config. A config's name may omit .yaml if no recipe has that name."""
    is_config = name.endswith(".yaml") or name in {*config.list_configs()} - {*config.list_recipes()}
    try:
        return config.find_config(name) if is_config else config.find_recipe(name)
    except TuneError as error:
        others = ", ".join(config.list_recipes() if is_config else [f"{each}.yaml" for each in config.list_configs()])
        raise TuneError(f"{error} The {'recipes' if is_config else 'configs'} are {others}.") from error


def run_recipe(arguments: Sequence[str]) -> None:
    """Run a recipe as `tune run` does. `arguments`: a launcher and its options, the recipe, its settings."""
    name, others = parted([*arguments])
    if others in (["-h"], ["--help"]):
        launcher(name)(others, Path(), [], Path())
    options, recipe, settings = split(arguments)
    sys.path.insert(0, str(recipe.resolve().parent))  # like `python`, so that components next to the recipe are found
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
    if default and signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # a shell may ignore SIGINT
        # Until `main(cfg)`: imports of other libraries may swallow KeyboardInterrupt.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        runpy.run_path(str(recipe), run_name="__main__")
    except (TuneError, BrokenPipeError):
        raise
    except Exception as error:
        if type(error).__name__ == "ConfigAttributeError":  # from OmegaConf, which is slow to import
            from tune.validate import described

            raise TuneError(described(error, recipe)) from error
        print_from(recipe, error)
        sys.exit(1)


def print_from(recipe: Path, error: Exception) -> None:
    """Print the traceback of an error from the recipe's first function on: the frames before it are this program's."""
    trace = begin = error.__traceback__
    while trace:
        code = trace.tb_frame.f_code
        if code.co_filename == str(recipe) and code.co_name != "<module>":
            begin = trace
            break
        trace = trace.tb_next
    traceback.print_exception(type(error), error, begin)


def split(arguments: Sequence[str]) -> tuple[list[str], Path, list[str]]:
    """Return the launcher's options, the recipe and the recipe's own arguments."""
    names = config.list_recipes()
    if not arguments[0].startswith("-"):
        require_recipe(arguments[0])
        return [], config.find_recipe(arguments[0]), list(arguments[1:])
    for position, argument in enumerate(arguments):
        if argument in names or argument.endswith(".py"):
            return list(arguments[:position]), config.find_recipe(argument), list(arguments[position + 1 :])
    for argument in arguments:
        require_recipe(argument)
    hints = [did_you_mean(each, names) for each in arguments if not re.search("^-|=", each)]
    raise TuneError(
        f"no recipe follows the launcher's options. Name one of {', '.join(names)}, or a file that ends in .py."
        f"{max(hints, default='')}"
    )


def require_recipe(name: str) -> None:
    """Raise TuneError if `name` is a file of settings."""
    if name.endswith((".yaml", ".yml")):
        script = Path(name).with_suffix(".py")
        recipe = script if script.is_file() else "RECIPE"
        raise TuneError(f"{name} is a file of settings. Name its recipe too: {recipe} --config {name}")


def check(default: str, settings: list[str]) -> None:
    """Report wrong keys at once, then all other errors in the settings, whose checks import for seconds."""
    _, found = config.read(default, settings, imports=False)
    if found:
        print(visible("\n  ".join(["error: in the configuration:", *found])), file=sys.stderr, flush=True)
        told = {each.partition(": ")[0] for each in found}
        cfg, found = config.read(default, settings)
        facts = Facts(cfg, defaults=config.read_file(config.find_config(default)))
        for each in config.all_problems(facts, found):
            if each.partition(": ")[0] not in told:
                print(visible(f"  {each}"), file=sys.stderr)
        sys.exit(2)


def parted(options: list[str], default: str = "torchrun") -> tuple[str, list[str]]:
    """Return the launcher named by `--launcher`, and its options."""
    parser = ArgumentParser("tune run", add_help=False, allow_abbrev=False)
    parser.add_argument("--launcher", default=default)
    chosen, others = parser.parse_known_args(options)
    return chosen.launcher, others


def parse_options(parser: ArgumentParser, arguments: list[str]) -> tuple[Namespace, list[str]]:
    """Return a verb's options and a recipe's settings. Raises TuneError for an unknown option."""
    options, rest = parser.parse_known_args(arguments)
    if unknown := [each for each in rest if re.match("-(?!-(config|debug)(=|$))", each)]:
        known = [each for each in parser._option_string_actions if each.startswith("--")]
        name, _, value = unknown[0].partition("=")
        setting = f"Write settings without dashes: {name.lstrip('-')}={value or '...'}"
        raise TuneError(f"{name}: is not an option.{did_you_mean(name, known)} --help lists them. {setting}")
    return options, rest


def with_folder(default: str | None, recipe: Path, settings: list[str]) -> tuple[list[str], Path]:
    """Return the settings with an `output_dir`, so that all attempts of a launcher share it, and that folder."""
    cfg = config.read(default, settings, imports=False)[0] if default else {}
    if default and not isinstance(cfg.get("output_dir"), str | None):  # a folder name that looks like a number
        cfg = config.read(default, settings)[0]
    if folder := cfg.get("output_dir"):
        return settings, config.local_folder(folder)
    new = f"runs/{recipe.stem}-{datetime.now():%Y%m%d-%H%M%S}"
    return ([*settings, f"output_dir={new}"] if "output_dir" in cfg else settings), Path(new)


def default_config(recipe: Path) -> str | None:
    """Return the default of the recipe's `@config.entrypoint("default")` without running it, or None without one.

    Raises TuneError if the file is not Python.
    """
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
    """Return a run's settings from its recipe or config and the arguments after it."""
    return config.load(*recipe_of(name, arguments))


def recipe_of(name: str, arguments: list[str]) -> tuple[str, list[str]]:
    """Return the recipe's default, and the arguments with the config."""
    is_config = name.endswith((".yaml", ".yml"))
    recipe = Path(name).with_suffix(".py") if is_config else config.find_recipe(name)
    default = default_config(recipe) if recipe.is_file() else None
    if default and (not is_config or Path(default) == Path(name)):
        sys.path.insert(0, str(recipe.resolve().parent))  # finds components next to the recipe
        return default, arguments
    if not is_config:
        raise TuneError(f"{recipe} does not name its settings: it has no @config.entrypoint(...). Add one")
    arguments = ["--config", name, *arguments]
    names = config.list_recipes_with_settings()
    names = [recipe.stem] if recipe.stem in names else names
    findings = {each: config.read(each, arguments, imports=False)[1] for each in names}
    return min(findings, key=lambda each: len(findings[each])), arguments


def data_of(cfg: DictConfig, tokenizer: Any, vocab_size: int | None = None) -> tuple[Any, Any]:
    """Return the training and validation datasets of a recipe's settings."""
    dataset = config.instantiate(cfg.dataset, tokenizer, max_seq_len=cfg.max_seq_len, packed=cfg.packed)
    for part in filter(None, (dataset, dataset.validation)) if vocab_size else ():
        part.require_vocabulary(vocab_size)
    return dataset, dataset.validation


def prompts_of(cfg: DictConfig, tokenizer: Any) -> dict[str, Any]:
    """Return the training and validation prompts of a recipe that samples."""
    prompts = config.instantiate(cfg.dataset, tokenizer, max_prompt_len=cfg.max_prompt_len)
    return {"training": prompts} | ({"validation": prompts.validation} if prompts.validation else {})
