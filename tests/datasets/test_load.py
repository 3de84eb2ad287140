"""From files to samples: which tokens are learned, what is counted and what is refused."""

import json
import re

import pytest
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tune.datasets import load
from tune.errors import TuneError
from tune.tokenizers import Tokenizer

CHAT = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hey 🦊"}]


@pytest.fixture
def tokenizer(folder):
    return Tokenizer(str(folder))


@pytest.fixture
def write(tmp_path):
    def write(*rows, name="data.jsonl"):
        file = tmp_path / name
        file.parent.mkdir(exist_ok=True)
        file.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
        return str(file)

    return write


def learned(dataset, tokenizer):
    """The text of each sample and its learned part."""
    return [
        (
            tokenizer.decode(sample.tokens.tolist()),
            tokenizer.decode([label for label in sample.labels if label != -100]),
        )
        for sample in dataset.samples
    ]


# formats


def test_conversations(tokenizer, write):
    data = load(tokenizer, write({"messages": CHAT}), max_seq_len=100)
    text = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHey 🦊<|im_end|>\n"
    assert learned(data, tokenizer) == [(text, "Hey 🦊<|im_end|>")]


def test_labels_are_the_transformers_assistant_mask_shifted_by_one(folder, tokenizer, write):
    transformers = pytest.importorskip("transformers")
    messages = [*CHAT, {"role": "user", "content": "é?"}, {"role": "assistant", "content": " 1\n\n"}]
    reference = transformers.AutoTokenizer.from_pretrained(folder).apply_chat_template(
        messages, return_assistant_tokens_mask=True, return_dict=True
    )
    (sample,) = load(tokenizer, write({"messages": messages}), max_seq_len=1000).samples
    ids, mask = reference["input_ids"], reference["assistant_masks"]
    assert sample.tokens.tolist() == ids
    targets = zip(ids[1:], mask[1:], strict=True)
    assert sample.labels.tolist() == [*(token if is_assistant else -100 for token, is_assistant in targets), -100]


@pytest.mark.slow
@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.text(), st.text(min_size=1)), min_size=1, max_size=4))
def test_all_answers_are_learned_and_nothing_else(tokenizer, write, turns):
    roles = ("user", "assistant")
    messages = [{"role": role, "content": text} for turn in turns for role, text in zip(roles, turn, strict=True)]
    data = load(tokenizer, write({"messages": messages}), max_seq_len=10_000)
    assert [answers for _, answers in learned(data, tokenizer)] == ["".join(f"{text}<|im_end|>" for _, text in turns)]


def test_spaces_are_learned_even_if_the_tokenizer_trims_offsets(folder, tokenizer, write):
    file = write({"messages": [CHAT[0], {"role": "assistant", "content": "  a \n"}]})
    trimming = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    trimming.post_processor = tokenizers.processors.ByteLevel(trim_offsets=True)
    trimming.save(str(folder / "tokenizer.json"))
    data = load(Tokenizer(str(folder)), file, max_seq_len=100)
    assert learned(data, tokenizer)[0][1] == "  a \n<|im_end|>"


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"prompt": "1+1=", "completion": "2"}, ("<s>1+1=2</s>", "2</s>")),
        ({"text": "once"}, ("<s>once</s>", "once</s>")),
        ({"text": "<s>once</s>"}, ("<s>once</s>", "once</s>")),  # never two BOS tokens
        ({"prompt": "", "completion": "2"}, ("<s>2</s>", "2</s>")),
    ],
)
def test_plain_texts_begin_with_bos_and_end_with_eos(tokenizer, write, row, expected):
    assert learned(load(tokenizer, write(row), max_seq_len=100), tokenizer) == [expected]


def test_prompt_and_completion_as_messages(tokenizer, write):
    more = [{"role": "user", "content": "More"}, {"role": "assistant", "content": "No"}]
    data = load(tokenizer, write({"prompt": [*CHAT, more[0]], "completion": more[1:]}), max_seq_len=1000)
    assert [answer for _, answer in learned(data, tokenizer)] == ["No<|im_end|>"]


