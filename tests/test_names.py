"""A name means one thing in the library and identifies one module or class."""

import ast
from collections import Counter
from pathlib import Path

import tune

HOUSE = Path(tune.__file__).parent


def defined(file: Path) -> list[str]:
    """Return the public classes and types of a module, and IGNORE, the label of unsupervised tokens."""
    names: list[str] = []
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.ClassDef):
            names.append(node.name)
        elif isinstance(node, ast.Assign):
            names += [target.id for target in node.targets if isinstance(target, ast.Name)]
    return [name for name in names if name[0].isupper() and (not name.isupper() or name == "IGNORE")]


def test_module_names_are_unique() -> None:
    """A family's file is named for its model_type, and `__init__.py` for its folder."""
    names = Counter(
        file.name for file in HOUSE.rglob("*.py") if file.name != "__init__.py" and file.parent.name != "families"
    )
    assert len(names) > 50
    assert not [name for name, count in names.items() if count > 1]


def test_class_names_are_unique() -> None:
    names = Counter(name for file in HOUSE.rglob("*.py") for name in set(defined(file)))
    assert names["Dataset"] == names["Span"] == names["IGNORE"] == 1
    assert not [name for name, count in names.items() if count > 1]


def test_suggestions_are_looked_up_in_one_place() -> None:
    texts = {file.name: file.read_text() for file in HOUSE.rglob("*.py")}
    assert [name for name, text in texts.items() if "get_close_matches" in text] == ["lookup.py"]
