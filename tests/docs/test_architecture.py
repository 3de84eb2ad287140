"""The names on the architecture page exist in the code."""

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
# Values, placeholders, and user files: not names in the code.
OTHERS = {
    "selective", "config.json", "config.yaml", "config-2.yaml", "RUN/checkpoints/step-N", "import tune",
    '("chats.jsonl:12", {"messages": ...})',
}  # fmt: skip


def defined() -> dict[str, set[str]]:
    """Return the names that each module of the library defines, by module. A package has its modules and their
    names."""
    names: dict[str, set[str]] = defaultdict(set)
    for file in (ROOT / "tune").rglob("*.py"):
        packages = file.relative_to(ROOT).parent.parts
        local_names = {file.stem, packages[-1]}
        for node in ast.walk(ast.parse(file.read_text())):
            match node:
                case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.Name(id=name, ctx=ast.Store()):
                    local_names.add(name)
                case ast.arg(arg=str(name)) | ast.keyword(arg=str(name)) | ast.Attribute(attr=name, ctx=ast.Store()):
                    local_names.add(name)
        for module in (file.stem, *packages):
            names[module] |= local_names
    return names


def settings(values: dict) -> set[str]:
    """Return the dotted keys of a config and their suffixes."""
    inner = {
        f"{key}.{inner_key}"
        for key, value in values.items()
        if isinstance(value, dict)
        for inner_key in settings(value)
    }
    return {*values, *inner, *(dotted.partition(".")[2] for dotted in inner)}


NAMES = defined()
SETTINGS = {key for file in (ROOT / "configs").glob("*.yaml") for key in settings(yaml.safe_load(file.read_text()))}


def exists(span: str) -> bool:
    """Return whether a code span is a file, a command (see test_commands.py), a setting, or a name in the code."""
    if span in OTHERS or span.startswith("tune ") or span.partition("=")[0] in SETTINGS:
        return True
    if any(any(place.glob(span)) for place in PLACES if re.fullmatch(r"[\w./*]+", span) and not span.startswith(".")):
        return True
    names = re.findall(
        r"[A-Za-z_][\w.]*", re.sub(r"^\w+ = |=[^,)]*", "", span)
    )  # for a call, its function and arguments
    for name in names:
        *modules, last = name.split(".")
        module = modules[-1] if modules else ""
        if last not in (NAMES[module] if module in NAMES else {*NAMES["tune"], *dir(builtins)}):
            return False
    return bool(names)


def test_documented_names_exist() -> None:
    text = re.sub(r"^```.*?^```", "", (ROOT / "docs" / "architecture.md").read_text(), flags=re.DOTALL | re.MULTILINE)
    spans = {*SPAN.findall(text)}
    assert len(spans) > 100
    assert sorted(span for span in spans if not exists(span)) == []


@pytest.mark.parametrize("span", ["tune/no.py", "parse/render.py", "rows.Reader", "fit.load", "fit(rows, unheard)"])
def test_missing_names_are_detected(span: str) -> None:
    assert not exists(span)
