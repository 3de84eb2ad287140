"""Prompts are prepared once, mapped from the cache, and equal to prompts that are read at each start."""

import json
import math
import os
import sys
import tracemalloc
from datetime import datetime
from multiprocessing import get_context

import pyarrow
import pyarrow.parquet
import pytest
from helpers import HANGS

from tune.datasets import Prompt, PromptLoader, Prompts, load_prompts
from tune.datasets.kept_files import hash_of
from tune.datasets.prompts import FOR_REWARDS, RIGHT, _parse
from tune.datasets.read.opening import read
from tune.datasets.rows import exact_text
from tune.errors import TuneError
from tune.files import contents
from tune.tokenizers import Tokenizer

LONGEST = 90
TOOLS = [{"type": "function", "function": {"name": "get", "parameters": {}}}]
ASK, SAY = {"role": "user", "content": "été?"}, {"role": "assistant", "content": "So."}
CALL = {"role": "assistant", "content": "", "tool_calls": [{"name": "get", "arguments": '{"at": 1}'}]}
ROWS = [
    {"messages": [ASK, SAY], "answer": 4},
    {"prompt": "a text " * 40},
    {"prompt": "the cat", "number": -0.0, "large": 2**70, "strange": "\ud800", "limit": math.inf, "none": None},
    {"prompt": [ASK], "system": "Be brief.", "unwanted": True},
    {"instruction": "Say", "input": "it", "output": "it", "nested": {"b": [1, 1.0, {"a": False}], "a": {}}},
    {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}], "tools": TOOLS},
    {"messages": [ASK, CALL, {"role": "tool", "content": "12"}, SAY], "tools": json.dumps(TOOLS)},
    *({"prompt": f"number {number}", "unwanted": number % 3 == 0} for number in range(600)),
]


@pytest.fixture
def tokenizer(folder):
    return Tokenizer(str(folder))


@pytest.fixture
def file(tmp_path):
    return written(tmp_path / "rows.jsonl", ROWS)


@pytest.fixture
def load(tokenizer, file, tmp_path):
    """Load the prompts of the file."""

    def load(path=file, **options):
        options = {"max_prompt_len": LONGEST, "cache_dir": str(tmp_path / "cache")} | options
        return load_prompts(tokenizer, str(path), **options)

    return load


