"""Find the errors of a run in one pass: wrong settings, broken rules, and the errors of the rehearsed recipe."""

import errno
import functools
import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from types import MappingProxyType
from typing import Any

from omegaconf import DictConfig
from packaging.requirements import Requirement

from tune.config import find_config, find_recipe, list_recipes, list_recipes_with_settings, read_file
from tune.errors import TuneError
from tune.processor import device_type
from tune.rules import Facts, Finding, Level, judge, unchecked
from tune.validate.hooks import Unfinished
from tune.validate.made_up import NotRehearsed
from tune.validate.recipe import Recipe, described, is_own, place_of
from tune.validate.rehearse import is_limit, rehearse

PLACE = re.compile(r"([\w./\[\]-]+(?::\d+)?): (.+)", re.DOTALL)
ABSENT = re.compile(r"(\S+) \(?does not exist\b")  # see tune.lookup.absent
LIMITED = "only the first {:,} rows were read; --all reads all rows"


@dataclass
class Findings:
    """The findings, without duplicates. `settings` are problems of the settings themselves."""

    settings: Sequence[str]
    all: list[Finding] = field(default_factory=list)

    def __post_init__(self) -> None:
        for problem in self.settings:
            self.add(problem, is_cause=True)

    def add(self, text: str, place: str = "", level: Level = Level.ERROR, is_cause: bool = False) -> None:
        """Keep a message, which may begin with its place.

        The same error is kept once, at its first place, unless it `is_cause`: a problem of the setting itself. So is
        the error that a path does not exist. An error at a setting that already has one, or at its group, is dropped as
        a consequence.
        """
        if match := PLACE.fullmatch(text):
            place, text = match.groups()
        is_once = level is Level.ERROR and not is_cause
        if any(finding.message == text and (is_once or finding.place == place) for finding in self.all):
            return
        reported = [path for finding in self.all for path in ABSENT.findall(finding.message)]
        if is_once and (path := ABSENT.search(text)) and path[1] in reported:
            return
        known = {finding.place for finding in self.all if finding.level is Level.ERROR}
        follows = any(f"{other}.".startswith(f"{place}.") for other in known if place)
        if level is not Level.ERROR or not follows or (is_cause and place not in known):
            self.all.append(Finding(level, place, text))

    def add_error(self, error: Exception, file: Path) -> None:
        """Keep an error that a rehearsal of `file` raises.

        After a first error, other exceptions of the library than TuneError are dropped as consequences.
        """
        if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
            self.add(f"'{error.filename}' is too long for a file name")
        elif isinstance(error, TuneError):
            self.add(str(error))
        elif isinstance(error, Unfinished):
            self.add(f"{place_of(error, file)}: {error}", level=Level.WARNING)
        elif isinstance(error, NotRehearsed):
            self.add(f"{described(error.error, file)} ({error.why})", level=Level.INFO)
        elif is_limit(error):
            self.add(f"{described(error, file)} (a rehearsal has no such values)", level=Level.INFO)
        elif is_own(error, file) or not any(finding.level is Level.ERROR for finding in self.all):
            self.add(described(error, file))

    def add_note(self, message: Any) -> None:
        """Keep a warning of the run, whose messages are texts, or whatever a recipe prints."""
        text = str(message)
        if text.startswith("warning: "):
            self.add(text.removeprefix("warning: "), level=Level.WARNING)


