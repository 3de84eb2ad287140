"""Datasets are prepared once and memory-mapped by all; broken or outdated files are never used."""

import fcntl
import json
import os
import random
import shutil
import signal
import time
from contextlib import contextmanager

import numpy as np
import pytest
from helpers import HANGS
from safetensors.numpy import load_file

from tune.datasets import kept_files as cache_module
from tune.datasets import load
from tune.datasets.fit import Fit
from tune.datasets.kept_files import content_of
from tune.datasets.preparation import Preparation
from tune.datasets.progress import PreparationProgress
from tune.datasets.read import pieces as pieces_module
from tune.datasets.read.opening import read
from tune.datasets.rows import RowReader
from tune.errors import TuneError
from tune.files import contents
from tune.tokenizers import Tokenizer


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache"


@pytest.fixture
def rows(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in ("one", "two and more", "", "three")))
    return file


def listing(folder):
    return sorted(entry.name for entry in folder.iterdir())


def test_second_load_tokenizes_nothing(folder, rows, cache, monkeypatch):
    first = load(
        Tokenizer(str(folder)), str(rows), max_seq_len=8, packed=True, too_long="truncate", cache_dir=str(cache)
    )
    monkeypatch.delattr(Tokenizer, "encode_with_offsets")
    second = load(
        Tokenizer(str(folder)), str(rows), max_seq_len=8, packed=True, too_long="truncate", cache_dir=str(cache)
    )
    assert second.fingerprint == first.fingerprint
    assert second.accounting == first.accounting
    assert second.accounting.dropped == {"empty text": 1} and second.accounting.truncated == 1
    for one, other in zip(first.samples, second.samples, strict=True):
        assert one.tokens.tolist() == other.tokens.tolist() and one.labels.tolist() == other.labels.tolist()


def test_cached_samples_match_samples_made_in_memory(folder, rows, cache, make):
    prepared = load(Tokenizer(str(folder)), str(rows), max_seq_len=8, cache_dir=str(cache))
    in_memory = type(prepared).from_samples(prepared.samples, max_seq_len=8)
    assert in_memory.fingerprint == prepared.fingerprint
    assert in_memory.row_supervised.tolist() == prepared.row_supervised.tolist()


def test_cache_key_depends_on_content_not_location(folder, rows, cache, tmp_path):
    def prepare(**changes):
        settings = {"path": str(rows), "max_seq_len": 8, "cache_dir": str(cache)}
        load(Tokenizer(str(folder)), **settings | changes)
        return len(listing(cache / "datasets"))

    assert prepare() == 1
    moved = shutil.copy(rows, tmp_path / "moved.jsonl")
    assert prepare(path=str(moved)) == 1
    assert prepare(max_seq_len=9) == 2
    assert prepare(max_seq_len=9, packed=True) == 2  # packing needs no tokens
    assert prepare(columns={"text": "text"}) == 3
    assert prepare(take=2) == 4
    rows.write_text(rows.read_text().replace("one", "One"))
    assert prepare() == 5
    (folder / "chat_template.jinja").write_text("changed")
    assert prepare() == 6
    of_text = shutil.copy(rows, tmp_path / "rows.txt")
    assert prepare(path=str(of_text)) == 7  # one text with the same bytes as the rows


def test_new_format_version_prepares_again(folder, rows, cache, monkeypatch):
    tokenizer = Tokenizer(str(folder))
    before = load(tokenizer, str(rows), max_seq_len=8, cache_dir=str(cache)).accounting
    again = load(tokenizer, str(rows), max_seq_len=8, cache_dir=str(cache)).accounting
    monkeypatch.setattr(cache_module, "FORMAT_VERSION", cache_module.FORMAT_VERSION + 1)
    after = load(tokenizer, str(rows), max_seq_len=8, cache_dir=str(cache)).accounting
    assert [before.prepared is None, again.prepared is None, after.prepared is None] == [True, False, True]


def test_hash_of_a_large_file_is_cached_until_it_changes(tmp_path, cache, monkeypatch):
    monkeypatch.setattr(contents, "LARGE", 1)
    file = tmp_path / "data.jsonl"
    file.write_text("first")
    files = read(str(file)).files
    before = content_of(files, cache)
    assert not cache.exists()  # so new that it could still be written to
    monkeypatch.setattr(contents.time, "time", lambda: file.stat().st_ctime + 5)
    assert content_of(files, cache) == before
    monkeypatch.delattr(contents.hashlib, "file_digest")
    assert content_of(files, cache) == before
    monkeypatch.undo()
    times = file.stat()
    file.write_text("other")
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert content_of(files, cache) != before


