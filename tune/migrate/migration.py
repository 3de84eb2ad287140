"""A peer, a config of that peer, and the settings that the config becomes.

A `Peer` maps each key of its configs to a function that converts the key. The function gets the `Migration`, the key
and its value. It calls `put` (set a setting), `same` (no setting needed), `differs` (no setting needed, but the result
is not identical) or `missing` (tune cannot do it). `converters.py` has classes for the common cases.
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
    """Raised if no recipe does what the config asks for."""


@dataclass
class Setting:
    """A value of a setting, the peer's keys it comes from, and notes on how it differs."""

    value: Any
    sources: list[str]
    notes: list[str] = field(default_factory=list)


class Entry(NamedTuple):
    """One key of the peer's config and its outcome."""

    key: str
    value: Any
    status: str
    ours: list[str]
    note: str


@dataclass(frozen=True)
class Peer:
    """A library and the meaning of its configs. A `config` is a dict of leaves: `datasets[0].path` and its value."""

    name: str
    looks_like: str  # typical keys, printed if no peer matches a file
    marks: Callable[[Leaves], list[bool]]  # signs of this peer's configs; the peer with the most signs wins
    refused: Callable[[Leaves], str]  # why no recipe does what the config asks for, or ""
    method: Callable[[Leaves], tuple[str, str]]  # the method (`METHODS`), and the key that names it, or ""
    has_adapter: Callable[[Leaves], bool]
    defaults: Callable[[Leaves, str], Leaves]  # (config, method) -> the peer's defaults for absent keys
    faults: Callable[
        [Leaves, str], Iterator[tuple[str, str]]
    ]  # (config, method) -> known problems of the peer, each with a URL
    keys: Mapping[KeyNames, "Convert"]  # the first name that matches a key converts it
    always: Mapping[KeyNames, str]  # keys that need no setting in tune, and why
    lacking: Mapping[KeyNames, str]  # keys without a counterpart, and the alternative
    read_from: Mapping[str, str]  # the releases that the defaults come from
    nulls: Mapping[KeyNames, str] = field(default_factory=dict)  # keys whose null is not the default, and its meaning
    empty_lists: tuple[str, ...] = ()  # keys whose empty list is a value
    has_stages: Callable[[Leaves], bool] = lambda config: False  # pipeline parallelism, a separate recipe in tune
    has_no_dropout: Callable[[Leaves, str], bool] = lambda config, method: False  # the trainer disables all dropout

    def look_up(self, key: str) -> tuple[str, Any]:
        """Return the name of the table that has `key`, and the entry; or `unknown` and a suggestion."""
        tables = {"keys": self.keys, "always": self.always, "lacking": self.lacking}
        plain = without_index(key)
        for table, entries in tables.items():
            for names, entry in entries.items():
                if matches(names, plain):
                    return table, entry
        known = [name for entries in tables.values() for name in each_name(entries)]
        if any(name.startswith((f"{plain}.", f"{plain}[")) for name in known):
            return "always", "an empty group"
        # Among hundreds of keys, one is always a little like the word.
        return "unknown", did_you_mean(plain, [name for name in known if re.fullmatch(r"[\w.]+", name)], cutoff=0.7)


def each_name(table: Mapping[KeyNames, Any]) -> list[str]:
    """List the names of a table; tuples of names are flattened."""
    return [name for names in table for name in ((names,) if isinstance(names, str) else names)]


