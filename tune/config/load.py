"""A recipe's settings: its default YAML, `--config` files and `key=value` overrides, in this order."""

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import MarkedYAMLError, YAMLError

from tune.config.paths import find_config
from tune.config.validate import Layer, Values, combine, merge
from tune.errors import TuneError
from tune.secrets import without_secrets


@dataclass
class Arguments:
    """A recipe's command line."""

    configs: list[str] = field(default_factory=list)
    overrides: list[str] = field(default_factory=list)
    debug: bool = False
    help: bool = False
    findings: list[str] = field(default_factory=list)


def parse(arguments: Sequence[str]) -> Arguments:
    """Sort a command line into options and overrides; what is neither is a finding."""
    parsed = Arguments()
    remaining = iter(arguments)
    for argument in remaining:
        option, equals, value = argument.partition("=")
        if option == "--config":
            value = value if equals else next(remaining, "")
            if not value or value.startswith("--"):
                parsed.findings.append("--config: needs the name or the file of a configuration behind it.")
            else:
                parsed.configs.append(value)
        elif argument == "--debug":
            parsed.debug = True
        elif argument in ("--help", "-h"):
            parsed.help = True
        elif argument.startswith("-"):
            hint = f" Settings are given without dashes: {option.lstrip('-')}={value or '...'}"
            parsed.findings.append(f"{option}: is not an option. The options are --config, --debug, --help.{hint}")
        elif not equals or not option:
            parsed.findings.append(f"'{argument}': is not key=value.")
        else:
            parsed.overrides.append(argument)
    return parsed


def load(recipe_default: str, arguments: Sequence[str]) -> DictConfig:
    """The settings of one run, every value resolved; raises one TuneError that tells all that is wrong with them.

    `recipe_default` is the name or file of the YAML that has every key the recipe knows; `arguments` is the command
    line: `--config FILE_OR_NAME` and `key=value`.
    """
    cfg, findings = read(recipe_default, arguments)
    if findings:
        count = f"{len(findings)} problems" if len(findings) > 1 else "a problem"
        raise TuneError("\n  ".join([f"{count} in the configuration:", *findings]))
    return cfg


def read(recipe_default: str, arguments: Sequence[str], imports: bool = True) -> tuple[DictConfig, list[str]]:
    """The settings of one run and all that is wrong with them; without `imports`, components are not looked at."""
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # components in the user's folder can be named
    parsed = parse(arguments)
    default = Layer(_read(find_config(recipe_default)))
    files = [find_config(config) for config in parsed.configs]
    layers = [Layer(_read(file), f" ({file.name})") for file in files]
    cfg, findings = combine(default, [*layers, Layer(_overrides(parsed))], imports)
    return cfg, parsed.findings + findings


def save(cfg: DictConfig, folder: Path) -> list[str]:
    """Write the settings, every value resolved and secrets left out: `--config` with this file reproduces the run.

    The file is config.yaml; where the folder has that of an earlier start, config-2.yaml and so on, if a setting has
    changed. Returns what has.
    """
    values = without_secrets(OmegaConf.to_container(cfg, resolve=True))
    there = sorted(folder.glob("config*.yaml"), key=lambda file: (len(file.name), file.name))
    before, now = _flat(_read(there[-1]) if there else values), _flat(values)
    keys = [key for key in {**before, **now} if before.get(key) != now.get(key) and key not in ("output_dir", "resume")]
    if keys or not there:
        name = f"config-{len(there) + 1}.yaml" if there else "config.yaml"
        OmegaConf.save(OmegaConf.create(values), folder / name)
    return [f"{key}: {before.get(key)} -> {now.get(key)}" for key in keys]


def _flat(values: object, key: str = "") -> Values:
    """Settings by their dotted keys."""
    if not isinstance(values, dict):
        return {key: values}
    parts = (_flat(value, f"{key}.{each}" if key else each) for each, value in values.items())
    return {name: value for part in parts for name, value in part.items()}


def _read(file: Path) -> Values:
    try:
        values = OmegaConf.load(file)
    except MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
        raise TuneError(f"{file}{line}: this is not YAML: {error.problem}.") from error
    except (YAMLError, OmegaConfBaseException, UnicodeDecodeError) as error:
        raise TuneError(f"{file}: cannot be read: {str(error).splitlines()[0]}.") from error
    except OSError as error:
        raise TuneError(f"{file}: cannot be read: {error.strerror or error}.") from error
    if not isinstance(values, DictConfig):
        raise TuneError(f"{file}: must have `key: value` lines at its top level, not a list.")
    if not values:
        raise TuneError(f"{file}: is empty.")
    return cast(Values, OmegaConf.to_container(values))


def _overrides(parsed: Arguments) -> Values:
    values: Values = {}
    for override in parsed.overrides:
        key, _, text = override.partition("=")
        try:
            values = merge(values, cast(Values, OmegaConf.to_container(OmegaConf.from_dotlist([override]))))
        except (YAMLError, OmegaConfBaseException) as error:
            reason = getattr(error, "problem", None) or str(error).splitlines()[0]
            parsed.findings.append(f"{key}: '{text}' is not YAML ({reason}). A string is quoted so: {key}='\"...\"'")
    return values
