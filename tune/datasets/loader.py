"""The order of the rows in training, and each rank's part of an optimizer step."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from fractions import Fraction
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from tune import rehearsal
from tune.collators import Batch, collate
from tune.datasets.dataset import Dataset
from tune.datasets.mix import Mixture
from tune.datasets.stream import DrawnRows, Position, Stream
from tune.datasets.workers import ahead
from tune.errors import TuneError
from tune.types import Epochs, NonNegativeInt, PositiveInt

if TYPE_CHECKING:  # FSDP and pipelines, of which reading data needs nothing
    from tune.distributed import World


@dataclass(frozen=True, slots=True)
class GlobalBatch:
    """The rows of one optimizer step and this rank's micro-batches of them; the counts are those of all ranks.

    Iterating gives each micro-batch on the `device`, and whether it is the last one.
    """

    rows: list[int]
    micro_batches: list[Batch]
    device: torch.device
    num_tokens: int
    num_supervised: int
    num_pairs: int  # of answers to compare: the first of a group with each of the others
    num_without_room: int | None = None  # documents that the student could not answer, where it was to

    def __iter__(self) -> Iterator[tuple[Batch, bool]]:
        for number, micro_batch in enumerate(self.micro_batches, 1):
            yield micro_batch.to(self.device), number == len(self.micro_batches)


class DataLoader:
    """Iterates over the optimizer steps of a run: `for step, batch in data`, with `step` from 1 to `len(data)`.

    The rows of a step are a function of (seed, epoch) alone; ranks and micro-batches only divide them. The rows of one
    step are sorted by length so that those of a micro-batch are alike; the last step of an epoch may have fewer rows,
    but every rank gets the same number of micro-batches. A stream has no epochs: it needs `max_steps`. A fraction of an
    epoch is its first steps. `pad_to` is that of `collate`. A batch is made while the one before it is used. Of `world`
    `data_rank`, `data_size` and `device` are read; None is `tune.distributed.current_world()`.
    """

    def __init__(
        self, dataset: Dataset | Mixture | Stream, world: "World | None" = None, global_batch_size: PositiveInt = 16,
        micro_batch_size: PositiveInt = 1, *, epochs: Epochs = 1, max_steps: PositiveInt | None = None,
        seed: NonNegativeInt = 0,
        pad_to: int | None = None,
    ) -> None:  # fmt: skip
        world = _world(world)
        self.dataset, self.world, self.seed, self.pad_to = dataset, world, seed, pad_to
        self.global_batch_size, self.micro_batch_size = global_batch_size, micro_batch_size
        self.epochs, self.max_steps = epochs, max_steps
        self.steps_per_epoch: int | None = None
        if isinstance(dataset, Stream):
            if max_steps is None or epochs != 1:
                missing = "max_steps is missing" if max_steps is None else f"epochs={epochs} must be left out"
                raise TuneError(f"{missing}: {dataset.name} is streamed, and read until max_steps")
            self._steps = max_steps
        else:
            if len(dataset) < world.data_size and not rehearsal.is_cut():
                accounting = dataset.accounting
                instead = f", or packed=false ({accounting.samples} rows)" if accounting.row_capacity else ""
                raise TuneError(
                    f"{accounting.source} has {len(dataset)} rows for {world.data_size} data-parallel processes: "
                    f"use at most {len(dataset)}{instead}"
                )
            self.steps_per_epoch = -(-len(dataset) // global_batch_size)
            whole = steps_of(epochs, self.steps_per_epoch) if not rehearsal.is_cut() else rehearsal.UNKNOWN
            self._steps = whole if max_steps is None else min(whole, max_steps)
        require_batches(global_batch_size, micro_batch_size, world.data_size)
        self._step, self._position = 0, Position()

    def __len__(self) -> int:
        """Optimizer steps of the whole run."""
        return self._steps

    def __iter__(self) -> Iterator[tuple[int, GlobalBatch]]:
        batches = self._of_stream(self.dataset) if isinstance(self.dataset, Stream) else self._of_rows(self.dataset)
        batches = islice(batches, self._steps - self._step)
        for batch, position in batches if rehearsal.planning() else ahead(batches):
            self._step, self._position = self._step + 1, position
            yield self._step, batch

    def _of_rows(self, dataset: Dataset | Mixture) -> Iterator[tuple[GlobalBatch, Position]]:
        order, first = np.empty(0, dtype=np.int64), self._step
        for step in range(first, self._steps):
            epoch, position = divmod(step, -(-len(dataset) // self.global_batch_size))
            if step == first or not position:
                order = checked_order(dataset, self.seed, epoch)
                if rehearsal.is_cut():  # as if there were enough of them
                    order = np.resize(order, self.global_batch_size)
            rows = order[position * self.global_batch_size : (position + 1) * self.global_batch_size]
            yield self._batch(dataset, rows, rows.tolist(), step + 1), self._position

    def _of_stream(self, stream: Stream) -> Iterator[tuple[GlobalBatch, Position]]:
        drawn = stream.draw(self.seed, self.global_batch_size, self._position)
        indices = np.arange(self.global_batch_size)
        for step, (rows, position) in enumerate(drawn, self._step):
            names = (step * self.global_batch_size + indices).tolist()
            yield self._batch(rows, indices, names, step + 1), position

    def state_dict(self) -> dict[str, Any]:
        """The position after the step that was given last."""
        return {"step": self._step, "position": asdict(self._position), **self._identity()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue behind a saved step. Raises TuneError if the data, their order or their batches are others, or if
        the run ends before that step."""
        require_continuable(state, self._identity(), self._steps, "max_seq_len, packed")
        self._step, self._position = state["step"], Position(**state["position"])

    def _batch(self, data: Dataset | Mixture | DrawnRows, rows: np.ndarray, names: list[int], step: int) -> GlobalBatch:
        size = self.micro_batch_size
        if planning := rehearsal.planning():  # of the longest row, as many as it wants
            size = planning.take_rows(self.global_batch_size, size, self.max_steps)
            rows = np.resize(rows[data.row_tokens[rows].argmax()], size)
            names = [0]
        tokens, supervised, pairs = (
            int(counts[rows].sum()) for counts in (data.row_tokens, data.row_supervised, data.row_pairs)
        )
        scale = weight_scale(data, rows)
        parts = _micro_batches(data, rows, self.world, size, self.pad_to)
        micro_batches = [part.in_step(self.seed, step, supervised).reweighed(scale) for part in parts]
        if torch.cuda.is_initialized():  # from pinned memory it is copied while the GPU computes
            micro_batches = [batch.pin_memory() for batch in micro_batches]
        return GlobalBatch(names, micro_batches, self.world.device, tokens, supervised, pairs)

    def _identity(self) -> dict[str, Any]:
        return {"fingerprint": self.dataset.fingerprint, "seed": self.seed, "global_batch_size": self.global_batch_size}


