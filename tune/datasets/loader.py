from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from tune.collators import Batch, collate
from tune.datasets.dataset import Dataset
from tune.datasets.mix import Mixture
from tune.errors import TuneError


class DataRanks(Protocol):
    """This process among those that read different data."""

    @property
    def data_rank(self) -> int: ...
    @property
    def data_size(self) -> int: ...


@dataclass(frozen=True, slots=True)
class GlobalBatch:
    """The rows of one optimizer step and this rank's micro-batches of them; the counts are those of all ranks."""

    rows: list[int]
    micro_batches: list[Batch]
    num_tokens: int
    num_supervised: int


class DataLoader:
    """Iterates over the optimizer steps of a run: `for step, batch in data`, with `step` from 1 to `len(data)`.

    The rows of a step are a function of (seed, epoch) alone; ranks and micro-batches only divide them. The rows of one
    step are sorted by length so that those of a micro-batch are alike; the last step of an epoch may have fewer rows,
    but every rank gets the same number of micro-batches. `pad_to` is that of `collate`.
    """

    def __init__(
        self,
        dataset: Dataset | Mixture,
        world: DataRanks,
        global_batch_size: int,
        micro_batch_size: int,
        *,
        epochs: int = 1,
        max_steps: int | None = None,
        seed: int = 0,
        pad_to: int | None = None,
    ) -> None:
        _check_sizes(dataset, world.data_size, global_batch_size, micro_batch_size)
        self.dataset, self.world, self.seed, self.pad_to = dataset, world, seed, pad_to
        self.global_batch_size, self.micro_batch_size = global_batch_size, micro_batch_size
        self.steps_per_epoch = -(-len(dataset) // global_batch_size)
        whole = epochs * self.steps_per_epoch
        self._steps = whole if max_steps is None else min(whole, max_steps)
        self._step = 0

    def __len__(self) -> int:
        """Optimizer steps of the whole run."""
        return self._steps

    def __iter__(self) -> Iterator[tuple[int, GlobalBatch]]:
        epoch, order = -1, np.empty(0, dtype=np.int64)
        while self._step < self._steps:
            self._step += 1
            step_epoch, position = divmod(self._step - 1, self.steps_per_epoch)
            if step_epoch != epoch:
                epoch, order = step_epoch, self.dataset.order(self.seed, step_epoch)
            rows = order[position * self.global_batch_size : (position + 1) * self.global_batch_size]
            yield self._step, self._batch(rows)

    def state_dict(self) -> dict[str, Any]:
        """The position after the step that was given last."""
        return {"step": self._step, **self._identity()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue behind a saved step. Raises TuneError if the data, their order or their batches are others."""
        now = self._identity()
        changed = [f"{name} was {state[name]} and is now {now[name]}" for name in now if state[name] != now[name]]
        if changed:
            raise TuneError(
                f"the checkpoint was made with other data: {'; '.join(changed)}. Restore these settings (fingerprint: "
                "the dataset, tokenizer, max_seq_len, packed), or start anew with resume=never and another output_dir"
            )
        self._step = state["step"]

    def _batch(self, rows: np.ndarray) -> GlobalBatch:
        return GlobalBatch(
            rows.tolist(),
            list(_micro_batches(self.dataset, rows, self.world, self.micro_batch_size, self.pad_to)),
            int(self.dataset.row_tokens[rows].sum()),
            int(self.dataset.row_supervised[rows].sum()),
        )

    def _identity(self) -> dict[str, Any]:
        return {"fingerprint": self.dataset.fingerprint, "seed": self.seed, "global_batch_size": self.global_batch_size}


def validation_batches(
    dataset: Dataset | Mixture, world: DataRanks, micro_batch_size: int, pad_to: int | None = None
) -> Iterator[tuple[tuple[str, ...], Batch]]:
    """Every row once over all ranks, and the same number of batches on each.

    A batch comes with the metrics that its loss belongs to: `validation_loss`, and that of its source in a mixture.
    """
    parts = dataset.parts if isinstance(dataset, Mixture) else {"": dataset}
    for source, part in parts.items():
        names = ("validation_loss", f"validation_loss/{source}") if source else ("validation_loss",)
        for batch in _micro_batches(part, np.arange(len(part)), world, micro_batch_size, pad_to):
            yield names, batch


def _micro_batches(
    dataset: Dataset | Mixture, rows: np.ndarray, world: DataRanks, micro_batch_size: int, pad_to: int | None
) -> Iterator[Batch]:
    by_length = rows[np.argsort(-dataset.row_tokens[rows], kind="stable")]
    together = world.data_size * micro_batch_size
    for start in range(0, len(by_length), together):
        mine = by_length[start : start + together][world.data_rank :: world.data_size]
        missing = micro_batch_size - len(mine)
        yield collate([*map(dataset.row, mine), *([[]] * missing)], pad_to)


def _check_sizes(dataset: Dataset | Mixture, ranks: int, global_batch_size: int, micro_batch_size: int) -> None:
    if len(dataset) < ranks:
        rows = f"{len(dataset)} packed rows" if dataset.accounting.row_capacity else f"{len(dataset)} rows"
        instead = f" or packed=false ({dataset.accounting.samples} rows)" if dataset.accounting.row_capacity else ""
        raise TuneError(
            f"{dataset.accounting.source} has {rows} for {ranks} data-parallel processes: "
            f"use at most {len(dataset)} processes{instead}"
        )
    together = ranks * micro_batch_size
    if global_batch_size % together == 0:
        return
    message = (
        f"global_batch_size={global_batch_size} is not a multiple of {together} "
        f"(micro_batch_size={micro_batch_size} x {ranks} data-parallel processes). "
    )
    below = global_batch_size // together * together
    message += f"Set global_batch_size to {f'{below} or ' if below else ''}{below + together}"
    fitting = [size for size in range(1, global_batch_size) if global_batch_size % (ranks * size) == 0]
    if fitting:
        message += f", or micro_batch_size to {', '.join(map(str, fitting))}"
    raise TuneError(message)
