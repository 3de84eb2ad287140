"""What is prepared can be listed and removed."""

import json

import pytest

from tune.cli import main
from tune.datasets import load
from tune.tokenizers import Tokenizer


@pytest.fixture
def cache(checkpoint, tmp_path, monkeypatch):
    """A cache with one dataset of two blocks, one of which was cut."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("TUNE_CACHE", str(folder))
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps({"text": "one two three " * 9}) + "\n" for _ in range(3)))
    load(Tokenizer(str(checkpoint)), str(file), max_seq_len=8, workers=1)
    return folder


def test_datasets_are_listed_with_their_sizes(cache, capsys):
    main(["cache"])
    out = capsys.readouterr().out
    (line,) = [line for line in out.splitlines() if "rows.jsonl" in line]
    assert line.split()[1].isdigit() and str(cache) in out


def test_all_is_removed(cache, capsys):
    (cache / ("0" * 32)).mkdir()  # of an earlier version
    main(["cache", "--empty", "--older-than", "1"])
    assert list((cache / "blocks").iterdir())
    main(["cache", "--empty"])
    assert not [entry for entry in cache.rglob("*") if entry.is_file()]
    assert not (cache / ("0" * 32)).exists()


def test_no_cache(tmp_path, capsys):
    with pytest.raises(SystemExit):
        main(["cache", "--cache-dir", str(tmp_path / "none"), "--empty"])
    assert "none" in capsys.readouterr().err


def test_age_without_removing_is_an_error(cache, capsys):
    with pytest.raises(SystemExit) as end:
        main(["cache", "--older-than", "3"])
    assert end.value.code == 2 and "--empty" in capsys.readouterr().err
    assert list((cache / "blocks").iterdir())
