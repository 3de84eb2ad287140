"""The statistics of a dataset: counts of rows kept and dropped, of samples and of tokens.

`Fit` counts what becomes of the rows of a block. An `Accounting` is immutable: `+` adds other rows, `with_samples` and
`with_training_rows` add the figures of the whole dataset.
"""

import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from tune.datasets.reasons import CANNOT_BE_USED, ELSEWHERE, FULLY_MASKED
from tune.secrets import without_secrets

NAMES_SHOWN = 5
SUMS = (
    *("rows", "dropped", "kept", "truncated", "cut_tokens", "clipped", "split", "endless", "remarks"),
    *("samples", "tokens", "supervised_tokens", "training_rows"),
)


@dataclass(frozen=True)
class Accounting:
    """Counts of a dataset's rows. `rows == kept + sum(dropped.values())`."""

    source: str = "the dataset"
    format: str | None = None
    ignored_files: list[str] = field(default_factory=list)
    ignored_columns: list[str] = field(default_factory=list)
    rows: int = 0
    dropped: Counter[str] = field(default_factory=Counter)  # by reason
    first_dropped: dict[str, str] = field(default_factory=dict)  # the place of the first row, by reason
    mistakes: list[str] = field(default_factory=list)  # messages of the first unusable rows
    kept: int = 0
    truncated: int = 0  # rows kept, or fully masked after truncation
    cut_tokens: int = 0  # tokens cut off from the truncated rows
    clipped: int = 0  # rows kept, but cut inside an answer
    split: int = 0  # rows kept as several samples
    shortest_prompt: int | None = None  # tokens, with the answer's first; of the rows whose answer was cut off
    endless: int = 0  # rows kept without a supervised end-of-turn token
    remarks: Counter[str] = field(default_factory=Counter)  # rows kept but suspicious, by remark
    samples: int = 0
    tokens: int = 0
    supervised_tokens: int = 0
    supervised_weight: float | None = None  # sum over these tokens; None: each counts 1
    lengths: dict[str, int] = field(default_factory=dict)  # tokens of the samples: p50, p90, p99, max
    training_rows: int = 0
    row_capacity: int | None = None  # tokens in a packed row
    prepared: float | None = field(default=None, compare=False)  # seconds since 1970; None: prepared by this run
    prepared_in: str | None = field(default=None, compare=False)  # cache folder that an earlier run wrote

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Accounting":
        """Build from the result of `vars` of an `Accounting`, which may have been stored as JSON."""
        counters = {name: Counter(values[name]) for name in ("dropped", "remarks")}
        return cls(**{**values, **counters})

    def __add__(self, other: "Accounting") -> "Accounting":
        """Add the counts of other rows. Source and lengths are taken from `self`."""
        sums = {name: getattr(self, name) + getattr(other, name) for name in SUMS}
        prompts = filter(None, (self.shortest_prompt, other.shortest_prompt))
        whole = {name: getattr(self, name) for name in ("source", "ignored_files", "lengths", "row_capacity")}
        return Accounting(
            **whole,
            **sums,
            format=self.format or other.format,
            ignored_columns=self.ignored_columns or other.ignored_columns,
            first_dropped={**other.first_dropped, **self.first_dropped},
            mistakes=(self.mistakes + other.mistakes)[:NAMES_SHOWN],
            shortest_prompt=min(prompts, default=None),
            supervised_weight=self.weight + other.weight if self.is_weighted or other.is_weighted else None,
        )

    def with_source(self, name: str, ignored_files: Iterable[str] = ()) -> "Accounting":
        """Return a copy with the name of the source, without the password that a URL may contain."""
        return replace(self, source=without_secrets(name), ignored_files=[*ignored_files])

    def with_samples(
        self, lengths: np.ndarray, supervised: np.ndarray, weight: np.ndarray | None = None
    ) -> "Accounting":
        """Return a copy with the figures of all samples: tokens, supervised tokens, and the weight of the latter.

        Each array has a value per sample; `weight` is None if every token counts 1.
        """
        percentiles = np.percentile(lengths, [50, 90, 99, 100], method="higher")
        return replace(
            self,
            lengths=dict(zip(("p50", "p90", "p99", "max"), map(int, percentiles), strict=True)),
            samples=len(lengths),
            tokens=int(lengths.sum()),
            supervised_tokens=int(supervised.sum()),
            supervised_weight=None if weight is None else float(weight.sum()),
        )

    def with_training_rows(self, count: int, capacity: int | None) -> "Accounting":
        """Return a copy with the number of training rows, and the tokens of a packed row (None: not packed)."""
        return replace(self, training_rows=count, row_capacity=capacity)

    def from_cache(self, folder: str, modified: float) -> "Accounting":
        """Return a copy that notes the cache folder and when an earlier run wrote it, in seconds since 1970."""
        return replace(self, prepared=modified, prepared_in=folder)

    def with_remark(self, remark: str, count: int) -> "Accounting":
        """Return a copy with `remark` added for `count` rows."""
        return replace(self, remarks=self.remarks + Counter({remark: count}))

    @property
    def longest(self) -> int:
        return self.lengths.get("max", 0)

    @property
    def is_weighted(self) -> bool:
        """Whether some supervised tokens count less than others."""
        return self.supervised_weight is not None

    @property
    def weight(self) -> float:
        """The sum of the weights of all supervised tokens, 1 each by default."""
        return self.supervised_tokens if self.supervised_weight is None else self.supervised_weight

    @property
    def supervised_share(self) -> float:
        return self.supervised_tokens / max(1, self.tokens)

    @property
    def packing_efficiency(self) -> float | None:
        """The share of tokens in packed rows that is not padding; None if not packed."""
        return self.tokens / (self.training_rows * self.row_capacity) if self.row_capacity else None

    def as_dict(self) -> dict[str, Any]:
        derived = {name: getattr(self, name) for name in ("supervised_share", "packing_efficiency")}
        counters = {"dropped": dict(self.dropped), "remarks": dict(self.remarks)}
        return {**asdict(self), **counters, "fully_masked": self.dropped[FULLY_MASKED], **derived}

    def table(self) -> str:
        """Aligned lines for people to read."""
        lines = [*self._lines_of_rows(), *self._lines_of_samples()]
        if self.format:
            lines.insert(0, ("format", self.format))
        width = max(len(name) for name, _ in lines) + 2
        return "\n".join([self.source, *(f"  {name:<{width}}{value}" for name, value in lines)])

    def _lines_of_rows(self) -> list[tuple[str, str]]:
        lines = [("rows", f"{self.rows:,}")]
        for reason, count in self.dropped.most_common():
            if reason in ELSEWHERE:
                lines.append((f"  {reason}", f"{count:,}"))
                continue
            first = self.first_dropped.get(reason)
            place = f" (first: {first})" if first and reason != CANNOT_BE_USED else ""
            lines.append((f"  dropped: {reason}", f"{count:,}{place}"))
            if reason == CANNOT_BE_USED:
                lines += [("    such as" if mistake is self.mistakes[0] else "", mistake) for mistake in self.mistakes]
        inside = f", {self.clipped:,} times inside an answer" if self.clipped else ""
        cut = f" ({self.cut_tokens:,} tokens cut off{inside})" if self.truncated else ""
        lines += [("  kept", f"{self.kept:,}"), ("  truncated", f"{self.truncated:,}{cut}")]
        if self.split:
            lines.append(("  split", f"{self.split:,} ({self.samples:,} samples in all)"))
        if self.endless:
            lines.append(("  without an end of turn", f"{self.endless:,} (they do not teach the model to stop)"))
        return lines + [(f"  {remark}", f"{count:,}") for remark, count in self.remarks.most_common(NAMES_SHOWN)]

    def _lines_of_samples(self) -> list[tuple[str, str]]:
        lines = [("tokens", f"{self.tokens:,}")]
        lines.append(("  supervised", f"{self.supervised_tokens:,} ({self.supervised_share:.1%})"))
        if self.supervised_weight is not None:
            lines.append(("    their weight", f"{self.supervised_weight:,.1f}"))
        if self.lengths:
            lengths = ", ".join(f"{name} {length:,}" for name, length in self.lengths.items())
            lines.append(("tokens per sample", lengths))
        if self.row_capacity:
            filled = f"{self.packing_efficiency:.1%} filled"
            lines.append(("packed rows", f"{self.training_rows:,} of {self.row_capacity:,} tokens, {filled}"))
        for what, names in (("columns", self.ignored_columns), ("files", self.ignored_files)):
            if names:
                more = f" and {len(names) - NAMES_SHOWN:,} more" if len(names) > NAMES_SHOWN else ""
                lines.append((f"{what} ignored", ", ".join(names[:NAMES_SHOWN]) + more))
        if self.prepared:
            age = _age(time.time() - self.prepared)
            lines.append(("prepared", f"{age} ago, in {self.prepared_in} (see tune cache)"))
        return lines


def _age(seconds: float) -> str:
    for unit, length in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} seconds"
