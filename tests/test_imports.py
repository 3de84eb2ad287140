"""Imports run one way: a component knows neither the config system nor the commands, so any script can use it alone."""

import ast
from pathlib import Path

import tune

HOUSE = Path(tune.__file__).parent
ABOVE = {"config", "cli"}
OF_A_RECIPE = HOUSE / "loggers" / "run.py"  # keeps the recipe's settings


def imported(file: Path) -> set[str]:
    """The packages of `tune` that a file imports, wherever in it."""
    names = []
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom):
            names += [f"{node.module}.{each.name}" for each in node.names]
        elif isinstance(node, ast.Import):
            names += [each.name for each in node.names]
    return {name.split(".")[1] for name in names if name.startswith("tune.")}


def test_components_do_not_know_what_is_above_them() -> None:
    components = {file for file in HOUSE.rglob("*.py") if file.relative_to(HOUSE).parts[0] not in ABOVE} - {OF_A_RECIPE}
    assert len(components) > 50
    assert not {str(file): found for file in components if (found := imported(file) & ABOVE)}
