"""A peer, a config of it, and the settings that the config becomes.

A `Peer` maps a key of its configs to the function that converts it. Such a function gets the `Migration`, the key and
its value, and calls `put` (this is a setting), `same` (it needs none), `differs` (it needs none, and is not the same)
or `missing` (nothing here does it). `converters.py` has classes for the usual ones.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tune.config import signature_of
from tune.errors import TuneError
from tune.lookup import did_you_mean
from tune.migrate.leaves import NOTHING, KeyNames, Leaves, matches, show, without_index

STATUSES = ("converted", "differs", "same by default", "no counterpart", "unknown")
OFF = ("false", "0", "0.0", "no", "none", "off")


class NotConverted(TuneError):
    """What the config asks for is nothing that a recipe here does."""


@dataclass
class Setting:
    """A value of ours, their keys that it is made of, and how it differs from theirs."""

    value: Any
    sources: list[str]
    notes: list[str] = field(default_factory=list)


class Entry(NamedTuple):
    """What became of one key of theirs."""

    key: str
    value: Any
    status: str
    ours: list[str]
    note: str


@dataclass(frozen=True)
class Peer:
    """A library, and what its configs mean. A `config` is a dict of leaves: `datasets[0].path` and its value."""

    name: str
    looks_like: str  # shown where a file is nobody's
    marks: Callable[[Leaves], list[bool]]  # signs of a config of this peer: the peer with most of them has written it
    refused: Callable[[Leaves], str]  # why no recipe does what the config asks for, or ""
    method: Callable[[Leaves], tuple[str, str]]  # the method (`METHODS`), and the key that says so, or ""
    has_adapter: Callable[[Leaves], bool]
    defaults: Callable[[Leaves, str], Leaves]  # of a config and its method: what the peer takes for absent keys
    faults: Callable[
        [Leaves, str], Iterator[tuple[str, str]]
    ]  # of both: what goes wrong there, and where to read of it
    keys: Mapping[KeyNames, "Convert"]  # the first name that matches a key converts it
    always: Mapping[KeyNames, str]  # keys that need no setting here, and why
    lacking: Mapping[KeyNames, str]  # keys of what is not here, and what there is instead
    read_from: Mapping[str, str]  # the releases that the defaults are of
    nulls: Mapping[KeyNames, str] = field(default_factory=dict)  # keys whose null is not the default, and what it means
    has_stages: Callable[[Leaves], bool] = lambda config: False  # pipeline parallelism, a recipe of its own here
    has_no_dropout: Callable[[Leaves, str], bool] = lambda config, method: False  # its trainer turns all of it off

    def look_up(self, key: str) -> tuple[str, Any]:
        """Return the table that knows `key`, and its entry there; or `unknown`, and a suggestion."""
        tables = {"keys": self.keys, "always": self.always, "lacking": self.lacking}
        plain = without_index(key)
        for table, entries in tables.items():
            for names, entry in entries.items():
                if matches(names, plain):
                    return table, entry
        known = [name for entries in tables.values() for name in each_name(entries)]
        if any(name.startswith((f"{plain}.", f"{plain}[")) for name in known):
            return "always", "its keys say it"  # an empty group
        return "unknown", did_you_mean(plain, [name for name in known if re.fullmatch(r"[\w.]+", name)])


def each_name(table: Mapping[KeyNames, Any]) -> list[str]:
    """The names of a table, with those of its tuples one by one."""
    return [name for names in table for name in ((names,) if isinstance(names, str) else names)]


@dataclass
class Migration:
    """A config of a peer on its way to the settings of `recipe`, whose own values by dotted key are `defaults`."""

    peer: str
    library: Peer
    method: str
    recipe: str
    theirs: Leaves
    referred: set[str]  # the keys of them that others refer to
    defaults: Leaves
    usual: Leaves  # what the peer takes for a key that is not there
    world_size: int
    has_adapter: bool
    settings: dict[str, Setting] = field(default_factory=dict)
    parts: dict[str, Setting] = field(default_factory=dict)  # of settings that several of their keys say together
    said: dict[str, tuple[str, str]] = field(default_factory=dict)  # by key, without a setting: its status and why
    is_usual: bool = False  # the key that is read is not in the file: its value gives way to settings that are

    def takes(self, key: str) -> bool:
        """Whether the recipe has this setting, or a component that may take it."""
        group, _, name = key.rpartition(".")
        component = self.defaults.get(f"{group}._component_")
        if group == "adapter":
            return self.has_adapter
        if component and group.endswith("dataset"):  # one that this recipe does not exchange for another
            return name in signature_of(component).parameters
        return key.startswith("parts.") or key == "recipe" or key in self.defaults or component is not None

    def is_own(self, key: str, value: Any) -> bool:
        """Whether the recipe's own setting has this value."""
        return key in self.defaults and self.defaults[key] == value

    def put(self, key: str, value: Any, *targets: str, note: str = "", gives_way: bool = False) -> None:
        """Make their `key` the first of the settings `targets` that the recipe has; `note` says how this differs.

        A target `parts.NAME` is kept for a function of `finishing.py`. `recipe` stands for keys that choose the recipe:
        its value is the recipe's name. With `gives_way`, as with a default of the peer, what is set already stays.
        """
        target = next(filter(self.takes, targets), "")
        if target == "recipe":
            self.set(target, self.recipe, key, note=note)
        elif target:
            place, name = self.place(target)
            stays = name in place and (gives_way or self.is_usual)
            if not stays:
                self.set(target, value, key, note="" if self.is_own(target, value) else note)
        elif targets[0].startswith("adapter."):
            self.same("no adapter is trained", key)
        elif value == 0 or (value == 1 and targets[0].startswith("parallel.")):
            self.same("off there too", key)
        else:
            self.missing(f"{self.recipe} has no {targets[0]}", key)

    def same(self, why: str, *keys: str) -> None:
        """What these keys ask for is so here without a setting."""
        self.said.update(dict.fromkeys(keys, ("same by default", why)))

    def missing(self, why: str, *keys: str) -> None:
        """What these keys ask for is not here."""
        self.said.update(dict.fromkeys(keys, ("no counterpart", why)))

    def differs(self, why: str, *keys: str) -> None:
        """What these keys ask for needs no setting, and is not quite the same."""
        self.said.update(dict.fromkeys(keys, ("differs", why)))

    def set(self, key: str, value: Any, *sources: str, note: str = "") -> None:
        """Set a setting, or a part, that is made of their keys `sources`."""
        if isinstance(value, float) and value.is_integer() and isinstance(self.defaults.get(key), int | None):
            value = int(value)
        place, name = self.place(key)
        before = place.get(name, Setting(value, []))
        if isinstance(value, dict) and isinstance(before.value, dict):  # two keys of theirs may say one item each
            value = before.value | value
        sources = tuple(dict.fromkeys([*before.sources, *sources]))
        place[name] = Setting(value, list(sources), [*before.notes, *([note] if note else [])])

    def place(self, key: str) -> tuple[dict[str, Setting], str]:
        """The dict that has a setting or a part, and its name there."""
        if key.startswith("parts."):
            return self.parts, key.removeprefix("parts.")
        return self.settings, key

    def pop(self, key: str) -> Setting:
        """Take a setting away; without a value and sources if there is none."""
        return self.settings.pop(key, Setting(None, []))

    def part(self, name: str, default: Any = None) -> Setting:
        """Take a part; with `default` and no sources if there is none."""
        return self.parts.pop(name, Setting(default, []))

    def read(self, key: str, value: Any, is_usual: bool = False) -> None:
        """Convert one key of theirs. None stands for the peer's default, as a rule."""
        table, entry = self.library.look_up(key)
        null = next((why for names, why in self.library.nulls.items() if matches(names, without_index(key))), None)
        if value is None and null:
            self.missing(null, key)
            return
        value = self.usual.get(key) if value is None else value
        if table == "unknown" and key in self.referred:
            self.same("only other keys refer to it", key)
        elif table == "unknown":
            self.said[key] = "unknown", f"{self.library.name} has no such key, as far as is known here.{entry}"
        elif value in NOTHING:
            self.same("not set", key)
        elif table == "keys":
            self.is_usual = is_usual
            entry(self, key, value)
            self.is_usual = False
        elif table == "always":
            self.same(entry, key)
        elif str(value).lower() in OFF:
            self.same("off there too", key)
        else:
            self.missing(entry, key)

    def entries(self) -> list[Entry]:
        """List each key of theirs once, with what became of it."""
        listed = []
        for key, value in self.theirs.items():
            made = {name: setting for name, setting in self.settings.items() if key in setting.sources}
            notes = list(dict.fromkeys(note for setting in made.values() for note in setting.notes))
            ours = [f"{name}={show(setting.value)}" for name, setting in made.items()]
            is_own = all(self.is_own(name, setting.value) for name, setting in made.items())
            status = "same by default" if is_own else "converted"
            if notes:
                status = "differs"
            if key not in self.said and not ours:
                self.missing("nothing here takes it", key)
            status, why = self.said.get(key, (status, ""))
            listed.append(Entry(key, value, status, ours, "; ".join(filter(None, (why, *notes)))))
        return listed

    def lost(self) -> list[Entry]:
        """List the peer's defaults, of keys that the file does not have, that are not the same here."""
        absent = sorted(self.usual.keys() - self.theirs.keys())
        said = {key: self.said[key] for key in absent if key in self.said}
        return [
            Entry(key, self.usual[key], status, [], why)
            for key, (status, why) in said.items()
            if status in ("differs", "no counterpart")
        ]

    def changed(self) -> dict[str, Setting]:
        """The settings that differ from the recipe's own: all that a config has to say."""
        return {
            key: setting
            for key, setting in self.settings.items()
            if key != "recipe" and not self.is_own(key, setting.value)
        }

    def refuse(self, key: str, problem: str) -> None:
        """Take back a setting that the recipe does not accept."""
        self.missing(problem, *self.settings.pop(key).sources)

    def faults(self) -> list[str]:
        """List what is known to go wrong there with these settings, and does not here."""
        return [f"{fault} ({url})" for fault, url in self.library.faults(self.theirs, self.method)]


Convert = Callable[[Migration, str, Any], None]
