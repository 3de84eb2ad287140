"""Evaluate a model, an adapter or a run on lm-evaluation-harness tasks or your own data:

    tune eval ./SmolLM2-135M --tasks arc_easy,hellaswag --out results.json
    tune eval ./runs/mine --data held_out.jsonl
    tune eval ./runs/mine --data held_out.jsonl --score my_scores:is_right
    tune eval ./base --adapter ./runs/lora --tasks gsm8k --apply-chat-template --nproc-per-node 8

It runs the recipe `evaluate`. Each setting below is an option; nested settings also work as key=value:
"""

import json
import os
import sys
import tempfile
from argparse import ArgumentParser
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path

from tune import config
from tune.cli.model_options import add_step, dotted
from tune.cli.recipes import parse_options, run_recipe
from tune.lookup import assignment

NESTED = {
    "data": "dataset.path", "quantization": "quantization", "max_new_tokens": "generation.max_new_tokens",
    "tp": "parallel.tp",
}  # fmt: skip
METAVARS = {"data": "FILE", "quantization": "KIND", "max_new_tokens": "N", "tp": "N", "adapters": "A"}


def main(parser: ArgumentParser, arguments: list[str]) -> None:
    defaults = config.find_config("evaluate")
    parser.usage = "tune eval MODEL [--tasks A,B] [--data FILE] [--out FILE.json] [--json] [OPTIONS] [key=value ...]"
    parser.epilog = defaults.read_text(encoding="utf-8")
    parser.add_argument("model", metavar="MODEL", help="a model in Hugging Face layout, an adapter, or a run folder")
    add_step(parser)
    parser.add_argument("--nproc-per-node", metavar="N", help="processes that share the requests")
    values = config.read_file(defaults)
    keys = {name: name for name, value in values.items() if not isinstance(value, dict)} | NESTED
    for name, key in keys.items():
        option = "--adapter" if name == "adapters" else f"--{name.replace('_', '-')}"
        if values.get(key) is False:
            parser.add_argument(option, dest=key, action="store_true")
        else:
            parser.add_argument(option, dest=key, action="append", metavar=METAVARS.get(name, name.upper()))
    parser.add_argument("--json", action="store_true", help="print the results as JSON, and everything else on stderr")
    options, rest = parse_options(parser, arguments)
    settings = []
    for key in keys.values():
        if (given := getattr(options, key)) is True:
            settings.append(f"{key}=true")
        elif given and isinstance(values.get(key), list):
            names = [name for text in given for name in (names_in(text) if key == "tasks" else [text])]
            settings.append(f"{key}={json.dumps(names, ensure_ascii=False)}")
        elif given:
            settings.append(assignment(key, dotted(given[-1]) if key == "score" else given[-1]))
    launch = ["--nproc-per-node", options.nproc_per_node] if options.nproc_per_node else []
    model = options.model if options.step is None else Path(options.model, "checkpoints", f"step-{options.step:08d}")
    run = [*launch, "evaluate", assignment("model.path", model), *settings, *rest]
    if not options.json:
        run_recipe(run)
        return
    with tempfile.TemporaryDirectory() as folder:
        out = Path(options.out[-1] if options.out else Path(folder, "results.json"))
        with on_stderr():
            run_recipe([*run, assignment("out", out)])
        print(out.read_text(encoding="utf-8"))


@contextmanager
def on_stderr() -> Iterator[None]:
    """Redirect the output of this process and its children to stderr."""
    sys.stdout.flush()
    stdout = os.dup(1)
    os.dup2(2, 1)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(stdout, 1)
        os.close(stdout)


def names_in(text: str) -> list[str]:
    """Split task names A,B. A file may have a comma in its name."""
    return [text] if Path(text).exists() else text.split(",")
