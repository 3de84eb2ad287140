"""A recipe's settings: its default YAML, `--config` files and `key=value` overrides, in this order."""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import MarkedYAMLError, YAMLError

from tune.config.check import Values, combine, merge, walk
from tune.config.instantiate import COMPONENT
from tune.config.paths import find_config
from tune.errors import TuneError
from tune.secrets import without_secrets
from tune.type_check import as_given, show


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """A recipe's command line: the options `config` (a list), `debug` and `help`, and the rest as `settings`."""
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
    """The settings of one run, every value resolved; raises one TuneError that lists all problems. `recipe_default` is
    the name or file of the YAML that has every key the recipe knows; `arguments` is the command line: `--config
    FILE_OR_NAME` and `key=value`."""
    cfg, findings = read(recipe_default, arguments)
    if findings:
        count = f"{len(findings)} problems" if len(findings) > 1 else "a problem"
        raise TuneError("\n  ".join([f"{count} in the configuration:", *findings]))
    return cfg


def read(recipe_default: str, arguments: Sequence[str], imports: bool = True) -> tuple[DictConfig, list[str]]:
    """The settings of one run and their problems; without `imports`, arguments of components are not checked."""
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # components in the user's folder can be named
    options = parse(arguments)
    files = [find_config(name) for name in options.config]
    overrides, unreadable = _overrides(options.settings)
    default = read_file(find_config(recipe_default))
    layers = [(default, ""), *((read_file(file), f" ({file.name})") for file in files), (overrides, "")]
    cfg, findings = combine(layers, imports)
    return cfg, unreadable + findings


def save(cfg: DictConfig, folder: Path) -> list[str]:
    """Write the settings, every value resolved and secrets left out: `--config` with this file reproduces the run. The
    file is config.yaml; where the folder has that of an earlier start, config-2.yaml and so on, if one has changed.
    Returns what has."""
    values = without_secrets(OmegaConf.to_container(cfg, resolve=True))
    starts = len([*folder.glob("config*.yaml")])
    now = flat(values)
    before = saved(folder) if starts else now
    keys = [key for key in {**before, **now} if before.get(key) != now.get(key) and key not in ("output_dir", "resume")]
    if keys or not starts:
        name = f"config-{starts + 1}.yaml" if starts else "config.yaml"
        OmegaConf.save(OmegaConf.create(values), folder / name)
    return [f"{key}: {as_given(before.get(key))} -> {as_given(now.get(key))}" for key in keys]


def saved(folder: Path) -> Values:
    """The settings of a run folder's last start by their dotted keys, none if there are none. Raises TuneError."""
    newest = max(folder.glob("config*.yaml"), default=None, key=lambda file: (len(file.name), file.name))
    return flat(without_secrets(read_file(newest))) if newest else {}


def flat(values: Values) -> Values:
    """Settings by their dotted keys."""
    return {key: value for key, value in walk(values) if not isinstance(value, dict)}


def read_file(file: Path) -> Values:
    """The values in a YAML, interpolations as they stand there. Raises TuneError."""
    try:
        values = OmegaConf.load(file)
    except MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
        raise TuneError(f"{file}{line}: this is not YAML: {error.problem}.") from error
    except (YAMLError, OmegaConfBaseException, UnicodeDecodeError, OSError) as error:
        raise TuneError(f"{file}: cannot be read: {str(error).splitlines()[0]}.") from error
    except RecursionError as error:
        raise TuneError(f"{file}: values are nested too deep to be read.") from error
    if not isinstance(values, DictConfig):
        raise TuneError(f"{file}: must have `key: value` lines at its top level, not a list.")
    if not values:
        raise TuneError(f"{file}: is empty.")
    return _spelt_out(OmegaConf.to_container(values))


def _spelt_out(values: Any) -> Values:
    """With `parallel=auto` as the setting that it stands for."""
    return values | {"parallel": {"auto": True}} if values.get("parallel") == "auto" else values


def _overrides(settings: Sequence[str]) -> tuple[Values, list[str]]:
    """The settings of `key=value` arguments, and the problems of all others."""
    values: Values = {}
    findings = []
    for setting in settings:
        key, equals, text = setting.partition("=")
        if key.startswith("-"):
            hint = f" Settings are given without dashes: {key.lstrip('-')}={text or '...'}"
            findings.append(f"{key}: is not an option. A recipe has --config, --debug, --help.{hint}")
        elif not (key and equals):
            findings.append(f"'{setting}': is not key=value.")
        else:
            try:
                given = _spelt_out(OmegaConf.to_container(OmegaConf.from_dotlist([setting])))
            except (YAMLError, OmegaConfBaseException) as error:
                reason = getattr(error, "problem", None) or str(error).splitlines()[0]
                findings.append(f"{key}: '{text}' is not YAML ({reason}). A string is quoted so: {key}='\"...\"'")
                continue
            except RecursionError:
                findings.append(f"{key}: its value is nested too deep to be read.")
                continue
            before = dict(walk(values))
            for name, value in walk(given):
                groups = [each for each in (before.get(name), value) if isinstance(each, dict)]
                others = [each for each in (before.get(name), value) if not isinstance(each, dict | None)]
                if others and groups and COMPONENT not in groups[0]:  # one would replace the other
                    both = f"is given as {show(others[0])} and by its keys ({', '.join(groups[0])})"
                    findings.append(f"{name}: {both}. Give one of both; a component with keys as {name}.{COMPONENT}.")
            values = merge(values, given)
    return values, findings
