"""Run a recipe: one that `tune ls` lists, or a script of your own (a path that ends with .py).

    tune run full_finetune model.path=./model dataset.path=./chats.jsonl
    tune run --nproc-per-node 8 my_recipe.py --config my.yaml global_batch_size=128

What stands before RECIPE goes to torchrun (`torchrun --help`), what stands after it to the recipe
(`tune run RECIPE --help` prints its settings).
"""

import ast
import logging
import os
import re
import runpy
import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Sequence
from pathlib import Path

from tune import config
from tune.errors import TuneError

# After SIGTERM, until processes that have not ended are killed: a step and a checkpoint take longer than torchrun's 30.
SHUTDOWN_SECONDS = "600"


def main(parser: ArgumentParser, arguments: Sequence[str]) -> None:
    parser.usage = "tune run [TORCHRUN OPTIONS] RECIPE [--config FILE_OR_NAME] [key=value ...]"
    parser.formatter_class = RawDescriptionHelpFormatter
    if not arguments or arguments[0] in ("-h", "--help"):
        parser.print_help()
        return
    options, recipe, settings = split(arguments)
    sys.path.insert(0, str(recipe.resolve().parent))  # as `python` does: components beside the recipe can be named
    default = default_config(recipe)
    if default and {"-h", "--help"} & set(settings):
        print(ast.get_docstring(ast.parse(recipe.read_text())) or "", Path(default).read_text(), sep="\n\n")
        return
    if default:
        check(default, settings)
    if options:
        launch(options, recipe, settings)
        return
    sys.argv = [str(recipe), *settings]
    runpy.run_path(str(recipe), run_name="__main__")


def split(arguments: Sequence[str]) -> tuple[list[str], Path, list[str]]:
    """The torchrun options, the recipe and the recipe's own arguments."""
    if not arguments[0].startswith("-"):
        return [], config.find_recipe(arguments[0]), list(arguments[1:])
    names = config.list_recipes()
    for position, argument in enumerate(arguments):
        if argument in names or argument.endswith(".py"):
            return list(arguments[:position]), config.find_recipe(argument), list(arguments[position + 1 :])
    raise TuneError(
        f"no recipe stands behind the torchrun options: name one of {', '.join(names)}, or a file that ends with .py."
    )


def check(default: str, settings: list[str]) -> None:
    """Report wrong keys and values at once, then those of components, whose imports take seconds."""
    _, found = config.read(default, settings, imports=False)
    if found:
        print("\n  ".join(["error: in the configuration:", *found]), file=sys.stderr, flush=True)
        _, findings = config.read(default, settings)
        for each in findings:
            if each not in found:
                print(f"  {each}", file=sys.stderr)
        sys.exit(2)


def launch(options: list[str], recipe: Path, settings: list[str]) -> None:
    """Run the recipe in several processes, through torchrun."""
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    # Each process has already printed its error; the agent's report would only hide it.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", SHUTDOWN_SECONDS)
    try:
        torchrun.run(torchrun.parse_args([*options, str(recipe), *settings]))
    except ValueError as error:  # of an option
        raise TuneError(f"torchrun: {error}") from error
    except SignalException:  # passed on to the processes, which have saved a checkpoint
        sys.exit(130)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode > 0:
            sys.exit(failure.exitcode)
        raise TuneError(
            f"process {rank} was ended by signal {-failure.exitcode}, not by itself; if nobody did that, the machine "
            "ran out of memory. The same command with this run's output_dir continues after the last checkpoint."
        ) from error


def default_config(recipe: Path) -> str | None:
    """The default of the recipe's `@config.entrypoint("default")`, read without running it; None without one."""
    found = re.search(r"""^@.*\bentrypoint\(\s*["']([^"']+)["']\s*\)""", recipe.read_text(), re.MULTILINE)
    return str(config.find_default(recipe, found[1])) if found else None
