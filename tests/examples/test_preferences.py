import json
import subprocess
import sys
from pathlib import Path

import pytest

from tune.datasets import load
from tune.tokenizers import Tokenizer

FOLDER = Path(__file__).parents[2] / "examples" / "preferences"


def rows(name: str) -> list[dict[str, str]]:
    return [json.loads(line) for line in (FOLDER / name).open()]


def test_shipped_files_match_the_script(tmp_path: Path) -> None:
    subprocess.run([sys.executable, FOLDER / "make_pairs.py", "--out", tmp_path], check=True)
    for name in ("train.jsonl", "validation.jsonl"):
        assert (tmp_path / name).read_bytes() == (FOLDER / name).read_bytes()


def test_held_out_requests_are_new_and_answers_are_terse_or_chatty() -> None:
    train, held_out = rows("train.jsonl"), rows("validation.jsonl")
    assert not {row["instruction"] for row in train} & {row["instruction"] for row in held_out}
    for row in train + held_out:
        assert len(row["chosen"].split()) <= 8 < len(row["rejected"].split())


@pytest.mark.parametrize("name", ["train.jsonl", "validation.jsonl"])
def test_all_pairs_are_trained_on(name: str, checkpoint: Path) -> None:
    data = load(Tokenizer(str(checkpoint)), str(FOLDER / name), max_seq_len=1024, kind="preferences")
    assert data.accounting.kept == len(rows(name)) and data.accounting.cut_tokens == 0
