"""Settings of ours from a config of torchtune, axolotl, LLaMA-Factory or TRL.

What each key becomes stands in the tables of `peers/`; what takes several of them together is in `rules.py`.
"""

import functools
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from omegaconf import Container, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from tune.config import read_file, signature_of
from tune.errors import TuneError
from tune.lookup import did_you_mean

PEERS = {"torchtune": "torchtune", "axolotl": "axolotl", "llama_factory": "LLaMA-Factory", "trl": "TRL"}
STATUSES = ("converted", "differs", "same by default", "no counterpart", "unknown")
PARTS = ("keys", "always", "lacking")  # of a table
NOTHING: tuple[Any, ...] = (None, "", [], {})
OFF = ("false", "0", "0.0", "no", "none", "off")

Fields = dict[str, Any]


class NotConverted(TuneError):
    """What the config asks for is nothing that a recipe here does."""


@dataclass
class Setting:
    """A value of ours, the keys of theirs that it is made of, and in what it differs. A key with _ is only a step."""

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


@dataclass
class Migration:
    """A config of a peer on its way to the settings of `recipe`, whose own ones by their dotted keys are `defaults`."""

    peer: str
    method: str
    recipe: str
    theirs: Fields  # each leaf by its dotted key
    referred: set[str]  # the keys of them that others refer to
    defaults: Fields
    usual: Fields  # what the peer takes for a key that is not there
    world_size: int
    has_adapter: bool
    functions: Mapping[str, Callable[..., None]]  # of `rules.py`, for the lines that name one
    settings: dict[str, Setting] = field(default_factory=dict)
    said: dict[str, tuple[str, str]] = field(default_factory=dict)  # what has no setting: its status and why

    def takes(self, key: str) -> bool:
        """Whether the recipe has this setting, or a component that may take it."""
        group, _, name = key.rpartition(".")
        component = self.defaults.get(f"{group}._component_")
        if group == "adapter":
            return self.has_adapter
        if component and group.endswith("dataset"):  # one that this recipe does not exchange for another
            return name in signature_of(component).parameters
        return key.startswith(("_", "recipe")) or key in self.defaults or component is not None

    def is_own(self, key: str, value: Any) -> bool:
        """Whether the recipe's own setting has this value."""
        return key in self.defaults and self.defaults[key] == value

    def set(self, key: str, value: Any, *sources: str, note: str = "") -> None:
        if isinstance(value, float) and value.is_integer() and isinstance(self.defaults.get(key), int | None):
            value = int(value)
        before = self.settings.get(key, Setting(value, []))
        if isinstance(value, dict) and isinstance(before.value, dict):  # two keys of theirs may say one each
            value = before.value | value
        sources = tuple(dict.fromkeys([*before.sources, *sources]))
        self.settings[key] = Setting(value, list(sources), [*before.notes, *([note] if note else [])])

    def pop(self, key: str, default: Any = None) -> Setting:
        return self.settings.pop(key, Setting(default, []))

    def read(self, key: str, value: Any, implied: bool = False) -> None:
        """Convert one key of theirs by the first line of the table that it matches."""
        part, found, line = look_up(self.peer, key)
        meaning = first(table(self.peer).get("nulls", {}), key)[1] if value is None else None
        if meaning:
            self.said[key] = "no counterpart", meaning
            return
        value = self.usual.get(key) if value is None else value
        if part == "unknown" and key in self.referred:
            self.said[key] = "same by default", "only other keys refer to it"
        elif part == "unknown":
            self.said[key] = part, f"{PEERS[self.peer]} has no such key, as far as is known here.{line}"
        elif value in NOTHING:
            self.said[key] = "same by default", "not set"
        elif part == "keys":
            self.convert(key, value, {"to": line} if isinstance(line, str | list) else line, found, implied)
        elif part == "lacking" and str(value).lower() not in OFF:
            self.said[key] = "no counterpart", line
        else:
            self.said[key] = "same by default", line if part == "always" else "off there too"

    def convert(self, key: str, value: Any, rule: Fields, found: re.Match[str], implied: bool) -> None:
        if "by" in rule:
            return self.functions[rule["by"]](self, key, value)
        index = (re.search(r"\[\d+\]", key) or [""])[0]
        targets = [rule["to"]] if isinstance(rule["to"], str) else rule["to"]
        targets = [found.expand(each).replace("[]", index) for each in targets]
        note = rule.get("note", "")
        if "values" in rule:
            value = value[0] if isinstance(value, list) and len(value) == 1 else value
            choices = table("common")[rule["values"]] if isinstance(rule["values"], str) else rule["values"]
            word, chosen = first(choices, str(value).lower())
            if word is None:
                hint = did_you_mean(str(value), [name for each in choices for name in names(each)])
                self.said[key] = "no counterpart", f"there is nothing like {value}.{hint}"
                return
            chosen, note = chosen if isinstance(chosen, list) else (chosen, note)
            if isinstance(chosen, dict):
                for name, each in chosen.items():
                    self.put(key, each, [targets[0] + name.replace("[]", index)], note, implied=True)
                return
            if chosen is None:
                self.said[key] = ("differs", note) if note else ("same by default", "")
                return
            value = {"same": value, "nothing": None}.get(chosen, chosen) if isinstance(chosen, str) else chosen
        if rule.get("split") and isinstance(value, str):
            value = re.split(r"\s*,\s*", value)
        self.put(key, {rule["in"]: value} if "in" in rule else value, targets, note, implied)

    def put(self, key: str, value: Any, targets: list[str], note: str = "", implied: bool = False) -> None:
        """Set the first of `targets` that the recipe has; what is only `implied` gives way to what is set."""
        target = next(filter(self.takes, targets), None)
        if target is not None:
            if target == "recipe" or not (implied and target in self.settings):
                note = "" if self.is_own(target, value) else note
                self.set(target, self.recipe if target == "recipe" else value, key, note=note)
        elif targets[0].startswith("adapter."):
            self.said[key] = "same by default", "no adapter is trained"
        elif value == 0 or (value == 1 and targets[0].startswith("parallel.")):
            self.said[key] = "same by default", "off there too"
        else:
            self.said[key] = "no counterpart", f"{self.recipe} has no {targets[0]}"

    def entries(self) -> list[Entry]:
        """Each key of theirs once, with what became of it."""
        found = []
        for key, value in self.theirs.items():
            into = {name: each for name, each in self.settings.items() if key in each.sources}
            notes = list(dict.fromkeys(note for each in into.values() for note in each.notes))
            ours = [f"{name}={show(each.value)}" for name, each in into.items() if name[0] != "_"]
            usual = all(self.is_own(name, each.value) for name, each in into.items())
            status = "same by default" if usual else "converted"
            if notes:
                status = "differs"
            if key not in self.said and not ours:
                self.said[key] = "no counterpart", "nothing here takes it"
            status, why = self.said.get(key, (status, ""))
            found.append(Entry(key, value, status, ours, "; ".join(filter(None, (why, *notes)))))
        return found

    def lost(self) -> list[Entry]:
        """The peer's defaults, of keys that the file does not have, that are not the same here."""
        said = {key: self.said[key] for key in sorted(self.usual.keys() - self.theirs.keys()) if key in self.said}
        return [
            Entry(key, self.usual[key], status, [], why)
            for key, (status, why) in said.items()
            if status in ("differs", "no counterpart")
        ]

    def changed(self) -> dict[str, Setting]:
        """What differs from the recipe's own settings: all that a config has to say."""
        shown = {key: each for key, each in self.settings.items() if key[0] != "_" and key != "recipe"}
        return {key: each for key, each in shown.items() if not self.is_own(key, each.value)}

    def refuse(self, key: str, problem: str) -> None:
        """Take back a setting that the recipe does not accept."""
        self.said.update(dict.fromkeys(self.settings.pop(key).sources, ("no counterpart", problem)))

    def faults(self) -> list[str]:
        """What is known to go wrong there with these settings, and does not here."""
        lines, facts = table(self.peer)["faults"], {"method": self.method, **self.theirs}
        return [f"{each['says']} ({each['upstream']})" for each in lines if holds(each["when"], facts)]


