from bisect import bisect_left, insort
from collections.abc import Iterable


def pack(lengths: Iterable[int], capacity: int) -> list[list[int]]:
    """Distribute documents over rows of `capacity` tokens: best-fit decreasing over the whole set, deterministic.

    Returns the indices of each row's documents in ascending order, rows ordered by their first index. No length may
    exceed `capacity`.
    """
    lengths = list(lengths)
    rows: list[list[int]] = []
    open_rows: dict[int, list[list[int]]] = {}  # by the space that is left in them
    spaces: list[int] = []  # the keys of open_rows, sorted
    for index in sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True):
        length = lengths[index]
        at = bisect_left(spaces, length)
        if at == len(spaces):
            rows.append([])
            space, row = capacity, rows[-1]
        else:
            space = spaces[at]
            row = open_rows[space].pop()
            if not open_rows[space]:
                del open_rows[space], spaces[at]
        row.append(index)
        left = space - length
        if left not in open_rows:
            open_rows[left] = []
            insort(spaces, left)
        open_rows[left].append(row)
    return sorted(sorted(row) for row in rows)
