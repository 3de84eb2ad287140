"""Each document of a batch names the file and line that it comes from."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tune.collators import Batch, Sample, collate
from tune.datasets import DataLoader, Dataset, Mixture, load, preparation
from tune.datasets.read import pieces
from tune.tokenizers import Tokenizer

WORDS = ["once", "upon", "a", "time", "there", "was", "a", "quick", "brown", "fox", "that", "said", "hello"]


def write_rows(file: Path, first: int, count: int) -> dict[str, str]:
    """Write rows of different texts: every fourth is blank, every fifth long. Return the text of each place."""
    texts = {}
    with file.open("w") as lines:
        for number in range(1, count + 1):
            at = first + number
            text = f"{at} {' '.join(WORDS[: 2 + at % 11])}" * (5 if number % 5 == 0 else 1)
            texts[f"{file.name}:{number}"] = text = "" if number % 4 == 0 else text
            lines.write(json.dumps({"text": text}) + "\n")
    return texts


def count_right_places(data: Any, places: dict[str, str], tokenizer: Tokenizer, steps: int, pad_to: int | None) -> int:
    """Iterate over the loader and compare each document's text with the row that its place names."""
    world: Any = SimpleNamespace(data_rank=0, data_size=1, device="cpu")
    loader = DataLoader(data, world, 8, 2, max_steps=steps, seed=3)
    loader.pad_to = pad_to
    seen = set()
    for _, step in loader:
        for batch in step.micro_batches:
            bounds = batch.documents.boundaries.tolist()
            assert len(batch.places) == len(bounds) - 1 == len(batch.documents.samples)
            for place, start, end in zip(batch.places, bounds, bounds[1:], strict=False):
                ids = batch.tokens.flatten()[start:end].tolist()
                if not place:
                    assert not any(ids)  # padding
                    continue
                assert tokenizer.decode(ids, skip_special_tokens=True) in places[place]
                seen.add(place)
    return len(seen)


@pytest.fixture
def source(tmp_path: Path) -> tuple[Path, dict[str, str]]:
    folder = tmp_path / "rows"
    folder.mkdir()
    return folder, write_rows(folder / "a.jsonl", 0, 40) | write_rows(folder / "b.jsonl", 100, 30)


@pytest.mark.parametrize("pad_to", [None, 64])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("too_long", ["truncate", "split", "drop"])
@pytest.mark.parametrize("streaming", [False, True])
def test_documents_name_their_line(
    folder: Path, source: tuple[Path, dict[str, str]], tmp_path: Path, pad_to: Any, packed: bool, too_long: Any,
    streaming: bool,
) -> None:  # fmt: skip
    path, places = source
    tokenizer = Tokenizer(folder)
    options: dict[str, Any] = {"streaming": True, "shuffle_buffer": 64} if streaming else {"cache_dir": str(tmp_path)}
    data = load(tokenizer, str(path), max_seq_len=64, packed=packed, too_long=too_long, **options)
    steps = 14 if packed else 20
    seen = count_right_places(data, places, tokenizer, steps if streaming else 100, pad_to)
    if not streaming:  # an epoch
        kept = [text for text in places.values() if text and (too_long != "drop" or len(tokenizer.encode(text)) < 64)]
        assert seen == len(kept)


def test_prepared_rows_of_a_renamed_file(folder: Path, tmp_path: Path) -> None:
    tokenizer, file = Tokenizer(folder), tmp_path / "a.jsonl"
    write_rows(file, 0, 9)
    options: dict[str, Any] = {"max_seq_len": 64, "cache_dir": str(tmp_path / "cache"), "too_long": "truncate"}
    before = [sample.place for sample in load(tokenizer, str(file), **options).samples]
    moved = file.rename(tmp_path / "b.jsonl")
    again = load(tokenizer, str(moved), **options)
    assert isinstance(again, Dataset) and again.accounting.prepared
    assert before == [f"a.jsonl:{line}" for line in (1, 2, 3, 5, 6, 7, 9)]
    assert [sample.place for sample in again.samples] == [place.replace("a.jsonl", "b.jsonl") for place in before]


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet", ".csv"])
def test_rows_of_later_pieces(suffix: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet

    monkeypatch.setattr(pieces, "BYTES", 1)
    monkeypatch.setattr(pieces, "ROWS", 2)
    monkeypatch.setattr(preparation, "ROWS", 2)
    (tmp_path / "rows").mkdir()
    mark, places = ":" if suffix == ".jsonl" else ":row ", {}
    for name in ("a", "b"):
        file, texts = tmp_path / "rows" / f"{name}{suffix}", [f"text {name} {number}" for number in range(1, 10)]
        places |= {f"{file.name}{mark}{number}": text for number, text in enumerate(texts, 1)}
        if suffix == ".parquet":
            pyarrow.parquet.write_table(arrow.table({"text": texts}), file, row_group_size=2)
        elif suffix == ".csv":
            file.write_text("\n".join(["text", *texts]) + "\n")
        else:
            file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    tokenizer = Tokenizer(folder)
    for streaming in (False, True):
        data = load(tokenizer, str(file.parent), max_seq_len=64, cache_dir=str(tmp_path), streaming=streaming)
        samples = next(iter(data.windows())).data if streaming else data
        found = {sample.place: tokenizer.decode(sample.tokens.tolist(), skip_special_tokens=True) for sample in samples}
        assert found == places


def test_other_sources_and_kinds(folder: Path, tmp_path: Path) -> None:
    tokenizer = Tokenizer(folder)
    pairs = tmp_path / "pairs.csv"
    pairs.write_text("prompt,chosen,rejected\nQ:,yes,no\nR:,yes,no\n")
    text = tmp_path / "é.txt"
    text.write_text("one text")
    options: dict[str, Any] = {"max_seq_len": 64, "cache_dir": str(tmp_path / "cache")}
    compared = load(tokenizer, str(pairs), kind="preferences", **options)
    labelled = load(tokenizer, str(pairs), kind="labelled", **options)
    whole = load(tokenizer, str(text), **options)
    rows = [f"pairs.csv:row {number}" for number in (1, 2)]
    assert [sample.place for sample in compared.samples] == np.repeat(rows, 2).tolist()
    assert [sample.place for sample in labelled.samples] == np.repeat(rows, 4).tolist()
    assert [sample.place for sample in whole.samples] == [text.name]


def test_mixtures_and_own_samples(folder: Path, tmp_path: Path) -> None:
    tokenizer = Tokenizer(folder)
    places = write_rows(tmp_path / "a.jsonl", 0, 20) | write_rows(tmp_path / "b.jsonl", 50, 20)
    options: dict[str, Any] = {"max_seq_len": 64, "cache_dir": str(tmp_path / "cache"), "too_long": "truncate"}
    parts = {name: load(tokenizer, str(tmp_path / f"{name}.jsonl"), **options) for name in "ab"}
    assert count_right_places(Mixture(parts), places, tokenizer, 100, None) == 30
    samples = [replace(sample, place=f"mine {sample.index}") for sample in parts["a"].samples]
    made = Dataset.from_samples(samples, max_seq_len=64, packed=True)
    assert {place for row in range(len(made)) for place in collate([made.row(row)]).places} == {
        f"mine {index}" for index in range(15)
    }
    assert collate([Sample(np.arange(3), np.arange(3))], pad_to=4).places == ("", "")
    assert Batch.of([[1, 2, 3]], documents=[[0, 0, 1]]).places == ("", "")
