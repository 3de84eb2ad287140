"""Turn a config of torchtune, axolotl, LLaMA-Factory or TRL into settings: YAML, or a file with a command line of TRL.

    tune migrate axolotl.yaml --out mine.yaml

Each key of the file is listed with what became of it, then what is known to go wrong there and does not here. Without
--out the settings are printed, and the list goes to stderr. The exit code is 0 if every key is accounted for, 1 if some
are unknown, 2 if the file cannot be read, and 3 if it asks for what no recipe does.
"""

import re
import shlex
import sys
from argparse import ArgumentParser
from collections.abc import Callable
from operator import attrgetter
from pathlib import Path
from typing import Any

from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from tune import config
from tune.config import Layer, all_problems, combine, parse
from tune.errors import TuneError
from tune.launchers import count
from tune.lookup import in_shell, local_path
from tune.migrate import PEERS, STATUSES, Migration, NotConverted, Setting, leaves, migrate, peer_of, show
from tune.rules import Facts
from tune.secrets import without_secrets

COMMAND = re.compile(r"^[^#\n]*?(?:\btrl (?P<trl>\w+)|(?P<script>\w+)\.py)(?P<options> .*--\w.*)$", re.MULTILINE)
PROCESSES = re.compile(r"--(?:nproc[-_]per[-_]node|num_processes)[ =](\d+)")


def main(parser: ArgumentParser, arguments: list[str]) -> None:
    parser.usage = "tune migrate FILE [--out FILE.yaml] [--from NAME] [--method NAME] [--world-size N]"
    parser.add_argument("file", metavar="FILE", type=local_path, help="the config of another library")
    parser.add_argument("--out", metavar="FILE.yaml", type=local_path, help="the file to write (default: print it)")
    parser.add_argument("--from", dest="peer", choices=PEERS, help="whose config it is (default: by its keys)")
    parser.add_argument("--method", help="sft, dpo, grpo, ...: where the file does not say it (TRL's do not)")
    devices = "devices it ran on (default: what FILE says, or 1)"
    parser.add_argument("--world-size", metavar="N", type=count, help=devices)
    options = parser.parse_args(arguments)
    if options.out and options.out.exists():
        raise TuneError(f"{options.out} exists already. Name another --out, or move it away.")
    values, method, processes = read(options.file)
    peer = options.peer or ("trl" if method else peer_of(values, options.file))
    recipes = {name: dict(leaves(config.read_file(config.find_config(name)))) for name in config.list_recipes()}
    try:
        run = migrate(values, peer, options.method or method, recipes, options.world_size or processes)
    except NotConverted as reason:
        print(f"not converted: {reason}.", file=sys.stderr)
        sys.exit(3)
    missing = check(run)
    text = without_secrets(render(run, options.file.name))
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(text, encoding="utf-8")
    else:
        print(text)
    name = options.out or "FILE.yaml"
    print(
        without_secrets(report(run, options.file.name, missing, str(name))),
        file=sys.stdout if options.out else sys.stderr,
    )
    if any(entry.status == "unknown" for entry in run.entries()):
        sys.exit(1)


def read(file: Path) -> tuple[dict[str, Any], str | None, int]:
    """The values in a YAML or on a command line of TRL, its method if the command says it, and its processes."""
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TuneError(f"{file}: cannot be read: {getattr(error, 'strerror', None) or 'it is no text'}.") from error
    found = PROCESSES.search(text)
    processes = int(found[1]) if found else 1
    command = None if file.suffix in (".yaml", ".yml") else COMMAND.search(text.replace("\\\n", " "))
    if command is None:
        return config.read_file(file), None, processes
    values = options_of(shlex.split(command["options"], comments=True))
    if "config" in values:
        values = config.read_file(file.parent / str(values.pop("config"))) | values
    return values, command["trl"] or command["script"], processes


