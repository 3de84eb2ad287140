"""A resumed stream reads the window where it stopped from the cache, and skips the rows before it without parsing."""

import json
import os
from itertools import islice

import pytest

from tune import rehearsal
from tune.datasets import DataLoader, load
from tune.datasets.kept_windows import MOST
from tune.datasets.read import readers
from tune.datasets.read.opening import read
from tune.datasets.rows import RowReader
from tune.datasets.stream import Position
from tune.errors import TuneError
from tune.tokenizers import Tokenizer

ROWS = [{"text": f"row {number}", "number": number} for number in range(500)]
LINES = [json.dumps(row) for row in ROWS]


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TUNE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "windows"


@pytest.fixture
def tokenized(monkeypatch):
    """The rows that were tokenized since the last `clear`."""
    rows = []

    def call(reader, row):
        rows.append(row)
        return tokenize(reader, row)

    tokenize = RowReader.__call__
    monkeypatch.setattr(RowReader, "__call__", call)
    return rows


@pytest.fixture
def opened(folder, tmp_path):
    """Open a file with a row a line as a stream with windows of 128 rows."""
    file = tmp_path / "rows.jsonl"

    def opened(lines=LINES, **options):
        file.write_text("\n".join(lines))
        tokenizer = Tokenizer(str(folder))
        return load(tokenizer, str(file), max_seq_len=32, streaming=True, shuffle_buffer=128, workers=1, **options)

    return opened


def texts(rows):
    return [document.tokens.tolist() for row in rows.documents for document in row]


def drawn(stream, start, number):
    """The tokens of batches of 20 rows, and the position after the last batch."""
    batches = [*islice(stream.draw(0, 20, start), number)]
    return [texts(rows) for rows, _ in batches], batches[-1][1]


# resuming


@pytest.mark.parametrize("packed", [False, True])
def test_kept_window_is_not_tokenized_again(opened, cache, tokenized, packed):
    whole, _ = drawn(opened(packed=packed), Position(), 12)
    stream = opened(packed=packed)
    before, position = drawn(stream, Position(), 8 if not packed else 3)
    stream.keep(position)
    assert position.row == 128 if not packed else position.row > 0
    tokenized.clear()
    resumed = opened(packed=packed)
    assert not tokenized  # of the first window
    window = next(resumed.windows(position))
    assert not tokenized
    assert window.data.fingerprint == position.fingerprint
    after, _ = drawn(resumed, position, 12 - len(before))
    assert before + after == whole


def test_same_samples_and_places_from_the_cache(opened, cache):
    options = {"turns": "as_seen", "on_bad_row": "skip", "max_bad_share": 0.5, "extra_columns": ["number"]}
    chats = []
    for number in range(100):
        turns = [("user", "a"), ("assistant", "b"), ("user", "long " * number), ("assistant", "c")]
        messages = [{"role": role, "content": text} for role, text in turns]
        chats.append(json.dumps({"messages": messages, "number": number}))
    chats[10], chats[20] = '{"messages":', '{"messages": 3}'
    made, read_again = opened(chats, **options), opened(chats, **options)
    first, second = made.parts[""], read_again.parts[""]
    assert first.accounting.as_dict() == second.accounting.as_dict()
    assert first.fingerprint == second.fingerprint
    for one, other in zip(first, second, strict=True):
        assert (one.place, one.columns, one.index) == (other.place, other.columns, other.index)
        assert one.tokens.tolist() == other.tokens.tolist() and one.labels.tolist() == other.labels.tolist()


def test_changed_row_is_tokenized_and_noticed(opened, cache, tokenized):
    stream = opened()
    _, position = drawn(stream, Position(), 8)
    stream.keep(position)
    changed = [*LINES]
    changed[130] = json.dumps({"text": "changed", "number": 130})
    with pytest.raises(TuneError, match=r"rows after row 128 have changed"):
        drawn(opened(changed), position, 1)
    # A column that is not read makes no difference.
    changed[130] = json.dumps(ROWS[130] | {"number": -1})
    tokenized.clear()
    next(opened(changed).windows(position))
    assert len(tokenized) == 128
    # Rows that are moved have other places.
    with pytest.raises(TuneError, match=r"rows after row 128 have changed"):
        drawn(opened(["", *LINES[1:]]), position, 1)


@pytest.mark.parametrize("damage", ["emptied", "cut", "other"])
def test_emptied_or_damaged_cache_only_costs_time(opened, cache, damage):
    whole, _ = drawn(opened(), Position(), 12)
    stream = opened()
    before, position = drawn(stream, Position(), 8)
    stream.keep(position)
    assert len([*cache.iterdir()]) == 2
    for file in cache.iterdir():
        if damage == "emptied":
            file.unlink()
        else:
            file.write_bytes(file.read_bytes()[:-1] if damage == "cut" else b"something else")
    after, _ = drawn(opened(), position, 4)
    assert before + after == whole


