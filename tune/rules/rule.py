"""Rules, the facts they read before a run is built, and their findings."""

import enum
import json
import os
import shutil
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from tune import devices
from tune.errors import TuneError
from tune.types import as_given

GREAT = 1e9  # no limit
COMPONENT = "_component_"
LIBRARIES = ("tune", "torch", "torchao", "bitsandbytes", "transformers")
SHARED = ("model.path",)  # arguments that recipes also read themselves


@dataclass(frozen=True)
class Facts:
    """A run's settings, its target machine, and the model files except weights.

    `device` is cpu, cuda or mps; None skips rules about machines. `capability` is the GPU's compute capability, if
    known. `is_here` is true if the target is this machine. `recipe` is the file of a run that starts now. `defaults`
    are the values of the recipe's own YAML.
    """

    cfg: DictConfig
    device: str | None = None
    processes: int = 1
    capability: tuple[int, int] | None = None
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    is_here: bool = True
    recipe: Path | None = None
    defaults: Mapping[str, Any] = field(default_factory=dict)
    asked: set[str] = field(default_factory=set, compare=False)  # top-level settings that were read

    def __call__(self, key: str, default: Any = None) -> Any:
        """Return a setting, or the default if it is null, if the recipe does not have it, or if it is an argument of a
        component that is not of a library: the name may mean something else there."""
        self.asked.add(key.partition(".")[0])
        if self.is_of_own_component(key):
            return default
        value = OmegaConf.select(self.cfg, key, throw_on_resolution_failure=False, throw_on_missing=False)
        return default if value is None else value

    def is_of_own_component(self, key: str) -> bool:
        """Return whether a setting is an argument of a component that is not of a library."""
        group, _, name = key.rpartition(".")
        if not group or name == COMPONENT or key in SHARED:
            return False
        component = OmegaConf.select(self.cfg, f"{group}.{COMPONENT}", throw_on_resolution_failure=False)
        return isinstance(component, str) and component.partition(".")[0] not in LIBRARIES

    def usual(self, key: str, default: Any = None) -> Any:
        """Return a setting's value in the recipe's own YAML."""
        value: Any = self.defaults
        for name in key.split("."):
            value = value.get(name) if isinstance(value, Mapping) else None
        return default if value is None else value

    def number(self, key: str, default: float = 0.0) -> float:
        """Return a numeric setting, or the default. Wrong types are reported by their own check."""
        value = self(key)
        return value if isinstance(value, int | float) and not isinstance(value, bool) else default

    @property
    def lr(self) -> float:
        """Return the base learning rate of Adam and its variants; 0 for other optimizers."""
        return self.number("optimizer.lr") if "Adam" in self("optimizer._component_", "") else 0.0

    def asks(self, key: str, *parts: str) -> bool:
        """Return whether a setting contains one of the parts."""
        value = self(key, "")
        return any(part in str(value) for part in parts)

    @cached_property
    def model(self) -> dict[str, Any]:
        """Return the model's config.json, with the fields of its language model if it has several; {} if unreadable."""
        fields = _fields(self("model.path"), "config.json")
        outer = {name: fields[name] for name in ("tie_word_embeddings",) if name in fields}  # which decides
        return {**fields, **(fields.get("text_config") or {}), **outer}

    @cached_property
    def template(self) -> str:
        """Return the source of the model's chat template; "" if it has none or `chat_template` is set."""
        if self("tokenizer.chat_template"):
            return ""
        folder = self("tokenizer.path", self("model.path"))
        inside = _fields(folder, "tokenizer_config.json").get("chat_template") or ""
        return _text(folder, "chat_template.jinja") or (json.dumps(inside) if inside else "")

    @property
    def has_compiler(self) -> bool:
        return bool(shutil.which(self.environ.get("CXX") or "g++"))

    @property
    def triton_lacks(self) -> str:
        """Return what Triton needs to compile its launchers and this machine lacks; "" for another machine."""
        return devices.triton_lacks(self.environ) if self.is_here else ""


def _text(folder: Any, name: str) -> str:
    try:
        return (Path(str(folder)) / name).read_text(encoding="utf-8")
    except (OSError, ValueError):  # reported by the code that needs the file
        return ""


def _fields(folder: Any, name: str) -> dict[str, Any]:
    with suppress(ValueError):
        fields = json.loads(_text(folder, name))
        return fields if isinstance(fields, dict) else {}
    return {}


class Level(enum.StrEnum):
    """`ERROR`: the run would fail or learn nothing. `CHANGED`: a setting gets another value. `WARNING`: rarely
    intended. `INFO`: not checked."""

    ERROR = "error"
    CHANGED = "changed"
    WARNING = "warning"
    INFO = "info"


@dataclass(frozen=True)
class Finding:
    """A problem at a `place`: a setting or a file. `rule` and `link` name the rule that found it, else are empty."""

    level: Level
    place: str
    message: str
    rule: str = ""
    link: str = ""

    def __str__(self) -> str:
        return f"{self.place}: {self.message}" if self.place else self.message


@dataclass(frozen=True)
class Rule:
    """A condition `when` on a run that is an error, changes settings, or gives a warning.

    `key` is the setting to blame. `says` states the problem and what to do, with the value for `{}`; `why` states what
    the mistake costs. `key` and `says` may be functions of a run. `source` is an upstream thread (owner/name#number),
    or empty if the rule follows from this library. `since` is the first version with this behavior. `changes` returns
    new values by dotted keys; rules of level CHANGED have it.
    """

    id: str
    level: Level
    key: str | Callable[[Facts], str]
    source: str
    since: str
    says: str | Callable[[Facts], str]
    why: str
    when: Callable[[Facts], Any]
    changes: Callable[[Facts], dict[str, Any]] | None = None

    @property
    def link(self) -> str:
        """Return the URL of the thread; GitHub redirects it for pull requests."""
        name, _, number = self.source.partition("#")
        return f"https://github.com/{name}/issues/{number}" if name else ""

    def place(self, facts: Facts) -> str:
        """Return the setting to blame."""
        return self.key if isinstance(self.key, str) else self.key(facts)

    def said(self, facts: Facts) -> str:
        """Return the problem and what to do."""
        return self.says.format(facts(self.place(facts))) if isinstance(self.says, str) else self.says(facts)

    def judge(self, facts: Facts, strict: bool = False, wrong: Collection[str] = ()) -> Finding | None:
        """Return the finding if the condition holds, except for settings that are already `wrong`, and for arguments of
        components that are not of a library.

        Changes are made in `facts.cfg`. With `strict`, a change is an error instead.
        """
        if not self.when(facts) or self.place(facts) in wrong or facts.is_of_own_component(self.place(facts)):
            return None
        place, level, message = self.place(facts), self.level, f"{self.said(facts)}: {self.why}"
        if self.changes and strict:
            level = Level.ERROR
        elif self.changes:
            try:
                changes = self.changes(facts)
            except TuneError as error:
                return Finding(Level.ERROR, place, str(error).removeprefix(f"{place}: "), self.id, self.link)
            for key, value in changes.items():
                OmegaConf.update(facts.cfg, key, value)
            message += "; now " + " ".join(f"{key}={as_given(value)}" for key, value in changes.items())
        return Finding(level, place, message, self.id, self.link)
