"""Mix several sources into one dataset or stream, by weight."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from itertools import chain, count
from typing import Any, Literal, get_type_hints

import numpy as np

from tune.collators import Pixels, Sample
from tune.datasets.accounting import Accounting
from tune.datasets.dataset import Dataset, drawn_places, permuted, renumbered
from tune.datasets.from_path import load
from tune.datasets.kept_files import hash_of
from tune.datasets.parse.formats import Kind
from tune.datasets.stream import DrawnRows, Position, Stream, Window
from tune.datasets.workers import cores_of_a_process
from tune.errors import TuneError
from tune.lookup import did_you_mean
from tune.tokenizers import Tokenizer, require_ours
from tune.types import PositiveFloat, PositiveInt, checked, mismatch

NOT_OF_A_SOURCE = ("tokenizer", "max_seq_len", "packed", "kind", "return")  # but of the whole mixture
BLOCK = 1000  # rows of streams that are drawn by weight

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
) -> "Mixture | StreamMixture":
    """Mix sources. Each takes the arguments of `tune.datasets.load` and a `weight`: its share of the rows or tokens.

    An epoch ends when every source has been read at least once, when the first source has been read, or after a given
    number of training rows. Without weights, shares follow the sizes.

    If a source is streamed, the mixture is a stream: it has no epochs, and all sources need weights.

    Raises TuneError for invalid sources or weights.
    """
    require_ours(tokenizer)
    _check(sources)
    datasets: dict[str, Dataset | Stream] = {}
    streams = [name for name, source in sources.items() if source.get("streaming") is True]
    for name, source in sources.items():
        arguments = {key: value for key, value in source.items() if key != "weight"}
        if name in streams:  # their workers run side by side
            arguments.setdefault("workers", max(1, cores_of_a_process() // len(streams)))
        try:
            part = load(tokenizer, max_seq_len=max_seq_len, packed=packed, kind=kind, **arguments)
        except TuneError as error:
            is_of_argument = str(error).partition(":")[0].partition(".")[0] in arguments
            raise TuneError(f"sources.{name}{'.' if is_of_argument else ': '}{error}") from error
        datasets[name] = part
    weights = {name: source["weight"] for name, source in sources.items() if "weight" in source}
    kept = {name: part for name, part in datasets.items() if isinstance(part, Dataset)}
    if len(kept) == len(datasets):
        return Mixture(kept, weights, weigh_by, epoch_ends)
    if epoch_ends != "all_exhausted":
        raise TuneError(f"epoch_ends={epoch_ends}: a mixture with streams has no epochs. Remove epoch_ends")
    return StreamMixture(datasets, weights, weigh_by)


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
        _require_same_columns(self.parts)
        sizes = np.array([len(part) for part in datasets])
        self.drawn = _rows_of_an_epoch(_shares(self.parts, weights, weigh_by), sizes, epoch_ends)
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
        return _columns_of_all([part.columns for part in self.parts.values()])

    @property
    def pictures(self) -> Pixels | None:
        """Makes pixels of the pictures of all parts; None if none has pictures."""
        return next((part.pictures for part in self.parts.values() if part.pictures), None)

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


class StreamMixture(Stream):
    """Streams, and datasets in memory, as one stream. Training rows are drawn from each part by weight, without end.

    A part that ends is read again, in another order. Each `BLOCK` rows have the share of each part, to within one row,
    in an order that is a function of (seed, number of the block) alone. If rows are packed or weighed by tokens, the
    shares follow the first window of each stream.
    """

    def __init__(
        self,
        parts: Mapping[str, Dataset | Stream],
        weights: Mapping[str, float],
        weigh_by: Literal["rows", "tokens"] = "rows",
    ) -> None:
        self.mixed = dict(parts)
        if without := [name for name in parts if name not in weights]:
            raise TuneError(
                f"sources.{without[0]} has no weight: the size of a stream is not known, so a mixture with streams "
                "needs a weight for every source"
            )
        _require_same_columns(self.parts)
        self.columns = _columns_of_all([part.columns for part in self.parts.values()])
        self.shares = _shares(self.parts, weights, weigh_by)
        self.name = ", ".join(parts)
        self.max_seq_len = max(part.max_seq_len for part in parts.values() if isinstance(part, Stream))
        self.fingerprint = hash_of([[name, part.fingerprint] for name, part in parts.items()], self.shares.tolist())
        of_block = _rows_of_an_epoch(self.shares, np.ones(len(parts)), BLOCK).tolist()
        of_parts = {name: part.accounting for name, part in self.mixed.items()}
        self.accounting = MixtureAccounting(of_parts, dict(zip(parts, of_block, strict=True)), "block")
        self._rows_drawn = dict.fromkeys(parts, 0)
        held_out: dict[str, Dataset] = {}
        for name, part in parts.items():
            if isinstance(part.validation, Dataset):
                held_out[name] = part.validation
            elif part.validation:
                raise TuneError(f"sources.{name}.validation: cannot be streamed in a mixture. Remove its streaming")
        self.validation = Mixture(held_out) if held_out else None

    @property
    def parts(self) -> dict[str, Dataset]:
        """The first window of each stream, as long as nothing has been drawn, and the datasets in memory."""
        return {name: dataset for name, part in self.mixed.items() for dataset in part.parts.values()}

    @property
    def seen(self) -> Accounting:
        """The rows that were read so far, and the training rows drawn of each part."""
        read = {name: part.seen if isinstance(part, Stream) else part.accounting for name, part in self.mixed.items()}
        return MixtureAccounting(read, self._rows_drawn, "run")

    def require_vocabulary(self, size: int) -> None:
        for part in self.mixed.values():
            part.require_vocabulary(size)

    def keep(self, position: Position) -> None:
        for name, of_part in position.parts.items():
            part = self.mixed[name]
            if isinstance(part, Stream):
                part.keep(of_part)

    def draw(self, seed: int, number: int, start: Position) -> Iterator[tuple[DrawnRows, Position]]:
        positions = {name: start.parts.get(name, Position()) for name in self.mixed}
        draws = []
        for index, (name, part) in enumerate(self.mixed.items()):
            seed_of_part = seed << 32 | index  # equal sources are drawn in different orders
            draw = part.draw if isinstance(part, Stream) else partial(_drawn_in_memory, part)
            draws.append(draw(seed_of_part, 1, positions[name]))
        names = [*self.mixed]
        for first in count(start.drawn, number):
            rows = []
            for index in self.sources_of_rows(seed, first, first + number).tolist():
                row, positions[names[index]] = next(draws[index])
                rows.append(replace(row, documents=[self._numbered(row.documents[0], index)]))
                self._rows_drawn[names[index]] += 1
            yield self._joined(rows), Position(drawn=first + number, parts=dict(positions))

    def sources_of_rows(self, seed: int, start: int, stop: int) -> np.ndarray:
        """The numbers of the parts from which the rows [start, stop) are drawn."""
        ends = np.cumsum(self.shares)
        blocks = range(start // BLOCK, -(-stop // BLOCK))
        sources = []
        for block in blocks:
            # Points at equal distances: each share of the line has as many of them as it is long, to within one.
            shift = np.random.Generator(np.random.PCG64([seed, block])).random()
            points = (permuted(BLOCK, seed, block) + shift) / BLOCK
            sources.append(np.minimum(np.searchsorted(ends, points, side="right"), len(ends) - 1))
        return np.concatenate(sources)[start - blocks[0] * BLOCK : stop - blocks[0] * BLOCK]

    def windows(self, start: Position | None = None) -> Iterator[Window]:
        """Yield the windows of all streams, one stream after the other, and then the datasets in memory."""
        streams = [part for part in self.mixed.values() if isinstance(part, Stream)]
        yield from chain.from_iterable(part.windows() for part in streams)
        for part in self.mixed.values():
            if isinstance(part, Dataset):
                yield Window(Position(), part, [])

    def _numbered(self, documents: Sequence[Sample], index: int) -> list[Sample]:
        """The documents of a part, with numbers that no other part has."""
        numbered = []
        for document in documents:
            columns = dict(document.columns)
            if "group" in columns:
                columns["group"] = columns["group"] * len(self.mixed) + index
            numbered.append(replace(document, index=document.index * len(self.mixed) + index, columns=columns))
        return numbered

    def _joined(self, rows: Sequence[DrawnRows]) -> DrawnRows:
        documents = [row.documents[0] for row in rows]
        columns = _columns_of_all([self.columns, *(row.columns for row in rows)])
        counts = ("row_tokens", "row_supervised", "row_weights", "row_pairs")
        whole = [np.concatenate([getattr(row, name) for row in rows]) for name in counts]
        return DrawnRows(
            documents, columns, *whole, pictures=next((row.pictures for row in rows if row.pictures), None)
        )


def _drawn_in_memory(dataset: Dataset, seed: int, number: int, start: Position) -> Iterator[tuple[DrawnRows, Position]]:
    """Draw `number` rows of a dataset at a time as a stream does, pass after pass in another order, without end."""
    order, of_pass = np.empty(0, np.int64), -1
    for first in count(start.drawn, number):
        rows = []
        for place in range(first, first + number):
            if place // len(dataset) != of_pass:
                of_pass = place // len(dataset)
                order = permuted(len(dataset), seed, of_pass)
            rows.append(order[place % len(dataset)])
        documents = [dataset.row(row) for row in rows]
        counts = (dataset.row_tokens, dataset.row_supervised, dataset.row_weights, dataset.row_pairs)
        drawn = DrawnRows(documents, dataset.columns, *(of_rows[rows] for of_rows in counts), pictures=dataset.pictures)
        yield drawn, Position(drawn=first + number, fingerprint=dataset.fingerprint)


HEADINGS = {"epoch": "an epoch has {:,} rows", "block": "of each {:,} rows", "run": "{:,} rows drawn in this run"}


class MixtureAccounting(Accounting):
    """The statistics of all sources together, and the number of training rows drawn from each.

    They are drawn in an `epoch`, in a `block` of the rows of streams, or in the `run` so far.
    """

    def __init__(
        self,
        parts: dict[str, Accounting],
        drawn: dict[str, int],
        period: Literal["epoch", "block", "run"] = "epoch",
    ) -> None:
        first, *others = parts.values()
        whole = sum(others, first).with_source(", ".join(parts))
        if period == "epoch":
            whole = whole.with_training_rows(sum(drawn.values()), first.row_capacity)
        super().__init__(**vars(whole) | {"lengths": {"max": max(part.longest for part in parts.values())}})
        self.parts, self.drawn, self.period = parts, drawn, period

    def epoch(self) -> dict[str, dict[str, float]]:
        """For each source: the training rows drawn, passes over those that were read, and its share of the tokens."""
        times = {name: drawn / max(1, self.parts[name].training_rows) for name, drawn in self.drawn.items()}
        tokens = {name: self.parts[name].tokens * times[name] for name in times}
        total = sum(tokens.values()) or 1
        return {
            name: {"rows": self.drawn[name], "times": times[name], "tokens": tokens[name] / total} for name in times
        }

    def as_dict(self) -> dict[str, Any]:
        return {"sources": {name: part.as_dict() for name, part in self.parts.items()}, self.period: self.epoch()}

    def table(self) -> str:
        """Aligned lines for people to read."""
        lines = [f"{name}: {part.table()}" for name, part in self.parts.items()]
        lines.append(HEADINGS[self.period].format(sum(self.drawn.values())))
        width = max(map(len, self.parts)) + 2
        for name, of in self.epoch().items():
            times = f" ({of['times']:.3g}x)" if self.period == "epoch" else ""
            rows = f"{of['rows']:,.0f} rows{times}"
            lines.append(f"  {name:<{width}}{rows}, {of['tokens']:.1%} of the tokens")
        return "\n".join(lines)


def _shares(
    parts: Mapping[str, Dataset], weights: Mapping[str, float] | None, weigh_by: Literal["rows", "tokens"]
) -> np.ndarray:
    """The share of each part in the training rows, by weight, or by size without weights."""
    sizes = np.array([len(part) for part in parts.values()], float)
    shares = sizes
    if weights:
        units = [part.accounting.kept if weigh_by == "rows" else part.accounting.tokens for part in parts.values()]
        shares = np.array([weights[name] for name in parts]) * sizes / np.array(units)
    return shares / shares.sum()


def _require_same_columns(parts: Mapping[str, Dataset]) -> None:
    names = {name: sorted(part.columns) for name, part in parts.items()}
    first, *others = names.values()
    if any(other != first for other in others):
        raise TuneError(f"sources: all must have the same extra_columns and the same turns; found columns {names}")


def _columns_of_all(parts: Sequence[Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Column names with an example value each; of a fraction, if it is one in any part."""
    first, *others = parts
    columns = {}
    for name, value in first.items():
        alike = [part[name] for part in others if name in part]
        columns[name] = value.astype(np.result_type(value, *alike))
    return columns


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
