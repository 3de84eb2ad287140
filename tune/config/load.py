"""Load a recipe's settings: its default YAML, `--config` files and `key=value` overrides, in this order."""

import argparse
import functools
import os
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from tune.config import text
from tune.config.arguments import types_of_settings
from tune.config.check import combine, merge, walk
from tune.config.instantiate import COMPONENT
from tune.config.paths import find_config, find_script, is_of_the_library
from tune.config.text import Values
from tune.errors import TuneError
from tune.rules import Facts, Finding, Level, judge
from tune.run_settings import escaped, is_saved, read_settings, read_yaml, require_resolved, settings_file
from tune.secrets import REMOVED, without_secrets
from tune.types import as_given, show


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse a recipe's command line: the options `config` (a list), `debug` and `help`, and the rest as `settings`."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--config", action="append", default=[])
    parser.add_argument("--debug", action="store_true")
    parser.add_argument("-h", "--help", action="store_true")
    try:
        options, rest = parser.parse_known_args(arguments)
    except argparse.ArgumentError as error:
        raise TuneError(f"{error}. The options are --config FILE_OR_NAME, --debug and --help") from error
    options.settings = rest
    return options


def load(recipe_default: str, arguments: Sequence[str]) -> DictConfig:
    """Return the resolved settings of a run on any machine. Raises one TuneError that lists all problems.

    `recipe_default` is the name or file of the YAML with all keys of the recipe. `arguments` is the command line:
    `--config FILE_OR_NAME` and `key=value`.
    """
    cfg, problems = read(recipe_default, arguments)
    settle(Facts(cfg, defaults=read_file(find_config(recipe_default))), problems)
    return cfg


def read(
    recipe_default: str, arguments: Sequence[str], imports: bool = True, recipe: Path | None = None
) -> tuple[DictConfig, list[str]]:
    """Return the settings of a run, and the problems in their keys, types and values.

    Types come from the file `recipe`; None stands for the recipe of `recipe_default`. Without `imports`, values are not
    checked.
    """
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # finds components in the user's folder
    options = parse(arguments)
    files = [find_config(name) for name in options.config]
    overrides, unreadable = _overrides(options.settings)
    for saved_file in filter(is_saved, files):
        require_resolved(read_yaml(saved_file), saved_file)
    file = find_config(recipe_default)
    default = text.read(file)
    layers = [default, *(text.read(file, f" ({file.name})") for file in files), overrides]
    recipe = recipe if recipe and recipe.is_file() else find_script(file)
    values = functools.reduce(merge, [layer.values for layer in layers])
    types = types_of_settings(recipe, default.values, values) if imports and recipe else {}
    cfg, problems = combine(layers, types, imports, "" if is_of_the_library(file) else file.name)
    return cfg, unreadable + problems


def require_none(problems: Sequence[str]) -> None:
    """Raise one TuneError that lists all problems, if there are any."""
    if problems:
        count = f"{len(problems)} problems" if len(problems) > 1 else "a problem"
        raise TuneError("\n  ".join([f"{count} in the configuration:", *problems]))


def settle(facts: Facts, problems: Sequence[str] = ()) -> None:
    """Apply the rules to the settings of a run that starts now. Rules change settings only here. `notes` returns these
    changes and warnings.

    Raises:
        TuneError: rules find errors, or there are `problems`; the message lists both.
    """
    findings = _judge(facts, problems)
    require_none([*problems, *_errors(findings)])
    facts.cfg.__dict__["_notes"] = [f"{finding.level}: {finding}" for finding in findings]


def all_problems(facts: Facts, problems: Sequence[str] = ()) -> list[str]:
    """Return `problems`, and the errors that rules find in all other settings."""
    return [*problems, *_errors(_judge(facts, problems))]


def _judge(facts: Facts, problems: Sequence[str]) -> list[Finding]:
    return judge(facts, wrong={problem.partition(": ")[0] for problem in problems})


def _errors(findings: Sequence[Finding]) -> list[str]:
    return [f"{finding}." for finding in findings if finding.level is Level.ERROR]


def notes(cfg: DictConfig) -> list[str]:
    """Return the changes that rules made when the settings were read, and warnings."""
    return list(cfg.__dict__.get("_notes", ()))


