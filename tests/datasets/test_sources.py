"""The same rows from every kind of source."""

import bz2
import gzip
import json
import lzma
import os
from contextlib import nullcontext
from random import random
from typing import ClassVar

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from tune import rehearsal
from tune.datasets import load
from tune.datasets.kept_files import content_of
from tune.datasets.read.data_files import SCHEMES
from tune.datasets.read.opening import read
from tune.errors import TuneError
from tune.tokenizers import Tokenizer

ROWS = [{"prompt": "NA", "completion": "007"}, {"prompt": "a\nb\t", "completion": '1,"5"'}]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS).encode()


@pytest.fixture
def tokenizer(folder):
    return Tokenizer(str(folder))


@pytest.fixture(scope="module")
def arrow():
    pyarrow = pytest.importorskip("pyarrow")
    pytest.importorskip("pyarrow.parquet")
    return pyarrow


def rows_of(path, **options):
    return [row for _, row in read(str(path), **options)]


def places_of(path, **options):
    return [place for place, _ in read(str(path), **options)]


def put(file, content=LINES):
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    return file


# files


# Compressed content has no timestamp: parallel test processes must collect the same names.
@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("data.jsonl", LINES),
        ("data.json", LINES),
        ("data.json", json.dumps(ROWS, indent=2)),
        ("data.json", "\ufeff" + " " * 100 + json.dumps(ROWS)),
        ("data.json", json.dumps({"version": "1.0", "data": ROWS})),
        ("data.json", json.dumps({"rows": ROWS, "columns": ["prompt", "completion"]}, indent=2)),
        ("data.csv", '\ufeffprompt;completion\r\nNA;007\r\n"a\nb\t";"1,""5"""\r\n'),
        ("data.csv", 'prompt\tcompletion\nNA\t007\n"a\nb\t"\t"1,""5"""\n'),
        ("data.csv", '\ufeffprompt,completion\r\nNA,007\r\n"a\nb\t","1,""5"""\r\n'),
        ("data.tsv", 'prompt\tcompletion\nNA\t007\n"a\nb\t"\t"1,""5"""\n'),
        ("data.jsonl.gz", gzip.compress(LINES, mtime=0)),
        ("data.jsonl.bz2", bz2.compress(LINES)),
        ("data.jsonl.xz", lzma.compress(LINES)),
        ("DATA.JSONL", LINES),
        ("data.Jsonl.GZ", gzip.compress(LINES, mtime=0)),
        ("data.json.gz", gzip.compress(json.dumps(ROWS).encode(), mtime=0)),
        ("data.csv.gz", gzip.compress(b'prompt,completion\nNA,007\n"a\nb\t","1,""5"""', mtime=0)),
    ],
)
def test_files(tmp_path, name, content):
    assert rows_of(put(tmp_path / name, content)) == ROWS


@pytest.mark.parametrize("content", [json.dumps(ROWS[1]), "\n" + json.dumps(ROWS[1], indent=1)])
def test_one_row(tmp_path, content):
    assert rows_of(put(tmp_path / "data.json", content)) == ROWS[1:]


def test_commas_come_before_semicolons(tmp_path):
    assert rows_of(put(tmp_path / "data.csv", "prompt,answer; in short\na;b,c\n")) == [
        {"prompt": "a;b", "answer; in short": "c"}
    ]


def test_zstandard(tmp_path, arrow):
    for frames in (1, 2):
        put(tmp_path / "data.jsonl.zst", arrow.Codec("zstd").compress(LINES, asbytes=True) * frames)
        assert rows_of(tmp_path / "data.jsonl.zst") == ROWS * frames


def test_arrow_files_and_streams(tmp_path, arrow):
    table = arrow.Table.from_pylist(ROWS)
    for make in (arrow.ipc.new_file, arrow.ipc.new_stream):
        with make(str(tmp_path / "data.arrow"), table.schema) as writer:
            writer.write_table(table, max_chunksize=1)
        assert rows_of(tmp_path / "data.arrow") == ROWS


def test_parquet_in_batches(tmp_path, arrow):
    many = [{"text": str(number)} for number in range(3000)]
    arrow.parquet.write_table(arrow.Table.from_pylist(many), tmp_path / "data.parquet", row_group_size=1100)
    assert rows_of(tmp_path / "data.parquet") == many
    assert places_of(tmp_path / "data.parquet")[-1] == "data.parquet:row 3000"


def test_text_file_is_one_document(tmp_path):
    put(tmp_path / "book.txt", "\ufeffOnce\n\nupon a time\n")
    assert rows_of(tmp_path / "book.txt") == [{"text": "Once\n\nupon a time\n"}]


