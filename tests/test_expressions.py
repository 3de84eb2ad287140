"""Expressions that are hard to read are written as statements."""

import ast
from pathlib import Path

import pytest

import tune

HOUSE = Path(tune.__file__).parent
FILES = [*HOUSE.rglob("*.py"), *(HOUSE.parent / "recipes").glob("*.py")]
TEXTS = (ast.JoinedStr, ast.List, ast.ListComp)


def is_nested_choice(node: ast.AST) -> bool:
    """Return whether it is `a if x else b if y else c`."""
    return isinstance(node, ast.IfExp) and any(isinstance(part, ast.IfExp) for part in (node.body, node.orelse))


def is_text_times_condition(node: ast.AST) -> bool:
    """Return whether it is like `" and more" * is_more` or `[one] * (number > 1)`: one factor is a condition."""
    if not (isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult)):
        return False
    sides = (node.left, node.right)
    is_text = any(isinstance(side, TEXTS) or isinstance(getattr(side, "value", None), str) for side in sides)
    return is_text and any(isinstance(side, (ast.Compare, ast.BoolOp)) or is_named_as_one(side) for side in sides)


def is_named_as_one(node: ast.AST) -> bool:
    if isinstance(node, ast.UnaryOp):
        return isinstance(node.op, ast.Not)
    called = node.func if isinstance(node, ast.Call) else node
    name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
    return name in ("bool", "isinstance", "any", "all") or name.lstrip("_").startswith(("is_", "has_"))


@pytest.mark.slow
@pytest.mark.parametrize("is_riddle", [is_nested_choice, is_text_times_condition])
def test_no_hard_to_read_expressions(is_riddle):
    riddles = [
        f"{file.relative_to(HOUSE.parent)}:{node.lineno}"
        for file in FILES
        for node in ast.walk(ast.parse(file.read_text()))
        if is_riddle(node)
    ]
    assert not riddles, "\n".join(riddles)
