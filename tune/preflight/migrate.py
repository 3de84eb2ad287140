"""Settings of ours from a config of torchtune, axolotl, LLaMA-Factory or TRL.

What each key becomes stands in the tables of `peers/`; what takes several of them together is in `migrate_rules.py`.
"""

import functools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from omegaconf import Container, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from tune.errors import TuneError
from tune.lookup import did_you_mean

PEERS = {"torchtune": "torchtune", "axolotl": "axolotl", "llama_factory": "LLaMA-Factory", "trl": "TRL"}
STATUSES = ("converted", "differs", "same by default", "no counterpart", "unknown")
TABLES = Path(__file__).parent / "peers"

Values = dict[str, Any]


class NotConverted(TuneError):
    """What the config asks for is nothing that a recipe here does."""


@dataclass
class Setting:
    """A value of ours, the keys of theirs that it is made of, and in what it differs. A key with _ is only a step."""

    value: Any
    sources: list[str]
    notes: list[str] = field(default_factory=list)


@dataclass
class Entry:
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
    theirs: Values  # each leaf by its dotted key
    defaults: Values
    elsewhere: set[str]  # settings of other recipes
    usual: Values  # what the peer takes for a key that is not there
    world_size: int = 1
    has_adapter: bool = False
    settings: dict[str, Setting] = field(default_factory=dict)
    said: dict[str, tuple[str, str]] = field(default_factory=dict)  # what has no setting: its status and why

    @property
    def table(self) -> Values:
        return table(self.peer)

    def takes(self, key: str) -> bool:
        """Whether the recipe has this setting, or a component that may take it."""
        group = key.rpartition(".")[0]
        if key.startswith("adapter.") and not self.has_adapter:
            return False
        is_argument = f"{group}._component_" in self.defaults and key not in self.elsewhere
        return (
            key.startswith(("_", "recipe"))
            or key in self.defaults
            or is_argument
            or group in ("adapter", "dataset.sources")
        )

    def set(self, key: str, value: Any, *sources: str, note: str = "") -> None:
        if isinstance(value, float) and value.is_integer() and isinstance(self.defaults.get(key), int | None):
            value = int(value)
        before = self.settings.get(key, Setting(value, []))
        notes = [*before.notes, note] if note else before.notes
        self.settings[key] = Setting(value, list(dict.fromkeys([*before.sources, *sources])), notes)

    def pop(self, key: str, default: Any = None) -> Setting:
        return self.settings.pop(key, Setting(default, []))

    def read(self, key: str, value: Any, implied: bool = False) -> None:
        """Convert one key of theirs by the first line of the table that it matches."""
        plain = re.sub(r"\[\d+\]", "[]", key)
        rule = match(self.table["keys"], plain)
        always, lost = (match(self.table[part], plain) for part in ("always", "lacking"))
        if value is None:
            value = self.usual.get(key)
        if value is None or value in ("", [], {}):
            patterns = [str(each) for part in ("keys", "always", "lacking") for each in self.table[part]]
            is_known = rule is not None or always or lost or any(plain in each for each in patterns)  # a group
            self.said[key] = ("same by default", "not set") if is_known else self.unknown(plain)
        elif rule is not None:
            self.convert(key, value, {"to": rule} if isinstance(rule, str | list) else rule, implied)
        elif always:
            self.said[key] = ("same by default", always)
        elif lost:
            is_off = value is False or str(value).lower() in ("0", "0.0", "no", "none", "off")
            self.said[key] = ("same by default", "off there too") if is_off else ("no counterpart", lost)
        else:
            self.said[key] = self.unknown(plain)

    def unknown(self, key: str) -> tuple[str, str]:
        known = [
            name for part in ("keys", "always", "lacking") for pattern in self.table[part] for name in names(pattern)
        ]
        return "unknown", f"{PEERS[self.peer]} has no such key, as far as is known here.{did_you_mean(key, known)}"

    def convert(self, key: str, value: Any, rule: Values, implied: bool = False) -> None:
        note, index = rule.get("note", ""), re.search(r"\[\d+\]", key)
        if "by" in rule:
            from tune.preflight import migrate_rules

            return getattr(migrate_rules, rule["by"])(self, key, value)
        targets = [rule["to"]] if isinstance(rule["to"], str) else rule["to"]
        if "values" in rule:
            choices = common()[rule["values"]] if isinstance(rule["values"], str) else rule["values"]
            value = value[0] if isinstance(value, list) and len(value) == 1 else value
            word = next((each for each in choices if re.fullmatch(str(each), str(value).lower())), None)
            if word is None:
                hint = did_you_mean(str(value), [name for each in choices for name in names(each)])
                self.said[key] = "no counterpart", f"there is nothing like {value}.{hint}"
                return
            found, *more = choices[word] if isinstance(choices[word], list) else [choices[word]]
            note = " ".join(filter(None, [note, *more]))
            if found is None:
                self.said[key] = ("differs", note) if note else ("same by default", "")
                return
            if isinstance(found, dict):
                prefix = targets[0].replace("[]", index[0] if index else "")
                for name, each in found.items():
                    if prefix + name not in self.settings:
                        self.set(prefix + name, each, key, note=note)
                self.said.update({} if found else {key: ("differs", note)})
                return
            value = {"same": value, "nothing": None}.get(found, found) if isinstance(found, str) else found
        targets = [re.sub(r"\\(\d)", lambda group: self.group(key, int(group[1])), each) for each in targets]
        target = next(filter(self.takes, targets), None)
        if target is None:
            no_adapter = targets[0].startswith("adapter.") and not self.has_adapter
            is_off = value is False or (value == 1 and targets[0].startswith("parallel."))
            why = (
                "no adapter is trained"
                if no_adapter
                else "off there too"
                if is_off
                else f"{self.recipe} has no {targets[0]}"
            )
            self.said[key] = ("same by default" if no_adapter or is_off else "no counterpart", why)
            return
        target = target.replace("[]", index[0] if index else "")
        if not (implied and target in self.settings):
            value = {rule["in"]: value} if "in" in rule else value
            usual = target in self.defaults and self.defaults[target] == value
            self.set(target, self.recipe if target == "recipe" else value, key, note="" if usual else note)

    def group(self, key: str, number: int) -> str:
        """What the group of the pattern that stands for `key` found in it."""
        plain = re.sub(r"\[\d+\]", "[]", key)
        found = (re.fullmatch(str(pattern), plain) for pattern in self.table["keys"])
        return next(each[number] for each in found if each)

    def entries(self) -> list[Entry]:
        """Each key of theirs once, with what became of it."""
        found = []
        for key, value in self.theirs.items():
            into = {name: each for name, each in self.settings.items() if key in each.sources}
            ours = [f"{name}={show(each.value)}" for name, each in into.items()]
            notes = "; ".join(dict.fromkeys(note for each in into.values() for note in each.notes))
            status, why = "converted", ""
            if all(self.is_default(name) for name in into):
                status = "same by default"
            if key in self.said:
                status, why = self.said[key]
            elif all(name.startswith("_") for name in into):
                status, why, ours = "no counterpart", "nothing here takes it", []
            elif notes:
                status = "differs"
            found.append(Entry(key, value, status, ours, "; ".join(filter(None, (why, notes)))))
        return found

    def is_default(self, key: str) -> bool:
        return key in self.defaults and self.defaults[key] == self.settings[key].value

    def changed(self) -> dict[str, Setting]:
        """What differs from the recipe's own settings: all that a config has to say."""
        return {
            key: each
            for key, each in self.settings.items()
            if key[0] != "_" and key != "recipe" and not self.is_default(key)
        }

    def refuse(self, key: str, problem: str) -> None:
        """Take back a setting that the recipe does not accept."""
        for source in self.settings.pop(key).sources:
            self.said[source] = "no counterpart", problem

    def faults(self) -> list[str]:
        """What is known to go wrong there with these settings, and does not here."""
        return [
            each["says"] + (f" ({each['upstream']})" if "upstream" in each else "")
            for each in self.table["faults"]
            if holds(each["when"], self.theirs)
        ]


