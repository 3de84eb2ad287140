"""Find errors in a run before it starts: in settings and their combinations, model files, data and layout. It reads no
weights, and needs neither the processes nor the device. Exit code 1 if there is an error. It takes the arguments of
`tune run`."""

import atexit
import gc
import json
import sys
from argparse import ArgumentParser
from dataclasses import asdict
from pathlib import Path

from tune import config
from tune.cli.recipes import parse_options, recipe_of, require_recipe
from tune.errors import TuneError
from tune.launchers import count
from tune.terminal import visible

ROWS = 1000


def main(parser: ArgumentParser, arguments: list[str]) -> None:
    run = "RECIPE [--config FILE_OR_NAME] [key=value ...]"
    parser.usage = f"tune validate {run} [--world-size N] [--device NAME] [--all] [--strict] [--json]"
    parser.add_argument("--world-size", metavar="N", type=count, default=1, help="number of processes (default: 1)")
    parser.add_argument(
        "--device", metavar="NAME", help="cpu, mps, cuda, or a device of `tune plan` (default: this machine's)"
    )
    parser.add_argument("--all", action="store_true", help=f"read all rows of the data instead of the first {ROWS:,}")
    parser.add_argument("--strict", action="store_true", help="report settings that a run would change as errors")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("recipe", metavar="RECIPE")
    options, rest = parser.parse_known_args(arguments)
    gc.disable()  # imported objects stay; collecting among them takes a quarter of the import time
    from tune import devices
    from tune.rules import Finding, Level
    from tune.validate import validate

    kind, capability = options.device, None
    rows = None if options.all else ROWS
    try:
        parse_options(parser, arguments)  # an unknown option is also a finding
        if kind not in (None, "cpu", "mps", "cuda"):
            known = devices.device(kind)
            kind, capability = "cpu" if known.is_host else "cuda", known.capability
        is_config = options.recipe.endswith((".yaml", ".yml"))
        if is_config and not Path(options.recipe).with_suffix(".py").is_file():
            require_recipe(options.recipe)
        default, rest = recipe_of(options.recipe, rest)
        file = Path(options.recipe).with_suffix(".py") if is_config else config.find_recipe(options.recipe)
        cfg, problems = config.read(default, rest, recipe=file)
        defaults = config.read_file(config.find_config(default))
        machine = {"processes": options.world_size, "device": kind, "capability": capability}
        found = validate(file, cfg, problems, defaults=defaults, **machine, rows=rows, strict=options.strict)
    except TuneError as error:  # an unknown option, or a missing recipe or config
        found = [Finding(Level.ERROR, "", str(error))]
    finally:
        gc.enable()
        atexit.register(gc.freeze)  # skips them at exit too
    counts = {level: sum(finding.level == level for finding in found) for level in ("error", "changed", "warning")}
    if options.json:
        print(json.dumps({**counts, "findings": [asdict(finding) for finding in found]}, indent=2))
    else:
        for finding in found:
            print(visible(f"{finding.level:<7}  {finding}"))
            if finding.link:
                print(f"         {finding.rule}: {finding.link}")
        print(", ".join(f"{level}: {count}" for level, count in counts.items()))
    sys.exit(1 if counts["error"] else 0)
