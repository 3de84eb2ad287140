"""Convert a config of torchtune, axolotl, LLaMA-Factory or TRL to settings: YAML, or a file with a TRL command line.

    tune migrate axolotl.yaml --out mine.yaml

It lists the result for each key of the file, then known problems of the other library that do not occur here. Without
--out, it prints the settings and writes the list to stderr. Exit codes: 0 if every key is accounted for, 1 if some are
unknown, 2 if the file cannot be read, 3 if no recipe supports its method.
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
from tune.migrate import (
    LAUNCH,
    PEERS,
    STATUSES,
    Migration,
    NotConverted,
    Setting,
    leaves,
    migrate,
    peer_of,
    require_training,
    show,
)
from tune.rules import Facts
from tune.secrets import without_secrets

COMMAND = re.compile(
    r"^(?P<launcher>[^#\n]*?)(?:\btrl (?P<trl>\w+)|(?P<script>\w+)\.py)(?P<options> .*--\w.*)$", re.MULTILINE
)
PROCESSES = re.compile(r"--(?:nproc[-_]per[-_]node|num_processes)[ =](\d+)")


def main(parser: ArgumentParser, arguments: list[str]) -> None:
    parser.usage = "tune migrate FILE [--out FILE.yaml] [--from NAME] [--method NAME] [--world-size N]"
    parser.add_argument("file", metavar="FILE", type=local_path, help="the config of another library")
    parser.add_argument("--out", metavar="FILE.yaml", type=local_path, help="the file to write (default: print it)")
    parser.add_argument("--from", dest="peer", choices=PEERS, help="the library of FILE (default: by its keys)")
    parser.add_argument("--method", help="sft, dpo, grpo, ..., if the file does not name it (TRL files do not)")
    devices = "devices it ran on (default: from FILE, else 1)"
    parser.add_argument("--world-size", metavar="N", type=count, help=devices)
    options = parser.parse_args(arguments)
    if options.out and options.out.exists():
        raise TuneError(f"{options.out} already exists. Name another --out, or move the file.")
    values, method, processes = read(options.file)
    peer = options.peer or ("trl" if method else peer_of(values, options.file))
    recipes = {
        name: dict(leaves(config.read_file(config.find_config(name)))) for name in config.list_recipes_with_settings()
    }
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
    """Return the values in a YAML or a TRL command line, the method if the command names it, and the process count.

    Settings of `accelerate launch` are in the group `accelerate`.
    """
    if file.suffix == ".py" and file.is_file():
        raise TuneError(
            f"{file}: this is a Python script; tune migrate reads a YAML, or a file with a command line. Write the "
            "arguments of its config (SFTConfig, DPOConfig, ...) as a YAML, and those of LoraConfig as use_peft: true, "
            "lora_r, lora_alpha, lora_dropout and lora_target_modules (docs/coming_from_trl.md#a-python-script)"
        )
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TuneError(f"{file}: cannot be read: {getattr(error, 'strerror', None) or 'it is not text'}.") from error
    found = PROCESSES.search(text)
    command = None if file.suffix in (".yaml", ".yml") else COMMAND.search(text.replace("\\\n", " "))
    options: dict[str, Any] = {}
    method = None
    if command is None:
        values = config.read_file(file)
        require_training(values, file)
    else:
        values = options_of(shlex.split(command["options"], comments=True))
        if "config" in values:
            values = config.read_file(file.parent / str(values.pop("config"))) | values
        options = launcher_options(command["launcher"])
        method = command["trl"] or command["script"]
    launch = launch_settings(values, options, file.parent)
    if launch:
        values["accelerate"] = launch
    devices = int(found[1]) if found else launch.get("num_processes") or 1
    if not isinstance(devices, int):
        raise TuneError(f"{file}: num_processes must be a number of devices, not {devices!r}.")
    return values, method, devices


def launcher_options(launcher: str) -> dict[str, Any]:
    """Return the options of `accelerate launch` before a command: `accelerate launch --config_file a.yaml -m `."""
    words = re.sub(r"\S+$", "", launcher)  # without the folder of a script
    _, _, words = words.partition("accelerate launch ")
    return options_of([word for word in shlex.split(words) if word != "-m"])


def launch_settings(values: dict[str, Any], options: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return the settings of `accelerate launch`: its config file, overridden by its `options`.

    TRL also takes the options, and the file as accelerate_config, among its own `values`; they are removed there.
    """
    of_trl = {"accelerate_config": "config_file"} | {name: name for name in LAUNCH}
    options = options | {launch: values.pop(name) for name, launch in of_trl.items() if name in values}
    name = str(options.get("config_file", ""))
    file = next((file for file in (folder / name, local_path(name)) if file.is_file()), None)
    if file is None:
        return options
    del options["config_file"]
    return config.read_file(file) | options


def options_of(words: list[str]) -> dict[str, Any]:
    """Parse `--key value`, `--key=value`, `--key one two`, `--flag` and `--no_flag`."""
    values: dict[str, Any] = {}
    key = ""
    for word in words:
        if word.startswith("--"):
            key, equals, text = word[2:].partition("=")
            key = key.replace("-", "_")
            is_off = key.startswith("no_") and key != "no_cuda"  # how transformers' parser turns off a flag
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
    """Take back settings that the recipe refuses in `tune run`. Returns the required keys that are missing."""
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
    """Return the settings as YAML, each with its original key in a comment."""
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


def summary(statuses: list[str]) -> str:
    """Return how many settings were lost, and the exit code, which only unknown ones change."""
    lost, unknown = statuses.count("no counterpart"), statuses.count("unknown")
    have, are = "has" if lost == 1 else "have", "is" if unknown == 1 else "are"
    text = f"{lost} setting{'' if lost == 1 else 's'} {have} no counterpart"
    return text + (f", {unknown} {are} unknown (exit code 1)" if unknown else "")


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
    lines += ["", summary([entry.status for entry in entries])]
    more = "".join(f" {key}=..." for key in missing)
    processes = f"--nproc-per-node {run.world_size} " if run.world_size > 1 else ""
    return "\n".join([*lines, "", f"tune run {processes}{run.recipe} --config {in_shell(out)}{more}"])
