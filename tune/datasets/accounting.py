"""Counts of a dataset's rows, kept and dropped, and of its samples and tokens."""

import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

from tune.datasets.rows import CANNOT_BE_USED, FOR_TRAINING, FULLY_MASKED, HELD_OUT, Outcome
from tune.secrets import without_secrets

NAMES_SHOWN = 5


@dataclass
class Accounting:
    """What became of a dataset's rows. `rows == kept + sum(dropped.values())`."""

    source: str = "the dataset"
    format: str | None = None
    ignored_files: list[str] = field(default_factory=list)
    ignored_columns: list[str] = field(default_factory=list)
    rows: int = 0
    dropped: Counter[str] = field(default_factory=Counter)  # by reason
    mistakes: list[str] = field(default_factory=list)  # of the first rows that cannot be used
    kept: int = 0
    truncated: int = 0  # kept, or fully masked after it
    cut_tokens: int = 0  # of these rows
    clipped: int = 0  # kept, but cut inside what is learned
    split: int = 0  # kept, as several samples
    shortest_prompt: int | None = None  # tokens, of the rows whose answer was cut off
    endless: int = 0  # kept, but without an end-of-turn token to learn
    remarks: Counter[str] = field(default_factory=Counter)  # kept, but probably not what was meant, by remark
    samples: int = 0
    tokens: int = 0
    supervised_tokens: int = 0
    lengths: dict[str, int] = field(default_factory=dict)  # tokens of the samples: p50, p90, p99, max
    training_rows: int = 0
    row_capacity: int | None = None  # of a packed row
    prepared: float | None = field(default=None, compare=False)  # seconds since 1970; None: by this run
    prepared_in: str | None = field(default=None, compare=False)  # the folder of what an earlier run prepared

    def __post_init__(self) -> None:
        self.source = without_secrets(self.source)  # a URL may have a password

    def count(self, outcome: Outcome) -> None:
        """One more row."""
        self.rows += 1
        self.truncated += outcome.cut > 0
        self.cut_tokens += outcome.cut
        if outcome.dropped is not None:
            self.dropped[outcome.dropped] += 1
            self.mistakes += [outcome.mistake] if outcome.mistake else []
            if outcome.needs:
                self.shortest_prompt = min(outcome.needs, self.shortest_prompt or outcome.needs)
            return
        self.kept += 1
        self.clipped += outcome.clipped
        self.split += len(outcome.samples) > 1 and "group" not in outcome.samples[0].columns
        self.endless += not outcome.ends
        self.remarks.update(outcome.remarks)

    @property
    def longest(self) -> int:
        return self.lengths.get("max", 0)

    @property
    def supervised_share(self) -> float:
        return self.supervised_tokens / max(1, self.tokens)

    @property
    def packing_efficiency(self) -> float | None:
        """The share of the packed rows that is not padding; None if not packed."""
        return self.tokens / (self.training_rows * self.row_capacity) if self.row_capacity else None

    def add(self, other: "Accounting") -> None:
        """Count what became of other rows too."""
        for name, value in vars(other).items():
            if isinstance(value, int | Counter) and name not in ("row_capacity", "shortest_prompt"):
                setattr(self, name, getattr(self, name) + value)
        prompts = filter(None, (self.shortest_prompt, other.shortest_prompt))
        self.shortest_prompt = min(prompts, default=None)
        self.mistakes = (self.mistakes + other.mistakes)[:NAMES_SHOWN]

    def as_dict(self) -> dict[str, Any]:
        derived = {name: getattr(self, name) for name in ("supervised_share", "packing_efficiency")}
        counters = {"dropped": dict(self.dropped), "remarks": dict(self.remarks)}
        return {**asdict(self), **counters, "fully_masked": self.dropped[FULLY_MASKED], **derived}

    def table(self) -> str:
        """Aligned lines for people to read."""
        lines = [("rows", f"{self.rows:,}")]
        for reason, count in self.dropped.most_common():
            lines += [(f"  {reason}" if reason in (HELD_OUT, FOR_TRAINING) else f"  dropped: {reason}", f"{count:,}")]
            if reason == CANNOT_BE_USED:
                lines += [("    such as" if mistake is self.mistakes[0] else "", mistake) for mistake in self.mistakes]
        inside = f", {self.clipped:,} times inside an answer" if self.clipped else ""
        cut = f" ({self.cut_tokens:,} tokens cut off{inside})" if self.truncated else ""
        lines += [("  kept", f"{self.kept:,}"), ("  truncated", f"{self.truncated:,}{cut}")]
        if self.split:
            lines += [("  split", f"{self.split:,} ({self.samples:,} samples in all)")]
        if self.endless:
            lines += [("  without an end of turn", f"{self.endless:,} (the model does not learn to stop there)")]
        lines += [(f"  {remark}", f"{count:,}") for remark, count in self.remarks.most_common(NAMES_SHOWN)]
        lines += [("tokens", f"{self.tokens:,}")]
        lines += [("  supervised", f"{self.supervised_tokens:,} ({self.supervised_share:.1%})")]
        if self.lengths:
            lines += [("tokens per sample", ", ".join(f"{name} {length:,}" for name, length in self.lengths.items()))]
        if self.row_capacity:
            filled = f"{self.packing_efficiency:.1%} filled"
            lines += [("packed rows", f"{self.training_rows:,} of {self.row_capacity:,} tokens, {filled}")]
        if self.format:
            lines[0:0] = [("format", self.format)]
        for what, names in (("columns", self.ignored_columns), ("files", self.ignored_files)):
            if names:
                more = f" and {len(names) - NAMES_SHOWN:,} more" if len(names) > NAMES_SHOWN else ""
                lines += [(f"{what} ignored", ", ".join(names[:NAMES_SHOWN]) + more)]
        if self.prepared:
            lines += [("prepared", f"{_age(time.time() - self.prepared)} ago; delete {self.prepared_in} to do it anew")]
        width = max(len(name) for name, _ in lines) + 2
        return "\n".join([self.source, *(f"  {name:<{width}}{value}" for name, value in lines)])


def _age(seconds: float) -> str:
    for unit, length in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} seconds"
