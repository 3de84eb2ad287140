"""A preview shows the text of rows with marks, their lengths, copies and warnings."""

import json
import re

import numpy as np
import pytest
from row_outcomes import outcomes

from tune.collators import Sample
from tune.datasets import Dataset, load, mix
from tune.datasets.display import document, first_rows, histogram, marked, parts_of
from tune.datasets.stream import Stream
from tune.datasets.warnings import overlap, warnings_of
from tune.tokenizers import Tokenizer

SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
GOOD = {"messages": [{"role": "user", "content": "What is it?"}, {"role": "assistant", "content": "A cat."}]}


def chat(*texts):
    roles = ("user", "assistant") * len(texts)
    return {"messages": [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]}


@pytest.fixture
def tokenizer(folder):
    return Tokenizer(str(folder))


@pytest.fixture
def dataset(tokenizer, tmp_path):
    def dataset(rows, max_seq_len=1000, name="rows", **options) -> Dataset:
        file = tmp_path / f"{name}.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return load(tokenizer, str(file), max_seq_len=max_seq_len, **options)

    return dataset


@pytest.fixture
def text(dataset, tokenizer):
    def text(row, short=False, **options):
        return marked(document(dataset([row], **options).row(0)[0], tokenizer), short)

    return text


# text


def test_marks_enclose_learned_text(text):
    turns = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n⟦{}<|im_end|>⟧\n"
    assert text(chat("Hi", "Hello!", "And?", "Bye")) == turns.format("Hi", "Hello!") + turns.format("And?", "Bye")
    assert text({"prompt": "2+2=", "completion": "4"}) == "<s>2+2=⟦4</s>⟧"
    assert text({"text": "Once"}) == "<s>⟦Once</s>⟧"


def test_multi_token_characters_stay_whole_and_control_ones_are_visible(text):
    assert text({"prompt": "été: ", "completion": "日本\r\n\x1b[31m\tred"}) == "<s>été: ⟦日本\\r\n\\x1b[31m\tred</s>⟧"
    cut = text({"text": "日"}, max_seq_len=3, too_long="truncate")  # two of its three tokens
    assert cut == "<s>⟦\ufffd⟧"


def test_short_preview_omits_the_middle_of_long_texts(text):
    row = {"prompt": "a" * 400 + "b" * 600, "completion": "c" * 400}
    short = f"<s>{'a' * 117} [... 763 characters ...] {'b' * 120}⟦{'c' * 400}</s>⟧"
    assert text(row, short=True, max_seq_len=2000) == short
    turn = "<|im_start|>user\nm<|im_end|>\n<|im_start|>assistant\nn<|im_end|>\n"
    many_turns = chat(*"abcdefghijklmnopqrstuvwxyz")
    assert text(many_turns, short=True).endswith(f"⟦l<|im_end|>⟧ [... {1 + 7 * len(turn)} characters]")
    assert text(GOOD, short=True) == text(GOOD)


def test_first_row_of_a_mixture_and_of_a_stream(dataset, tokenizer, tmp_path):
    dataset([GOOD])
    path = str(tmp_path / "rows.jsonl")
    mixture = mix(tokenizer, {"cats": {"path": path}}, max_seq_len=100)
    stream = load(tokenizer, path, max_seq_len=100, streaming=True)
    assert isinstance(stream, Stream)
    assert list(parts_of(mixture, "training")) == ["training/cats"]
    assert list(parts_of(stream, "training")) == ["training"]
    for data in (mixture, stream):
        ((only,),) = first_rows(data, tokenizer)
        assert "⟦A cat.<|im_end|>⟧" in marked(only)


# all samples


def test_histogram_counts_each_sample_in_a_range_of_doubled_width():
    lengths = np.random.default_rng(0).lognormal(5, 1, 500).astype(int) + 1
    for first, last, count in histogram(lengths):
        assert last == 1 or first == last // 2 + 1
        assert count == ((lengths >= first) & (lengths <= last)).sum()
    assert sum(count for _, _, count in histogram(lengths)) == 500
    assert histogram(np.array([1, 2, 3, 4, 5])) == [(1, 1, 1), (2, 2, 1), (3, 4, 2), (5, 8, 1)]


def test_copies_counts_samples_with_repeated_tokens(dataset, tokenizer):
    one, other = chat("a", "b"), chat("a", "c")
    assert dataset([one, other, one, {**one, "id": 3}]).copies == 2
    assert dataset([one, other]).copies == 0