def test_few_windows_are_kept(opened, cache):
    stream = opened(LINES * 3)
    steps = stream.draw(0, 128, Position())
    for at, (_, position) in enumerate(islice(steps, MOST + 5)):
        stream.keep(position)
        os.utime(next(cache.glob(f"*-{position.row}")), (at, at))  # mtime is too coarse for so short a test
    assert sorted(int(file.name.rpartition("-")[2]) for file in cache.iterdir()) == [
        0, *range(position.row - 128 * (MOST - 1), position.row + 1, 128),
    ]  # fmt: skip


def test_checkpoint_of_a_loader_keeps_its_window(opened, cache, make, tokenized):
    data = DataLoader(opened(), make.world(), 20, 20, max_steps=20)
    for step, _ in data:
        if step == 7:  # the next window is being drawn ahead
            state = data.state_dict()
            break
    assert state["position"]["row"] == 128 and {file.name[-4:] for file in cache.iterdir()} >= {"-128"}


def test_unwritable_cache_is_a_warning(opened, tmp_path, monkeypatch, capsys):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TUNE_CACHE", str(tmp_path / "file" / "cache"))
    stream = opened()
    assert f"{tmp_path / 'file' / 'cache' / 'windows'}" in capsys.readouterr().err
    assert len(drawn(stream, Position(), 12)[0]) == 12


def test_rehearsal_keeps_nothing(opened, cache, monkeypatch):
    monkeypatch.setattr(rehearsal, "current", lambda: rehearsal.Rehearsal(print, print, 10, None, None, {}))
    assert opened().accounting.rows == 10
    assert not cache.exists()


# skipping


def write(path, kind):
    if kind == ".csv":
        path.write_text("text,number\n" + "".join(f'"{row["text"]}",{row["number"]}\n' for row in ROWS))
    elif kind == ".json":
        path.write_text(json.dumps(ROWS))
    elif kind == ".jsonl":
        path.write_text("\n \n".join([*LINES[:100], "malformed", *LINES[100:]]))
    else:
        pyarrow = pytest.importorskip("pyarrow")
        pytest.importorskip("pyarrow.parquet")
        table = pyarrow.Table.from_pylist(ROWS)
        if kind == ".parquet":
            pyarrow.parquet.write_table(table, path, row_group_size=70)
            return
        with pyarrow.ipc.new_file(str(path), table.schema) as file:
            for batch in table.to_batches(70):
                file.write_batch(batch)


@pytest.mark.parametrize("kind", [".jsonl", ".json", ".csv", ".parquet", ".arrow", ".txt", "saved", "python"])
def test_rows_after_a_number_of_rows_are_those_of_all(tmp_path, monkeypatch, kind):
    if kind == "python":
        (tmp_path / "generated.py").write_text("def rows():\n    yield from ({'n': n} for n in range(500))\n")
        monkeypatch.syspath_prepend(tmp_path)
        path = "python:generated.rows"
    elif kind == "saved":
        path = tmp_path / "saved"
        pytest.importorskip("datasets").Dataset.from_list(ROWS).save_to_disk(str(path))
    else:
        path = tmp_path / "data"
        path.mkdir()
        for number in range(3):
            file = path / f"{number}{kind}"
            file.write_text("text") if kind == ".txt" else write(file, kind)
    source, cut = read(str(path)), read(str(path), take=450)
    rows = [(place, str(row)) for place, row in source]
    for start in (0, 1, 70, 139, 450, 499, 500, 501, 1001, 9999):
        assert [(place, str(row)) for place, row in source.after(start)] == rows[start:]
        assert [(place, str(row)) for place, row in cut.after(start)] == rows[start:450]


def test_skipped_lines_are_not_parsed(tmp_path, monkeypatch):
    (tmp_path / "rows.jsonl").write_text("\n".join(LINES))
    parsed = []
    monkeypatch.setattr(readers, "json_row", lambda line, _: parsed.append(line) or json.loads(line))
    assert [row for _, row in read(str(tmp_path / "rows.jsonl")).after(490)] == ROWS[490:]
    assert len(parsed) == 10


def test_skipped_row_groups_are_not_read(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    file = tmp_path / "rows.parquet"
    write(file, ".parquet")
    group = parquet.ParquetFile(file).metadata.row_group(2)
    end = min(group.column(number).file_offset or group.column(number).data_page_offset for number in range(2))
    end = min(end, *(group.column(number).dictionary_page_offset for number in range(2)))
    content = bytearray(file.read_bytes())
    content[4:end] = bytes(end - 4)
    file.write_bytes(content)
    with pytest.raises(TuneError):
        [*read(str(file)).after(139)]
    assert [row for _, row in read(str(file)).after(140)] == ROWS[140:]