# broken, interrupted or concurrent preparation


@contextmanager
def process(function):
    """Run `function` in a forked process, which is killed at the end."""
    child = os.fork()
    if child == 0:
        try:
            function()
        finally:
            os._exit(0)
    try:
        yield child
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def wait_for(condition):
    deadline = time.monotonic() + HANGS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def prepare(folder, rows, cache):
    """Return a function that loads the rows with one process."""
    tokenizer = Tokenizer(str(folder))

    def prepare(path=rows, **options):
        return load(tokenizer, str(path), **{"max_seq_len": 8, "cache_dir": str(cache), "workers": 1} | options)

    return prepare


@pytest.fixture
def tokenized(monkeypatch):
    """The rows that are tokenized, in the order in which it happens."""
    seen, read = [], RowReader.__call__

    def counted(reader, row):
        seen.append(row)
        return read(reader, row)

    monkeypatch.setattr(RowReader, "__call__", counted)
    return seen


@pytest.fixture
def small_pieces(monkeypatch):
    """Cut sources into pieces of two rows."""
    monkeypatch.setattr(pieces_module, "BYTES", 20)
    monkeypatch.setattr(pieces_module, "ROWS", 2)


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("suffix", [".jsonl", ".csv"])
def test_killed_preparation_goes_on_after_the_last_piece(folder, tmp_path, cache, tokenized, suffix):
    texts = [f"row number {number}" for number in range(9)]
    file = tmp_path / f"data{suffix}"
    lines = [json.dumps({"text": text}) for text in texts] if suffix == ".jsonl" else ["text", *texts]
    file.write_text("\n".join(lines))

    def load_it():
        return load(Tokenizer(str(folder)), str(file), max_seq_len=40, cache_dir=str(cache), workers=1)

    def stuck():
        read = RowReader.blocks

        def blocks(reader, rows, places, fit):
            return read(reader, rows, places, fit) if rows[0][0] + places.first < 5 else signal.pause()

        RowReader.blocks = blocks
        load_it()

    with process(stuck):
        wait_for(lambda: len(list((cache / "blocks").glob("[!.]*"))) == (4 if suffix == ".jsonl" else 2))
    data = load_it()
    assert [sample.tokens.tolist() for sample in data.samples] == [
        sample.tokens.tolist()
        for sample in load(
            Tokenizer(str(folder)), str(file), max_seq_len=40, cache_dir=str(cache / "new"), workers=1
        ).samples
    ]
    kept = 4
    assert [row["text"] for row in tokenized[: len(texts) - kept]] == texts[kept:]


WAYS = {
    "first rows": {"take": 2}, "all rows": {}, "split": {"too_long": "split"}, "dropped": {"too_long": "drop"},
    "split shorter": {"too_long": "split", "max_seq_len": 110}, "held out": {"validation_fraction": 0.5},
    "all learned": {"train_on": "all"}, "rows that can be skipped": {"on_bad_row": "skip", "take": 5},
}  # fmt: skip


def outcome(data):
    sides = [data] if data.validation is None else [data, data.validation]
    return [(side.fingerprint, [sample.place for sample in side], side.accounting) for side in sides]


@pytest.mark.slow
@pytest.mark.parametrize(("step", "size"), [(1, 2**23), (-1, 2000)])
def test_other_settings_in_the_same_cache_change_nothing(step, size, folder, tmp_path, monkeypatch):
    """In one piece or several, whatever was prepared before."""
    monkeypatch.setattr(pieces_module, "BYTES", size)
    roles = ("user", "assistant") * 3
    lines = []
    for length in range(3, 15):  # 99 to 231 tokens
        chat = [{"role": role, "content": f"{word} " * length} for role, word in zip(roles, "abcdef", strict=True)]
        lines.append(json.dumps({"messages": chat}) + "\n")
    file = tmp_path / "chats.jsonl"
    file.write_text("".join(lines))
    tokenizer = Tokenizer(str(folder))

    def prepared(way, cache):
        return outcome(load(tokenizer, str(file), cache_dir=str(cache), workers=1, **{"max_seq_len": 160} | WAYS[way]))

    alone = {way: prepared(way, tmp_path / way) for way in WAYS}
    assert {way: prepared(way, tmp_path / "shared") for way in [*WAYS][::step]} == alone
    assert len({fingerprint for (fingerprint, *_), *_ in alone.values()}) == len(WAYS)


