"""Configs explain every setting."""

import re
from pathlib import Path

import pytest

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.yaml"))


@pytest.mark.parametrize("file", CONFIGS, ids=lambda file: file.stem)
def test_every_value_has_a_comment(file):
    values = [line for line in file.read_text().splitlines() if re.match(r" *[\w-]+: *[^ #]", line)]
    assert values and [line for line in values if "  # " not in line and " # " not in line] == []