def test_overlap_reports_validation_samples_in_training(dataset):
    training = {"": dataset([chat("a", "b"), chat("c", "d")])}
    assert overlap(training, {"": dataset([chat("e", "f")], name="other")}) is None
    held_out = {"": dataset([chat("e", "f"), chat("c", "d")], name="held_out")}
    assert "1 of the 2 validation samples are also training samples" in overlap(training, held_out)
    assert overlap(training, {}) is None


# warnings


@pytest.fixture
def warnings(dataset, tokenizer):
    return lambda rows, **options: warnings_of(dataset(rows, **options), tokenizer)


def test_no_warnings_for_good_rows(warnings):
    assert warnings([GOOD, chat("a < b, `<s`", "<b>c</b>"), chat("Hi", "Hello!", "And?", "Bye")]) == []
    assert warnings([{"text": "Once upon a time " * 3}]) == []
    assert warnings([{"prompt": "2+2=", "completion": "4"}]) == []


@pytest.mark.parametrize(
    ("rows", "options", "warning"),
    [
        ([GOOD], {"train_on_end_of_turn": False}, r"no end-of-turn token \(</s>, <\|im_end\|>\) is supervised"),
        ([{"input_ids": [72, 73, 74]}], {}, "no end-of-turn token"),
        ([chat("word " * 100, "No")], {}, r"only 0\.\d% of the tokens are supervised"),
        ([chat("Yes", "word " * 10)], {"train_on": "all"}, r"9\d\.\d% of the tokens are supervised, prompts included"),
        ([GOOD, chat("Say <|im_end|>!", "No")], {}, r"<\|im_end\|> spelled in user text: in 1 of 2 rows"),
        ([GOOD, chat("Say it!", "</s>")], {}, "</s> spelled in assistant text: in 1 of 2 rows"),
    ],
)
def test_each_warning(warnings, rows, options, warning):
    (message,) = warnings(rows, **options)
    assert re.match(warning, message)


def test_answers_without_an_end_of_turn_get_a_warning(byte_checkpoint, tmp_path, dataset):
    template = "{% for m in messages %}{{ m.content }}{% if m.content != 'Bye' %}<|im_end|>{% endif %}{% endfor %}"
    tokenizer = Tokenizer(str(byte_checkpoint(tmp_path / "other", SPECIAL, template)))
    dataset([GOOD, chat("See you", "Bye")])
    (message,) = warnings_of(load(tokenizer, str(tmp_path / "rows.jsonl"), max_seq_len=100), tokenizer)
    assert message == "1 of 2 rows (50.0%) have no supervised end of turn: see the chat template"


def test_remarks_list_roles_the_template_omits(byte_checkpoint, tmp_path, folder):
    system, tool = {"role": "system", "content": "Be kind.\n\nAlways."}, {"role": "tool", "content": '{"a": "é"}\n'}
    schema = {"type": "function", "function": {"name": "weather", "parameters": {}}}
    row = {"messages": [system, GOOD["messages"][0], tool, GOOD["messages"][1]], "tools": [schema]}

    def remarks(template):
        tokenizer = Tokenizer(str(byte_checkpoint(tmp_path / "other", SPECIAL, template)))
        (outcome,) = outcomes(tokenizer, 1000, [("row", row)])
        assert outcome.mistake is None
        return list(outcome.remarks)

    without_tools = (folder / "chat_template.jinja").read_text()
    assert remarks(without_tools) == ["tools left out by the template"]
    everything = "{{ tools | tojson if tools }}" + without_tools
    assert remarks(everything) == []
    assert remarks(everything.replace("message.content +", "message.content | trim | tojson +")) == []
    without = everything.replace("in messages", "in messages if message.role in ('user', 'assistant')")
    assert remarks(without) == ["system left out by the template", "tool left out by the template"]


def test_broken_characters_are_decoded_a_few_times_each(tokenizer, monkeypatch):
    """A text of 4,000 first bytes of characters; each token is decoded with a bounded number of others."""
    decoded = []
    decode = Tokenizer.decode
    monkeypatch.setattr(
        Tokenizer, "decode", lambda self, ids, **options: decoded.append(len(ids)) or decode(self, ids, **options)
    )
    (first_byte, _) = tokenizer.encode("\u00e9")[-2:]
    count = 4000
    shown = document(Sample(np.full(count, first_byte), np.full(count, -100)), tokenizer)
    assert "".join(text for text, _ in shown.tokens) == "\ufffd" * count
    assert sum(decoded) < 200 * count