def checked_order(dataset: Dataset | Mixture, seed: int, epoch: int) -> np.ndarray:
    """The rows of an epoch as `dataset.order` gives them, which may be a function of your own. Raises TuneError if they
    are not as many row numbers as an epoch has rows: steps would be empty."""
    order = np.asarray(dataset.order(seed, epoch))
    rows = dataset.parts.values() if isinstance(dataset, Mixture) else [dataset]
    known = sum(len(part) for part in rows)
    what = f"dataset.order(seed={seed}, epoch={epoch}): "
    if order.shape != (len(dataset),):
        raise TuneError(
            f"{what}an epoch has {len(dataset)} rows, and the order has the shape {order.shape}. Give one row number "
            "for each; rows may be repeated, so for fewer of them repeat those you keep (np.resize)"
        )
    if order.dtype.kind not in "iu" or order.min() < 0 or order.max() >= known:
        found = f"{order.dtype}" if order.dtype.kind not in "iu" else f"{order.min()} to {order.max()}"
        raise TuneError(f"{what}found {found}. Give integers from 0 to {known - 1}")
    return order


def steps_of(epochs: float, steps_per_epoch: int) -> int:
    """The optimizer steps of a number of epochs, which may be a fraction: rounded up, as in other libraries, from the
    decimal that was written (1.1 epochs of 10 steps are 11, though 1.1 * 10 is above 11 in floating point)."""
    return math.ceil(Fraction(str(epochs)) * steps_per_epoch)


