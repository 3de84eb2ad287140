"""Values from text. The written text is kept next to its YAML value, and text settings get the written text: `2024`,
`run #2` and `12:30` can be folder names."""

import contextlib
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf

from tune.run_settings import read_yaml
from tune.types import as_given, fits

Values = dict[str, Any]

INTEGER = re.compile(r"[-+]?(0|[1-9][\d_]*)")
FLOAT = re.compile(r"[-+]?(\d[\d_]*\.\d*|\.\d+|\d[\d_]*(?=[eE]))([eE][-+]?\d+)?")
WORDS = {
    "": None, "null": None, "true": True, "false": False,
    ".inf": float("inf"), "-.inf": -float("inf"), ".nan": float("nan"),
}  # fmt: skip


@dataclass
class Layer:
    """Settings from one place. `origin` ends each message about them: ` (mine.yaml)`."""

    values: Values
    origin: str = ""
    texts: dict[str, list[Any]] = field(default_factory=dict)  # dotted key -> written texts
    unreadable: dict[str, str] = field(default_factory=dict)  # dotted key -> why the text is not YAML

    def note(self, key: str, written: Any) -> None:
        """Keep the `written` text of `key` and of the keys in it."""
        self.texts.setdefault(key, []).append(written)
        if isinstance(written, dict):
            for name, each in written.items():
                self.note(f"{key}.{name}", each)

    def forget(self, key: str) -> None:
        """Drop the written text of `key`, because a later value replaces it."""
        for notes in (self.texts, self.unreadable):
            for known in [each for each in notes if each == key or each.startswith(f"{key}.")]:
                del notes[known]

    def as_kind(self, key: str, value: Any, kind: Any) -> Any:
        """Return the value of `key`, or its written text if only the text fits `kind`."""
        is_any = fits(object(), kind)
        if value is None or is_any or (fits(value, kind) and not isinstance(value, str)):
            return value
        return next((text for text in self.texts.get(key, [as_given(value)]) if fits(text, kind)), value)


class Written(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]  # the loader of OmegaConf
    """Loads YAML with all plain scalars as text."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 (of the class there, too)


Written.add_implicit_resolver("tag:yaml.org,2002:merge", re.compile("<<"), ["<"])


def scalar(text: str) -> Any:
    """Return the number, true, false or null in `text`, else the text. Ambiguous ones (007, 12:30) are text."""
    word = text.strip()
    if word.lower() in WORDS:
        return WORDS[word.lower()]
    if INTEGER.fullmatch(word):
        return int(word)
    return float(word) if FLOAT.fullmatch(word) else text


def parse(text: str) -> tuple[Any, Any]:
    """Return the value of `text` on a command line (a YAML list or group, a quoted string, or a `scalar`), and the same
    value with all scalars as written. Raises yaml.YAMLError if a list or group is not YAML."""
    word = text.strip()
    if word[:1] in ("[", "{"):
        if word[-1] != {"[": "]", "{": "}"}[word[0]]:
            raise yaml.YAMLError(f"{word[0]} has no end")
        value: Any = OmegaConf.to_container(OmegaConf.create(f"value: {word}"))
        written = _written(f"value: {word}")
        return _without_other_numbers(value, written)["value"], written["value"]
    if len(word) > 1 and word[0] == word[-1] and word[0] in "\"'":
        with contextlib.suppress(yaml.YAMLError):  # a text that only starts and ends with quotes
            quoted = _written(f"value: {word}")["value"]
            return quoted, quoted
    return scalar(text), text


def read(file: Path, origin: str = "") -> Layer:
    """Return the settings in a YAML file, with unresolved interpolations. Raises TuneError."""
    values = read_yaml(file)
    written = _written(file.read_text(encoding="utf-8"))
    layer = Layer(spelled_out(_without_other_numbers(values, written)), origin)
    for key, each in written.items() if isinstance(written, dict) else ():  # a lone text is a key without a value
        layer.note(key, each)
    return layer


def spelled_out(values: Any) -> Values:
    """Replace `parallel=auto` by the setting parallel.auto=true."""
    return values | {"parallel": {"auto": True}} if values.get("parallel") == "auto" else values


def _without_other_numbers(value: Any, written: Any) -> Any:
    """Replace numbers that YAML 1.1 has and `scalar` has not by their text: octal 010, 0x10 and 12:30 (750)."""
    if isinstance(value, dict) and isinstance(written, dict):
        return {key: _without_other_numbers(item, written.get(str(key))) for key, item in value.items()}
    if isinstance(value, list) and isinstance(written, list):
        return [_without_other_numbers(item, text) for item, text in zip(value, written, strict=True)]
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return written if is_number and isinstance(written, str) and isinstance(scalar(written), str) else value


def _written(text: str) -> Any:
    return yaml.load(text, Written)
