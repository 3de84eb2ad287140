"""Mix several sources into one dataset, by weight."""

import hashlib
from collections.abc import Mapping
from functools import cached_property
from typing import Any, Literal, get_type_hints

import numpy as np

from tune.collators import Sample
from tune.datasets.accounting import Accounting
from tune.datasets.dataset import Dataset, drawn_places, permuted, renumbered
from tune.datasets.from_path import load
from tune.datasets.parse.formats import Kind
from tune.errors import TuneError
from tune.lookup import did_you_mean
from tune.tokenizers import Tokenizer, require_ours
from tune.types import PositiveFloat, PositiveInt, checked, mismatch

# Settings of the whole mixture, and of streams, which cannot be mixed.
NOT_OF_A_SOURCE = ("tokenizer", "max_seq_len", "packed", "kind", "streaming", "shuffle_buffer", "return")

EpochEnds = PositiveInt | Literal["all_exhausted", "first_exhausted"]


@checked
def mix(
    tokenizer: Tokenizer,
    sources: Mapping[str, Mapping[str, Any]],
    *,
    max_seq_len: int,
    packed: bool = False,
    kind: Kind = "supervised",
    weigh_by: Literal["rows", "tokens"] = "rows",
    epoch_ends: EpochEnds = "all_exhausted",
) -> "Mixture":
    """Mix sources. Each takes the arguments of `tune.datasets.load` and a `weight`: its share of the rows or tokens.

    An epoch ends when every source has been read at least once, when the first source has been read, or after a given
    number of training rows. Without weights, shares follow the sizes. Raises TuneError for invalid sources or weights.
    """
    require_ours(tokenizer)
    _check(sources)
    datasets = {}
    for name, source in sources.items():
        arguments = {key: value for key, value in source.items() if key != "weight"}
        try:
            part = load(tokenizer, max_seq_len=max_seq_len, packed=packed, kind=kind, **arguments)
        except TuneError as error:
            is_of_argument = str(error).partition(":")[0].partition(".")[0] in arguments
            raise TuneError(f"sources.{name}{'.' if is_of_argument else ': '}{error}") from error
        assert isinstance(part, Dataset)
        datasets[name] = part
    weights = {name: source["weight"] for name, source in sources.items() if "weight" in source}
    return Mixture(datasets, weights, weigh_by, epoch_ends)


class Mixture:
    """Several datasets as one. Its rows are the rows of all parts in order; an epoch draws from each part by weight.

    If an epoch reads only a part of a dataset, the next epoch continues there. Each pass has another order. After any
    number of epochs, the read counts of a dataset's rows differ by at most one. `len` counts the rows of an epoch.
    """

    def __init__(
        self,
        parts: Mapping[str, Dataset],
        weights: Mapping[str, float] | None = None,
        weigh_by: Literal["rows", "tokens"] = "rows",
        epoch_ends: EpochEnds = "all_exhausted",
    ) -> None:
        self.parts = dict(parts)
        datasets = list(self.parts.values())
        names = {name: sorted(part.columns) for name, part in self.parts.items()}
        if any(each != sorted(self.columns) for each in names.values()):
            raise TuneError(f"sources: all must have the same extra_columns and the same turns; found columns {names}")
        sizes = np.array([len(part) for part in datasets])
        if weights:
            units = [part.accounting.kept if weigh_by == "rows" else part.accounting.tokens for part in datasets]
            shares = np.array([weights[name] for name in self.parts]) * sizes / np.array(units)
        else:
            shares = sizes.astype(float)
        self.drawn = _rows_of_an_epoch(shares / shares.sum(), sizes, epoch_ends)
        if len(unread := [name for name, rows in zip(self.parts, self.drawn, strict=True) if not rows]):
            raise TuneError(
                f"sources.{unread[0]}.weight is too low: an epoch of {self.drawn.sum():,} rows reads no row of this "
                "source. Raise the weight, or remove the source"
            )
        self.row_tokens = np.concatenate([part.row_tokens for part in datasets])
        self.row_supervised = np.concatenate([part.row_supervised for part in datasets])
        self.row_weights = np.concatenate([part.row_weights for part in datasets])
        self.row_pairs = np.concatenate([part.row_pairs for part in datasets])
        self._row_starts = np.concatenate([[0], np.cumsum(sizes)])
        self._sample_starts = np.concatenate([[0], np.cumsum([part.accounting.samples for part in datasets])])
        self.accounting = MixtureAccounting(
            {name: part.accounting for name, part in self.parts.items()},
            dict(zip(self.parts, self.drawn.tolist(), strict=True)),
        )

    @property
    def name(self) -> str:
        """The names of the sources."""
        return self.accounting.source

    @property
    def columns(self) -> dict[str, np.ndarray]:
        """Column names of all parts with an example value each; of a fraction, if it is one in any part."""
        first, *others = [part.columns for part in self.parts.values()]
        columns = {}
        for name, value in first.items():
            alike = [part[name] for part in others if name in part]
            columns[name] = value.astype(np.result_type(value, *alike))
        return columns

    @cached_property
    def validation(self) -> "Mixture | None":
        """The validation data of the sources."""
        held_out = {name: part.validation for name, part in self.parts.items() if part.validation}
        return Mixture(held_out) if held_out else None

    def __len__(self) -> int:
        return int(self.drawn.sum())

    def order(self, seed: int, epoch: int) -> np.ndarray:
        """The row numbers of an epoch in training order."""
        sources = enumerate(zip(self._row_starts, self.parts.values(), self.drawn.tolist(), strict=False))
        rows = [
            start + drawn_places(len(part), epoch * number, (epoch + 1) * number, seed, index)
            for index, (start, part, number) in sources
        ]
        return permuted(np.concatenate(rows), seed, epoch)

    def row(self, index: int) -> list[Sample]:
        """The documents of one row."""
        part = int(np.searchsorted(self._row_starts, index, side="right")) - 1
        documents = list(self.parts.values())[part].row(index - self._row_starts[part])
        first = int(self._sample_starts[part])
        return [renumbered(each, first) for each in documents]

    def require_vocabulary(self, size: int) -> None:
        """Raise TuneError if a token id is not below a model's vocabulary `size`."""
        for part in self.parts.values():
            part.require_vocabulary(size)

    @cached_property
    def fingerprint(self) -> str:
        """A hash that is equal for equal training data in equal shares."""
        contents = [(part.fingerprint, int(drawn)) for part, drawn in zip(self.parts.values(), self.drawn, strict=True)]
        return hashlib.blake2b(repr(contents).encode(), digest_size=16).hexdigest()


