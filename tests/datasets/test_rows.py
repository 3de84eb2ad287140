"""How the options turn a row into samples."""

import json
import pickle
import sys
from datetime import datetime
from types import MappingProxyType, SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from row_outcomes import outcomes

from tune.datasets import load
from tune.datasets.rows import exact_text
from tune.datasets.user_functions import sources_of
from tune.errors import TuneError
from tune.tokenizers import Tokenizer

SYSTEM = {"role": "system", "content": "S"}
TURNS = [{"role": role, "content": text} for role, text in zip(("user", "assistant") * 3, "aAbBcC", strict=True)]
CHAT = {"messages": [SYSTEM, *TURNS]}


@pytest.fixture
def tokenizer(folder):
    return Tokenizer(str(folder))


@pytest.fixture
def outcome(tokenizer):
    def outcome(row, max_seq_len=10_000, **options):
        (outcome,) = outcomes(tokenizer, max_seq_len, [("row", row)], **options)
        return outcome

    return outcome


@pytest.fixture
def shown(tokenizer):
    """The text of a sample, with its learned part in brackets."""

    def shown(sample):
        pieces, on = "", False
        for index, token in enumerate(sample.tokens.tolist()):
            learned = index > 0 and bool(sample.labels[index - 1] != -100)
            pieces += ("[" if learned else "]") * (learned != on) + tokenizer.decode([token])
            on = learned
        return (
            (pieces + "]" * on).replace("<|im_start|>", "<").replace("<|im_end|>\n", ">\n").replace("<|im_end|>", ">")
        )

    return shown


# what is learned


@pytest.mark.parametrize(
    ("train_on", "learned"),
    [
        ("assistant", "A>B>C>"),
        ("last", "C>"),
        ("all", "<system\nS>\n<user\na>\n<assistant\nA>\n<user\nb>\n<assistant\nB>\n<user\nc>\n<assistant\nC>\n"),
        (["user"], "a>b>c>"),
        (["system", "assistant"], "S>A>B>C>"),
    ],
)
def test_train_on(outcome, tokenizer, train_on, learned):
    (sample,) = outcome(CHAT, train_on=train_on).samples
    text = tokenizer.decode([label for label in sample.labels if label != -100])
    text = text.replace("<|im_start|>", "<").replace("<|im_end|>", ">")
    assert text == learned.removeprefix("<")  # the first token has nothing to be predicted from


@pytest.mark.parametrize(
    ("train_on", "learned"), [("assistant", "B>C>"), ("last", "C>"), (["user"], "a>b>"), ("all", "-")]
)
def test_train_of_a_message_overrides_train_on(outcome, tokenizer, train_on, learned):
    turns = [dict(message) for message in TURNS]
    turns[1]["train"] = turns[4]["train"] = False
    (sample,) = outcome({"messages": turns}, train_on=train_on).samples
    text = tokenizer.decode([label for label in sample.labels if label != -100]).replace("<|im_end|>", ">")
    if train_on == "all":
        assert "A>" not in text and "c>" not in text and "<|im_start|>user" in text
    else:
        assert text == learned


@pytest.mark.parametrize(
    ("row", "train_on", "expected"),
    [
        ({"prompt": "2+2=", "completion": "4"}, "assistant", "<s>2+2=[4</s>]"),
        ({"prompt": "2+2=", "completion": "4"}, "all", "<s>[2+2=4</s>]"),
        ({"prompt": "2+2=", "completion": "4"}, ["user"], "<s>[2+2=]4</s>"),
        ({"text": "once"}, "assistant", "<s>[once</s>]"),
    ],
)
def test_train_on_in_plain_texts(outcome, shown, row, train_on, expected):
    assert shown(outcome(row, train_on=train_on).samples[0]) == expected


def test_end_of_turn_can_be_excluded(outcome, shown):
    (sample,) = outcome({"messages": TURNS[:2]}, train_on_end_of_turn=False).samples
    assert shown(sample) == "<user\na>\n<assistant\n[A]>\n"
    (sample,) = outcome({"prompt": "2+2=", "completion": "4"}, train_on_end_of_turn=False).samples
    assert shown(sample) == "<s>2+2=[4]</s>"