def test_saved_datasets(tmp_path, arrow):
    datasets = pytest.importorskip("datasets")
    saved = datasets.Dataset.from_list([*ROWS, *ROWS]).select([0, 3])  # with indices into the rows
    saved.save_to_disk(tmp_path / "one")
    assert rows_of(tmp_path / "one") == ROWS
    datasets.DatasetDict(train=saved, test=saved.select([0])).save_to_disk(tmp_path / "several")
    assert rows_of(tmp_path / "several") == ROWS
    assert rows_of(tmp_path / "several", split="test") == ROWS[:1]
    assert {file.name for file in read(str(tmp_path / "one")).files} >= {"state.json"}
    with pytest.raises(TuneError, match="has no split 'validation'; it has train, test"):
        rows_of(tmp_path / "several", split="validation")


def test_take_reads_only_the_first(tmp_path):
    put(tmp_path / "data.jsonl", LINES + b"this is no JSON")
    assert rows_of(tmp_path / "data.jsonl", take=2) == ROWS


@pytest.mark.parametrize(("rows", "take", "is_cut"), [(2, None, False), (3, None, True), (3, 2, False), (9, 3, True)])
def test_rehearsal_reads_the_first_rows_and_knows_if_more_exist(tmp_path, rows, take, is_cut):
    put(tmp_path / "data.jsonl", b'{"text": "a"}\n' * rows)
    note = rehearsal.Rehearsal(print, print, 2, nullcontext, print, {})
    with rehearsal.start(note):
        source = read(str(tmp_path / "data.jsonl"), take=take).rehearsed()
        assert len([*source]) == 2 and rehearsal.is_cut() == is_cut


# folders and globs


def test_subfolders_are_read_but_links_to_folders_are_not(tmp_path):
    put(tmp_path / "data" / "a.jsonl")
    put(tmp_path / "data" / "b" / "c.jsonl.gz", gzip.compress(LINES))
    put(tmp_path / "data" / ".cache" / "d.jsonl")
    put(tmp_path / "data" / "notes.txt", "about it")
    os.symlink(tmp_path / "data", tmp_path / "data" / "loop")
    os.symlink(tmp_path / "nowhere", tmp_path / "data" / "gone.jsonl")
    os.symlink(tmp_path / "data" / "a.jsonl", tmp_path / "data" / "z.jsonl")
    assert places_of(tmp_path / "data") == [
        "a.jsonl:1", "a.jsonl:2", "b/c.jsonl.gz:1", "b/c.jsonl.gz:2", "z.jsonl:1", "z.jsonl:2",
    ]  # fmt: skip
    assert read(str(tmp_path / "data")).ignored_files == ["gone.jsonl", "loop", "notes.txt"]


def test_splits_of_a_folder_follow_its_file_names(tmp_path):
    for name in ("train-00000-of-00001.jsonl", "test.jsonl", "validation/a.jsonl", "dev_b.jsonl", "extra.jsonl"):
        put(tmp_path / "data" / name)
    chosen = {split: places_of(tmp_path / "data", split=split)[::2] for split in ("train", "test", "validation")}
    assert chosen == {
        "train": ["train-00000-of-00001.jsonl:1"],
        "test": ["test.jsonl:1"],
        "validation": ["dev_b.jsonl:1", "validation/a.jsonl:1"],
    }
    assert "test.jsonl" in read(str(tmp_path / "data")).ignored_files


def test_globs(tmp_path):
    for name in ("2023-a.jsonl", "2024-a.jsonl", "2024-b.jsonl", "deep/er/2024-c.jsonl"):
        put(tmp_path / name)
    assert len(rows_of(tmp_path / "2024-*.jsonl")) == 4
    assert len(rows_of(tmp_path / "**" / "2024-*.jsonl")) == 6
    put(tmp_path / "odd[1].jsonl")
    assert rows_of(tmp_path / "odd[1].jsonl") == ROWS


# remote files


@pytest.fixture(autouse=True)
def web(monkeypatch):
    """Let data come from the file system `Web`."""
    monkeypatch.setattr("tune.datasets.read.data_files.SCHEMES", (*SCHEMES, "web"))


@pytest.fixture
def memory():
    filesystem = fsspec.filesystem("memory")
    filesystem.pipe({"/bucket/a.jsonl": LINES, "/bucket/b/c.jsonl.gz": gzip.compress(LINES), "/bucket/test.csv": b"a"})
    filesystem.pipe({"/train/a.jsonl": LINES})
    yield filesystem
    filesystem.rm("/bucket", recursive=True)
    filesystem.rm("/train", recursive=True)


@pytest.mark.usefixtures("memory")
def test_fsspec_urls():
    assert rows_of("memory://bucket/a.jsonl") == ROWS
    assert rows_of("memory://bucket/*.jsonl") == ROWS
    assert rows_of("memory://bucket/b") == ROWS
    assert places_of("memory://bucket/b/") == ["c.jsonl.gz:1", "c.jsonl.gz:2"]
    assert rows_of("memory://train") == ROWS  # the folder's own name is not a split


