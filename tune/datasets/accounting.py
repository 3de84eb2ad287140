from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

FULLY_MASKED = "fully masked"


@dataclass
class Accounting:
    """What became of a dataset's rows. `rows == kept + sum(dropped.values())`."""

    source: str = "the dataset"
    ignored_files: list[str] = field(default_factory=list)
    rows: int = 0
    dropped: Counter[str] = field(default_factory=Counter)  # by reason
    truncated: int = 0  # kept or fully masked after it
    kept: int = 0
    tokens: int = 0
    supervised_tokens: int = 0
    lengths: dict[str, int] = field(default_factory=dict)  # tokens of the kept samples: p50, p90, p99, max
    training_rows: int = 0
    row_capacity: int | None = None  # of a packed row

    @property
    def fully_masked(self) -> int:
        return self.dropped[FULLY_MASKED]

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
            if isinstance(value, int | Counter):
                setattr(self, name, getattr(self, name) + value)

    def steps_per_epoch(self, global_batch_size: int) -> int:
        return -(-self.training_rows // global_batch_size)

    def as_dict(self) -> dict[str, Any]:
        derived = ("fully_masked", "supervised_share", "packing_efficiency")
        return {**asdict(self), "dropped": dict(self.dropped), **{name: getattr(self, name) for name in derived}}

    def table(self) -> str:
        """Aligned lines for people to read."""
        lines = [("rows", f"{self.rows:,}")]
        lines += [(f"  dropped: {reason}", f"{count:,}") for reason, count in self.dropped.most_common()]
        lines += [("  kept", f"{self.kept:,}"), ("  truncated", f"{self.truncated:,}")]
        lines += [("tokens", f"{self.tokens:,}")]
        lines += [("  supervised", f"{self.supervised_tokens:,} ({self.supervised_share:.1%})")]
        lines += [("tokens per sample", ", ".join(f"{name} {length:,}" for name, length in self.lengths.items()))]
        if self.row_capacity:
            filled = f"{self.packing_efficiency:.1%} filled"
            lines += [("packed rows", f"{self.training_rows:,} of {self.row_capacity:,} tokens, {filled}")]
        if self.ignored_files:
            lines += [("files ignored", ", ".join(self.ignored_files))]
        width = max(len(name) for name, _ in lines) + 2
        return "\n".join([self.source, *(f"  {name:<{width}}{value}" for name, value in lines)])
