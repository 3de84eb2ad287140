import pytest

from tune.datasets import Dataset
from tune.errors import TuneError


def test_counts_what_it_holds(make):
    accounting = Dataset.from_samples([make.sample(10, 4), make.sample(2, 1)], max_seq_len=10).accounting
    assert accounting.as_dict() == {
        "source": "the dataset",
        "format": None,
        "ignored_files": [],
        "ignored_columns": [],
        "rows": 2,
        "dropped": {},
        "fully_masked": 0,
        "kept": 2,
        "truncated": 0,
        "cut_tokens": 0,
        "split": 0,
        "without_end": 0,
        "samples": 2,
        "tokens": 12,
        "supervised_tokens": 5,
        "supervised_share": 5 / 12,
        "lengths": {"p50": 10, "p90": 10, "p99": 10, "max": 10},
        "training_rows": 2,
        "row_capacity": None,
        "packing_efficiency": None,
    }
    assert accounting.steps_per_epoch(global_batch_size=4) == 1


def test_packed_rows_hold_whole_samples(make):
    data = make.dataset([30, 40, 20, 64, 10], capacity=64, packed=True)
    rows = [[(document.tokens[0], len(document.tokens)) for document in data.row(index)] for index in range(len(data))]
    assert rows == [[(0, 30), (4, 10)], [(1, 40), (2, 20)], [(3, 64)]]
    assert data.row_tokens.tolist() == [40, 60, 64]
    assert data.row_supervised.tolist() == [38, 58, 63]
    assert data.accounting.packing_efficiency == pytest.approx(164 / 192)
    assert [len(each.tokens) for each in data.samples] == [30, 40, 20, 64, 10]


def test_fingerprint_tells_data_apart(make):
    lengths = [3, 4, 5]
    same = make.dataset(lengths).fingerprint
    assert make.dataset(lengths).fingerprint == same
    others = [make.dataset([4, 3, 5]), make.dataset(lengths, packed=True), make.dataset([3, 4])]
    relabelled = Dataset.from_samples([make.sample(3, 2, 0), make.sample(4, 3, 1), make.sample(5, 3, 2)], 64)
    assert len({same, relabelled.fingerprint, *(other.fingerprint for other in others)}) == 5


def test_table_is_aligned(make):
    accounting = make.dataset([30, 40, 20], capacity=64, packed=True).accounting
    assert accounting.table() == (
        "the dataset\n"
        "  rows               3\n"
        "    kept             3\n"
        "    truncated        0\n"
        "  tokens             90\n"
        "    supervised       87 (96.7%)\n"
        "  tokens per sample  p50 30, p90 40, p99 40, max 40\n"
        "  packed rows        2 of 64 tokens, 70.3% filled"
    )


def test_no_samples_at_all():
    with pytest.raises(TuneError, match="the dataset has no rows"):
        Dataset.from_samples([], max_seq_len=16)
