"""The README shows the current loop, edits, recipes, and pictures."""

import re
import textwrap

from copied_recipe import CHANGES, ROOT, lines_of

from examples import pictures

README = (ROOT / "README.md").read_text(encoding="utf-8")


def section(title: str) -> str:
    return README.split(f"\n## {title}\n")[1].split("\n## ")[0]


def test_loop_matches_the_recipe():
    recipe = (ROOT / "recipes" / "full_finetune.py").read_text(encoding="utf-8")
    (block,) = re.findall(r"```python\n(.*?)```", section("Read it"), flags=re.DOTALL)
    before, after = (textwrap.indent(part, " " * 8) for part in block.split("    ...\n"))
    assert recipe.index(before) < recipe.index(after)
    left_out = recipe[recipe.index(before) + len(before) : recipe.index(after)]
    assert "backward()" in before and "optimizer.step()" in after and len(left_out.splitlines()) < 10


def test_edits_have_the_stated_number_of_lines():
    rows = re.findall(r"^\| \[([^]]+)\]\(docs/changes\.md#.+\|\s*(\d+) \|$", section("Change it"), flags=re.MULTILINE)
    assert len(rows) == 8
    assert {title: int(lines) for title, lines in rows} == {title: lines_of(CHANGES[title]) for title, _ in rows}


def test_table_has_all_recipes():
    named = re.findall(r"`(\w+)`", "".join(row.split("|")[1] for row in section("Recipes").splitlines() if row))
    assert sorted(named) == sorted(file.stem for file in (ROOT / "recipes").glob("*.py"))


def test_pictures_match_the_script():
    drawn = pictures.pictures()
    assert {name: (pictures.FOLDER / name).read_text(encoding="utf-8") for name in drawn} == drawn


def test_pictures_on_pages_exist():
    pages = [ROOT / "README.md", ROOT / "docs" / "index.md", ROOT / "examples" / "README.md"]
    shown = {page.parent / file for page in pages for file in re.findall(r"!\[[^]]+\]\(([^)]+)\)", page.read_text())}
    assert len(shown) > 3 and all(file.is_file() for file in shown)
