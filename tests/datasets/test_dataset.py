import pytest

from tune.datasets import Dataset
from tune.errors import TuneError


def test_accounting_counts_the_outcomes_of_samples(make):
    samples = [make.sample(10, 4), make.sample(5, 4), make.sample(9, 2), make.sample(3, 0)]
    accounting = Dataset.from_samples(samples, max_seq_len=7).accounting
    assert accounting.as_dict() == {
        "source": "the dataset",
        "format": None,
        "ignored_files": [],
        "ignored_columns": [],
        "rows": 4,
        "dropped": {"fully masked": 2},  # the third after truncation
        "first_dropped": {"fully masked": ""},
        "fully_masked": 2,
        "mistakes": [],
        "kept": 2,
        "truncated": 2,
        "cut_tokens": 5,
        "clipped": 1,  # the first
        "split": 0,
        "shortest_prompt": 8,
        "endless": 0,
        "remarks": {},
        "samples": 2,
        "tokens": 12,
        "supervised_tokens": 5,  # one of the first sample's four targets is left
        "supervised_share": 5 / 12,
        "supervised_weight": None,
        "lengths": {"p50": 7, "p90": 7, "p99": 7, "max": 7},
        "training_rows": 2,
        "row_capacity": None,
        "prepared": None,
        "prepared_in": None,
        "packing_efficiency": None,
    }


def test_truncated_sample_does_not_predict_removed_tokens(make):
    (document,) = Dataset.from_samples([make.sample(10, 9)], max_seq_len=4).row(0)
    assert document.tokens.tolist() == [1, 1, 1, 1]
    assert document.labels.tolist() == [1, 1, 1, -100]


def test_learns_any_finds_labels_at_the_end_of_a_long_sample(make):
    data = Dataset.from_samples([make.sample(2**20 + 5, supervised=2, token=7)], max_seq_len=2**21)
    assert data.learns_any([6, 7]) and not data.learns_any([6, 8])


def test_packed_rows_hold_whole_samples(make):
    data = make.dataset([30, 40, 20, 64, 10], capacity=64, packed=True)
    rows = [[(document.tokens[0], len(document.tokens)) for document in data.row(index)] for index in range(len(data))]
    assert rows == [[(0, 30), (4, 10)], [(1, 40), (2, 20)], [(3, 64)]]
    assert data.row_tokens.tolist() == [40, 60, 64]
    assert data.row_supervised.tolist() == [38, 58, 63]
    assert data.accounting.packing_efficiency == pytest.approx(164 / 192)
    assert [len(sample.tokens) for sample in data.samples] == [30, 40, 20, 64, 10]


def test_fingerprint_distinguishes_datasets(make):
    lengths = [3, 4, 5]
    same = make.dataset(lengths).fingerprint
    assert make.dataset(lengths).fingerprint == same
    others = [make.dataset([4, 3, 5]), make.dataset(lengths, packed=True), make.dataset([3, 4])]
    relabeled = Dataset.from_samples([make.sample(3, 2, 0), make.sample(4, 3, 1), make.sample(5, 3, 2)], 64)
    assert len({same, relabeled.fingerprint, *(other.fingerprint for other in others)}) == 5


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


def test_error_when_all_answers_are_cut_off(make):
    samples = [make.sample(40, 5), make.sample(30, 5)]
    with pytest.raises(
        TuneError,
        match=r"none of the 2 rows .*: fully masked \(2\)\. max_seq_len cuts .* has 26 tokens",
    ):
        Dataset.from_samples(samples, max_seq_len=16)
    assert Dataset.from_samples(samples, max_seq_len=26).accounting.supervised_tokens == 1


def test_dataset_without_samples_is_refused():
    with pytest.raises(TuneError, match="the dataset has no rows"):
        Dataset.from_samples([], max_seq_len=16)