def test_columns_with_other_names(tokenizer, write):
    file = write({"question": "1+1=", "answer": "2", "id": 7})
    data = load(tokenizer, file, max_seq_len=100, columns={"prompt": "question", "completion": "answer"})
    assert learned(data, tokenizer) == [("<s>1+1=2</s>", "2</s>")]


def test_mapped_column_is_not_also_read_under_its_own_name(tokenizer, write):
    """`input` is also a column of the format, which follows the instruction."""
    file = write({"input": "1+1=", "output": "2"})
    named = load(tokenizer, file, max_seq_len=100, columns={"instruction": "input", "output": "output"})
    assert learned(named, tokenizer) == learned(
        load(tokenizer, write({"instruction": "1+1=", "output": "2"}), max_seq_len=100), tokenizer
    )


def test_mapped_columns_decide_the_format(tokenizer, write):
    file = write({"instruction": "a", "output": "b", "story": "c"})
    assert load(tokenizer, file, max_seq_len=100, columns={"text": "story"}).accounting.format == "text"


def test_tools_reach_the_template(folder, tokenizer, write):
    (folder / "chat_template.jinja").write_text(
        "{{ tools[0].name }}|{% for m in messages %}{{ m.content }}|{% endfor %}"
    )
    tools = [{"name": "weather"}]
    file = write({"messages": CHAT, "tools": tools}, {"messages": CHAT, "tools": json.dumps(tools)})
    texts = [text for text, _ in learned(load(Tokenizer(str(folder)), file, max_seq_len=100), tokenizer)]
    assert texts == ["weather|Hi|Hey 🦊|"] * 2


def test_template_date_is_the_same_every_day(folder, tokenizer, write):
    (folder / "chat_template.jinja").write_text(
        "{{ strftime_now('%d %b %Y') }}{% for m in messages %}|{{ m.content }}{% endfor %}"
    )
    data = load(Tokenizer(str(folder)), write({"messages": CHAT}), max_seq_len=100)
    assert learned(data, tokenizer)[0][0] == "26 Jul 2024|Hi|Hey 🦊"


# sources


ROWS = [{"prompt": "NA", "completion": "007"}, {"prompt": "a\nb", "completion": "1,5"}]
EXPECTED = [("<s>NA007</s>", "007</s>"), ("<s>a\nb1,5</s>", "1,5</s>")]


def test_json_lines_with_blank_lines_and_a_byte_order_mark(tokenizer, write):
    file = write("\ufeff" + json.dumps(ROWS[0]), "", ROWS[1])
    assert learned(load(tokenizer, file, max_seq_len=100), tokenizer) == EXPECTED


@pytest.mark.parametrize("text", [json.dumps(ROWS, indent=2), "\n".join(map(json.dumps, ROWS))], ids=["list", "lines"])
def test_json(tokenizer, write, text):
    assert learned(load(tokenizer, write(text, name="data.json"), max_seq_len=100), tokenizer) == EXPECTED


def test_csv_cells_stay_unparsed_strings(tokenizer, write):
    file = write('prompt,completion\nNA,007\n"a\nb","1,5"', name="data.csv")
    assert learned(load(tokenizer, file, max_seq_len=100), tokenizer) == EXPECTED