class MixtureAccounting(Accounting):
    """The statistics of all sources together, and the number of training rows an epoch draws from each."""

    def __init__(self, parts: dict[str, Accounting], drawn: dict[str, int]) -> None:
        first, *others = parts.values()
        whole = (
            sum(others, first).with_source(", ".join(parts)).with_training_rows(sum(drawn.values()), first.row_capacity)
        )
        super().__init__(**vars(whole) | {"lengths": {"max": max(part.longest for part in parts.values())}})
        self.parts, self.drawn = parts, drawn

    def epoch(self) -> dict[str, dict[str, float]]:
        """For each source: its training rows in an epoch, passes over it, and its share of the epoch's tokens."""
        times = {name: drawn / self.parts[name].training_rows for name, drawn in self.drawn.items()}
        tokens = {name: self.parts[name].tokens * times[name] for name in times}
        return {
            name: {"rows": self.drawn[name], "times": times[name], "tokens": tokens[name] / sum(tokens.values())}
            for name in times
        }

    def as_dict(self) -> dict[str, Any]:
        return {"sources": {name: part.as_dict() for name, part in self.parts.items()}, "epoch": self.epoch()}

    def table(self) -> str:
        """Aligned lines for people to read."""
        lines = [f"{name}: {part.table()}" for name, part in self.parts.items()]
        lines.append(f"an epoch has {self.training_rows:,} rows")
        width = max(map(len, self.parts)) + 2
        for name, of in self.epoch().items():
            rows = f"{of['rows']:,.0f} rows ({of['times']:.3g}x)"
            lines.append(f"  {name:<{width}}{rows}, {of['tokens']:.1%} of the tokens")
        return "\n".join(lines)


def _rows_of_an_epoch(shares: np.ndarray, sizes: np.ndarray, ends: EpochEnds) -> np.ndarray:
    """The rows an epoch draws from each source: its share, to the nearest row."""
    if isinstance(ends, int):
        exact = shares * ends
        rows = np.floor(exact).astype(np.int64)
        rows[np.argsort(rows - exact, kind="stable")[: ends - rows.sum()]] += 1  # the largest remainders
        return rows
    often = sizes / shares
    total = often.max() if ends == "all_exhausted" else often.min()
    return np.rint(total * shares).astype(np.int64)


def _check(sources: Mapping[str, Mapping[str, Any]]) -> None:
    kinds = get_type_hints(load, include_extras=True) | {"weight": PositiveFloat}
    known = [name for name in kinds if name not in NOT_OF_A_SOURCE]
    if not sources:
        raise TuneError("sources is empty. Give each source a name and a path: {chats: {path: chats.jsonl, weight: 2}}")
    for name, source in sources.items():
        if not isinstance(source, Mapping) or "path" not in source:
            raise TuneError(f"sources.{name} has no path. Write {name}: {{path: {name}.jsonl}}")
        for key, value in source.items():
            if key not in known:
                hint = did_you_mean(str(key), known) or f" Known settings: {', '.join(known)}."
                raise TuneError(f"sources.{name}.{key} is not a setting of a source.{hint}")
            if problem := mismatch(value, kinds[key]):
                raise TuneError(f"sources.{name}.{key}: {problem}")
    without = [name for name, source in sources.items() if "weight" not in source]
    if 0 < len(without) < len(sources):
        raise TuneError(f"sources.{without[0]} has no weight, but others have. Give every source a weight, or none")
