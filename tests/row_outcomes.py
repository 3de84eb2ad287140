"""What becomes of single rows, for tests of the steps between a row and its samples."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from tune.collators import Sample
from tune.datasets import RowReader
from tune.datasets.fit import Fit
from tune.datasets.samples import Samples
from tune.tokenizers import Tokenizer

OF_READER = {field.name for field in fields(RowReader)}


@dataclass(frozen=True)
class Named:
    """The place of a row."""

    place: str

    def of(self, number: int) -> str:
        return self.place


@dataclass(frozen=True)
class Outcome:
    """The samples of a row, or the reason why it has none, and what was counted."""

    samples: Sequence[Sample] = ()
    dropped: str | None = None
    mistake: str | None = None
    cut: int = 0
    clipped: bool = False
    ends: bool = True
    remarks: Sequence[str] = ()
    needs: int | None = None


def outcomes(
    tokenizer: Tokenizer,
    max_seq_len: int,
    rows: Sequence[tuple[str, Any]],
    kind_of_reader: type[RowReader] = RowReader,
    **options: Any,
) -> list[Outcome]:
    """What becomes of rows with their places. `options` are those of `tune.datasets.load`."""
    reader = kind_of_reader(tokenizer, **{name: value for name, value in options.items() if name in OF_READER})
    of_fit = {name: value for name, value in options.items() if name not in OF_READER}
    prefix = tokenizer.prefix_ids if of_fit.pop("bos_in_pieces", True) else ()
    fit = Fit(max_seq_len, as_seen=reader.turns == "as_seen", kind=reader.kind, prefix=prefix, **of_fit)
    return [_outcome(reader, fit, place, row) for place, row in rows]


def _outcome(reader: RowReader, fit: Fit, place: str, row: Any) -> Outcome:
    block, rendered = reader.blocks([(1, row)], Named(place), fit)
    fitted = fit(block, rendered, Named(place))
    counted = fitted.accounting
    samples: list[Sample] = []
    if len(fitted):
        samples = [*Samples.joined([fitted], "a row")]
    return Outcome(
        samples,
        next(iter(counted.dropped), None),
        next(iter(counted.mistakes), None),
        counted.cut_tokens,
        bool(counted.clipped),
        not counted.endless,
        [*counted.remarks],
        counted.shortest_prompt,
    )