def test_parquet_and_the_nulls_it_adds(folder, tokenizer, tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    import pyarrow

    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m | tojson }}{% endfor %}")
    calls = [
        {"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {name: 1}}}]}
        for name in "ab"
    ]
    parquet.write_table(pyarrow.Table.from_pylist([{"messages": [CHAT[0], *calls]}]), tmp_path / "data.parquet")
    data = load(Tokenizer(str(folder)), str(tmp_path / "data.parquet"), max_seq_len=1000)
    assert learned(data, tokenizer)[0][0] == "".join(map(json.dumps, [CHAT[0], *calls]))


def test_files_of_a_folder_are_read_in_name_order(tokenizer, write, tmp_path):
    for name, row in (("b.jsonl", ROWS[1]), ("a.jsonl", ROWS[0])):
        write(row, name=f"data/{name}")
    write("about the data", name="data/README.md")
    data = load(tokenizer, str(tmp_path / "data"), max_seq_len=100)
    assert learned(data, tokenizer) == EXPECTED
    assert data.accounting.ignored_files == ["README.md"]


def test_hub_dataset(tokenizer, monkeypatch):
    datasets = pytest.importorskip("datasets")
    asked = []

    def load_dataset(name, subset, split):
        asked.append((name, subset, split))
        return datasets.Dataset.from_list(ROWS)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    data = load(tokenizer, "someone/rows", "test", max_seq_len=100, subset="main")
    assert learned(data, tokenizer) == EXPECTED
    assert set(asked) == {("someone/rows", "main", "test")}


def test_unreachable_hub_is_reported(tokenizer, monkeypatch):
    datasets = pytest.importorskip("datasets")

    def load_dataset(name, subset, split):
        raise ConnectionError("no network")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(TuneError, match=r"someone/rows is not a file .*no network"):
        load(tokenizer, "someone/rows", max_seq_len=100)


# counting


def test_unusable_rows_are_dropped_and_counted(tokenizer, write):
    file = write(*({"prompt": "a", "completion": answer} for answer in ("", "b", "")))
    accounting = load(tokenizer, file, max_seq_len=100).accounting
    assert (accounting.rows, accounting.kept, dict(accounting.dropped)) == (3, 1, {"empty completion": 2})
    file = write({"messages": CHAT[:1]}, {"messages": CHAT})
    assert dict(load(tokenizer, file, max_seq_len=100).accounting.dropped) == {"no assistant message": 1}


def test_max_seq_len_shorter_than_every_prompt(tokenizer, write):
    with pytest.raises(TuneError, match=r"max_seq_len cuts off every answer: .* Set max_seq_len to at least 22\b"):
        load(tokenizer, write({"prompt": "a" * 20, "completion": "b"}), max_seq_len=16)


@pytest.mark.parametrize(
    ("kind", "row"),
    [
        ("supervised", {"prompt": "a" * 20, "completion": "b"}),
        ("supervised", {"messages": CHAT}),
        ("preferences", {"prompt": "a" * 20, "chosen": "bbb", "rejected": "cc"}),
    ],
)
def test_least_max_seq_len_that_the_error_names(tokenizer, write, kind, row):
    with pytest.raises(TuneError) as error:
        load(tokenizer, write(row), kind=kind, max_seq_len=2)
    least = int(re.search(r"max_seq_len to at least (\d+)", str(error.value))[1])
    if kind == "supervised":  # a group may use an odd token
        with pytest.raises(TuneError):
            load(tokenizer, write(row), kind=kind, max_seq_len=least - 1)
    assert len(load(tokenizer, write(row), kind=kind, max_seq_len=least)) > 0


@pytest.mark.slow
def test_many_rows_keep_their_order(tokenizer, write):
    file = write(*({"text": str(number)} for number in range(1300)))
    assert [answer for _, answer in learned(load(tokenizer, file, max_seq_len=9), tokenizer)] == [
        f"{number}</s>" for number in range(1300)
    ]


# mistakes; see also tests/datasets/test_wrong_rows.py


def test_up_to_five_mistakes_are_reported_at_once(tokenizer, write):
    rows = [{"text": "a"}, {"text": 1}] * 9
    with pytest.raises(TuneError) as error:
        load(tokenizer, write(*rows), max_seq_len=100)
    places = [line.split(": ")[0].strip() for line in str(error.value).splitlines()[1:]]
    assert places == ["data.jsonl:2, 4, 6, 8, 10"]


def test_mistakes_are_collected_over_all_rows_but_stop_a_stream(tokenizer, write):
    """Rows are read 64 at a time."""
    rows = [{"text": 1 if number in (9, 99, 249) else "a"} for number in range(300)]
    file = write(*rows)
    with pytest.raises(TuneError) as error:
        load(tokenizer, file, max_seq_len=9)
    assert "  data.jsonl:10, 100, 250: " in str(error.value)
    with pytest.raises(TuneError) as error:
        load(tokenizer, file, max_seq_len=9, streaming=True, shuffle_buffer=512, workers=1)
    assert "  data.jsonl:10: " in str(error.value)


def test_template_that_rejects_a_row_is_reported(folder, write):
    (folder / "chat_template.jinja").write_text("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(TuneError, match=r"data\.jsonl:1: the chat template in .* refuses the conversation: roles must"):
        load(Tokenizer(str(folder)), write({"messages": CHAT}), max_seq_len=100)


def test_template_without_tool_call_support_is_reported(folder, write):
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m.role + ': ' + m.content }}{% endfor %}")
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    with pytest.raises(TuneError, match=r"no attribute .content."):
        load(Tokenizer(str(folder)), write({"messages": [*CHAT, call]}), max_seq_len=100)