def peer_of(values: Fields, file: Path) -> str:
    """Whose config this file is, by its keys. Raises TuneError if they are nobody's."""
    text = " ".join(f"{key}={value}" for key, value in leaves(values))
    if re.search(r"_component_=tune\.", text):
        raise TuneError(f"{file}: it is a config of tune already: tune run RECIPE --config {file}")
    points = {peer: sum(bool(re.search(mark, text)) for mark in table(peer)["marks"]) for peer in PEERS}
    best = max(points, key=lambda peer: points[peer])
    if points[best] == 0:
        looks = "; ".join(f"{name} has {table(peer)['looks_like']}" for peer, name in PEERS.items())
        raise TuneError(
            f"{file}: by its keys ({', '.join([*values][:6])}) it is no config of these: {looks}. "
            f"--from NAME takes it for one: {', '.join(PEERS)}."
        )
    return best


@functools.cache
def table(name: str) -> Fields:
    """A table of `peers/`: of a peer its lines, then those of transformers' arguments where it takes these too."""
    own = read_file(Path(__file__).parent / "peers" / f"{name}.yaml")
    if own.get("takes_training_arguments"):
        shared = table("training_arguments")
        own |= {part: own[part] | shared[part] for part in PARTS} | {"faults": own["faults"] + shared["faults"]}
    return own