def test_remote_files_are_prepared_once(tokenizer, memory, monkeypatch):
    first = load(tokenizer, "memory://train/a.jsonl", max_seq_len=100)
    with monkeypatch.context() as patch:
        patch.delattr(Tokenizer, "encode_with_offsets")
        assert load(tokenizer, "memory://train/a.jsonl", max_seq_len=100).fingerprint == first.fingerprint
    memory.pipe({"/train/a.jsonl": LINES + LINES})
    assert len(load(tokenizer, "memory://train/a.jsonl", max_seq_len=100)) == 4


class Web(MemoryFileSystem):
    """Report the headers of a web server for a file; without headers, only its path and size."""

    protocol = "web"
    headers: ClassVar[dict[str, str]] = {}

    @classmethod
    def _strip_protocol(cls, path):
        return MemoryFileSystem._strip_protocol(path.removeprefix("web://"))

    def ukey(self, path):
        return path  # as fsspec's file system for https does

    def info(self, path, **kwargs):
        return {**super().info(path), "created": None, "url": f"https://signed/{random()}"} | self.headers


@pytest.mark.parametrize("headers", [{"ETag": '"1"'}, {"Last-Modified": "Mon, 01 Jan 2024 00:00:00 GMT"}, {}])
def test_changes_of_remote_files_are_noticed(memory, monkeypatch, headers, tmp_path):
    fsspec.register_implementation("web", Web, clobber=True)
    monkeypatch.setattr(Web, "headers", headers)

    def content():
        return content_of(read("web://train/a.jsonl").files, tmp_path)

    before = content()
    assert content() == before  # although the signed URL may differ each time
    if headers:
        with monkeypatch.context() as patch:
            patch.setattr(Web, "_open", None)  # the bytes are not downloaded
            assert content() == before
    memory.pipe({"/train/a.jsonl": LINES.replace(b"o", b"0")})  # as long as before
    monkeypatch.setattr(Web, "headers", {name: f"{value} later" for name, value in headers.items()})
    assert content() != before
    changed = content()
    memory.pipe({"/train/a.jsonl": LINES + LINES})  # in the same second
    assert content() != changed


def test_files_with_the_same_etag_stay_distinct(memory, monkeypatch, tmp_path):
    fsspec.register_implementation("web", Web, clobber=True)
    monkeypatch.setattr(Web, "headers", {"ETag": '"1"'})
    memory.pipe({"/train/other.jsonl": LINES.replace(b"o", b"0")})
    one, other = (read(f"web://train/{name}.jsonl").files for name in ("a", "other"))
    assert content_of(one, tmp_path) != content_of(other, tmp_path)


def test_remote_file_without_headers_is_hashed_by_content(memory, monkeypatch, tmp_path):
    """If the server sends no headers, the bytes are the key, whatever the path."""
    fsspec.register_implementation("web", Web, clobber=True)
    memory.pipe({"/train/copy.jsonl": LINES})
    one, other = (read(f"web://train/{name}.jsonl").files for name in ("a", "copy"))
    assert content_of(one, tmp_path) == content_of(other, tmp_path)


def test_remote_parquet(memory, arrow):
    with memory.open("/bucket/deep/data.parquet", "wb") as file:
        arrow.parquet.write_table(arrow.Table.from_pylist(ROWS), file)
    assert rows_of("memory://bucket/deep/data.parquet") == ROWS


# unreadable paths


@pytest.mark.parametrize(
    "url",
    [
        "reference://a::file:///refs.json", "simplecache::s3://a/b", "zip://a::https://x/y.zip", "ssh://h/a",
        "https://host/a::reference://b", "github://a:b@main/c", "jupyter://h/a", "dask://a", "data:x://a", "HTTP://h/a",
    ],
)  # fmt: skip
def test_schemes_that_open_other_things_are_refused(url, monkeypatch):
    monkeypatch.setattr("fsspec.url_to_fs", None)
    with pytest.raises(TuneError, match="is not read"):
        read(url)