def migrate(
    values: Values, peer: str, method: str | None, recipes: Mapping[str, Values], world_size: int = 1
) -> Migration:
    """The settings for one of `recipes` (name -> its own settings by dotted keys) that a config of `peer` stands for.

    Raises:
        NotConverted: the config is for something that no recipe does.
        TuneError: its method is unknown.
    """
    from tune.preflight import migrate_rules

    theirs, rules = dict(leaves(resolved(values))), table(peer)
    for each in rules["refused"]:
        if holds(each["when"], theirs):
            raise NotConverted(f"{PEERS[peer]}: {each['says']}")
    given, source = method_of(rules, theirs, method)
    found = match(common()["methods"], given.lower())
    if found is None:
        known = [name for each in common()["methods"] for name in names(each)]
        raise TuneError(f"{source}: {given} is no method.{did_you_mean(given, known)} There are: {', '.join(known)}.")
    if isinstance(found, str):
        raise NotConverted(f"{source}: {given} {found}")
    has_adapter = holds(rules["adapter"], theirs)
    name = found["recipe"] if found["recipe"] != "sft" else "lora_finetune" if has_adapter else "full_finetune"
    elsewhere = {key for each in recipes.values() for key in each} - set(recipes[name])
    facts = {"method": given, **theirs}
    usual = {
        key: value for each in rules["defaults"] if holds(each["when"], facts) for key, value in each["are"].items()
    }
    run = Migration(peer, given, name, theirs, recipes[name], elsewhere, usual, world_size, has_adapter)
    for key, value in found.items():
        if key != "recipe":
            run.set(key, value, *([source] if source in theirs else []))
    for key, value in theirs.items():
        run.read(key, value)
    for key, value in usual.items():
        if key not in theirs:
            run.read(key, value, implied=True)
    for finish in migrate_rules.FINISH:
        finish(run)
    return run