def test_eos_is_learned_even_if_it_is_the_padding(folder, shown):
    config = {"bos_token": "<s>", "eos_token": "<|im_end|>", "pad_token": "<|im_end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer(str(folder))
    assert tokenizer.pad_id == tokenizer.eos_id
    rows = [("row", {"messages": TURNS[:2]}), ("row", {"text": "once"})]
    assert [shown(outcome.samples[0]) for outcome in outcomes(tokenizer, 100, rows)] == [
        "<user\na>\n<assistant\n[A>]\n",
        "<s>[once>]",
    ]


@pytest.mark.parametrize("text", ["once", "<s>once", "<s><s>once"])
def test_bos_is_added_only_to_texts_without_one(outcome, tokenizer, text):
    (sample,) = outcome({"text": text}).samples
    assert tokenizer.decode(sample.tokens.tolist()) == f"{text if text.startswith('<s>') else '<s>' + text}</s>"


def test_template_that_writes_bos_gets_no_second_one(folder):
    template = (folder / "chat_template.jinja").read_text()
    (folder / "chat_template.jinja").write_text("{{ bos_token }}" + template)
    tokenizer = Tokenizer(str(folder))
    (outcome,) = outcomes(tokenizer, 100, [("row", {"messages": TURNS})])
    assert outcome.samples[0].tokens.tolist().count(tokenizer.bos_id) == 1


def test_conversations_without_end_of_turn_are_counted(folder):
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}")
    found = outcomes(Tokenizer(str(folder)), 100, [("row", {"messages": TURNS}), ("row", {"text": "once"})])
    assert [outcome.ends for outcome in found] == [False, True]


def test_cut_conversation_is_not_counted_as_endless(folder):
    """It is counted as truncated."""
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}")
    rows = [("row", {"messages": TURNS[:2]}), ("row", {"messages": TURNS})]
    whole, cut = outcomes(Tokenizer(str(folder)), 24, rows)
    assert (whole.cut, whole.ends) == (0, False)
    assert cut.cut > 0 and cut.samples and cut.ends


def test_template_with_empty_generation_blocks_masks_the_row(folder):
    template = "{% for m in messages %}{{ m.content }}{% if m.role == 'model' %}{% generation %}{% endgeneration %}"
    (folder / "chat_template.jinja").write_text(template + "{% endif %}{% endfor %}")
    (outcome,) = outcomes(Tokenizer(str(folder)), 100, [("row", {"messages": TURNS})])
    assert (len(outcome.samples), outcome.dropped) == (0, "fully masked")


# long rows


def test_conversation_is_cut_after_the_last_answer_that_fits(outcome, shown, tokenizer):
    whole = outcome(CHAT).samples[0]
    two_turns = outcome({"messages": [SYSTEM, *TURNS[:4]]}).samples[0]
    for length in (len(two_turns.tokens), len(whole.tokens) - 1):
        cut = outcome(CHAT, length)
        assert shown(cut.samples[0]) == shown(two_turns)
        assert cut.cut == len(whole.tokens) - len(two_turns.tokens)


def test_first_answer_that_does_not_fit_is_cut_inside(outcome, shown):
    cut = outcome({"messages": [TURNS[0], {"role": "assistant", "content": "Answer"}]}, 23)
    assert shown(cut.samples[0]) == "<user\na>\n<assistant\n[Ans]"
    assert cut.samples[0].labels[-1] == -100 and cut.cut == 5


def test_cutting_off_the_last_turn_leaves_nothing_to_learn(outcome):
    fitting = len(outcome({"messages": TURNS[:4]}).samples[0].tokens)
    cut = outcome({"messages": TURNS}, fitting, train_on="last")
    assert cut.dropped == "fully masked" and cut.needs > fitting


def test_conversation_is_split_between_turns(outcome, shown):
    length = len(outcome({"messages": [SYSTEM, *TURNS[:2]]}).samples[0].tokens)
    split = outcome(CHAT, length, too_long="split")
    assert [shown(sample) for sample in split.samples] == [
        f"<system\nS>\n<user\n{low}>\n<assistant\n[{low.upper()}>]\n" for low in "abc"
    ]
    assert (split.cut, split.dropped) == (0, None)


