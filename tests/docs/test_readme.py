"""The README's commands run as they stand, and it shows the current loop, edits, recipes, and pictures."""

import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from copied_recipe import CHANGES, ROOT, lines_of
from docs_reader import BLOCK
from torch.testing import assert_close

from examples import pictures

README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = [block for language, block in BLOCK.findall(README) if not language]
FOLDERS = ("configs", "examples", "recipes", "tune")
ENVIRONMENT = Path(sys.prefix)


def section(title: str) -> str:
    return README.split(f"\n## {title}\n")[1].split("\n## ")[0]


def test_blocks_can_be_pasted():
    """No block of the README has a placeholder, and the first one has the two commands that work from a fresh clone."""
    assert BLOCKS[0].splitlines() == ["make demo", "make test"]
    commands = "".join(BLOCKS)
    assert not re.findall(r"\.\.\.|<\w+>|=[A-Z]{2}|\b(?!JSON\b)[A-Z]{4,}\b", commands)
    # There is no address, and no package on an index.
    assert "git clone" not in commands and "pip install" not in commands


@pytest.mark.slow
@pytest.mark.skipif(not (ENVIRONMENT / "bin" / "activate").exists(), reason="needs a virtual environment")
def test_blocks_run_as_they_stand(checkpoint, tmp_path):
    """A shell runs all blocks in order, in a copy with a tiny model in place of the demo's and less data."""
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("Makefile", "constraints.txt", "pyproject.toml"):
        shutil.copy2(ROOT / file, tmp_path)
    (tmp_path / ".demo").mkdir()
    shutil.copytree(checkpoint, tmp_path / ".demo" / "smollm2-135m")
    data = tmp_path / "examples" / "home_commands" / "train.jsonl"
    rows = data.read_text(encoding="utf-8").splitlines(keepends=True)
    data.write_text("".join(rows[:64]), encoding="utf-8")

    # This environment is the installed one. Were it not, `make` would fail instead of installing into it.
    (tmp_path / ".venv").mkdir()
    for part in ENVIRONMENT.iterdir():
        if not part.name.startswith(".installed"):
            (tmp_path / ".venv" / part.name).symlink_to(part)
    for stamp in (".installed", ".installed_dev"):
        (tmp_path / ".venv" / stamp).touch()
    settings = {"PYTHON": "false", "PYTHONPATH": str(tmp_path), "STEPS": "3", "ROWS": "4", "OMP_NUM_THREADS": "1"}

    # These tests are what `make test` runs.
    script = "set -e\n" + "".join(BLOCKS).replace("make test\n", "make --dry-run test\n")
    command = ["bash", "-c", script]
    done = subprocess.run(command, cwd=tmp_path, env=os.environ | settings, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]
    assert json.loads((tmp_path / ".demo" / "run" / "results.json").read_text())["of"] == 4
    assert "pytest" in done.stdout

    def losses(run):
        lines = (tmp_path / "runs" / run / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line)["loss"] for line in lines]

    assert len(losses("mine")) == 4  # 64 rows, 16 a step
    assert_close(losses("eight"), losses("mine"), rtol=1e-5, atol=0)
    (copied,) = (tmp_path / "runs").glob("mine-*")
    assert len(losses(copied.name)) == 4


def test_loop_is_the_one_of_the_recipe():
    """From its first line to the save, without a cut, on less than half a screen."""
    recipe = (ROOT / "recipes" / "full_finetune.py").read_text(encoding="utf-8")
    (block,) = re.findall(r"```python\n(.*?)```", section("Read it"), flags=re.DOTALL)
    loop = recipe[recipe.index("        for step, batch in") : recipe.index("        run.finish()")]
    assert textwrap.dedent(loop).rstrip() == block.rstrip()
    assert block.splitlines()[-1].strip().startswith("checkpointer.step(")
    assert len(block.splitlines()) <= 25


def test_plain_recipe_stands_next_to_the_demo():
    beginning = README.split("\n## ")[0]
    demo, plain = (beginning.index(text) for text in ("**`make demo`**", "(recipes/plain.py)"))
    assert demo < plain < beginning.index("**`make test`**")


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
