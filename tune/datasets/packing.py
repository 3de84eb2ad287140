"""Several documents in a row."""

from bisect import bisect_left, insort

import numpy as np


def pack(lengths: np.ndarray, capacity: int) -> tuple[np.ndarray, np.ndarray]:
    """Distribute documents over rows of `capacity` tokens: best-fit decreasing over the whole set, deterministic.

    Returns `(order, starts)`, int64: row i holds the documents `order[starts[i]:starts[i + 1]]`, in ascending order,
    and rows are ordered by their first document. No length may exceed `capacity`.

    All documents of one length are placed together: into the rows with the least space that holds it, as many into
    each as fit, which is where best fit would put them one by one.
    """
    decreasing = np.argsort(-lengths, kind="stable")
    distinct, counts = np.unique(lengths, return_counts=True)
    row_of = np.empty(len(lengths), dtype=np.int64)  # by rank in `decreasing`
    open_rows: dict[int, list[int]] = {}  # by the space that is left in them
    spaces: list[int] = []  # the keys of open_rows, sorted
    num_rows = placed = 0
    for length, count in zip(distinct[::-1].tolist(), counts[::-1].tolist(), strict=True):
        while count:
            at = bisect_left(spaces, length)
            space = spaces[at] if at < len(spaces) else capacity
            each = min(space // length, count)  # documents into every one of `rows`
            if at < len(spaces):
                rows = open_rows[space][-(count // each) :]
                del open_rows[space][-len(rows) :]
                if not open_rows[space]:
                    del open_rows[space], spaces[at]
            else:
                rows = [*range(num_rows, num_rows + count // each)]
                num_rows += len(rows)
            row_of[placed : placed + len(rows) * each] = np.repeat(rows, each)
            placed += len(rows) * each
            count -= len(rows) * each
            left = space - each * length
            if left not in open_rows:
                open_rows[left] = []
                insort(spaces, left)
            open_rows[left] += rows

    rows_in_order = np.empty_like(row_of)
    rows_in_order[decreasing] = row_of
    firsts = np.unique(rows_in_order, return_index=True)[1]
    rank = np.empty(num_rows, dtype=np.int64)
    rank[np.argsort(firsts)] = np.arange(num_rows)
    rows_in_order = rank[rows_in_order]
    starts = np.concatenate([[0], np.cumsum(np.bincount(rows_in_order, minlength=num_rows))])
    return np.argsort(rows_in_order, kind="stable"), starts
