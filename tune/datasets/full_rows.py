"""Rows of the maximum length, from which `tune plan` measures a step without the data."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from tune.collators import Sample
from tune.datasets.block import Example, RowBlock, TokenizedRow
from tune.datasets.dataset import Dataset
from tune.datasets.fit import Fit
from tune.datasets.parse.formats import Kind
from tune.datasets.read.pieces import RowPlaces
from tune.datasets.samples import Samples


def full_rows(kind: Kind, max_seq_len: int, packed: bool, extra_columns: Sequence[str] = ()) -> Dataset:
    """One row of `max_seq_len` tokens, all supervised.

    Kinds that compare answers get two answers of equal length without a shared token. A labeled answer and its
    mismatched answer have `max_seq_len` tokens each, unless they are packed.
    """
    answers = 1 if kind == "supervised" else 2
    length = max_seq_len if kind == "labelled" and not packed else max(1, max_seq_len // answers)
    samples = []
    for answer in range(answers):
        columns: dict[str, Any] = dict.fromkeys(extra_columns, np.float32(0))
        if answers > 1:
            columns |= {"answer": answer, "group": 0}
        if kind == "graded":
            columns |= {"margin": 0.0}
        if kind == "labelled":
            columns |= {"label": 1 - answer}
        tokens = np.full(length, answer, dtype=np.int32)
        samples.append(Sample(tokens, np.zeros(length, dtype=np.int32), answer, columns))
    block, places = RowBlock.of([(1, TokenizedRow([Example(sample) for sample in samples]))]), RowPlaces("full rows")
    return Dataset(Samples.joined([Fit(max_seq_len * answers)(block, None, places)], "full rows"))