@pytest.fixture
def wanted(tmp_path, monkeypatch):
    """The path of a filter that writes a line for each of its calls, and the file of these lines."""
    calls = tmp_path / "calls.txt"
    (tmp_path / "filter_of_prompts.py").write_text(
        "import os\n"
        "def wanted(row):\n"
        f"    with open({str(calls)!r}, 'a') as calls:\n"
        "        calls.write(f'{os.getpid()}\\n')\n"
        "    return not row.get('unwanted')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    return "filter_of_prompts.wanted", calls


def written(file, rows):
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def in_memory(tokenizer, file, columns=None, is_wanted=lambda row: True):
    """All prompts, made one by one as lists, with the number of rows that are too long."""
    prompts, too_long = [], 0
    for _, row in filter(lambda placed: is_wanted(placed[1]), read(str(file))):
        content = _parse(row, columns or {}, FOR_REWARDS, is_first=not prompts)
        right = {ours: row[theirs] for ours, theirs in (columns or {}).items() if ours in RIGHT and theirs in row}
        if hasattr(content, "messages"):
            text = tokenizer.apply_chat_template(content.messages, tools=content.tools, add_generation_prompt=True)
            prompt = Prompt(len(prompts), tokenizer.encode(text), row | right, content.messages, content.tools)
        else:
            tokens = [*tokenizer.prefix_ids, *tokenizer.encode(content.prompt)]
            prompt = Prompt(len(prompts), tokens, row | right)
        if len(prompt.tokens) > LONGEST:
            too_long += 1
        else:
            prompts.append(prompt)
    return prompts, too_long


def fingerprint_of(prompts):
    return hash_of([(prompt.tokens, exact_text(prompt.row)) for prompt in prompts])


def are_same(prompts, expected):
    """Whether all fields are equal; `repr` tells 1 from 1.0 and True, and 0.0 from -0.0."""
    return [*map(repr, prompts)] == [*map(repr, expected)]


def entries(tmp_path):
    return [entry.name for entry in (tmp_path / "cache" / "prompts").iterdir() if entry.is_dir()]


@pytest.mark.parametrize("workers", [1, 2])
def test_prompts_equal_those_made_one_by_one(load, tokenizer, file, wanted, workers):
    expected, too_long = in_memory(tokenizer, file, is_wanted=lambda row: not row.get("unwanted"))
    assert any(prompt.tools for prompt in expected) and any(prompt.messages is None for prompt in expected)
    for _ in ("first start", "second start"):
        prompts = load(filter=wanted[0], workers=workers)
        assert are_same(prompts, expected)
        assert prompts.fingerprint == fingerprint_of(expected)
        assert prompts.dropped == {"left out by filter_of_prompts.wanted": 201, "longer than max_prompt_len": too_long}
        lengths = [len(prompt.tokens) for prompt in expected]
        assert prompts.as_dict()["lengths"] == {"shortest": min(lengths), "longest": max(lengths)}
        assert prompts.as_dict()["tokens"] == sum(lengths) and prompts.as_dict()["rows"] == len(ROWS)


def test_mapped_answer_may_have_the_name_of_another_column(load, tokenizer, tmp_path):
    """The question is read before the answer takes its place."""
    rows = [{"answer": f"How {word}?", "solution": word} for word in ("many", "much")]
    file, columns = written(tmp_path / "swapped.jsonl", rows), {"instruction": "answer", "answer": "solution"}
    expected, _ = in_memory(tokenizer, file, columns)
    assert are_same(load(file, columns=columns), expected)
    assert expected[1].messages == [{"role": "user", "content": "How much?"}] and expected[1].row["answer"] == "much"


def test_loader_draws_the_same_and_has_the_same_state(load, tokenizer, file):
    of_list = PromptLoader(Prompts("list", in_memory(tokenizer, file)[0], {}), 7, epochs=2, seed=3)
    of_cache = PromptLoader(load(), 7, epochs=2, seed=3)
    for _ in range(100):
        assert are_same(of_cache.draw(7), of_list.draw(7))
    assert of_cache.state_dict() == of_list.state_dict()
    of_cache.load_state_dict(of_list.state_dict())


def test_prompts_are_a_sequence(load):
    prompts = load()
    assert prompts[-1].index == len(prompts) - 1
    assert [prompt.index for prompt in prompts[1:7:2]] == [1, 3, 5]
    with pytest.raises(IndexError):
        prompts[len(prompts)]


def test_extreme_prompts_stand_for_all(load, tokenizer, file):
    everything, _ = in_memory(tokenizer, file)
    extremes = load().extremes()
    for measure in (lambda each: len(each.tokens), lambda each: -len(each.tokens), lambda each: max(each.tokens)):
        assert max(map(measure, extremes)) == max(map(measure, everything))
    assert any(prompt.messages is None for prompt in extremes)
    assert len(extremes) <= 4


opened = []
is_counting = False


def note_opened(event, arguments):
    if is_counting and event == "open":
        opened.append(str(arguments[0]))


def test_second_start_reads_nothing_of_the_file(load, file, monkeypatch):
    monkeypatch.setattr(contents, "LARGE", 1)
    monkeypatch.setattr(contents.time, "time", lambda: file.stat().st_ctime + 5)
    load()
    monkeypatch.delattr(Tokenizer, "encode")
    monkeypatch.setattr(sys.modules[__name__], "is_counting", True)
    sys.addaudithook(note_opened)
    prompts = load()
    assert prompts[0].row == ROWS[0]
    assert opened and str(file) not in opened


def prepare(load, barrier, results, **options):
    barrier.wait(HANGS)
    results.put(load(**options).fingerprint)


@pytest.mark.slow
def test_two_processes_prepare_once(load, wanted):
    name, calls = wanted
    fork = get_context("fork")
    barrier, results = fork.Barrier(2), fork.Queue()
    processes = [fork.Process(target=prepare, args=(load, barrier, results), kwargs={"filter": name}) for _ in range(2)]
    for process in processes:
        process.start()
    assert results.get(timeout=HANGS) == results.get(timeout=HANGS)
    for process in processes:
        process.join(HANGS)
    lines = calls.read_text().splitlines()
    assert len(lines) == len(ROWS) and len({*lines}) == 1


@pytest.mark.parametrize("damage", ["cut", "absent", "about", "no object", "a number"])
def test_damaged_prompts_are_prepared_again(load, tmp_path, damage):
    before = [repr(prompt) for prompt in load()]
    (name,) = entries(tmp_path)
    entry = tmp_path / "cache" / "prompts" / name
    if damage == "cut":
        os.truncate(entry / "rows.npy", 200)
    elif damage == "absent":
        (entry / "token_ends.npy").unlink()
    else:
        (entry / "about.json").write_text({"about": "{", "no object": "[]", "a number": "1"}[damage])
    assert [repr(prompt) for prompt in load()] == before
    assert entries(tmp_path) == [name]


def test_key_covers_all_that_changes_prompts(load, file, wanted, tmp_path):
    for options in ({}, {"take": 9}, {"max_prompt_len": 70}, {"filter": wanted[0]}, {"ignore": ["note"]}):
        before = len(entries(tmp_path)) if (tmp_path / "cache" / "prompts").exists() else 0
        load(**options)
        load(**options)
        assert len(entries(tmp_path)) == before + 1
    written(file, ROWS[:-1])
    assert len(load()) + sum(load().dropped.values()) == len(ROWS) - 1


@pytest.mark.slow
def test_error_names_the_first_bad_row_at_each_start(load, file):
    written(file, [*ROWS[:400], {"question": "?"}, *ROWS[:100], {"messages": []}])
    for _ in range(2):
        with pytest.raises(TuneError, match=r"^rows.jsonl:401: no column"):
            load(workers=2)


def test_no_prompt_left_is_an_error_at_each_start(load):
    for _ in range(2):
        with pytest.raises(TuneError, match=f"no prompt is left of {len(ROWS)} rows"):
            load(max_prompt_len=2)


def test_rows_that_json_lacks_stay_the_same_objects(load, tmp_path, capsys):
    rows = [{"prompt": f"number {number}", "at": datetime(2024, 5, 1, number)} for number in range(3)]
    file = tmp_path / "dated.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    prompts = load(file)
    assert [prompt.row for prompt in prompts] == rows
    assert prompts.fingerprint == fingerprint_of(prompts)
    assert "datetime" in capsys.readouterr().err
    assert not entries(tmp_path)


def test_rows_of_a_function_are_stored_too(load, tmp_path, monkeypatch):
    source = tmp_path / "source_of_prompts.py"
    source.write_text("def rows():\n    return [{'prompt': 'the cat'}, {'prompt': 'the mat'}]\n")
    monkeypatch.syspath_prepend(tmp_path)
    for _ in range(2):
        assert [prompt.row["prompt"] for prompt in load("python:source_of_prompts.rows")] == ["the cat", "the mat"]
        assert len(entries(tmp_path)) == 1


@pytest.mark.slow
@pytest.mark.parametrize("start", ["first", "second"])
def test_memory_does_not_grow_with_the_rows(load, tmp_path, start):
    count = 20_000
    file = written(
        tmp_path / "many.jsonl", ({"prompt": f"number {number}", "answer": number} for number in range(count))
    )
    load(file, take=10)  # what is imported and compiled once
    if start == "second":
        load(file, workers=1)
    tracemalloc.start()
    try:
        prompts = load(file, workers=1)
        kept, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(prompts) == count
    assert kept < 16 * count
    if start == "second":
        assert most < 16 * count