def look_up(peer: str, key: str) -> tuple[str, Any, Any]:
    """The part of the table that knows `key`, the match, and the line; or `unknown`, and what may be meant."""
    plain = re.sub(r"\[\d+\]", "[]", key)
    lines = [(part, str(pattern), line) for part in PARTS for pattern, line in table(peer)[part].items()]
    for part, pattern, line in lines:
        if found := _pattern(pattern).fullmatch(plain):
            return part, found, line
    if any(re.match(rf"(.*\|)?\(?{re.escape(plain)}\\?[.\[]", pattern) for _, pattern, _ in lines):
        return "always", None, "its keys say it"  # a group
    return "unknown", None, did_you_mean(plain, [name for _, pattern, _ in lines for name in names(pattern)])


_pattern = functools.cache(re.compile)  # the tables have more of them than `re` keeps


def first(lines: Mapping[str, Any], text: str) -> tuple[str | None, Any]:
    """The first pattern that is all of `text`, and its line."""
    return next(((key, line) for key, line in lines.items() if _pattern(str(key)).fullmatch(text)), (None, None))


def names(pattern: str) -> list[str]:
    """The plain words of a pattern `one|other`."""
    return [word for word in str(pattern).split("|") if re.fullmatch(r"[\w.]+", word)]


def holds(conditions: Mapping[str, Any], theirs: Fields) -> bool:
    """Whether the keys that match have such values: `set`, `unset`, `>1`, `~pattern` in one, or just this one."""
    return all(_holds([v for key, v in theirs.items() if re.fullmatch(k, key)], want) for k, want in conditions.items())


def _holds(values: list[Any], wanted: Any) -> bool:
    if wanted in ("set", "unset"):
        return any(value not in (*NOTHING, False, 0) for value in values) == (wanted == "set")
    if str(wanted).startswith(">"):
        return any(isinstance(value, int | float) and value > float(wanted[1:]) for value in values)
    if str(wanted).startswith("~"):
        return any(re.search(wanted[1:], str(value), re.IGNORECASE) for value in values)
    return wanted in values


def leaves(values: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Each value by its dotted key; `datasets[0].path` for groups in lists. Lists of plain values are values."""
    if isinstance(values, dict) and (values or not prefix):
        for name, value in values.items():
            yield from leaves(value, f"{prefix}.{name}" if prefix else str(name))
    elif isinstance(values, list) and any(isinstance(each, dict) for each in values):
        for index, each in enumerate(values):
            yield from leaves(each, f"{prefix}[{index}]")
    else:
        yield prefix, values


def resolved(values: Fields) -> Fields:
    """With what `${key}` stands for, where that is in the file."""

    def resolve(node: Any, key: Any) -> Any:
        try:
            value = node[key]
        except OmegaConfBaseException:  # a resolver of theirs
            return OmegaConf.to_container(node)[key]  # type: ignore[index]
        if isinstance(value, DictConfig):
            return {each: resolve(value, each) for each in value}
        return [resolve(value, each) for each in range(len(value))] if isinstance(value, Container) else value  # type: ignore[arg-type]

    cfg = OmegaConf.create(values)
    return {key: resolve(cfg, key) for key in values}


def show(value: Any) -> str:
    """A value as YAML on one line."""
    return yaml.safe_dump({"x": value}, default_flow_style=True, width=float("inf"), allow_unicode=True)[4:-2]