def options_of(words: list[str]) -> dict[str, Any]:
    """`--key value`, `--key=value`, `--key one two`, `--flag` and `--no_flag` as values."""
    values: dict[str, Any] = {}
    key = ""
    for word in words:
        if word.startswith("--"):
            key, equals, text = word[2:].partition("=")
            key = key.replace("-", "_")
            is_off = key.startswith("no_") and key != "no_cuda"  # as transformers' parser writes a switch that is on
            values[key.removeprefix("no_") if is_off else key] = value_of(text) if equals else not is_off
        elif key:
            before, value = values[key], value_of(word)
            values[key] = value if before is True else [*(before if isinstance(before, list) else [before]), value]
    return values


def value_of(word: str) -> Any:
    try:
        return {"yes": True, "no": False}.get(word.lower(), parse(word)[0])
    except (YAMLError, OmegaConfBaseException):
        return word


def check(run: Migration) -> list[str]:
    """Take back the settings that the recipe refuses, as `tune run` would; returns the keys that are left to give."""
    default = config.read_file(config.find_config(run.recipe))
    types = config.types_of_settings(config.find_recipe(run.recipe), default)
    while True:
        cfg, problems = combine([Layer(default), Layer(nested(run.changed()))], types)
        problems = all_problems(Facts(cfg, defaults=default), problems)
        findings = [each.partition(": ") for each in problems]
        missing = [key for key, _, problem in findings if problem.startswith("is missing")]
        wrong = {key: problem for key, _, problem in findings if key not in missing}
        for key, problem in wrong.items():
            name = next((each for each in run.changed() if each == key or key.startswith(f"{each}.")), None)
            if name is None:
                raise TuneError(f"{key}: {problem}")
            run.refuse(name, problem)
        if not wrong:
            return missing


def nested(settings: dict[str, Setting], show: Callable[[Setting], Any] = attrgetter("value")) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key, setting in settings.items():
        group = values
        *groups, name = key.split(".")
        for each in groups:
            group = group.setdefault(each, {})
        group[name] = show(setting)
    return values


def render(run: Migration, name: str) -> str:
    """The settings as YAML, each with what it was there."""
    lines = [f"# {name}, a config of {run.library.name}, for: tune run {run.recipe} --config FILE"]

    def text(setting: Setting) -> str:
        there = [
            f"{key}: {show(run.theirs[key])}" if key in run.theirs else f"{run.library.name}'s default of {key}"
            for key in setting.sources
        ]
        return show(setting.value) + (f"  # {'; '.join(there)}" if there else "")

    def write(group: dict[str, Any], indent: str) -> None:
        for key, value in group.items():
            lines.append(f"{indent}{key}:" if isinstance(value, dict) else f"{indent}{key}: {value}")
            if isinstance(value, dict):
                write(value, indent + "  ")

    write(nested(run.changed(), text), "")
    return "\n".join(lines) + "\n"


def report(run: Migration, name: str, missing: list[str], out: str) -> str:
    entries = run.entries()
    lines = [f"{name}, a config of {run.library.name}: {run.method}, for the recipe {run.recipe}"]
    for status in STATUSES:
        chosen = [entry for entry in entries if entry.status == status]
        lines += ["", f"{status} ({len(chosen)})"] if chosen else []
        for entry in chosen:
            into = f" -> {', '.join(entry.ours)}" if entry.ours else ""
            lines.append(f"  {entry.key}: {show(entry.value)}{into}" + (f"  ({entry.note})" if entry.note else ""))
    lost = run.lost()
    lines += ["", f"defaults of {run.library.name} that are not the same here ({len(lost)})"] if lost else []
    lines += [f"  {entry.key}: {show(entry.value)}  ({entry.note})" for entry in lost]
    faults = run.faults()
    lines += ["", f"known to go wrong there ({len(faults)})", *(f"  {each}" for each in faults)] if faults else []
    lines += ["", f"left to give: {', '.join(missing)}"] if missing else []
    more = "".join(f" {key}=..." for key in missing)
    return "\n".join([*lines, "", f"tune run {run.recipe} --config {in_shell(out)}{more}"])
