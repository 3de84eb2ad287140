"""Validation data that are named next to the training data: a path, or the arguments that differ."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tune.datasets import load, load_prompts, mix
from tune.errors import TuneError
from tune.tokenizers import Tokenizer


def rows(file: Path, count: int, word: str) -> str:
    turns = [
        [{"role": "user", "content": f"{word} {n}?"}, {"role": "assistant", "content": word}] for n in range(count)
    ]
    file.write_text(
        "".join(json.dumps({"messages": each, "prompt": f"{word} {n}"}) + "\n" for n, each in enumerate(turns))
    )
    return str(file)


@pytest.fixture
def files(tmp_path: Path) -> tuple[str, str]:
    return rows(tmp_path / "train.jsonl", 6, "train"), rows(tmp_path / "test.jsonl", 4, "test")


@pytest.fixture
def read(folder: Path) -> Callable[..., Any]:
    return lambda path, **more: load(Tokenizer(str(folder)), path, max_seq_len=64, **more)


@pytest.mark.parametrize("as_path", [True, False])
def test_rows_are_those_of_the_other_file(read: Any, files: tuple[str, str], as_path: bool) -> None:
    train, test = files
    data = read(train, train_on="all", take=2, validation=test if as_path else {"path": test, "take": 3})
    alone = read(test, train_on="all", **({} if as_path else {"take": 3}))
    assert (len(data), len(data.validation)) == (2, 4 if as_path else 3)  # `take` is of the training data
    assert [each.labels.tolist() for each in data.validation] == [each.labels.tolist() for each in alone]


def test_rows_held_out_twice_are_refused(read: Any, files: tuple[str, str]) -> None:
    """They would be used neither for training nor for validation."""
    train, test = files
    with pytest.raises(TuneError, match=r"validation_fraction: .*Leave one of them out"):
        read(train, validation_fraction=0.5, validation=test)
    with pytest.raises(TuneError, match=r"validation_fraction: "):
        read(train, validation={"path": test, "validation_fraction": 0.5})
    assert read(train, validation_fraction=0.0, validation=test).validation
    assert read(train, validation_fraction=0.5).validation


def test_sources_of_a_mixture_have_their_own(folder: Path, files: tuple[str, str]) -> None:
    train, test = files
    sources = {"one": {"path": train, "validation": test}, "two": {"path": test}}
    data = mix(Tokenizer(str(folder)), sources, max_seq_len=64)
    assert data.validation and {*data.validation.parts} == {"one"} and len(data.validation) == 4
    twice = {"one": {"path": train, "validation": test, "validation_fraction": 0.5}}
    with pytest.raises(TuneError, match=r"validation_fraction: "):
        mix(Tokenizer(str(folder)), twice, max_seq_len=64)


def test_prompts_have_them_too(folder: Path, files: tuple[str, str]) -> None:
    train, test = files
    data = load_prompts(Tokenizer(str(folder)), train, max_prompt_len=64, take=2, validation=test)
    assert data.validation and (len(data), len(data.validation)) == (2, 4)


@pytest.mark.parametrize(
    ("validation", "message"),
    [
        ({"pathh": "x"}, r"validation\.pathh: .*'path'\?"),
        ({"max_seq_len": 8}, r"validation\.max_seq_len: "),
        ({"path": "nowhere.jsonl"}, r"validation.*nowhere\.jsonl"),
    ],
)
def test_wrong_arguments_are_named(read: Any, files: tuple[str, str], validation: Any, message: str) -> None:
    with pytest.raises(TuneError, match=message):
        read(files[0], validation=validation)
