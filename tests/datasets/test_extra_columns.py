"""Extra columns and groups on their way from a file or from samples to the batches."""

import itertools
import json
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tune import distributed
from tune.collators import Sample, collate
from tune.datasets import DataLoader, Dataset, Mixture, add_scores, load
from tune.distributed import World
from tune.errors import TuneError
from tune.tokenizers import Tokenizer


@pytest.fixture
def tokenizer(folder):
    return Tokenizer(str(folder))


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def pairs(count, seed=0, longest=9):
    """Samples in groups of one to three, each with its group, a weight and a value per token."""
    random = np.random.default_rng(seed)
    samples = []
    for group in range(count):
        for _ in range(random.integers(1, 4)):
            tokens = random.integers(1, 90, random.integers(2, longest)).astype(np.int32)
            labels = np.append(tokens[1:], np.int32(-100))
            columns = {"group": group % 2, "weight": float(tokens.sum()), "score": (tokens / 7).astype(np.float32)}
            samples.append(Sample(tokens, labels, len(samples), columns))
    return samples


def ranks(size):
    return [SimpleNamespace(data_rank=rank, data_size=size, device=torch.device("cpu")) for rank in range(size)]


def documents_of(batch):
    """Yield (tokens, weight, scores, group) of each document of a batch, without padding."""
    bounds = batch.documents.boundaries.tolist()
    for index, (start, end) in enumerate(itertools.pairwise(bounds)):
        columns = {name: values[index].item() for name, values in batch.columns.items() if values.ndim == 1}
        if columns["group"]:
            tokens, scores = (values.flatten()[start:end].tolist() for values in (batch.tokens, batch.columns["score"]))
            yield tuple(tokens), columns["weight"], tuple(scores), columns["group"]


@pytest.mark.slow
@given(st.integers(1, 4), st.booleans(), st.sampled_from([None, 40]), st.integers(0, 5))
@settings(deadline=None, max_examples=30)
def test_groups_stay_together_and_columns_follow_their_documents(size, packed, pad_to, seed):
    samples = pairs(30, seed)
    data = Dataset.from_samples(samples, 40, packed=packed)
    seen = []
    for world in ranks(size):
        loader = DataLoader(data, world, 2 * size, 2, seed=seed)
        loader.pad_to = pad_to
        for _, step in loader:
            for batch in step.micro_batches:
                seen += [(batch, document) for document in documents_of(batch)]
    by_tokens = {tuple(sample.tokens.tolist()): sample for sample in samples}
    assert sorted(tokens for _, (tokens, *_) in seen) == sorted(tuple(sample.tokens.tolist()) for sample in samples)
    for _, (tokens, weight, scores, _) in seen:
        assert weight == by_tokens[tokens].columns["weight"]
        assert scores == tuple(by_tokens[tokens].columns["score"].tolist())
    where = {}
    for batch, (*_, group) in seen:
        where.setdefault(group, set()).add(id(batch))
    assert len(where) == 30 and all(len(batches) == 1 for batches in where.values())


def test_packed_rows_keep_groups_whole_and_in_order():
    samples = pairs(20)
    data = Dataset.from_samples(samples, 64, packed=True)
    indices = [[sample.index for sample in data.row(row)] for row in range(len(data))]
    assert all(row == sorted(row) for row in indices)
    assert sum(map(len, indices)) == len(samples)


def test_groups_of_two_sources_stay_distinct():
    parts = {name: Dataset.from_samples(pairs(4, seed), 40) for name, seed in (("a", 0), ("b", 1))}
    mixture = Mixture(parts)
    groups = [{sample.columns["group"] for sample in mixture.row(row)} for row in range(8)]
    assert all(len(group) == 1 for group in groups) and len(set().union(*groups)) == 8
    without = Dataset.from_samples([Sample(sample.tokens, sample.labels) for sample in pairs(3)], 40)
    with pytest.raises(TuneError, match="all must have the same extra_columns"):
        Mixture({"a": parts["a"], "b": without})


def test_dropping_a_sample_drops_its_group():
    samples = pairs(6)
    spoilt = len(samples) // 2
    samples[spoilt].labels[:] = -100
    gone = [samples[spoilt].columns["group"]]
    start = end = spoilt
    while start and samples[start - 1].columns["group"] == gone[0]:
        start -= 1
    while end + 1 < len(samples) and samples[end + 1].columns["group"] == gone[0]:
        end += 1
    data = Dataset.from_samples(samples, 40)
    kept = [tuple(sample.tokens.tolist()) for sample in data]
    assert kept == [tuple(sample.tokens.tolist()) for sample in [*samples[:start], *samples[end + 1 :]]]
    assert sum(data.accounting.dropped.values()) == end + 1 - start


def test_group_longer_than_a_packed_row_is_refused():
    samples = [Sample(sample.tokens, sample.labels, 0, {"group": 0}) for sample in pairs(9)]
    with pytest.raises(TuneError, match=r"a group of samples has \d+ tokens, more than .* packed=false"):
        Dataset.from_samples(samples, 16, packed=True)
    assert len(Dataset.from_samples(samples, 16)) == 1


