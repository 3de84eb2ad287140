"""`validation` of a dataset: other data, read as the training data are except for what it names."""

import json
from pathlib import Path

import pytest

from tune.datasets import Stream, load, load_prompts, mix
from tune.errors import TuneError
from tune.tokenizers import Tokenizer


@pytest.fixture
def tokenizer(checkpoint: Path) -> Tokenizer:
    return Tokenizer(str(checkpoint))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of a training split of 9 rows and a validation split of 5, and another file of 4 rows."""
    data = tmp_path / "data"
    data.mkdir()
    for name, rows in (("train", 9), ("validation", 5)):
        lines = [
            json.dumps({"talk": f"{name} cat {row}", "instruction": f"{name} {row}"}) + "\n" for row in range(rows)
        ]
        (data / f"{name}.jsonl").write_text("".join(lines))
    lines = [json.dumps({"talk": f"other {row}", "instruction": f"other {row}"}) + "\n" for row in range(4)]
    (tmp_path / "other.jsonl").write_text("".join(lines))
    return data


def texts(tokenizer, data):
    return [tokenizer.decode(sample.tokens.tolist(), skip_special_tokens=True) for sample in data.samples]


def of_text(tokenizer, path, **options):
    return load(tokenizer, str(path), max_seq_len=64, columns={"text": "talk"}, **options)


def test_path_is_read_like_the_training_data(tokenizer, folder):
    data = of_text(tokenizer, folder, take=3, packed=True, validation=str(folder.parent / "other.jsonl"))
    assert texts(tokenizer, data) == [f"train cat {row}" for row in range(3)]
    # The columns and packing are those of the training data, the number of rows is not.
    assert texts(tokenizer, data.validation) == [f"other {row}" for row in range(4)]
    assert data.validation.accounting.row_capacity == data.accounting.row_capacity == 64


@pytest.mark.parametrize(
    ("validation", "expected"),
    [
        ({"split": "validation"}, [f"validation cat {row}" for row in range(5)]),
        ({"split": "validation", "take": 2}, [f"validation cat {row}" for row in range(2)]),
        ({"take": 2}, [f"train cat {row}" for row in range(2)]),
        ({"path": "OTHER", "columns": {"text": "instruction"}, "take": 1}, ["other 0"]),
    ],
)
def test_mapping_names_what_differs(validation, expected, tokenizer, folder):
    validation = {
        key: str(folder.parent / "other.jsonl") if value == "OTHER" else value for key, value in validation.items()
    }
    data = of_text(tokenizer, folder, validation=validation)
    assert texts(tokenizer, data.validation) == expected and len(data) == 9


@pytest.mark.parametrize(
    ("validation", "message"),
    [
        ({"splitt": "validation"}, r"^validation\.splitt: .*Did you mean 'split'"),
        ({"tokenizer": "other"}, r"^validation\.tokenizer: "),
        ({"max_seq_len": 3}, r"^validation\.max_seq_len: "),
        ({"packed": True}, r"^validation\.packed: "),
        ({"validation": "train"}, r"^validation\.validation: "),
        ("nowhere.jsonl", r"^validation\.path: .*nowhere\.jsonl does not exist"),
        ({"split": "tests"}, r"^validation\.path: .* no files of the split 'tests'"),
        ({"take": -1}, r"^validation\.take: "),
    ],
)
def test_what_is_wrong_is_named(validation, message, tokenizer, folder):
    with pytest.raises(TuneError, match=message):
        of_text(tokenizer, folder, validation=validation)


def test_fraction_of_the_rows_beside_other_data_is_refused(tokenizer, folder):
    with pytest.raises(TuneError, match=r"^validation_fraction: "):
        of_text(tokenizer, folder, validation_fraction=0.2, validation={"split": "validation"})
    with pytest.raises(TuneError, match=r"^sources\.a\.validation_fraction: "):
        source = {"path": str(folder), "columns": {"text": "talk"}, "validation_fraction": 0.2}
        mix(tokenizer, {"a": source | {"validation": {"split": "validation"}}}, max_seq_len=64)


def test_stream_is_not_inherited(tokenizer, folder):
    data = of_text(tokenizer, folder, streaming=True, shuffle_buffer=4, validation={"split": "validation"})
    assert isinstance(data, Stream) and texts(tokenizer, data.validation) == [
        f"validation cat {row}" for row in range(5)
    ]


def test_each_source_of_a_mixture_has_its_own(tokenizer, folder):
    columns = {"columns": {"text": "talk"}}
    sources = {
        "split": {"path": str(folder), "validation": {"split": "validation", "take": 2}, **columns},
        "fraction": {"path": str(folder), "validation_fraction": 0.3, **columns},
        "none": {"path": str(folder.parent / "other.jsonl"), "weight": 1, **columns},
    }
    sources = {name: {"weight": 1} | source for name, source in sources.items()}
    mixture = mix(tokenizer, sources, max_seq_len=64)
    assert [*mixture.parts] == ["split", "fraction", "none"] and [*mixture.validation.parts] == ["split", "fraction"]
    assert texts(tokenizer, mixture.validation.parts["split"]) == ["validation cat 0", "validation cat 1"]
    held_out = texts(tokenizer, mixture.validation.parts["fraction"])
    trained = texts(tokenizer, mixture.parts["fraction"])
    assert held_out and sorted(held_out + trained) == [f"train cat {row}" for row in range(9)]
    assert mix(tokenizer, {"none": sources["none"]}, max_seq_len=64).validation is None
    sources["split"]["validation"] = {"splitt": "validation"}
    with pytest.raises(TuneError, match=r"^sources\.split\.validation\.splitt: "):
        mix(tokenizer, sources, max_seq_len=64)


def test_prompts(tokenizer, folder):
    options = {"max_prompt_len": 64, "ignore": ["talk"]}
    prompts = load_prompts(tokenizer, str(folder), **options, validation={"split": "validation", "take": 3})
    assert [prompt.row["instruction"] for prompt in prompts.validation] == [f"validation {row}" for row in range(3)]
    assert len(prompts) == 9
    assert load_prompts(tokenizer, str(folder), **options).validation is None
    with pytest.raises(TuneError, match=r"^validation\.max_prompt_len: "):
        load_prompts(tokenizer, str(folder), **options, validation={"max_prompt_len": 3})
    with pytest.raises(TuneError, match=r"^validation\.takes: .*Did you mean 'take'"):
        load_prompts(tokenizer, str(folder), **options, validation={"takes": 3})
