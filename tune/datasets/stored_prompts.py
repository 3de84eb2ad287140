"""Keep the rows and tokens of prompts in the cache, in flat arrays that all processes map.

A row is stored as JSON. Rows with values that JSON lacks, such as dates from Parquet, are not stored: a reward must get
the same objects in each run, and a cache with pickled objects would be code.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO, overload

import numpy as np

from tune.datasets.parse.content import Row
from tune.datasets.rows import exact_text

SCALARS = (str, int, float, bool, type(None))
TYPES = {"tokens": "<i4", "token_ends": "<i8", "rows": "|u1", "row_ends": "<i8"}  # of the arrays


class NotJson(Exception):
    """A row has a value that JSON does not give back as it was."""


@dataclass(frozen=True, slots=True)
class PromptRow:
    """A row of the data and its tokens. `exact` is the text of the row that rewards get, for the fingerprint."""

    row: Row
    tokens: list[int]
    exact: str
    is_chat: bool


@dataclass(frozen=True)
class Summary:
    """Figures of all prompts.

    `extremes` are the indices of the shortest prompt, the longest, the one with the largest token, and the first that
    is no conversation, if there is one. A model that can answer these can answer all.
    """

    fingerprint: str
    tokens: int
    shortest: int
    longest: int
    extremes: list[int]


class Summing:
    """Compute the summary of prompts, one after the other."""

    def __init__(self) -> None:
        self.count = self.tokens = 0
        self.first_text: int | None = None
        self.shortest: tuple[int, int] | None = None  # length and index
        self.longest: tuple[int, int] | None = None  # negative length and index, so that the first one counts
        self.largest: tuple[int, int] | None = None  # negative token and index
        self.digest = hashlib.blake2b(b"[[", digest_size=16)

    def add(self, prompt: PromptRow) -> None:
        length, index = len(prompt.tokens), self.count
        shortest, longest = (length, index), (-length, index)
        largest = (-max(prompt.tokens, default=0), index)
        self.shortest = min(self.shortest or shortest, shortest)
        self.longest = min(self.longest or longest, longest)
        self.largest = min(self.largest or largest, largest)
        if self.first_text is None and not prompt.is_chat:
            self.first_text = index

        # The digest is of one JSON list, which is never in memory as a whole. Checkpoints hold it.
        if index:
            self.digest.update(b", ")
        self.digest.update(json.dumps([prompt.tokens, prompt.exact]).encode())
        self.count += 1
        self.tokens += length

    def summary(self) -> Summary:
        """The summary. At least one prompt must have been added."""
        assert self.shortest and self.longest and self.largest
        whole = self.digest.copy()
        whole.update(b"]]")
        extremes = [self.shortest[1], self.longest[1], self.largest[1]]
        if self.first_text is not None:
            extremes.append(self.first_text)
        return Summary(whole.hexdigest(), self.tokens, self.shortest[0], -self.longest[0], extremes)


class StoredRows(Sequence[tuple[Row, list[int]]]):
    """Rows and their tokens in mapped `arrays`. They are made when they are asked for."""

    def __init__(self, arrays: Mapping[str, np.ndarray]) -> None:
        self._tokens, self._token_ends = arrays["tokens"], arrays["token_ends"]
        self._rows, self._row_ends = arrays["rows"], arrays["row_ends"]

    def __len__(self) -> int:
        return len(self._row_ends)

    @overload
    def __getitem__(self, index: int) -> tuple[Row, list[int]]: ...
    @overload
    def __getitem__(self, index: slice) -> list[tuple[Row, list[int]]]: ...
    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return [self[each] for each in range(*index.indices(len(self)))]
        text = _between(self._rows, self._row_ends, index)
        tokens = _between(self._tokens, self._token_ends, index)
        return json.loads(text.tobytes()), tokens.tolist()


def _between(values: np.ndarray, ends: np.ndarray, index: int) -> np.ndarray:
    start = ends[index - 1] if index else 0
    return values[start : ends[index]]


def write(prompts: Iterable[PromptRow], files: Mapping[str, BinaryIO]) -> Summary:
    """Write the arrays of `StoredRows` to files. Raises NotJson for a row that JSON does not give back as it was."""
    summing = Summing()
    token_end = row_end = 0
    for prompt in prompts:
        require_json(prompt.row)
        summing.add(prompt)
        text = exact_text(prompt.row).encode()
        token_end += len(prompt.tokens)
        row_end += len(text)
        files["tokens"].write(np.array(prompt.tokens, TYPES["tokens"]).tobytes())
        files["token_ends"].write(np.array(token_end, TYPES["token_ends"]).tobytes())
        files["rows"].write(text)
        files["row_ends"].write(np.array(row_end, TYPES["row_ends"]).tobytes())
    return summing.summary()


def require_json(row: Row) -> None:
    """Raise NotJson if the row read from its JSON would differ: JSON has no tuples, and its keys are texts."""
    waiting: list[Any] = [row]  # without recursion, since rows are nested as deep as the file has them
    while waiting:
        value = waiting.pop()
        if type(value) is dict:
            waiting += value.values()
            if any(type(key) is not str for key in value):
                raise NotJson("keys that are no texts")
        elif type(value) is list:
            waiting += value
        elif type(value) not in SCALARS:
            raise NotJson(f"values of the type {type(value).__name__}")