def test_single_turn_that_is_too_long_is_cut_and_others_are_kept(outcome, shown):
    long = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "X" * 50}]
    split = outcome({"messages": [*TURNS[:2], *long, *TURNS[2:4]]}, 40, too_long="split")
    first, second, third = map(shown, split.samples)
    assert first.endswith("[A>]\n") and third.endswith("[B>]\n") and second.endswith("XXX]")
    assert split.cut > 0


def test_each_piece_of_a_completion_has_the_prompt(outcome, shown):
    row = {"prompt": [SYSTEM, TURNS[0]], "completion": TURNS[1:]}
    length = len(outcome({"messages": [SYSTEM, *TURNS[:4]]}).samples[0].tokens)
    pieces = [shown(sample) for sample in outcome(row, length, too_long="split").samples]
    assert all(piece.startswith("<system\nS>\n<user\na>\n") for piece in pieces)
    assert [piece.count("[") for piece in pieces] == [2, 1]


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=60), length=st.integers(2, 20))
def test_every_token_of_a_split_text_is_learned_once(outcome, text, length):
    whole = outcome({"text": text}).samples[0]
    pieces = outcome({"text": text}, length).samples  # texts are split by default
    assert all(len(piece.tokens) <= length for piece in pieces)
    learned = [label for piece in pieces for label in piece.labels.tolist() if label != -100]
    assert learned == whole.tokens[1:].tolist()


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("bos_in_pieces", [True, False])
def test_pieces_of_a_text_begin_as_the_text_does(tokenizer, shown, tmp_path, packed, bos_in_pieces):
    file = tmp_path / "text.jsonl"
    file.write_text(json.dumps({"text": "abcdefgh"}) + "\n")
    pieces = load(tokenizer, str(file), max_seq_len=4, packed=packed, bos_in_pieces=bos_in_pieces).samples
    assert [shown(piece) for piece in pieces] == (
        ["<s>[abc]", "<s>d[ef]", "<s>g[h</s>]"] if bos_in_pieces else ["<s>[abc]", "d[efg]", "h[</s>]"]
    )
    assert [label for piece in pieces for label in piece.labels if label != -100] == tokenizer.encode("abcdefgh</s>")


@pytest.mark.parametrize("row", [CHAT, {"prompt": "a" * 50, "completion": "b"}, {"input_ids": [1] * 50}], ids=str)
def test_long_rows_can_be_dropped_or_refused(outcome, row):
    assert outcome(row, 40, too_long="drop").dropped == "longer than max_seq_len"
    assert "row: the row has " in outcome(row, 40, too_long="error").mistake
    assert "more than max_seq_len=40" in outcome(row, 40, too_long="error").mistake


def test_tokens_are_cut_or_split(outcome):
    row = {"input_ids": [1, 2, 3, 4, 5]}
    (cut,) = outcome(row, 3).samples
    assert (cut.tokens.tolist(), cut.labels.tolist()) == ([1, 2, 3], [2, 3, -100])
    pieces = outcome(row, 3, too_long="split").samples
    assert [piece.tokens.tolist() for piece in pieces] == [[1, 2, 3], [4, 5]]
    assert [piece.labels.tolist() for piece in pieces] == [[2, 3, 4], [5, -100]]


def test_pieces_of_tokens_begin_with_bos_if_the_tokens_do(outcome, tokenizer):
    bos = tokenizer.bos_id
    pieces = outcome({"input_ids": [bos, 2, 3, 4, 5]}, 3, too_long="split").samples
    assert [piece.tokens.tolist() for piece in pieces] == [[bos, 2, 3], [bos, 4, 5]]
    assert [piece.labels.tolist() for piece in pieces] == [[2, 3, 4], [-100, 5, -100]]
    assert len(outcome({"input_ids": [bos, 2, 3]}, 1, too_long="split").samples) == 2  # no room for BOS


