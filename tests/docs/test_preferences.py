"""docs/preferences.md: its example rows are read as documented, and its table lists all losses."""

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
def test_rows_have_the_documented_format(name, row, checkpoint, tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text(f"{row}\n")
    kind = "labelled" if name.startswith("labelled") else "preferences"
    data = load(Tokenizer(str(checkpoint)), str(file), max_seq_len=128, kind=kind)
    assert data.accounting.format == name and data.accounting.remarks == {}
    values = json.loads(row)
    assert len(data.samples) == (3 if isinstance(values.get("rejected"), list) and values["rejected"][0] == " 5" else 2)


def test_every_format_has_an_example():
    assert {name for name, _ in ROWS} == {entry.name for kind in ("preferences", "labelled") for entry in FORMATS[kind]}


def test_table_lists_every_loss_with_its_beta_and_reference():
    table = {
        name: (beta, reference == "yes")
        for name, beta, reference in re.findall(r"^\| `(\w+)`(?:, \w+)? \| .* \| ([\d.]+) \| (yes|no) \|$", PAGE, re.M)
    }
    existing = {
        name: (f"{inspect.signature(loss).parameters['beta'].default:g}", loss.needs_reference)
        for name, loss in vars(losses).items()
        if hasattr(loss, "needs_reference")
    }
    assert table == existing
