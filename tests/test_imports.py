"""Imports run one way, from what stands on top of the library to its ground."""

import ast
import sys
from pathlib import Path

import pytest

import tune

HOUSE = Path(tune.__file__).parent
RECIPES = HOUSE.parent / "recipes"

# Each package may import those after it. The first lines use the library, the last are used by all of it.
ORDER = [
    *("cli", "preflight", "launchers", "loggers", "records"),
    *("evaluation", "peft", "generation", "checkpointers"),
    *("datasets", "models", "optimizers"),
    *("tokenizers", "losses", "quantization", "distributed"),
    *("collators", "config", "rules"),
    # Files beside the packages.
    *(
        "ray_cluster",
        "contents",
        "atomic",
        "type_check",
        "types",
        "devices",
        "lookup",
        "errors",
        "secrets",
        "__version__",
    ),
]
ALLOWED = {
    ("loggers", "config"): "a run writes its recipe's settings to config.yaml",
    ("preflight", "config"): "what is wrong with a run is found by making all that its settings name",
    ("records", "config"): "a report reads them there, and the recipe's defaults",
}


def imported(file: Path) -> set[str]:
    """The full names of the modules, or of what is in them, that a file imports, wherever in it."""
    names = []
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom):
            assert not node.level, f"{file}:{node.lineno}: relative imports hide which package is meant"
            names += [f"{node.module}.{each.name}" for each in node.names]
        elif isinstance(node, ast.Import):
            names += [each.name for each in node.names]
    return set(names)


def packages(file: Path) -> set[str]:
    """The packages of `tune`, and the files beside them, that a file imports."""
    return {name.split(".")[1] for name in imported(file) if name.startswith("tune.")}


def wrong(package: str, file: Path) -> set[str]:
    """What a file of `package` imports and may not: only recipes and `cli` know the config."""
    below = set(ORDER[ORDER.index(package) :]) - ({"config"} - {package} if package != "cli" else set())
    return {other for other in packages(file) - below if (package, other) not in ALLOWED}


def test_each_package_imports_only_what_is_below_it() -> None:
    files = [file for file in HOUSE.rglob("*.py") if file != HOUSE / "__init__.py"]
    of = {file: file.relative_to(HOUSE).parts[0].removesuffix(".py") for file in files}
    assert len(files) > 50
    assert not {str(file): found for file in files if (found := wrong(of[file], file))}
    assert set(ALLOWED) <= {(of[file], other) for file in files for other in packages(file)}  # no longer needed?


@pytest.mark.parametrize(
    ("package", "line", "found"),
    [
        ("losses", "import tune.models", {"models"}),
        ("models", "def f():\n    from tune.cli import main", {"cli"}),
        ("checkpointers", "from tune import peft", {"peft"}),
        ("datasets", "from tune.config import load", {"config"}),
        ("datasets", "from tune.collators import Batch", set()),
        ("cli", "from tune import config", set()),
        ("config", "from tune.config.paths import find_config", set()),
    ],
)
def test_what_is_wrong(package: str, line: str, found: set[str], tmp_path: Path) -> None:
    (tmp_path / "file.py").write_text(line)
    assert wrong(package, tmp_path / "file.py") == found


def test_recipes_import_tune_torch_and_the_standard_library() -> None:
    allowed = {"tune", "torch", *sys.stdlib_module_names}
    for recipe in RECIPES.glob("*.py"):
        assert {name.split(".")[0] for name in imported(recipe)} <= allowed, recipe