def test_extra_columns_from_a_file_through_the_cache(tokenizer, tmp_path):
    path = write(tmp_path / "rows.jsonl", [{"text": f"cat {i}", "weight": i / 4, "kind": i % 3} for i in range(9)])
    options = {"max_seq_len": 32, "extra_columns": ["weight", "kind"], "cache_dir": str(tmp_path / "cache")}
    first, again = (load(tokenizer, path, **options) for _ in range(2))
    for data in (first, again):
        assert [(sample.columns["weight"], sample.columns["kind"]) for sample in data] == [
            (i / 4, i % 3) for i in range(9)
        ]
    assert first.fingerprint == again.fingerprint
    assert first.fingerprint != load(tokenizer, path, **{**options, "extra_columns": ["weight"]}).fingerprint
    assert "weight" not in first.accounting.ignored_columns


@pytest.mark.parametrize(
    "change", [{"score": [1, 2, 4]}, {"kind": 5}, {"weights": [1, 0.5, 1]}, {"input_ids": [7, 8, 8]}]
)
def test_a_changed_column_is_other_data(change, tokenizer, tmp_path):
    """A resume compares the fingerprints."""
    row = {"input_ids": [7, 8, 9], "score": [1, 2, 3], "kind": 4}
    options = {"max_seq_len": 32, "extra_columns": ["score", "kind"], "cache_dir": str(tmp_path / "cache")}
    paths = [write(tmp_path / f"{name}.jsonl", [row, last]) for name, last in (("a", row), ("b", row | change))]
    same, other = (load(tokenizer, path, **options).fingerprint for path in paths)
    assert same == load(tokenizer, write(tmp_path / "c.jsonl", [row, row]), **options).fingerprint != other


@pytest.mark.parametrize("streaming", [False, True])
def test_integers_beyond_fp32_stay_exact(tokenizer, tmp_path, streaming):
    ids = [1_700_000_000 + i for i in range(8)]
    rows = [{"text": f"cat {i}", "id": i, "fraction": float(i)} for i in ids]
    options = {"extra_columns": ["id", "fraction"], "cache_dir": str(tmp_path / "cache"), "streaming": streaming}
    data = load(tokenizer, write(tmp_path / "rows.jsonl", rows), max_seq_len=32, **options)
    if streaming:
        data = next(data.windows()).data
    assert [(int(sample.columns["id"]), float(sample.columns["fraction"])) for sample in data] == [(i, i) for i in ids]
    ((_, step),) = list(DataLoader(data, ranks(1)[0], 8, 8))
    assert step.micro_batches[0].columns["id"].dtype == torch.int64
    assert sorted(step.micro_batches[0].columns["id"].tolist())[-8:] == ids


@pytest.mark.parametrize("number", [int, float])
def test_large_group_ids_stay_distinct(tokenizer, tmp_path, number):
    rows = [{"text": f"cat {i}", "group": number(1_700_000_000 + i)} for i in range(48)]
    options = {"extra_columns": ["group"], "cache_dir": str(tmp_path / "cache")}
    data = load(tokenizer, write(tmp_path / "rows.jsonl", rows), max_seq_len=32, **options)
    assert (len(data), data.row_pairs.sum()) == (48, 0)


@pytest.mark.parametrize("values", [[1, 0.5], [0.5, 1]])
def test_fractions_of_one_document_or_part_are_not_cut_to_integers(values):
    samples = [Sample([5, 6], [6, -100], 0, {"weight": value}) for value in values]
    assert collate(samples).columns["weight"].tolist() == values
    parts = {str(value): Dataset.from_samples([sample], 8) for value, sample in zip(values, samples, strict=True)}
    ((_, step),) = list(DataLoader(Mixture(parts), ranks(1)[0], 2, 2))
    assert sorted(step.micro_batches[0].columns["weight"].tolist()) == [0.5, 1]


def test_integers_that_no_tensor_holds_are_refused(tokenizer, tmp_path):
    path = write(tmp_path / "rows.jsonl", [{"text": "a", "w": 2**63}])
    with pytest.raises(TuneError, match=r"rows.jsonl:1: w is 9223372036854775808"):
        load(tokenizer, path, max_seq_len=8, extra_columns=["w"], cache_dir=str(tmp_path))


def test_per_token_columns_are_truncated_with_their_tokens(tokenizer, tmp_path):
    rows = [{"input_ids": [*range(5, 5 + length)], "score": [i / 2 for i in range(length)]} for length in (4, 12)]
    path = write(tmp_path / "rows.jsonl", rows)
    data = load(tokenizer, path, max_seq_len=8, extra_columns=["score"], cache_dir=str(tmp_path))
    assert [sample.columns["score"].tolist() for sample in data] == [row["score"][:8] for row in rows]


