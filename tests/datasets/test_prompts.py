"""Prompts from rows: what is read, refused and counted, and their order."""

import json
import re

import numpy as np
import pytest

from tune.datasets import Prompt, PromptLoader, Prompts, load_prompts
from tune.errors import TuneError
from tune.evaluation import exact_match
from tune.tokenizers import Tokenizer

LOOK = [{"role": "user", "content": "<image> What is it?"}]


@pytest.fixture
def tokenizer(checkpoint):
    return Tokenizer(str(checkpoint))


@pytest.fixture
def read(tokenizer, tmp_path):
    def read(*rows, **options):
        file = tmp_path / "rows.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return load_prompts(tokenizer, str(file), max_prompt_len=64, **options)

    return read


def test_malformed_line_is_an_error(tokenizer, tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text('{"prompt": "a"}\n{"prompt": \n')
    for options in ({}, {"filter": "tune.types.show"}):
        with pytest.raises(TuneError, match=r"rows.jsonl:2: malformed JSON: "):
            load_prompts(tokenizer, str(file), max_prompt_len=64, **options)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {"instruction": "What is it?", "images": ["cat.jpg"]},
            "images in addition to messages: images, video or audio",
        ),
        ({"prompt": "It shows", "image": "cat.jpg"}, "image in addition to prompt: images, video or audio"),
        ({"prompt": "<image> It shows"}, "<image> in addition to prompt: the place of an image"),
        ({"messages": LOOK}, "<image> in addition to messages: the place of an image"),
        ({"prompt": LOOK, "audio": "miau.wav"}, "audio and <image> in addition to prompt"),
    ],
)
def test_prompts_with_media_are_refused(row, message, read):
    with pytest.raises(TuneError, match=r"rows.jsonl:2: the row has ") as error:
        read({"instruction": "the cat"}, row)
    assert message in str(error.value) and "dataset.ignore=[" in str(error.value)
    assert len(read(row, ignore=["image", "images", "audio", "<image>"])) == 1


def test_other_columns_stay_available_to_rewards(read):
    row = {"prompt": "the cat", "chosen": "sat", "rejected": "ran", "label": 1, "weight": 2.5, "images": []}
    assert read(row)[0].row == row


def test_mapped_answer_is_added_to_the_row(read):
    row = {"ticket": "2 + 2", "reply": 4}
    (prompt,) = read(row, columns={"instruction": "ticket", "output": "reply"})
    assert prompt.row == {**row, "output": 4} and exact_match(prompt.row, "4") == 1
    with pytest.raises(TuneError, match="ticket, reply"):
        exact_match(row, "4")


@pytest.mark.parametrize("value", [9, None, {"a": 1}])
def test_mapped_prompt_must_be_text(value, read):
    with pytest.raises(TuneError, match=r"rows.jsonl:1: columns.instruction=left: the value is "):
        read({"left": value}, columns={"instruction": "left"})


def test_input_follows_its_instruction(read, tokenizer):
    (prompt,) = read({"instruction": "Translate.", "input": "the cat", "output": "die Katze"})
    assert prompt.messages == [{"role": "user", "content": "Translate.\n\nthe cat"}]
    assert "Translate.\n\nthe cat<|im_end|>" in tokenizer.decode(prompt.tokens)
    with pytest.raises(TuneError, match=r"rows.jsonl:1: input is 3; it must be a string"):
        read({"instruction": "Translate.", "input": 3})


def test_filtered_rows_are_counted(read, tmp_path, monkeypatch):
    (tmp_path / "wanted_prompts.py").write_text("def is_short(row):\n    return len(row['prompt']) < 8\n")
    monkeypatch.syspath_prepend(tmp_path)
    prompts = read({"prompt": "the cat"}, {"prompt": "the cat sat"}, filter="wanted_prompts.is_short")
    assert [len(prompts), prompts.dropped] == [1, {"left out by wanted_prompts.is_short": 1}]
    with pytest.raises(
        TuneError, match=r"rows.jsonl:1: wanted_prompts.is_short fails on this row .*: KeyError: 'prompt'"
    ):
        read({"instruction": "the cat"}, filter="wanted_prompts.is_short")


def test_epoch_is_shuffled_once_per_step(monkeypatch):
    """It is not shuffled once per prompt: shuffling a million prompts takes 40 ms."""
    made = []
    seeded = np.random.PCG64
    monkeypatch.setattr(np.random, "PCG64", lambda seed: made.append(seed) or seeded(seed))
    loader = PromptLoader(Prompts("ten", [Prompt(index, [1], {}) for index in range(10)], {}), 8, seed=3)
    drawn = [prompt.index for prompt in [*loader.draw(8), *loader.draw(8)]]
    assert made == [[3, 0], [3, 0], [3, 1]]
    assert sorted(drawn[:10]) == [*range(10)] and len({*drawn[10:]}) == 6


def test_sharegpt_conversations(read):
    turns = [{"from": "human", "value": "the cat"}, {"from": "gpt", "value": "sat"}]
    (prompt,) = read({"conversations": turns})
    assert prompt.messages == [{"role": "user", "content": "the cat"}]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"system": "rules"}, "columns.system=rules: the first row has no such column. It has instruction, sistem"),
        ({"sistem": "sistem"}, "columns.sistem: no format has such a column. Did you mean 'system'?"),
    ],
)
def test_missing_columns_are_refused(columns, message, read):
    """Misspelled columns are not silently left out."""
    with pytest.raises(TuneError, match=f"rows.jsonl:1: {re.escape(message)}"):
        read({"instruction": "1+1?", "sistem": "Be brief."}, columns=columns)


def test_columns_with_common_names_are_suggested(read):
    with pytest.raises(TuneError, match=r"the row has question, answer. .* 'dataset.columns={instruction: question}'"):
        read({"question": "1+1?", "answer": "2"})


@pytest.mark.parametrize(("epochs", "steps"), [(0.5, 3), (1.5, 8), (1.2, 6), (2.0, 10)])
def test_fractional_epochs_of_prompts(epochs, steps):
    prompts = Prompts("ten", [Prompt(index, [1], {}) for index in range(10)], {})

    def read(loader):
        return [[prompt.index for prompt in drawn] for _, drawn in loader]

    loader = PromptLoader(prompts, 2, epochs, seed=3)
    assert len(loader) == steps
    assert read(loader) == read(PromptLoader(prompts, 2, 2, seed=3))[:steps]