@dataclass
class Migration:
    """The conversion of one peer's config to settings of `recipe`, whose `defaults` are by dotted key."""

    peer: str
    library: Peer
    method: str
    recipe: str
    theirs: Leaves
    referred: set[str]  # the peer's keys that other keys refer to as ${key}
    defaults: Leaves
    usual: Leaves  # the peer's defaults for absent keys
    world_size: int
    has_adapter: bool
    settings: dict[str, Setting] = field(default_factory=dict)
    parts: dict[str, Setting] = field(default_factory=dict)  # of settings that depend on several of the peer's keys
    said: dict[str, tuple[str, str]] = field(default_factory=dict)  # status and reason of keys that set nothing
    is_usual: bool = False  # the current key is a default of the peer: it never overrides keys of the file

    def takes(self, key: str) -> bool:
        """Whether the recipe has this setting, or a component that may accept it."""
        group, _, name = key.rpartition(".")
        component = self.defaults.get(f"{group}._component_")
        if group == "adapter":
            return self.has_adapter
        if key == "model.double_quantization":  # an argument of every model, but only frozen weights are quantized
            key = "model.quantization"
        if key == "model.quantization":
            return key in self.defaults
        if component and group.endswith("dataset"):  # a migration never swaps the dataset's component for another
            return name in signature_of(component).parameters
        return key.startswith("parts.") or key == "recipe" or key in self.defaults or component is not None

    def is_own(self, key: str, value: Any) -> bool:
        """Whether this is the recipe's default value."""
        return key in self.defaults and self.defaults[key] == value

    def put(self, key: str, value: Any, *targets: str, note: str = "", gives_way: bool = False) -> None:
        """Set the first of `targets` that the recipe has from the peer's `key`; `note` says how the result differs.

        A target `parts.NAME` is stored for a function of `finishing.py`. The target `recipe` is for keys that choose
        the recipe; its value is the recipe's name. With `gives_way`, or for a default of the peer, an existing value
        stays.
        """
        target = next(filter(self.takes, targets), "")
        if target == "recipe":
            self.set(target, self.recipe, key, note=note)
        elif target:
            place, name = self.place(target)
            stays = name in place and (gives_way or self.is_usual)
            if not stays:
                self.set(target, value, key, note=note)
        elif targets[0].startswith("adapter."):
            self.same("no adapter is trained", key)
        elif value == 0 or (value == 1 and targets[0].startswith("parallel.")):
            self.same("also off in the original", key)
        else:
            self.missing(f"{self.recipe} has no {targets[0]}", key)

    def same(self, why: str, *keys: str) -> None:
        """Record that tune does the same by default."""
        self.said.update(dict.fromkeys(keys, ("same by default", why)))

    def missing(self, why: str, *keys: str) -> None:
        """Record that tune has no counterpart to these keys."""
        self.said.update(dict.fromkeys(keys, ("no counterpart", why)))

    def differs(self, why: str, *keys: str) -> None:
        """Record that these keys need no setting but tune differs."""
        self.said.update(dict.fromkeys(keys, ("differs", why)))

    def set(self, key: str, value: Any, *sources: str, note: str = "") -> None:
        """Set a setting or a part that comes from the peer's keys `sources`."""
        if isinstance(value, float) and value.is_integer() and isinstance(self.defaults.get(key), int | None):
            value = int(value)
        place, name = self.place(key)
        before = place.get(name, Setting(value, []))
        if isinstance(value, dict) and isinstance(before.value, dict):  # two of the peer's keys may give one item each
            value = before.value | value
        sources = tuple(dict.fromkeys([*before.sources, *sources]))
        place[name] = Setting(value, list(sources), [*before.notes, *([note] if note else [])])

    def place(self, key: str) -> tuple[dict[str, Setting], str]:
        """Return the dict that holds a setting or a part, and its name in that dict."""
        if key.startswith("parts."):
            return self.parts, key.removeprefix("parts.")
        return self.settings, key

    def pop(self, key: str) -> Setting:
        """Remove and return a setting; an empty one if it is not set."""
        return self.settings.pop(key, Setting(None, []))

    def part(self, name: str, default: Any = None) -> Setting:
        """Remove and return a part; `default` without sources if it is not set."""
        return self.parts.pop(name, Setting(default, []))

    def read(self, key: str, value: Any, is_usual: bool = False) -> None:
        """Convert one of the peer's keys. None means the peer's default unless `nulls` says otherwise."""
        table, entry = self.library.look_up(key)
        null = next((why for names, why in self.library.nulls.items() if matches(names, without_index(key))), None)
        if value is None and null:
            self.missing(null, key)
            return
        value = self.usual.get(key) if value is None else value
        if table == "unknown" and key in self.referred:
            self.same("only used as a variable by other keys", key)
        elif table == "unknown":
            self.said[key] = "unknown", f"not a known key of {self.library.name}.{entry}"
        elif value in NOTHING and not (value == [] and matches(self.library.empty_lists, without_index(key))):
            self.same("not set", key)
        elif table == "keys":
            self.is_usual = is_usual
            entry(self, key, value)
            self.is_usual = False
        elif table == "always":
            self.same(entry, key)
        elif str(value).lower() in OFF:
            self.same("also off in the original", key)
        else:
            self.missing(entry, key)

    def entries(self) -> list[Entry]:
        """List each of the peer's keys once, with its outcome."""
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
                self.missing("no setting of the recipe uses it", key)
            status, why = self.said.get(key, (status, ""))
            listed.append(Entry(key, value, status, ours, "; ".join(filter(None, (why, *notes)))))
        return listed

    def lost(self) -> list[Entry]:
        """List the peer's defaults for absent keys that tune does not reproduce."""
        absent = sorted(self.usual.keys() - self.theirs.keys())
        said = {key: self.said[key] for key in absent if key in self.said}
        return [
            Entry(key, self.usual[key], status, [], why)
            for key, (status, why) in said.items()
            if status in ("differs", "no counterpart")
        ]

    def changed(self) -> dict[str, Setting]:
        """Return the settings that differ from the recipe's defaults: the content of the new config."""
        return {
            key: setting
            for key, setting in self.settings.items()
            if key != "recipe" and not self.is_own(key, setting.value)
        }

    def refuse(self, key: str, problem: str) -> None:
        """Remove a setting that the recipe does not accept."""
        self.missing(problem, *self.settings.pop(key).sources)

    def faults(self) -> list[str]:
        """List known problems of the peer with these settings that tune does not have."""
        return [f"{fault} ({url})" for fault, url in self.library.faults(self.theirs, self.method)]


Convert = Callable[[Migration, str, Any], None]