@pytest.mark.parametrize(
    ("rows", "options", "message"),
    [
        ([{"text": "a", "w": 1}, {"text": "b"}], {}, r"rows.jsonl:2: w is missing; extra_columns must be numbers"),
        ([{"text": "a", "w": "1"}], {}, r"rows.jsonl:1: w is .*; extra_columns must be numbers"),
        ([{"text": "a", "w": [[1]]}], {}, r"extra_columns must be numbers, or lists of numbers"),
        ([{"input_ids": [5, 6], "w": [1]}], {}, r"w has 1 numbers for a row of 2 tokens"),
        ([{"input_ids": [5, 6, 7, 8], "w": [1, 2, 3, 4]}], {"too_long": "split"}, r"too_long=split"),
    ],
)
def test_invalid_columns_are_reported_with_their_row(tokenizer, tmp_path, rows, options, message):
    path = write(tmp_path / "rows.jsonl", rows)
    with pytest.raises(TuneError, match=message):
        load(tokenizer, path, max_seq_len=3, extra_columns=["w"], cache_dir=str(tmp_path), **options)


def test_extra_columns_move_with_the_batch():
    data = Dataset.from_samples(pairs(3), 40)
    ((_, step),) = list(DataLoader(data, ranks(1)[0], 3, 3))
    moved = step.micro_batches[0].to("meta")
    assert all(values.is_meta for values in moved.columns.values())
    assert step.micro_batches[0].columns["weight"].dtype == torch.float32


@pytest.mark.parametrize("options", [{"streaming": True}, {"validation_fraction": 0.5}])
def test_options_that_could_split_a_group_are_refused(tokenizer, tmp_path, options):
    path = write(tmp_path / "rows.jsonl", [{"text": f"cat {i}", "group": i // 2} for i in range(8)])
    with pytest.raises(TuneError, match="could separate the rows of a group"):
        load(tokenizer, path, max_seq_len=32, extra_columns=["group"], cache_dir=str(tmp_path / "cache"), **options)


def test_token_scores_are_summed_in_chunks(tmp_path, monkeypatch, capsys):
    """The device never holds all scores at once; progress counts rows."""
    monkeypatch.setattr("tune.datasets.scores.TELL", -1)
    sizes, add_up = [], World.sum
    monkeypatch.setattr("tune.datasets.scores.SUMMED", 16)
    monkeypatch.setattr(World, "sum", lambda self, value: sizes.append(len(value)) or add_up(self, value))
    samples = pairs(10)
    file = twice(samples, tmp_path)
    expected = np.concatenate([2 * np.where(sample.labels < 0, 0, sample.tokens) for sample in samples])
    assert np.load(file).flatten().tolist() == expected.tolist()
    assert max(sizes) == 16 and sum(sizes) == len(expected) > 64
    assert re.findall(r"([\d,]+) of ([\d,]+) rows", capsys.readouterr().err) == [
        (str(done), "10") for done in (2, 4, 6, 8, 10)
    ]


def twice(samples, folder):
    """Score each token with twice its id and return the file that stores the scores."""
    add_scores(
        Dataset.from_samples(samples, 40), "twice", lambda batch: 2 * batch.tokens.flatten()[batch.supervised][:, None],
        distributed.init("cpu"), micro_batch_size=2, pad_to=None, folder=folder, made_of=[],
    )  # fmt: skip
    (file,) = folder.glob("twice-*.npy")
    return file


DAMAGE = {
    "cut short": lambda whole: whole[:-9],
    "cut in the header": lambda whole: whole[:20],
    "empty": lambda whole: b"",
    "text": lambda whole: b"not an array\n" * 9,
    "start of a zip file": lambda whole: b"PK\x03\x04" + whole[4:],
    "a bit of a value": lambda whole: changed(whole, -50, 64),
    "a bit of the shape": lambda whole: changed(whole, whole.index(b"'shape': (") + 10, 1),
    "a bit of the type": lambda whole: changed(whole, whole.index(b"<f4"), 2),
    "a bit of the header's length": lambda whole: changed(whole, 8, 64),
}


def changed(whole, place, bits):
    place %= len(whole)
    return whole[:place] + bytes([whole[place] ^ bits]) + whole[place + 1 :]


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_scores_are_computed_again(damage, tmp_path):
    """Damage causes neither a traceback nor wrong scores."""
    samples = pairs(10)
    file = twice(samples, tmp_path)
    whole = file.read_bytes()
    file.write_bytes(DAMAGE[damage](whole))
    assert twice(samples, tmp_path).read_bytes() == whole


def test_intact_scores_are_reused(tmp_path, monkeypatch, capsys):
    samples = pairs(10)
    file = twice(samples, tmp_path)
    monkeypatch.setattr("tune.datasets.scores.validation_batches", lambda *_: pytest.fail("they are computed again"))
    assert twice(samples, tmp_path) == file and capsys.readouterr().err == ""