@pytest.mark.usefixtures("small_pieces")
def test_only_what_changes_is_tokenized(prepare, rows, tokenized):
    prepare()
    assert len(tokenized) == 4
    before = prepare(max_seq_len=5, too_long="drop", packed=True)
    prepare(take=2)
    prepare(validation_fraction=0.5)
    prepare(on_bad_row="skip")
    assert len(tokenized) == 4 and before.accounting.dropped["longer than max_seq_len"]
    with rows.open("a") as file:
        file.write(json.dumps({"text": "appended"}) + "\n")
    assert prepare().accounting.rows == 5
    assert [row["text"] for row in tokenized[4:]] == ["appended"]
    rows.write_text(rows.read_text().replace("two and", "Two and"))
    assert {sample.place for sample in prepare().samples} == {f"rows.jsonl:{number}" for number in (1, 2, 4, 5)}
    assert [row["text"] for row in tokenized[5:]] == ["one", "Two and more"]  # they are one piece
    rows.with_name("more").mkdir()
    for name in ("a", "b"):
        shutil.copy(rows, rows.with_name("more") / f"{name}.jsonl")
    more = rows.with_name("more")
    assert prepare(more).accounting.rows == 10
    assert len(tokenized) == 7


def test_rows_before_a_bad_one_are_kept(prepare, rows, tokenized):
    with rows.open("a") as file:
        file.write("{\n")
    with pytest.raises(TuneError, match=r"rows\.jsonl:5"):
        prepare()
    assert prepare(on_bad_row="skip", max_bad_share=0.5).accounting.kept == 3
    assert len(tokenized) == 5


def test_second_process_waits_for_the_first_to_prepare(prepare, cache, capsys, monkeypatch, tokenized):
    go, started = cache.parent / "go", cache.parent / "started"

    def slow():
        read = RowReader.blocks

        def blocks(*arguments, **options):
            started.touch()
            wait_for(go.exists)
            return read(*arguments, **options)

        RowReader.blocks = blocks
        prepare()

    with process(slow):
        wait_for(started.exists)
        monkeypatch.setattr(cache_module, "TELL", 0)
        monkeypatch.setattr(cache_module, "print", lambda *line, **at: print(*line, **at) or go.touch(), raising=False)
        data = prepare()
    assert data.accounting.kept == 3
    assert not tokenized  # the other process did
    assert "waiting for another process to prepare" in capsys.readouterr().err


def test_waiting_processes_raise_the_error_of_the_preparing_one(prepare, cache, capsys, monkeypatch, tokenized):
    go, started = cache.parent / "go", cache.parent / "started"

    def wrong():
        def blocks(*arguments, **options):
            started.touch()
            wait_for(go.exists)
            raise TuneError("rows.jsonl:3: wrong")

        RowReader.blocks = blocks
        prepare()

    lockf = fcntl.lockf
    with process(wrong):
        wait_for(started.exists)
        monkeypatch.setattr(fcntl, "lockf", lambda *how: (how[1] & fcntl.LOCK_NB or go.touch(), lockf(*how)))
        with pytest.raises(TuneError, match=r"^rows\.jsonl:3: wrong$"):
            prepare()
    assert not tokenized
    assert not capsys.readouterr().err  # a short wait for a process of the same run prints nothing
    assert prepare().accounting.kept == 3  # a process that did not wait tries again


@pytest.mark.parametrize("folder_name", ["blocks", "datasets"])
@pytest.mark.parametrize("damage", ["cut", "absent", "no header", "a bit of the header"])
def test_damaged_files_are_prepared_again(prepare, cache, folder_name, damage):
    whole = [sample.tokens.tolist() for sample in prepare().samples]
    (file,) = (cache / folder_name).iterdir()
    content = bytearray(file.read_bytes())
    if damage == "cut":
        os.truncate(file, len(content) - 4)
    elif damage == "absent":
        file.unlink()
    elif damage == "no header":
        file.write_bytes(b"[]")
    else:
        content[12] ^= 64
        file.write_bytes(content)
    assert [sample.tokens.tolist() for sample in prepare().samples] == whole
    assert (cache / folder_name / file.name).stat().st_size == len(content)