def test_cut_rows_are_counted(tokenizer, tmp_path):
    file = tmp_path / "data.jsonl"
    rows = [CHAT, {"messages": TURNS[:2]}, {"messages": [{"role": "user", "content": "x" * 90}, TURNS[1]]}]
    file.write_text("\n".join(map(json.dumps, rows)))
    accounting = load(tokenizer, str(file), max_seq_len=60).accounting
    assert (accounting.rows, accounting.kept, accounting.truncated, accounting.split) == (3, 2, 2, 0)
    assert (accounting.dropped, accounting.samples) == ({"fully masked": 1}, 2)
    accounting = load(tokenizer, str(file), max_seq_len=60, too_long="split").accounting
    assert (accounting.kept, accounting.samples, accounting.split, accounting.truncated) == (2, 3, 1, 1)
    assert "1 (3 samples in all)" in accounting.table()
    assert accounting.rows == accounting.kept + sum(accounting.dropped.values())


# held out for validation


@pytest.fixture
def numbers(tmp_path):
    def numbers(count, name="data.jsonl"):
        file = tmp_path / name
        file.write_text("".join(json.dumps({"text": str(number)}) + "\n" for number in range(count)))
        return str(file)

    return numbers


def texts(dataset, tokenizer):
    return [tokenizer.decode(sample.tokens.tolist()) for sample in dataset.samples]


def test_each_row_is_trained_on_or_validated_on(tokenizer, numbers):
    data = load(tokenizer, numbers(400), max_seq_len=16, validation_fraction=0.1)
    training, validation = texts(data, tokenizer), texts(data.validation, tokenizer)
    assert sorted(training + validation) == sorted(f"<s>{number}</s>" for number in range(400))
    assert 20 <= len(validation) <= 60
    assert data.accounting.dropped == {"held out for validation": len(validation)}
    assert data.validation.accounting.dropped == {"left for training": len(training)}
    assert "  held out for validation  " in data.accounting.table()
    assert load(tokenizer, numbers(400), max_seq_len=16).validation is None


def test_split_of_a_row_does_not_change_when_rows_are_added(tokenizer, numbers):
    few = load(tokenizer, numbers(100), max_seq_len=16, validation_fraction=0.2)
    more = load(tokenizer, numbers(200), max_seq_len=16, validation_fraction=0.2)
    assert texts(more.validation, tokenizer)[: len(few.validation)] == texts(few.validation, tokenizer)
    other = load(tokenizer, numbers(100), max_seq_len=16, validation_fraction=0.2, validation_seed=1)
    assert texts(other.validation, tokenizer) != texts(few.validation, tokenizer)


def test_validation_fraction_without_a_row_is_refused(tokenizer, numbers):
    with pytest.raises(TuneError, match="none of the 2 rows can be used: left for training"):
        load(tokenizer, numbers(2), max_seq_len=16, validation_fraction=0.001)


# functions of the user


@pytest.fixture
def my_data(tmp_path, monkeypatch):
    (tmp_path / "my_data.py").write_text(
        "def is_long(row): return len(row['text']) > 1\n"
        "def to_messages(row):\n"
        "    if row['text'] == '3': return None\n"
        "    return {'messages': [{'role': 'user', 'content': 'a'}, {'role': 'assistant', 'content': row['text']}]}\n"
        "def rows():\n    yield {'text': 'one'}\n    yield {'text': 'two'}\n"
        "def fails(row): return row['nothing']\n"
        "def strange(row): return 5\n"
        "def columns(row): return {'question': 'a'}\n"
        "def breaks():\n    yield {'text': 'one'}\n    raise KeyError('nothing')\n"
        "def five(): return 5\n"
    )
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.usefixtures("my_data")
def test_function_that_fails_on_all_rows_is_one_line(tokenizer, numbers):
    with pytest.raises(TuneError, match=r"data\.jsonl:1, 2, 3: my_data\.fails .*text.*KeyError") as error:
        load(tokenizer, numbers(3), max_seq_len=16, format="my_data.fails")
    assert str(error.value).count("KeyError") == 1