def require_continuable(state: Mapping[str, Any], now: Mapping[str, Any], steps: int, length: str) -> None:
    """Raises TuneError if a saved state is one of other data than those of `now`, or of a step behind the last one.
    `length` names the settings by which rows are cut."""
    changed = [f"{name} was {state[name]} and is now {now[name]}" for name in now if state[name] != now[name]]
    if changed:
        raise TuneError(
            f"the checkpoint was made with other data: {'; '.join(changed)}. Restore these settings (fingerprint: "
            f"the dataset, tokenizer, {length}), or start anew with resume=never and another output_dir"
        )
    if state["step"] > steps:
        raise TuneError(
            f"resume: the checkpoint is that of step {state['step']}, and this run ends with step {steps}. "
            "Raise max_steps or epochs, or start anew with resume=never and another output_dir"
        )


def validation_batches(
    dataset: Dataset | Mixture | Stream,
    world: "World | None" = None,
    micro_batch_size: int = 1,
    pad_to: int | None = None,
) -> Iterator[tuple[tuple[str, ...], Batch]]:
    """Every row once over all ranks, and the same number of batches on each, on the device.

    A batch comes with the metrics that its loss belongs to: `validation_loss`, and that of its source in a mixture.
    `world=None` is `tune.distributed.current_world()`.
    """
    world = _world(world)
    parts = (("", data) for _, data in dataset.windows()) if isinstance(dataset, Stream) else dataset.parts.items()
    for source, part in parts:
        names = ("validation_loss", f"validation_loss/{source}") if source else ("validation_loss",)
        rows = np.arange(len(part))
        scale = weight_scale(part, rows)
        for batch in _micro_batches(part, rows, world, micro_batch_size, pad_to):
            yield names, batch.reweighed(scale).to(world.device)
            if rehearsal.current():  # one stands for all
                break


def weight_scale(data: Dataset | Mixture | DrawnRows, rows: np.ndarray) -> float:
    """What the weights of these rows are multiplied by, so that those of supervised tokens are 1 on average: a loss
    divided by the number of these tokens is then the weighted mean."""
    weight = float(data.row_weights[rows].sum())
    return int(data.row_supervised[rows].sum()) / weight if weight else 1.0


def _world(world: "World | None") -> "World":
    if isinstance(world, int):
        raise TuneError(f"world: {world} is no World. Name the sizes: global_batch_size={world}, micro_batch_size=1")
    if world is not None:
        return world
    from tune.distributed import current_world

    return current_world()


def _micro_batches(
    data: Dataset | Mixture | DrawnRows, rows: np.ndarray, world: "World", micro_batch_size: int, pad_to: int | None
) -> Iterator[Batch]:
    by_length = rows[np.argsort(-data.row_tokens[rows], kind="stable")]
    together = world.data_size * micro_batch_size
    for start in range(0, len(by_length), together):
        mine = by_length[start : start + together][world.data_rank :: world.data_size]
        missing = micro_batch_size - len(mine)
        yield collate([*map(data.row, mine), *([[]] * missing)], pad_to, data.columns)


def require_batches(global_batch_size: PositiveInt, micro_batch_size: PositiveInt, ranks: int, stages: int = 1) -> None:
    """Raises TuneError if a global batch is not a number of micro-batches on each of the data-parallel `ranks`, or if
    there are fewer of them than `stages` of a pipeline."""
    together = ranks * micro_batch_size
    if stages * together > global_batch_size and global_batch_size % together == 0:
        raise TuneError(
            f"parallel.pp: {stages} stages take turns, and a step has {global_batch_size // together} micro-batch(es): "
            f"some always wait. Set global_batch_size to {stages * together} or more, or parallel.pp or "
            "micro_batch_size lower"
        )
    if global_batch_size % together == 0:
        return
    micro = [size for size in range(1, global_batch_size) if global_batch_size % (ranks * size) == 0]
    below = global_batch_size // together * together
    fitting = [size for size in (below, below + together) if size]
    others = f", or micro_batch_size to {', '.join(map(str, micro))}" if micro else ""
    raise TuneError(
        f"global_batch_size={global_batch_size} is not a multiple of {together} (micro_batch_size={micro_batch_size} x "
        f"{ranks} data-parallel processes). Set global_batch_size to {' or '.join(map(str, fitting))}{others}"
    )
