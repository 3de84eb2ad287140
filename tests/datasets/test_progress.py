"""What preparation tells while it works."""

import json

import pytest

from tune.datasets import load, progress
from tune.errors import TuneError
from tune.tokenizers import Tokenizer


@pytest.fixture
def bad(tmp_path):
    """A file whose second row has no answer that can be used."""
    good = {"messages": [{"role": "user", "content": "the cat"}, {"role": "assistant", "content": "sat"}]}
    wrong = {"messages": [{"role": "user", "content": "the cat"}, {"role": "assistant", "content": 4}]}
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in (good, wrong, good)))
    return file


@pytest.mark.parametrize(("seconds", "times"), [(0.0, 1), (60.0, 0)])
def test_a_bad_row_is_told_once_and_only_when_preparation_is_long(bad, checkpoint, capfd, monkeypatch, seconds, times):
    monkeypatch.setattr(progress, "TELL", seconds)
    with pytest.raises(TuneError, match=r"rows\.jsonl:2"):
        load(Tokenizer(str(checkpoint)), str(bad), max_seq_len=64, workers=1)
    assert capfd.readouterr().err.count("rows.jsonl:2: ") == times
