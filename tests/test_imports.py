"""Imports go one way, from the top of the library to its base."""

import ast
import sys
from pathlib import Path

import pytest

import tune
from tune.cli import VERBS

HOUSE = Path(tune.__file__).parent
RECIPES = HOUSE.parent / "recipes"

# Each package may import those after it. The first lines use the library, the last are used by all of it.
ORDER = [
    *("cli", "plan", "validate", "verify", "migrate", "convert", "launchers"),
    *("run", "loggers", "records"),
    *("evaluation", "generation", "peft", "checkpointers"),
    *("datasets", "models", "optimizers"),
    *("tokenizers", "losses", "quantization", "distributed"),
    *("collators", "config", "rules", "files"),
    # Files next to the packages.
    *("ray_cluster", "fused", "rehearsal", "processor", "parts", "run_settings"),
    *("devices", "lookup", "types", "errors", "secrets", "terminal", "__version__"),
]
ALLOWED = {
    ("run", "config"): "a run writes its recipe's settings to config.yaml",
    ("validate", "config"): "a run folder is a path or a URL",
    ("plan", "config"): "a plan is made of what the settings name",
    ("migrate", "config"): "the signatures of components say which keys they take",
    ("records", "config"): "a report reads them there, and the recipe's defaults",
}
# Imported from inside a package, because the package itself would have to load it for everyone.
INSIDE = {
    "tune.models.families": "a face itself",
    "tune.launchers.ray": "imports Ray",
    "tune.cli.plan": "a verb",
}


def imported(file: Path) -> set[str]:
    """Return the full names of modules and their members that a file imports anywhere."""
    names = []
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom):
            assert not node.level, f"{file}:{node.lineno}: relative imports hide which package is meant"
            names += [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
    return set(names)


def packages(file: Path) -> set[str]:
    """Return the packages of `tune`, and files next to them, that a file imports."""
    return {name.split(".")[1] for name in imported(file) if name.startswith("tune.")}


def wrong(package: str, file: Path) -> set[str]:
    """Return forbidden imports in a file of `package`: only recipes and `cli` know the config."""
    below = set(ORDER[ORDER.index(package) :]) - ({"config"} - {package} if package != "cli" else set())
    return {other for other in packages(file) - below if (package, other) not in ALLOWED}


def test_packages_import_only_lower_packages() -> None:
    files = [file for file in HOUSE.rglob("*.py") if file != HOUSE / "__init__.py"]
    of = {file: file.relative_to(HOUSE).parts[0].removesuffix(".py") for file in files}
    assert len(files) > 50
    assert not {str(file): forbidden for file in files if (forbidden := wrong(of[file], file))}
    assert set(ALLOWED) <= {(of[file], other) for file in files for other in packages(file)}  # no longer needed?


@pytest.mark.parametrize(
    ("package", "line", "expected"),
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
def test_forbidden_imports_are_detected(package: str, line: str, expected: set[str], tmp_path: Path) -> None:
    (tmp_path / "file.py").write_text(line)
    assert wrong(package, tmp_path / "file.py") == expected


def test_packages_are_imported_through_their_public_names() -> None:
    modules = {".".join(file.relative_to(HOUSE.parent).with_suffix("").parts) for file in HOUSE.rglob("*/*.py")}
    files = [*HOUSE.rglob("*.py"), *RECIPES.glob("*.py")]
    past = {
        (str(file), node.module)
        for file in files
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and node.module in modules
        if node.module.split(".")[1] not in file.relative_to(HOUSE.parent).parts and node.module not in INSIDE
    }
    assert not past


def test_no_two_modules_import_each_other() -> None:
    modules = {".".join(file.relative_to(HOUSE.parent).with_suffix("").parts): file for file in HOUSE.rglob("*.py")}
    below: dict[str, set[str]] = {}
    for name, file in modules.items():
        names = imported(file)
        below[name] = {
            imported_name
            for imported_name in names | {imported_name.rpartition(".")[0] for imported_name in names}
            if imported_name in modules
        }
    for name in below:  # the modules that one reaches
        reached, left = set[str](), [*below[name]]
        while left:
            if (module := left.pop()) not in reached:
                reached.add(module)
                left += below[module]
        assert name not in reached, name


def test_recipes_import_tune_torch_and_the_standard_library() -> None:
    allowed = {"tune", "torch", *sys.stdlib_module_names}
    for recipe in RECIPES.glob("*.py"):
        assert {name.split(".")[0] for name in imported(recipe)} <= allowed, recipe


def test_commands_do_not_import_each_other() -> None:
    """Code that several commands need is in the library, or in a file of `cli` that is not a command."""
    verbs = {verb.replace("-", "_") for verb in VERBS}
    modules = {f"tune.cli.{verb}" for verb in verbs}
    files = [HOUSE / "cli" / f"{verb}.py" for verb in verbs]
    shared = [file for file in (HOUSE / "cli").glob("*.py") if file.stem not in verbs]
    assert len(files) > 20 and {"recipes.py", "output.py"} <= {file.name for file in shared}
    imports = {
        (file.name, name)
        for file in [*files, *shared]
        for name in imported(file)
        if any(f"{name}.".startswith(f"{module}.") for module in modules)
    }
    assert not imports
