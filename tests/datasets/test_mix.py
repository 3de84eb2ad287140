"""The rows that an epoch draws from each source, for any number of processes."""

import json
from collections import Counter
from itertools import islice

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from tune.datasets import DataLoader, Mixture, mix, validation_batches
from tune.errors import TuneError
from tune.tokenizers import Tokenizer


@pytest.fixture
def mixture(make):
    """Build a mixture from {name: (number of rows, tokens per row)}."""

    def mixture(shapes, **options):
        return Mixture({name: make.dataset([length] * rows) for name, (rows, length) in shapes.items()}, **options)

    return mixture


SHAPES = {"chats": (30, 10), "code": (10, 40)}


@pytest.mark.parametrize(
    ("options", "rows"),
    [
        ({}, [30, 10]),
        ({"epoch_ends": 8}, [6, 2]),
        ({"weights": {"chats": 1, "code": 1}}, [30, 30]),
        ({"weights": {"chats": 1, "code": 1}, "epoch_ends": "first_exhausted"}, [10, 10]),
        ({"weights": {"chats": 9, "code": 1}}, [90, 10]),
        ({"weights": {"chats": 9, "code": 1}, "epoch_ends": "first_exhausted"}, [30, 3]),
        ({"weights": {"chats": 1, "code": 1}, "weigh_by": "tokens"}, [40, 10]),
        ({"weights": {"chats": 1, "code": 2}, "weigh_by": "tokens", "epoch_ends": "first_exhausted"}, [20, 10]),
        ({"weights": {"chats": 2, "code": 1}, "epoch_ends": 100}, [67, 33]),
    ],
)
def test_rows_of_an_epoch(mixture, options, rows):
    mixed = mixture(SHAPES, **options)
    assert mixed.drawn.tolist() == rows
    assert len(mixed) == sum(rows) == len(mixed.order(0, 0))
    assert np.bincount(mixed.order(0, 0) >= 30).tolist() == rows


def test_packed_rows_are_weighted_by_their_content(make):
    short, long = (
        make.dataset([8] * 64, packed=True),
        make.dataset([32] * 64, packed=True),
    )  # 8 and 32 rows of 64 tokens
    assert Mixture({"a": short, "b": long}, {"a": 1, "b": 1}).drawn.tolist() == [8, 32]
    assert Mixture({"a": short, "b": long}, {"a": 1, "b": 1}, "tokens").drawn.tolist() == [32, 32]


mixtures = st.lists(st.tuples(st.integers(1, 20), st.integers(1, 5)), min_size=1, max_size=4)


@pytest.mark.slow
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    parts=mixtures,
    seed=st.integers(0, 5),
    epochs=st.integers(1, 5),
    epoch_ends=st.sampled_from(["all_exhausted", "first_exhausted", 20]),
    ranks=st.sampled_from([1, 2, 3, 4, 8]),
    resumed_ranks=st.sampled_from([1, 2, 3, 4, 8]),
    data=st.data(),
)
def test_every_row_is_drawn_as_often_as_promised(make, parts, seed, epochs, epoch_ends, ranks, resumed_ranks, data):
    datasets = {str(index): make.dataset([2 + index] * rows) for index, (rows, _) in enumerate(parts)}
    weights = {str(index): weight for index, (_, weight) in enumerate(parts)}
    try:
        mixed = Mixture(datasets, weights, epoch_ends=epoch_ends)
    except TuneError:
        assume(False)
    assume(sum(rows for rows, _ in parts) >= max(ranks, resumed_ranks) and len(mixed) >= max(ranks, resumed_ranks))

    def loader(ranks, rank=0):
        return DataLoader(mixed, make.world(rank, ranks), 24, 1, epochs=epochs, seed=seed)

    whole = [batch.rows for _, batch in loader(1)]
    stop = data.draw(st.integers(0, len(whole)))
    first = loader(ranks)
    seen = [batch.rows for _, batch in islice(first, stop)]
    second = loader(resumed_ranks, resumed_ranks - 1)
    second.load_state_dict(first.state_dict())
    assert seen + [batch.rows for _, batch in second] == whole

    counts = Counter(row for rows in whole for row in rows)
    start = 0
    for (size, _), drawn in zip(parts, mixed.drawn.tolist(), strict=True):
        times = [counts[row] for row in range(start, start + size)]
        assert sum(times) == epochs * drawn
        assert max(times) - min(times) <= 1
        start += size