def validate(
    recipe: Path, cfg: DictConfig, settings: Sequence[str] = (), *, defaults: Mapping[str, Any] = MappingProxyType({}),
    processes: int = 1, device: str | None = None, capability: tuple[int, int] | None = None, rows: int | None = 1000,
    strict: bool = False,
) -> list[Finding]:  # fmt: skip
    """Return the findings for a run of the file `recipe`, sorted by place.

    The run has `processes` processes on a `device` (None: this machine's). `settings` are problems of `cfg` itself, and
    `defaults` the values of the recipe's own YAML. The rehearsal reads the first `rows` of the data, or all (None).
    """
    wrong_device = ""
    try:
        kind = device or device_type(cfg.get("device", "auto"))
    except TuneError as error:
        wrong_device, kind = str(error), "cpu"
    findings = Findings(settings)
    facts = Facts(cfg, kind, processes, capability, is_here=device is None, defaults=defaults)
    findings.all += judge(facts, strict, wrong={finding.place for finding in findings.all})
    is_copy = recipe.resolve() not in [find_recipe(name).resolve() for name in list_recipes()]
    if is_copy and (missing := _missing(cfg)):
        count, names = unchecked(facts, missing)
        if count:
            text = f"not checked: {count} rules, since they read {', '.join(f'`{name}`' for name in names)}"
            findings.add(f"{text}, which {recipe.name} does not have", level=Level.INFO)
    if wrong_device:
        findings.add(wrong_device, "device")
    if kind == "mps" and processes > 1:
        findings.add(f"device: mps has one device (got {processes} processes). Start one process, or set device=cpu")
    _require_versions(findings)
    try:
        found = Recipe(recipe)
    except TuneError as error:
        findings.add(str(error))
        return findings.all
    cut = rehearse(
        found, cfg, processes=processes, rows=rows, report=lambda error: findings.add_error(error, recipe),
        note=findings.add_note,
    )  # fmt: skip
    for line, problem in [*found.undefined_names(), *found.missing_settings(cfg)]:
        place = re.compile(rf"{re.escape(recipe.name)}:{line}\b")
        if not any(place.search(str(finding)) for finding in findings.all):  # else the rehearsal came there
            findings.add(problem)
    for key in unread(cfg, defaults, recipe):
        findings.add(f"{recipe.name} does not read this setting", key, Level.WARNING)
    if cut:
        findings.add(LIMITED.format(rows), "dataset", Level.INFO)
    return sorted(findings.all, key=lambda finding: (finding.place, finding.level != Level.ERROR))


def _missing(cfg: DictConfig) -> set[str]:
    """Return the top-level settings that the nearest recipe of the library has, and `cfg` lacks: the recipe with the
    most settings in common and the fewest others."""
    settings = [read_file(find_config(name)).keys() for name in list_recipes_with_settings()]
    nearest = max(settings, key=lambda names: (len(names & cfg.keys()), -len(names)))
    return {str(name) for name in nearest} - {str(name) for name in cfg}


def unread(cfg: DictConfig, defaults: Mapping[str, Any], recipe: Path) -> list[str]:
    """Return the top-level settings whose name is in no line of the recipe and of modules next to it or in the current
    folder, and in no reference of the recipe's YAML."""
    words = {*re.findall(r"\w+", " ".join(re.findall(r"\${[^}]*}", str(defaults))))}
    modules = (Path(file) for module in [*sys.modules.values()] if (file := getattr(module, "__file__", None)))
    folders = recipe.resolve().parent, Path.cwd()
    for file in (recipe, *(file for file in modules if file.suffix == ".py" and file.parent in folders)):
        words |= {*re.findall(r"\w+", file.read_text(encoding="utf-8", errors="replace"))}
    return [str(key) for key in cfg if str(key) not in words]


@functools.cache
def _version(package: str) -> str:
    return metadata.version(package)


def _require_versions(findings: Findings) -> None:
    """Report installed packages with unsupported versions."""
    with suppress(metadata.PackageNotFoundError):
        for wanted in map(Requirement, metadata.requires("tune-recipes") or ()):
            with suppress(metadata.PackageNotFoundError):
                installed = _version(wanted.name)
                if installed not in wanted.specifier and "dev" not in str(wanted.marker):
                    wants = f"{wanted.name}{wanted.specifier}"
                    findings.add(f"{installed} is installed; pip install '{wants}'", wanted.name)
