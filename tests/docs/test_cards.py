"""The page of models and cards has what `tune plan` computes, and each cell's command is one that it takes."""

import importlib.util
import re
import shlex

import pytest
from copied_recipe import ROOT
from helpers import weekly_but

from tune.cli.plan import without_data

PAGE = (ROOT / "docs" / "cards.md").read_text(encoding="utf-8")
README = (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def cards_page():
    spec = importlib.util.spec_from_file_location("cards_page", ROOT / "docs" / "cards_page.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def table_of(tokens: int) -> dict[tuple[str, str], list[str]]:
    """Return the cells of each line of a table: (size, method) -> one for each card."""
    text = PAGE.split(f"## Rows of {tokens:,} tokens")[1].split("\n## ")[0]
    lines = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    return {(size, method): cells for size, method, *cells in lines[1:]}


# One that fits as it is, one that does not fit, one with recomputation, and one on eight cards.
CELLS = [("1B", "LoRA", 2048, 0), ("8B", "LoRA", 2048, 2), ("70B", "full", 2048, 4), ("3B", "full", 8192, 5)]


@pytest.mark.weekly(but_one=True)
@pytest.mark.parametrize(("size", "method", "tokens", "card"), weekly_but(CELLS[:1], CELLS))
def test_cell_is_what_a_plan_computes(size, method, tokens, card, cards_page, tmp_path):
    cards_page.write_shapes(tmp_path)
    (name,) = [name for model_size, name, _ in cards_page.MODELS if model_size == size]
    cell = cards_page.cell(tmp_path, name, method, tokens, cards_page.CARDS[card])
    assert str(cell) == table_of(tokens)[size, method][card]
    assert cell.line in PAGE


def test_tables_are_complete(cards_page):
    for tokens in cards_page.LENGTHS:
        table = table_of(tokens)
        assert len(table) == len(cards_page.MODELS) * len(cards_page.METHODS)
        assert {len(cells) for cells in table.values()} == {len(cards_page.CARDS)}


@pytest.mark.weekly
def test_each_cell_has_a_command(cards_page, tmp_path, monkeypatch):
    """Its settings are read without an error."""
    monkeypatch.chdir(tmp_path)
    cards_page.write_shapes(cards_page.SHAPES)
    commands = re.findall(r"^tune plan (.*?) --world-size \d+ --device \w+  #", PAGE, flags=re.MULTILINE)
    cells = sum(len(table_of(tokens)) * len(cards_page.CARDS) for tokens in cards_page.LENGTHS)
    assert len(commands) == cells
    for command in {*commands}:
        recipe, *settings = shlex.split(command)
        without_data(recipe, settings)


def test_lines_in_the_readme_are_those_of_the_page():
    section = README.split("\n## Which model on which card\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if re.match(r"\| \d+B ", line)]
    assert len(lines) == 5 and all(line in PAGE for line in lines)