@pytest.mark.usefixtures("my_data")
def test_filter_function(tokenizer, numbers):
    data = load(tokenizer, numbers(12), max_seq_len=16, filter="my_data.is_long")
    assert texts(data, tokenizer) == ["<s>10</s>", "<s>11</s>"]
    assert data.accounting.dropped == {"left out by my_data.is_long": 10}


@pytest.mark.usefixtures("my_data")
def test_format_function_of_the_user(tokenizer, numbers):
    data = load(tokenizer, numbers(5), max_seq_len=100, format="my_data.to_messages")
    assert len(data.samples) == 4 and data.accounting.dropped == {"left out by my_data.to_messages": 1}
    assert data.accounting.format == "my_data.to_messages"
    assert "assistant\n4" in texts(data, tokenizer)[-1]


@pytest.mark.usefixtures("my_data")
def test_generator_function(tokenizer):
    assert texts(load(tokenizer, "python:my_data.rows", max_seq_len=16), tokenizer) == ["<s>one</s>", "<s>two</s>"]


@pytest.mark.usefixtures("my_data")
def test_changed_function_prepares_data_again(tokenizer, numbers, tmp_path):
    file = numbers(12)
    assert len(load(tokenizer, file, max_seq_len=16, filter="my_data.is_long")) == 2
    module = tmp_path / "my_data.py"
    module.write_text(module.read_text().replace("> 1", "> 0") + "\n")
    del sys.modules["my_data"]
    assert len(load(tokenizer, file, max_seq_len=16, filter="my_data.is_long")) == 12


@pytest.mark.parametrize("module", ["aside/words.py", "aside/deeper/__init__.py", "limits.py", "late.py"])
def test_imported_modules_are_part_of_the_key(tmp_path, monkeypatch, module):
    files = {
        "mine.py": "import os, json\nfrom aside import words\ndef keep(row):\n    import late\n    return words",
        "aside/__init__.py": "",
        "aside/words.py": "from . import deeper\nfrom limits import MOST",
        "aside/deeper/__init__.py": "",
        "limits.py": "MOST = 5",
        "late.py": "",
        "other.py": "",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    before = sources_of("mine.keep", "filter")
    (tmp_path / "other.py").write_text("MOST = 6")
    assert sources_of("mine.keep", "filter") == before
    (tmp_path / module).write_text(files[module] + "\nMOST = 6")
    assert sources_of("mine.keep", "filter") != before


@pytest.mark.usefixtures("my_data")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"filter": "my_data.fails"},
            r"data\.jsonl:1, 2, 3: my_data\.fails fails on this row \(columns text\): KeyError: 'nothing'",
        ),
        (
            {"format": "my_data.strange"},
            r"data\.jsonl:1, 2, 3: my_data\.strange returned 5; it must return a row, or None",
        ),
        ({"format": "my_data.columns"}, r"the row from my_data\.columns: the columns question match no known"),
        ({"format": "my_data.to_mesages"}, r"format: my_data has no 'to_mesages'\. Did you mean 'to_messages'\?"),
        (
            {"format": "your_data.rows"},
            r"there is no module 'your_data'. Is it installed, or in the current",
        ),
        ({"format": "my_data.to_messages", "columns": {"text": "text"}}, "remove columns"),
        ({"filter": "is_long"}, r"filter: 'is_long' is not the dotted path .* Include its module: my_module\.is_long"),
        (
            {"format": "sharegtp"},
            r"format=sharegtp is not a format of supervised rows\. Did you mean 'sharegpt'\? Known formats: chat",
        ),
        ({"format": "chat"}, r"data\.jsonl:1: format=chat needs the columns messages; the row has text"),
    ],
)
def test_failing_functions_and_formats_are_reported(tokenizer, numbers, options, message):
    with pytest.raises(TuneError, match=message):
        load(tokenizer, numbers(3), max_seq_len=100, **options)


@pytest.mark.usefixtures("my_data")
def test_broken_generator_functions_are_reported(tokenizer):
    with pytest.raises(
        TuneError, match=r"python:my_data\.five fails after row 0: TypeError: .int. object is not iterable"
    ):
        load(tokenizer, "python:my_data.five", max_seq_len=100)
    with pytest.raises(TuneError, match=r"python:my_data\.breaks fails after row 1: KeyError: 'nothing'"):
        load(tokenizer, "python:my_data.breaks", max_seq_len=100)


