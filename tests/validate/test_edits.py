"""`tune validate` accepts right edits of a copied recipe, whatever their syntax, and names the lines of wrong ones."""

import re
from pathlib import Path

import pytest
from helpers import weekly_but
from validate.edits import RIGHT, WRONG, applied
from validate.test_rehearsal import SETTINGS, errors, here  # noqa: F401

from tune import cli

QUICK_RIGHT = ["try/continue around backward", "loop in a helper", "while and next"]
QUICK_WRONG = ["local before assignment: schedule", "two in a with and after it", "consequence in a guard"]


def copied(edit) -> list[str]:
    """Write mine.py, full_finetune with an edit; return its lines."""
    cli.main(["cp", "full_finetune", "mine.py"])
    text = applied(edit)
    Path("mine.py").write_text(text)
    return text.split("\n")


@pytest.mark.parametrize("name", weekly_but(QUICK_RIGHT, RIGHT))
def test_right_edit_has_no_errors(name, here):  # noqa: F811
    copied(RIGHT[name])
    assert errors("mine.py", *SETTINGS) == []


@pytest.mark.parametrize("name", weekly_but(QUICK_WRONG, WRONG))
def test_exactly_the_wrong_lines_of_an_edit_are_named(name, here):  # noqa: F811
    edit, wrong = WRONG[name]
    lines = copied(edit)
    expected = {number for number, line in enumerate(lines, 1) if any(text in line for text in wrong)}
    reported = errors("mine.py", *SETTINGS)
    assert {int(line) for error in reported for line in re.findall(r"mine\.py:(\d+)", error)} == expected