def method_of(rules: Values, theirs: Values, method: str | None) -> tuple[str, str]:
    """The name of the method, and the key (or option) that it comes from."""
    if method:
        return method, "--method"
    for each in rules["method"]:
        if holds(each.get("when", {}), theirs):
            key = each.get("key")
            return (str(theirs[key]), key) if key else (each["is"], next(iter(each.get("when", {})), "method"))
    raise AssertionError("the last line of a table's methods holds always")


def peer_of(values: Values) -> str:
    """Whose config this is, by its keys. Raises TuneError if they are nobody's."""
    keys = [re.sub(r"\[\d+\]", "[]", key) for key, _ in leaves(values)]
    text = " ".join(f"{key}={value}" for key, value in leaves(values))
    points = {peer: sum(bool(re.search(mark, text)) for mark in table(peer)["marks"]) for peer in PEERS}
    best = max(points, key=lambda peer: points[peer])
    if points[best] == 0:
        marks = "; ".join(f"{name}: {table(peer)['looks_like']}" for peer, name in PEERS.items())
        raise TuneError(
            f"it is no config of these, by its keys ({', '.join(sorted(set(keys))[:6])}): {marks}. "
            f"--from NAME takes it for one: {', '.join(PEERS)}."
        )
    return best


@functools.cache
def common() -> Values:
    return _load("common")


@functools.cache
def table(peer: str) -> Values:
    """The lines of a peer, then those of transformers' arguments where it takes these too."""
    own, shared = _load(peer), _load("training_arguments")
    for part in ("keys", "always", "lacking"):
        own[part] = own.get(part, {}) | (shared[part] if own.get("takes_training_arguments") else {})
    own["faults"] = own["faults"] + (shared["faults"] if own.get("takes_training_arguments") else [])
    return {"refused": [], "defaults": []} | own


def _load(name: str) -> Values:
    found = OmegaConf.to_container(OmegaConf.load(TABLES / f"{name}.yaml"), resolve=False)
    assert isinstance(found, dict)
    return {str(key): value for key, value in found.items()}


_pattern = functools.cache(re.compile)  # the tables have more of them than `re` keeps


def match(lines: Mapping[str, Any], text: str) -> Any:
    """The value of the first pattern that is all of `text`."""
    return next((value for pattern, value in lines.items() if _pattern(str(pattern)).fullmatch(text)), None)


def names(pattern: str) -> list[str]:
    """The plain words of a pattern `one|other`."""
    return [word for word in re.split(r"\|", str(pattern)) if re.fullmatch(r"[\w.]+", word)]


def holds(conditions: Mapping[str, Any], theirs: Values) -> bool:
    """Whether each key that matches has such a value: `set`, `unset`, `>1`, `~pattern` in it, or just this one."""
    return all(_holds([v for key, v in theirs.items() if re.fullmatch(k, key)], want) for k, want in conditions.items())


def _holds(values: list[Any], wanted: Any) -> bool:
    is_set = any(value not in (None, False, "", [], 0) for value in values)
    if wanted in ("set", "unset"):
        return is_set == (wanted == "set")
    if str(wanted).startswith(">"):
        return any(isinstance(value, int | float) and value > float(wanted[1:]) for value in values)
    if str(wanted).startswith("~"):
        return any(re.search(wanted[1:], str(value), re.IGNORECASE) for value in values)
    return any(value == wanted for value in values)


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


def resolved(values: Values) -> Values:
    """With what `${key}` stands for, where that is in the file."""

    def resolve(node: Any, key: Any) -> Any:
        try:
            value = node[key]
        except OmegaConfBaseException:
            return OmegaConf.to_container(node, resolve=False)[key]  # type: ignore[index]
        if not isinstance(value, Container):
            return value
        keys = value.keys() if hasattr(value, "keys") else range(len(value))  # type: ignore[arg-type]
        found = {each: resolve(value, each) for each in keys}
        return found if hasattr(value, "keys") else list(found.values())

    return {key: resolve(cfg, key) for cfg in [OmegaConf.create(values)] for key in values}


def show(value: Any) -> str:
    """A value as YAML on one line."""
    return yaml.safe_dump({"x": value}, default_flow_style=True, width=float("inf"), allow_unicode=True)[4:-2]