def test_conversations_without_an_end_of_turn_are_counted(folder, write):
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ m.end }}\n{% endfor %}"
    (folder / "chat_template.jinja").write_text(template + "{% if add_generation_prompt %}assistant: {% endif %}")
    ended = [CHAT[0], {**CHAT[1], "end": "<|im_end|>"}]
    accounting = load(
        Tokenizer(str(folder)), write({"messages": CHAT}, {"messages": ended}), max_seq_len=100
    ).accounting
    assert accounting.endless == 1
    assert "without an end of turn  1 (they do not teach the model to stop)" in accounting.table()


def test_missing_chat_template_is_reported(folder, write):
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(TuneError, match=r"^the tokenizer in .* has no chat template"):
        load(Tokenizer(str(folder)), write({"messages": CHAT}), max_seq_len=100)


def test_missing_eos_token_is_reported(folder, write):
    (folder / "tokenizer_config.json").write_text("{}")
    with pytest.raises(TuneError, match="has no eos_token"):
        load(Tokenizer(str(folder)), write({"text": "a"}), max_seq_len=100)


def test_missing_paths_get_a_suggestion(tokenizer, write, tmp_path):
    write(*ROWS, name="chats.jsonl")
    with pytest.raises(TuneError, match=r"chat\.jsonl does not exist\. Did you mean 'chats\.jsonl'\?"):
        load(tokenizer, str(tmp_path / "chat.jsonl"), max_seq_len=100)
    with pytest.raises(TuneError, match="there is no folder"):
        load(tokenizer, str(tmp_path / "absent" / "chat.jsonl"), max_seq_len=100)


def test_folder_without_data_or_with_mixed_kinds_is_refused(tokenizer, write, tmp_path):
    (tmp_path / "data").mkdir()
    with pytest.raises(TuneError, match=r"must hold data files of one kind .* found nothing"):
        load(tokenizer, str(tmp_path / "data"), max_seq_len=100)
    write("text\na", name="data/a.csv")
    write({"text": "a"}, name="data/b.jsonl")
    with pytest.raises(TuneError, match=r"found a\.csv, b\.jsonl"):
        load(tokenizer, str(tmp_path / "data"), max_seq_len=100)


def test_split_of_a_single_file_is_refused(tokenizer, write):
    with pytest.raises(TuneError, match=r"has no splits: .*Remove split=test"):
        load(tokenizer, write(*ROWS), "test", max_seq_len=100)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"promt": "prompt"}, r"columns\.promt: no format has such a column\. Did you mean 'prompt'\?"),
        (
            {"prompt": "promp"},
            r"columns\.prompt=promp: data\.jsonl:1 has no such column\. Did you mean 'prompt'\?",
        ),
        (
            {"prompt": "prompt", "output": "completion"},
            r"columns: no format has prompt and output together\. Known formats: messages; .*; instruction \+ output;",
        ),
    ],
)
def test_missing_columns_are_refused(tokenizer, write, columns, message):
    with pytest.raises(TuneError, match=message):
        load(tokenizer, write(*ROWS), max_seq_len=100, columns=columns)