# the reader is a pure function that other processes can run


@pytest.mark.usefixtures("my_data")
def test_pickled_reader_gives_the_same_rows(tokenizer):
    options = {"filter": "my_data.is_long", "train_on": ["user"]}
    rows = [("one", CHAT | {"text": "yes"}), ("two", {"text": "x"}), ("three", {"text": 5.0, "messages": 1})]
    before = outcomes(tokenizer, 60, rows, **options)
    copy = pickle.loads(pickle.dumps(tokenizer))
    for one, other in zip(before, outcomes(copy, 60, rows, **options), strict=True):
        assert (one.dropped, one.mistake) == (other.dropped, other.mistake)
        for mine, theirs in zip(one.samples, other.samples, strict=True):
            assert mine.tokens.tolist() == theirs.tokens.tolist() and mine.labels.tolist() == theirs.labels.tolist()


def large(change):
    ids = np.arange(5, 2005)
    ids[1000] += change
    return ids


CHANGED = {
    "an array": (large(0), large(1)),
    "a tensor": (torch.from_numpy(large(0)), torch.from_numpy(large(1))),
    "a tensor in bf16": (torch.zeros(2000).bfloat16(), torch.eye(2000)[1000].bfloat16()),
    "a precise number": (np.float32(0.1), np.float64(np.float32(0.1)).item()),
    "an array of another type": (np.array([1, 2]), np.array([1.0, 2.0])),
    "an object": (SimpleNamespace(ids=large(0)), SimpleNamespace(ids=large(1))),
    "inside": ({"a": [large(0)]}, {"a": [large(1)]}),
    "bytes": (b"\0", b"\1"),
    "a time": (datetime(2024, 1, 1, microsecond=1), datetime(2024, 1, 1, microsecond=2)),
    "a mapping": (MappingProxyType({"a": 1}), MappingProxyType({"a": 2})),
}


@pytest.mark.parametrize("values", CHANGED.values(), ids=CHANGED)
def test_rows_that_differ_have_texts_that_differ(values):
    before, after = [exact_text({"x": value}) for value in values]
    assert before != after
    assert before == exact_text({"x": values[0]})


@pytest.mark.parametrize("kind", [set, frozenset])
def test_order_of_a_set_does_not_count(kind):
    """The order of a set of texts differs between processes; that of 0 and 8, which share a slot, by insertion."""
    one, other = kind([0, 8]), kind([8, 0])
    assert [*one] != [*other]
    assert exact_text({"x": [one]}) == exact_text({"x": [other]})


MARKED = """\
import numpy as np
from pathlib import Path

def rows():
    made = np.zeros(3000, int)
    made[1500] = int((Path(__file__).parent / "mark").read_text())
    yield {"made": made}

def text(row):
    return {"text": str(row["made"][1500])}

def functions():
    yield {"text": "one", "made": lambda: 0}
"""


@pytest.fixture
def marked(tmp_path, monkeypatch):
    (tmp_path / "marked.py").write_text(MARKED)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path / "mark"
    sys.modules.pop("marked", None)


def test_arrays_of_a_function_that_change_are_prepared_again(tokenizer, marked):
    """NumPy leaves out the middle of long arrays when it prints them."""
    made = []
    for mark in ("3", "3", "4"):
        marked.write_text(mark)
        options = {"format": "marked.text", "cache_dir": str(marked.parent / "cache")}
        made.append(load(tokenizer, "python:marked.rows", max_seq_len=16, **options))
    assert [texts(data, tokenizer) for data in made] == [["<s>3</s>"], ["<s>3</s>"], ["<s>4</s>"]]
    assert [data.accounting.prepared is None for data in made] == [True, False, True]


@pytest.mark.usefixtures("marked")
def test_rows_without_a_text_of_their_own_are_refused(tokenizer):
    with pytest.raises(TuneError, match=r"functions:row 1: .*function"):
        load(tokenizer, "python:marked.functions", max_seq_len=16)
