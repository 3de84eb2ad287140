"""The library stays what a person can read in a day: a feature that needs more lines makes something else smaller."""

from pathlib import Path

import tune

HOUSE = Path(tune.__file__).parent

# Lines of each package as `wc -l` counts them. Lower a ceiling when a package has become smaller.
CEILINGS = {
    "checkpointers": 2126,
    "cli": 2411,
    "collators": 264,
    "config": 904,
    "datasets": 3985,
    "distributed": 2508,
    "evaluation": 475,
    "generation": 1019,
    "launchers": 431,
    "loggers": 1525,
    "losses": 928,
    "models": 3382,
    "optimizers": 315,
    "peft": 1482,
    "preflight": 2301,
    "records": 360,
    "rules": 429,
    "quantization": 425,
    "tokenizers": 1145,
    "beside": 461,  # the files beside the packages
}


def test_no_package_outgrows_its_ceiling() -> None:
    lines = dict.fromkeys(CEILINGS, 0)
    for file in HOUSE.rglob("*.py"):
        package = "beside" if file.parent == HOUSE else file.relative_to(HOUSE).parts[0]
        lines[package] += file.read_text().count("\n")
    assert not {name: f"{lines[name]} lines, at most {most}" for name, most in CEILINGS.items() if lines[name] > most}


def test_recipes_are_short() -> None:
    for file in (HOUSE.parent / "recipes").glob("*.py"):
        assert (lines := file.read_text().count("\n")) <= 220, f"{file.name} has {lines} lines, at most 220"
