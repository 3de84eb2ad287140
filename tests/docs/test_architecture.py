"""The names on the page of the architecture are in the code."""

import ast
import builtins
import re
from collections import defaultdict
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
SPAN = re.compile(r"`([^`\n]+)`")
PLACES = [ROOT, *(ROOT / "tune" / name for name in ("", "cli", "datasets", "peft"))]
# Values, placeholders and files of users: no names of the code.
OTHERS = {
    "selective", "config.json", "config.yaml", "config-2.yaml", "RUN/checkpoints/step-N", "import tune",
    '("chats.jsonl:12", {"messages": ...})',
}  # fmt: skip


def defined() -> dict[str, set[str]]:
    """The names that each module of the library defines, by the module's name; of a package, those of its modules, and
    the modules."""
    names: dict[str, set[str]] = defaultdict(set)
    for file in (ROOT / "tune").rglob("*.py"):
        packages = file.relative_to(ROOT).parent.parts
        found = {file.stem, packages[-1]}
        for node in ast.walk(ast.parse(file.read_text())):
            match node:
                case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.Name(id=name, ctx=ast.Store()):
                    found.add(name)
                case ast.arg(arg=str(name)) | ast.keyword(arg=str(name)) | ast.Attribute(attr=name, ctx=ast.Store()):
                    found.add(name)
        for module in (file.stem, *packages):
            names[module] |= found
    return names


def settings(values: dict) -> set[str]:
    """The dotted keys of a config, and the ends of these."""
    inner = {f"{key}.{each}" for key, value in values.items() if isinstance(value, dict) for each in settings(value)}
    return {*values, *inner, *(each.partition(".")[2] for each in inner)}


NAMES = defined()
SETTINGS = {each for file in (ROOT / "configs").glob("*.yaml") for each in settings(yaml.safe_load(file.read_text()))}


def is_there(span: str) -> bool:
    """Whether a code span is a file, a command (see test_commands.py), a setting, or a name that the code defines."""
    if span in OTHERS or span.startswith("tune ") or span.partition("=")[0] in SETTINGS:
        return True
    if any(any(place.glob(span)) for place in PLACES if re.fullmatch(r"[\w./*]+", span) and not span.startswith(".")):
        return True
    names = re.findall(r"[A-Za-z_][\w.]*", re.sub(r"^\w+ = |=[^,)]*", "", span))  # a call: its function and arguments
    for name in names:
        *modules, last = name.split(".")
        module = modules[-1] if modules else ""
        if last not in (NAMES[module] if module in NAMES else {*NAMES["tune"], *dir(builtins)}):
            return False
    return bool(names)


def test_what_is_named_is_there() -> None:
    text = re.sub(r"^```.*?^```", "", (ROOT / "docs" / "architecture.md").read_text(), flags=re.DOTALL | re.MULTILINE)
    spans = {*SPAN.findall(text)}
    assert len(spans) > 100
    assert sorted(span for span in spans if not is_there(span)) == []


@pytest.mark.parametrize("span", ["tune/no.py", "parse/render.py", "rows.Reader", "pipe.load", "fit(rows, unheard)"])
def test_what_is_not_there_is_found(span: str) -> None:
    assert not is_there(span)