def test_samples_of_two_sources_have_different_indices(mixture):
    mixed = mixture(SHAPES)
    numbers = [document.index for row in range(40) for document in mixed.row(row)]
    assert numbers == list(range(40))
    assert [len(mixed.row(row)[0].tokens) for row in (0, 29, 30, 39)] == [10, 10, 40, 40]
    assert mixed.row_tokens[[29, 30]].tolist() == [10, 40]


def test_each_source_is_shuffled_independently(mixture):
    """With two sources of the same size, half an epoch draws different rows from each."""
    mixed = mixture({"a": (40, 5), "b": (40, 5)}, epoch_ends=40)
    rows = mixed.order(0, 0)
    assert {row for row in rows if row < 40} != {row - 40 for row in rows if row >= 40}


def test_fingerprint_changes_with_the_mixture(mixture):
    fingerprints = [mixture(SHAPES, epoch_ends=rows).fingerprint for rows in (10, 10, 11)]
    assert fingerprints[0] == fingerprints[1] != fingerprints[2]


def test_validation_reads_each_source_once_under_its_name(mixture, make):
    batches = list(validation_batches(mixture(SHAPES, weights={"chats": 1, "code": 1}), make.world(), 4))
    tokens = Counter()
    for names, batch in batches:
        for name in names:
            tokens[name] += batch.num_tokens
    assert tokens == {"validation_loss": 700, "validation_loss/chats": 300, "validation_loss/code": 400}


def test_table(mixture):
    table = mixture({"a": (10, 10), "code": (30, 40)}, weights={"a": 1, "code": 1}).accounting.table()
    assert table.endswith(
        "an epoch has 60 rows\n  a     30 rows (3x), 20.0% of the tokens\n  code  30 rows (1x), 80.0% of the tokens"
    )


# from files


@pytest.fixture
def tokenizer(folder):
    return Tokenizer(str(folder))


@pytest.fixture
def sources(tmp_path):
    """Two sources of 4 and 2 rows."""
    sources = {}
    for name, rows in {"chats": 4, "code": 2}.items():
        file = tmp_path / f"{name}.jsonl"
        file.write_text("".join(json.dumps({"text": f"{name}{row}"}) + "\n" for row in range(rows)))
        sources[name] = {"path": str(file)}
    return sources


def test_mixed_files(tokenizer, sources):
    sources["code"]["weight"], sources["chats"]["weight"] = 3, 1
    mixed = mix(tokenizer, sources, max_seq_len=20)
    assert mixed.drawn.tolist() == [4, 12]
    texts = Counter(tokenizer.decode(mixed.row(row)[0].tokens.tolist()) for row in mixed.order(0, 0))
    assert texts == {**{f"<s>chats{row}</s>": 1 for row in range(4)}, **{f"<s>code{row}</s>": 6 for row in range(2)}}
    assert mixed.accounting.as_dict()["sources"]["chats"]["rows"] == 4


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("code", {"weight": 0}, r"sources\.code\.weight: 0 is not a positive number"),
        ("code", {"weight": "2"}, r"sources\.code\.weight: '2' is not a positive number"),
        ("code", {"weight": float("nan")}, r"sources\.code\.weight: nan is not a positive number"),
        ("code", {"weight": 2}, r"sources\.chats has no weight, but others have"),
        ("code", {"wieght": 2}, r"sources\.code\.wieght is not a setting of a source\. Did you mean 'weight'\?"),
        (
            "code",
            {"max_seq_len": 2},
            r"sources\.code\.max_seq_len is not a setting of a source\. Known settings: path, ",
        ),
        ("code", {"path": "absent.jsonl"}, r"sources\.code\.path: absent\.jsonl does not exist"),
        ("code", {"take": "few"}, r"sources\.code\.take: 'few' is not a positive integer or null"),
        ("code", {"path": 3}, r"sources\.code\.path: 3 is not a string"),
        ("more", {}, r"sources\.more has no path"),
    ],
)
def test_invalid_sources_are_refused(tokenizer, sources, name, changes, message):
    sources[name] = {**sources.get(name, {}), **changes}
    with pytest.raises(TuneError, match=message):
        mix(tokenizer, sources, max_seq_len=20)


def test_weight_too_low_for_a_single_row_is_refused(tokenizer, sources):
    sources["chats"]["weight"], sources["code"]["weight"] = 1000, 1
    with pytest.raises(TuneError, match=r"sources\.code\.weight is too low: an epoch of 4 rows"):
        mix(tokenizer, sources, max_seq_len=20, epoch_ends="first_exhausted")


def test_empty_sources_are_refused(tokenizer):
    with pytest.raises(TuneError, match="sources is empty"):
        mix(tokenizer, {}, max_seq_len=20)