def test_unwritable_cache_is_reported(folder, rows, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    message = r"file/cache.*: Not a directory\. .*rows\.jsonl are stored there\. Set cache_dir \(or TUNE_CACHE"
    with pytest.raises(TuneError, match=message):
        load(Tokenizer(str(folder)), str(rows), max_seq_len=8, cache_dir=str(tmp_path / "file" / "cache"))
    monkeypatch.setenv("TUNE_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(TuneError, match=message):
        load(Tokenizer(str(folder)), str(rows), max_seq_len=8)


def test_full_disk_leaves_no_partial_files(prepare, cache, monkeypatch):
    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cache_module.os, "fsync", full)
    with pytest.raises(TuneError, match=r"cache: No space left on device\. .* cache_dir"):
        prepare()
    assert not list((cache / "blocks").iterdir())


def test_kept_files_are_safetensors(prepare, cache):
    first = prepare().samples[0].tokens
    (file,) = (cache / "blocks").iterdir()
    assert load_file(file)["tokens"][: len(first)].tolist() == first.tolist()


@pytest.mark.usefixtures("small_pieces")
def test_same_pieces_in_other_files_have_other_places(prepare, rows, tokenized):
    prepare()
    lines = rows.read_text().splitlines(keepends=True)
    rows.with_name("parts").mkdir()
    for name, part in {"a": lines[:2], "b": lines[2:]}.items():
        (rows.with_name("parts") / f"{name}.jsonl").write_text("".join(part))
    assert prepare(rows.with_name("parts")).samples[-1].place == "b.jsonl:2"
    assert prepare().samples[-1].place == "rows.jsonl:4"
    assert len(tokenized) == 4


@pytest.mark.usefixtures("small_pieces")
def test_finished_blocks_take_no_memory(folder, rows, cache):
    reader, fit = RowReader(Tokenizer(str(folder))), Fit(4, "truncate")
    parts = [*Preparation(read(str(rows)), reader, cache, 1)._parts(fit, PreparationProgress("rows"))]
    assert len(parts) == 2
    for part in parts:
        array = part.block.tokens
        while array.base is not None and not isinstance(array, np.memmap):
            array = array.base
        assert isinstance(array, np.memmap)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("suffix", [".jsonl", ".csv"])
def test_preparation_killed_at_ten_random_instants(folder, tmp_path, cache, monkeypatch, suffix, workers):
    """It gives the same samples, and prepares nothing twice but the pieces that were not finished."""
    monkeypatch.setattr(pieces_module, "BYTES", 600)
    monkeypatch.setattr(pieces_module, "ROWS", 20)
    texts = [f"row number {number}" for number in range(800)]
    file = tmp_path / f"data{suffix}"
    lines = [json.dumps({"text": text}) for text in texts] if suffix == ".jsonl" else ["text", *texts]
    file.write_text("\n".join(lines))
    counted = tmp_path / "counted"
    draw = random.Random(workers)

    def load_it(folder_of_cache):
        tokenizer = Tokenizer(str(folder))
        return load(tokenizer, str(file), max_seq_len=40, cache_dir=str(folder_of_cache), workers=workers)

    def slowly():
        read = RowReader.__call__

        def one_row(reader, row):
            with counted.open("a") as stream:
                stream.write(".")
            time.sleep(0.001)  # so that a kill falls into a preparation
            return read(reader, row)

        RowReader.__call__ = one_row
        load_it(cache)

    for _ in range(10):
        with process(slowly):
            time.sleep(draw.uniform(0.05, 0.15))
    tokenized = counted.stat().st_size if counted.exists() else 0
    assert tokenized <= len(texts) + 10 * workers * 64  # a chunk of rows is at work in each process
    killed, whole = load_it(cache), load_it(tmp_path / "another")
    assert killed.fingerprint == whole.fingerprint
    assert [sample.tokens.tolist() for sample in killed.samples] == [sample.tokens.tolist() for sample in whole.samples]
