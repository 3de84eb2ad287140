"""A list of rows in a .json file is read item by item."""

import json
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tune.datasets.read import readers
from tune.datasets.read.data_files import choose_files, place_at
from tune.errors import TuneError

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inside: st.lists(inside, max_size=3) | st.dictionaries(st.text(max_size=4), inside, max_size=3),
    max_leaves=8,
)


def read(path):
    (file,) = choose_files(place_at(str(path)), "train")[0]
    return [row for _, row in readers.rows_of(file)]


@settings(max_examples=40)
@given(st.lists(VALUES, max_size=6), st.sampled_from([None, 1, "\t"]), st.integers(1, 9), st.booleans())
def test_items_are_those_that_json_gives(tmp_path_factory, rows, indent, part, has_bom):
    path = tmp_path_factory.mktemp("json") / "rows.json"
    path.write_text("\ufeff" * has_bom + json.dumps(rows, indent=indent, ensure_ascii=False), encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(readers, "PART", part)
        assert read(path) == rows


@pytest.mark.parametrize("part", [1, 5, 2**20])
@pytest.mark.parametrize(
    "text",
    [
        '[{"a": 1},\n {"a": 2},\n {"a" 3}]',
        '[{"a": 1},\n {"a": "the end',
        '[{"a": 1}\n {"a": 2}]',
        '[{"a": 1},\n, {"a": 2}]',
        '[{"a": 1},\n {"a": 2}] and more',
        '[{"a": 1},\n {"a": 2},\n]',
        "[1, 2, tru",
        "[",
    ],
)
def test_errors_have_the_place_that_json_gives(tmp_path, monkeypatch, text, part):
    with pytest.raises(json.JSONDecodeError) as wrong:
        json.loads(text)
    monkeypatch.setattr(readers, "PART", part)
    (tmp_path / "rows.json").write_text(text)
    with pytest.raises(TuneError) as error:
        read(tmp_path / "rows.json")
    assert f"rows.json:{wrong.value.lineno}: " in str(error.value)
    assert f"at column {wrong.value.colno}" in str(error.value)


def test_memory_does_not_grow_with_the_list(tmp_path):
    row = json.dumps({"messages": [{"role": "user", "content": "the cat " * 50}] * 2})
    (tmp_path / "rows.json").write_text(f"[{','.join([row] * 20_000)}]")  # 17 MB
    (file,) = choose_files(place_at(str(tmp_path / "rows.json")), "train")[0]
    tracemalloc.start()
    count = sum(1 for _ in readers.rows_of(file))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert count == 20_000 and peak < 6 * readers.PART
