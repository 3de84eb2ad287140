"""The page on files of other people has all verbs, and the lists in the code."""

import re
from pathlib import Path

from tune.cli import VERBS
from tune.datasets.read.data_files import SCHEMES
from tune.run_settings import COMPONENTS
from tune.secrets import REMOVED

PAGE = (Path(__file__).parents[2] / "docs" / "security.md").read_text(encoding="utf-8")


def section(title: str) -> str:
    return PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def test_each_verb_has_a_row():
    first_cells = [line.split("|")[1] for line in section("What a folder may name").splitlines() if line[:3] == "| `"]
    assert {*VERBS} <= {name for cell in first_cells for name in re.findall(r"`([a-z-]+)[` ]", cell)}


def test_list_of_components():
    rows = [line.split("|")[1:3] for line in section("The list").splitlines() if line[:3] == "| `"]
    named = [f"{package.strip(' `')}.{name}" for package, names in rows for name in re.findall(r"`(\w+)`", names)]
    assert sorted(named) == sorted(COMPONENTS)


def test_schemes_and_mark():
    assert re.findall(r"`(\w+)://`", section("Your own settings")) == [*SCHEMES]
    assert f"`{REMOVED}`" in section("Secrets")