def save(cfg: DictConfig, folder: Path) -> list[str]:
    """Write the resolved settings; `--config` with this file reproduces the run. `REMOVED` stands for secrets, and
    `--config` asks for them again.

    The file is config.yaml. If the folder has one from an earlier start and settings have changed, it is config-2.yaml,
    and so on. Returns the changes.
    """
    values = without_secrets(OmegaConf.to_container(cfg, resolve=True), REMOVED)
    starts = len([*folder.glob("config*.yaml")])
    now = flat(values)
    before = saved(folder) if starts else now
    keys = [key for key in {**before, **now} if before.get(key) != now.get(key) and key not in ("output_dir", "resume")]
    if keys or not starts:
        name = f"config-{starts + 1}.yaml" if starts else "config.yaml"
        OmegaConf.save(OmegaConf.create(escaped(values)), folder / name)
    return [f"{key}: {as_given(before.get(key))} -> {as_given(now.get(key))}" for key in keys]


def saved(folder: Path) -> Values:
    """Return the settings of a run folder's last start by dotted keys, or {}. Raises TuneError."""
    newest = settings_file(folder)
    return flat(without_secrets(read_settings(newest), REMOVED)) if newest else {}


def flat(values: Values) -> Values:
    """Return settings by dotted keys."""
    return {key: value for key, value in walk(values) if not isinstance(value, dict)}


def read_file(file: Path) -> Values:
    """Return the values in a YAML file, with unresolved interpolations. Raises TuneError."""
    return text.read(file).values


def _whole(settings: Sequence[str]) -> Iterator[str]:
    """Yield the arguments; join those that the shell split within a list or group, since it was not quoted."""
    parts: list[str] = []
    for setting in settings:
        parts.append(setting)
        whole = " ".join(parts)
        is_group = parts[0].partition("=")[2][:1] in ("{", "[")
        if not (is_group and any(whole.count(begin) > whole.count(end) for begin, end in ("{}", "[]"))):
            yield whole
            parts = []
    yield from parts


def _without_blanks(settings: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the arguments, with `key = value` as one; and the problems of these."""
    joined, findings, rest = [], [], [*settings]
    while rest:
        setting = rest.pop(0)
        is_name = re.fullmatch(r"[\w.]+", setting)
        if is_name and rest and rest[0].startswith("="):  # key =value, key = value
            setting += rest.pop(0)
        is_empty = re.fullmatch(r"[\w.]+=", setting)
        if is_empty and rest and "=" not in rest[0] and not rest[0].startswith("-"):  # key= value
            setting += rest.pop(0)
            is_name = is_empty
        if is_name and "=" in setting:
            key, _, value = setting.partition("=")
            findings.append(f"{key}: has blanks around its =. Write {key}={value}")
        joined.append(setting)
    return joined, findings


def _overrides(settings: Sequence[str]) -> tuple[text.Layer, list[str]]:
    """Return the settings of `key=value` arguments, and the problems of all other arguments."""
    layer = text.Layer({})
    settings, findings = _without_blanks(settings)
    for setting in _whole(settings):
        key, equals, given = setting.partition("=")
        if key.startswith("-"):
            hint = f" Write settings without dashes: {key.lstrip('-')}={given or '...'}"
            findings.append(f"{key}: is not an option. A recipe has --config, --debug, --help.{hint}")
        elif not (key and equals):
            findings.append(f"'{setting}': is not key=value.")
        else:
            findings += _take(layer, key, given)
    return layer, findings


def _take(layer: text.Layer, key: str, given: str) -> list[str]:
    """Add the setting `key=given` to the layer. Return its problems."""
    if any("\ud800" <= letter <= "\udfff" for letter in key + given):
        return [
            f"{key!r}={given!r}: the locale cannot decode these characters. Set the environment variable PYTHONUTF8=1."
        ]
    layer.forget(key)
    value: Any = given
    try:
        value, written = text.parse(given)
        layer.note(key, written)
        OmegaConf.create({"value": value})
    except YAMLError as error:
        layer.unreadable[key] = getattr(error, "problem", None) or str(error).splitlines()[0]
    except RecursionError:
        return [f"{key}: its value is nested too deeply."]
    except OmegaConfBaseException as error:
        layer.forget(key)
        return [f"{key}: '{given}' has a ${{ that names no other setting: {str(error).splitlines()[0]}."]
    layer.note(key, given)  # the text of a list may be a name
    for name in reversed(key.split(".")):
        value = {name: value}
    value = text.spelled_out(value)
    findings = []
    before = dict(walk(layer.values))
    for name, each in walk(value):
        groups = [other for other in (before.get(name), each) if isinstance(other, dict)]
        others = [other for other in (before.get(name), each) if not isinstance(other, dict | None)]
        if others and groups and COMPONENT not in groups[0]:  # one of the two would replace the other
            both = f"is given as {show(others[0])} and by its keys ({', '.join(groups[0])})"
            findings.append(f"{name}: {both}. Use one of the two; name a component with keys as {name}.{COMPONENT}.")
    layer.values = merge(layer.values, value)
    return findings