def test_unreadable_paths_are_reported(tmp_path, monkeypatch):
    put(tmp_path / "data" / "train.jsonl")
    put(tmp_path / "data" / "more.jsonl")
    put(tmp_path / "mixed" / "a.csv", "text\na")
    put(tmp_path / "mixed" / "b.jsonl")
    put(tmp_path / "table.xlsx")
    put(tmp_path / "data.parquet.gz")
    os.symlink(tmp_path / "loop.jsonl", tmp_path / "loop.jsonl")
    (tmp_path / "empty").mkdir()
    cases = {
        f"{tmp_path}/loop.jsonl": "loop.jsonl is a broken link",
        f"{tmp_path}/2025-*.jsonl": r"2025-\*\.jsonl matches no file",
        f"{tmp_path}/empty": "must hold data files of one kind .* found nothing",
        f"{tmp_path}/mixed": r"found a\.csv, b\.jsonl",
        f"{tmp_path}/table.xlsx": r"cannot read \.xlsx files\. Supported: \.json, .* compressed as \.gz",
        f"{tmp_path}/data.parquet.gz": r"cannot read \.parquet\.gz files",
        "nope://bucket/a.jsonl": "nope://bucket/a.jsonl is not read.* s3, .* hf",
        "memory://nothing/here.jsonl": "memory://nothing/here.jsonl does not exist",
        "python:rows": r"python:rows: 'rows' is not the dotted path .* Include its module: my_module\.rows",
    }
    for path, message in cases.items():
        with pytest.raises(TuneError, match=message):
            rows_of(path)
    with pytest.raises(
        TuneError, match=r"no files of the split 'test'\. By their names, it has no split: more\.jsonl; train"
    ):
        rows_of(tmp_path / "data", split="test")
    with pytest.raises(TuneError, match=r"has no splits: .*Remove split=test"):
        rows_of(tmp_path / "mixed" / "b.jsonl", split="test")
    with pytest.raises(TuneError, match=r"is not a hub dataset.* Remove subset=main"):
        rows_of(tmp_path / "mixed" / "b.jsonl", subset="main")


def test_missing_package_for_a_url_is_reported(monkeypatch):
    def url_to_fs(path):
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr(fsspec, "url_to_fs", url_to_fs)
    with pytest.raises(TuneError, match=r"s3://bucket/a\.jsonl needs a package .*: Install s3fs to access S3"):
        rows_of("s3://bucket/a.jsonl")


# columns of the type Json

MIXED = [
    {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": 'hello "you"\nthere'}]},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "one", "note": None}]}, {"role": "assistant"}]},
    {"messages": None},
]


@pytest.fixture
def with_json():
    """A dataset whose contents are a text in one row and a list in another: `datasets` saves them as JSON."""
    datasets = pytest.importorskip("datasets", minversion="5.0")
    message = {"role": datasets.Value("string"), "content": datasets.Json()}
    features = datasets.Features({"messages": datasets.List(message), "n": datasets.Json()})
    return datasets.Dataset.from_list(
        [{**row, "n": n} for row, n in zip(MIXED, (1, "a", [2.5]), strict=True)], features
    )


@pytest.mark.parametrize("kind", ["parquet", "saved", "without its type in Arrow", "without its type in datasets"])
def test_columns_that_datasets_saved_as_json(tmp_path, arrow, with_json, kind):
    path = tmp_path / "rows.parquet"
    if kind == "saved":
        with_json.save_to_disk(path := tmp_path / "rows")
    else:
        with_json.to_parquet(path)
    if kind == "without its type in Arrow":
        table = arrow.parquet.read_table(path)
        message = arrow.struct({"role": arrow.string(), "content": arrow.string()})
        plain = arrow.schema({"messages": arrow.list_(message), "n": arrow.string()}, table.schema.metadata)
        arrow.parquet.write_table(arrow.Table.from_pylist(table.to_pylist(), plain), path)
    if kind == "without its type in datasets":
        arrow.parquet.write_table(arrow.parquet.read_table(path).replace_schema_metadata(None), path)
    rows = rows_of(path)
    assert [row["n"] for row in rows] == [1, "a", [2.5]]
    assert rows[0]["messages"] == MIXED[0]["messages"]
    assert rows[1]["messages"] == MIXED[1]["messages"] and rows[2]["messages"] is None


@pytest.mark.parametrize("kind", ["list_", "large_list", "list_of_two"])
def test_json_in_each_kind_of_list(tmp_path, arrow, kind):
    kinds = {"list_": arrow.list_, "large_list": arrow.large_list, "list_of_two": lambda each: arrow.list_(each, 2)}
    stored = arrow.array([['"a"', "[2.5]"]], kinds[kind](arrow.string())).cast(kinds[kind](arrow.json_()))
    arrow.parquet.write_table(arrow.table({"texts": stored}), tmp_path / "rows.parquet")
    assert rows_of(tmp_path / "rows.parquet") == [{"texts": ["a", [2.5]]}]


def test_json_that_is_damaged_names_its_row(tmp_path, arrow):
    table = arrow.table({"text": arrow.array(['"a"', '{"a'], arrow.json_())})
    arrow.parquet.write_table(table, tmp_path / "rows.parquet")
    (_, first), (place, second) = read(str(tmp_path / "rows.parquet"))
    assert (first, place, type(second)) == ({"text": "a"}, "rows.parquet:row 2", TuneError)
