"""Datasets are prepared once and memory-mapped by all; broken or outdated files are never used."""

import fcntl
import json
import os
import shutil
import signal
import time
from contextlib import contextmanager

import numpy as np
import pytest
from helpers import HANGS

from tune.datasets import cache as cache_module
from tune.datasets import load
from tune.datasets.cache import content_of, prepared
from tune.datasets.fit import Outcome
from tune.datasets.read.opening import read
from tune.datasets.samples import flat
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


@pytest.fixture
def chunks(make):
    """Two chunks, and a list that grows each time they are made."""
    made = []

    def chunks():
        made.append(os.getpid())
        yield flat([Outcome([make.sample(5, 4, 7)])])
        yield flat([Outcome([make.sample(3, 2, 9)]), Outcome(dropped="fully masked")])

    return chunks, made


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
        return len([name for name in listing(cache) if "." not in name])

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


def test_killed_preparation_is_repeated(chunks, cache):
    make_chunks, made = chunks

    def stuck():
        yield from make_chunks()
        signal.pause()

    with process(lambda: prepared(stuck(), "key", cache)):
        wait_for(lambda: list(cache.glob(".key.*.unfinished/tokens.npy")))
    samples = prepared(make_chunks(), "key", cache)
    assert samples.tokens.tolist() == [7] * 5 + [9] * 3
    assert listing(cache) == ["key", "key.lock"]
    assert made == [os.getpid()]


def test_second_process_waits_for_the_first_to_prepare(chunks, cache, capsys, monkeypatch):
    make_chunks, made = chunks
    go = cache.parent / "go"

    def slow():
        yield from make_chunks()
        wait_for(go.exists)

    with process(lambda: prepared(slow(), "key", cache)):
        wait_for(lambda: list(cache.glob(".key.*.unfinished")))
        monkeypatch.setattr(cache_module, "TELL", 0)
        monkeypatch.setattr(cache_module, "print", lambda *line, **at: print(*line, **at) or go.touch(), raising=False)
        samples = prepared(make_chunks(), "key", cache)
    assert samples.lengths.tolist() == [5, 3]
    assert not made  # the other process did
    assert "waiting for another process to prepare the dataset" in capsys.readouterr().err


def test_waiting_processes_raise_the_error_of_the_preparing_one(chunks, cache, capsys, monkeypatch):
    make_chunks, made = chunks
    go = cache.parent / "go"

    def wrong():
        wait_for(go.exists)
        raise TuneError("rows.jsonl:3: wrong")
        yield

    lockf = fcntl.lockf
    with process(lambda: prepared(wrong(), "key", cache)):
        wait_for(lambda: list(cache.glob(".key.*.unfinished")))
        monkeypatch.setattr(fcntl, "lockf", lambda *how: (how[1] & fcntl.LOCK_NB or go.touch(), lockf(*how)))
        with pytest.raises(TuneError, match=r"^rows\.jsonl:3: wrong$"):
            prepared(make_chunks(), "key", cache)
    assert not made
    assert not capsys.readouterr().err  # a short wait for a process of the same run prints nothing
    assert len(prepared(make_chunks(), "key", cache)) == 2  # a process that did not wait tries again


@pytest.mark.parametrize("damage", ["cut", "absent", "about", "no object", "a bit of the shape", "a bit of the header"])
def test_damaged_files_are_prepared_again(chunks, cache, damage):
    make_chunks, made = chunks
    prepared(make_chunks(), "key", cache)
    if damage == "cut":
        os.truncate(cache / "key" / "tokens.npy", 140)
    elif damage == "absent":
        (cache / "key" / "lengths.npy").unlink()
    elif damage.startswith("a bit"):
        file = cache / "key" / "tokens.npy"
        content = bytearray(file.read_bytes())
        content[content.index(b"(8,") + 1 if damage == "a bit of the shape" else 8] ^= 64 if "header" in damage else 12
        file.write_bytes(content)
    else:
        (cache / "key" / "about.json").write_text("{" if damage == "about" else "[]")
    assert prepared(make_chunks(), "key", cache).tokens.tolist() == [7] * 5 + [9] * 3
    assert len(made) == 2


def test_unwritable_cache_is_reported(folder, rows, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    message = r"file/cache.*: Not a directory\. .*rows\.jsonl are stored there\. Set cache_dir \(or TUNE_CACHE"
    with pytest.raises(TuneError, match=message):
        load(Tokenizer(str(folder)), str(rows), max_seq_len=8, cache_dir=str(tmp_path / "file" / "cache"))
    monkeypatch.setenv("TUNE_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(TuneError, match=message):
        load(Tokenizer(str(folder)), str(rows), max_seq_len=8)


def test_full_disk_leaves_no_partial_files(chunks, cache, monkeypatch):
    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cache_module.os, "fsync", full)
    with pytest.raises(TuneError, match=r"cache: No space left on device\. .* cache_dir"):
        prepared(chunks[0](), "key", cache)
    assert listing(cache) == ["key.lock"]


def test_flat_files_open_in_numpy(chunks, cache):
    prepared(chunks[0](), "key", cache)
    assert np.load(cache / "key" / "tokens.npy").tolist() == [7] * 5 + [9] * 3
