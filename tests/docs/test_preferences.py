"""docs/preferences.md: its example rows are read as it says, its losses are those that there are."""

import inspect
import json
import re
from pathlib import Path

import pytest

from tune import losses
from tune.datasets import load
from tune.datasets.parse.formats import FORMATS
from tune.tokenizers import Tokenizer

PAGE = (Path(__file__).parents[2] / "docs" / "preferences.md").read_text()
ROWS = re.findall(r"^\| `(\w+)` \| `(\{.*?\})` \|$", PAGE, re.MULTILINE)


@pytest.mark.parametrize(("name", "row"), ROWS)
def test_rows_have_the_format_that_the_page_gives_them(name, row, checkpoint, tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text(f"{row}\n")
    kind = "labelled" if name.startswith("labelled") else "preferences"
    data = load(Tokenizer(str(checkpoint)), str(file), max_seq_len=128, kind=kind)
    assert data.accounting.format == name and data.accounting.remarks == {}
    given = json.loads(row)
    assert len(data.samples) == (3 if isinstance(given.get("rejected"), list) and given["rejected"][0] == " 5" else 2)


def test_every_format_has_an_example():
    assert {name for name, _ in ROWS} == {each.name for kind in ("preferences", "labelled") for each in FORMATS[kind]}


def test_every_loss_is_in_the_table_with_its_beta_and_its_reference():
    table = {
        name: (beta, reference == "yes")
        for name, beta, reference in re.findall(r"^\| `(\w+)`(?:, \w+)? \| .* \| ([\d.]+) \| (yes|no) \|$", PAGE, re.M)
    }
    found = {
        name: (f"{inspect.signature(each).parameters['beta'].default:g}", each.needs_reference)
        for name, each in vars(losses).items()
        if hasattr(each, "needs_reference")
    }
    assert table == found
