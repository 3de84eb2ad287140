"""The order of rows in training, and each rank's part of an optimizer step."""

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
from tune.types import Epochs, NonNegativeInt, PositiveInt, checked

if TYPE_CHECKING:  # reading data needs no FSDP and no pipelines
    from tune.distributed import World


@dataclass(frozen=True, slots=True)
class GlobalBatch:
    """The rows of one optimizer step and this rank's micro-batches. The counts are over all ranks.

    Iterating yields each micro-batch on the `device`, and whether it is the last one.
    """

    rows: list[int]
    micro_batches: list[Batch]
    device: torch.device
    num_tokens: int
    num_supervised: int
    num_pairs: int  # answers to compare: the first of a group with each of the others
    num_without_room: int | None = None  # documents without room for the student's answer, if it had to answer

    def __iter__(self) -> Iterator[tuple[Batch, bool]]:
        for number, micro_batch in enumerate(self.micro_batches, 1):
            yield micro_batch.to(self.device), number == len(self.micro_batches)


@checked
class DataLoader:
    """Iterate over the optimizer steps of a run: `for step, batch in data`, with `step` from 1 to `len(data)`.

    The rows of a step are a function of (seed, epoch) alone; ranks and micro-batches only divide them. Within a step,
    rows are sorted by length, so that a micro-batch has rows of similar length. The last step of an epoch may have
    fewer rows, but every rank gets the same number of micro-batches. A fraction of an epoch is its first steps. A
    stream has no epochs and needs `max_steps`.

    With `pad_packed`, packed rows are padded to their capacity, as compiled blocks need it. A thread makes the next
    batch while the current one is used. `world` needs `data_rank`, `data_size` and `device`; None is
    `tune.distributed.current_world()`.
    """

    def __init__(
        self, dataset: Dataset | Mixture | Stream, world: "World | None" = None, global_batch_size: PositiveInt = 16,
        micro_batch_size: PositiveInt = 1, epochs: Epochs = 1, max_steps: PositiveInt | None = None,
        seed: NonNegativeInt = 0, pad_packed: bool = False,
    ) -> None:  # fmt: skip
        world = _world(world)
        self.dataset, self.world, self.seed = dataset, world, seed
        self.pad_to = dataset.accounting.row_capacity if pad_packed else None
        self.global_batch_size, self.micro_batch_size = global_batch_size, micro_batch_size
        self.epochs, self.max_steps = epochs, max_steps
        self.steps_per_epoch: int | None = None
        require_batches(global_batch_size, micro_batch_size, world.data_size, getattr(world, "num_stages", 1))
        if isinstance(dataset, Stream):
            if max_steps is None or epochs != 1:
                missing = "max_steps must be set" if max_steps is None else f"epochs={epochs} must be removed"
                raise TuneError(f"{missing}: {dataset.name} is streamed, and a stream is read until max_steps")
            self._steps = max_steps
        else:
            if len(dataset) < world.data_size and not rehearsal.is_cut():
                accounting = dataset.accounting
                instead = f", or packed=false ({accounting.samples} rows)" if accounting.row_capacity else ""
                raise TuneError(
                    f"{accounting.source} has {len(dataset)} rows, too few for {world.data_size} data-parallel "
                    f"processes. Use at most {len(dataset)}{instead}"
                )
            self.steps_per_epoch = -(-len(dataset) // global_batch_size)
            whole = steps_of(epochs, self.steps_per_epoch) if not rehearsal.is_cut() else rehearsal.UNKNOWN
            self._steps = whole if max_steps is None else min(whole, max_steps)
        self._step, self._position = 0, Position()

    def __len__(self) -> int:
        """The number of optimizer steps of the whole run."""
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
                if rehearsal.is_cut():  # repeat the rows that were read up to a whole batch
                    order = np.resize(order, self.global_batch_size)
            rows = order[position * self.global_batch_size : (position + 1) * self.global_batch_size]
            yield self._batch(dataset, rows, rows.tolist(), step + 1), self._position

    def _of_stream(self, stream: Stream) -> Iterator[tuple[GlobalBatch, Position]]:
        drawn = stream.draw(self.seed, self.global_batch_size, self._position)
        indices = np.arange(self.global_batch_size)
        for step, (rows, position) in enumerate(drawn, self._step):
            names = (step * self.global_batch_size + indices).tolist()
            yield self._batch(rows, indices, names, step + 1), position

    def validation_batches(self) -> Iterator[tuple[tuple[str, ...], Batch]]:
        """See `tune.datasets.validation_batches`: the batches of `dataset.validation`, with this loader's sizes."""
        assert self.dataset.validation is not None
        return validation_batches(self.dataset.validation, self.world, self.micro_batch_size, self.pad_to)

    def state_dict(self) -> dict[str, Any]:
        """The position after the last step that was yielded. A stream keeps the window of this position."""
        if isinstance(self.dataset, Stream):
            self.dataset.keep(self._position)
        return {"step": self._step, "position": asdict(self._position), **self._identity()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after a saved step. Raises TuneError if the data, their order or the batch size differ, or if the
        run ends before that step."""
        require_continuable(state, self._identity(), self._steps, "max_seq_len, packed")
        self._step, self._position = state["step"], Position.from_dict(state["position"])

    def _batch(self, data: Dataset | Mixture | DrawnRows, rows: np.ndarray, names: list[int], step: int) -> GlobalBatch:
        size = self.micro_batch_size
        if planning := rehearsal.planning():  # the longest row, as often as the plan asks for
            size = planning.take_rows(self.global_batch_size, size, self.max_steps)
            rows = np.resize(rows[data.row_tokens[rows].argmax()], size)
            names = [0]
        tokens, supervised, pairs = (
            int(counts[rows].sum()) for counts in (data.row_tokens, data.row_supervised, data.row_pairs)
        )
        scale = weight_scale(data, rows)
        parts = _micro_batches(data, rows, self.world, size, self.pad_to)
        micro_batches = [part.in_step(self.seed, step, supervised).reweighed(scale) for part in parts]
        if torch.cuda.is_initialized():  # copies from pinned memory overlap with computation
            micro_batches = [batch.pin_memory() for batch in micro_batches]
        return GlobalBatch(names, micro_batches, self.world.device, tokens, supervised, pairs)

    def _identity(self) -> dict[str, Any]:
        return {"fingerprint": self.dataset.fingerprint, "seed": self.seed, "global_batch_size": self.global_batch_size}


def checked_order(dataset: Dataset | Mixture, seed: int, epoch: int) -> np.ndarray:
    """The row numbers of an epoch from `dataset.order`, which users may replace.

    Raises TuneError if the order has another length than the epoch, which would leave steps empty, or if a number is
    not a row.
    """
    order = np.asarray(dataset.order(seed, epoch))
    rows = dataset.parts.values() if isinstance(dataset, Mixture) else [dataset]
    known = sum(len(part) for part in rows)
    what = f"dataset.order(seed={seed}, epoch={epoch}): "
    if order.shape != (len(dataset),):
        raise TuneError(
            f"{what}an epoch has {len(dataset)} rows, but the order has shape {order.shape}. Return {len(dataset)} row "
            "numbers; to use fewer rows, repeat the ones you keep (np.resize)"
        )
    if order.dtype.kind not in "iu" or order.min() < 0 or order.max() >= known:
        found = f"{order.dtype}" if order.dtype.kind not in "iu" else f"{order.min()} to {order.max()}"
        raise TuneError(f"{what}found {found}. Return integers from 0 to {known - 1}")
    return order


def steps_of(epochs: float, steps_per_epoch: int) -> int:
    """The optimizer steps of `epochs`, which may be fractional, rounded up as in other libraries.

    Computed from the decimal value: 1.1 epochs of 10 steps are 11, although 1.1 * 10 is above 11 in floating point.
    """
    return math.ceil(Fraction(str(epochs)) * steps_per_epoch)


def require_continuable(state: Mapping[str, Any], now: Mapping[str, Any], steps: int, length: str) -> None:
    """Raise TuneError if a saved state belongs to other data than `now`, or to a step after the last one.

    `length` names the settings that limit the length of rows. A rehearsal that has not read all rows does not know
    their fingerprint.
    """
    known = [name for name in now if name != "fingerprint" or not rehearsal.is_cut()]
    changed = [f"{name} was {state[name]} and is now {now[name]}" for name in known if state[name] != now[name]]
    if changed:
        raise TuneError(
            f"the checkpoint was made with other data: {'; '.join(changed)}. Restore these settings (fingerprint: "
            f"the dataset, tokenizer, {length}), or start over with resume=never and another output_dir"
        )
    if state["step"] > steps:
        raise TuneError(
            f"resume: the checkpoint is of step {state['step']}, but this run ends at step {steps}. "
            "Raise max_steps or epochs, or start over with resume=never and another output_dir"
        )


def validation_batches(
    dataset: Dataset | Mixture | Stream,
    world: "World | None" = None,
    micro_batch_size: int = 1,
    pad_to: int | None = None,
) -> Iterator[tuple[tuple[str, ...], Batch]]:
    """Yield every row once over all ranks, in the same number of batches on each rank, on the device.

    Each batch comes with the names of its metrics: `validation_loss`, and `validation_loss/SOURCE` in a mixture.
    `world=None` is `tune.distributed.current_world()`.
    """
    world = _world(world)
    parts = (
        (("", window.data) for window in dataset.windows()) if isinstance(dataset, Stream) else dataset.parts.items()
    )
    for source, part in parts:
        names = ("validation_loss", f"validation_loss/{source}") if source else ("validation_loss",)
        rows = np.arange(len(part))
        scale = weight_scale(part, rows)
        for batch in _micro_batches(part, rows, world, micro_batch_size, pad_to):
            yield names, batch.reweighed(scale).to(world.device)
            if rehearsal.current():  # one batch is enough
                break


def weight_scale(data: Dataset | Mixture | DrawnRows, rows: np.ndarray) -> float:
    """The factor that makes the mean weight of the rows' supervised tokens 1.

    A weighted loss divided by the number of supervised tokens is then the weighted mean.
    """
    weight = float(data.row_weights[rows].sum())
    return int(data.row_supervised[rows].sum()) / weight if weight else 1.0


def _world(world: "World | None") -> "World":
    if isinstance(world, int):
        raise TuneError(
            f"world: expected a World, found {world}. Pass sizes by name: global_batch_size={world}, micro_batch_size=1"
        )
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
        yield collate([*map(data.row, mine), *([[]] * missing)], pad_to, data.columns, getattr(data, "pictures", None))


def require_batches(global_batch_size: PositiveInt, micro_batch_size: PositiveInt, ranks: int, stages: int = 1) -> None:
    """Raise TuneError if `ranks` data-parallel ranks cannot split a global batch into whole micro-batches.

    Also raises it if a step has fewer micro-batches than the pipeline has `stages`.
    """
    together = ranks * micro_batch_size
    if stages * together > global_batch_size and global_batch_size % together == 0:
        raise TuneError(
            f"parallel.pp: a step has {global_batch_size // together} micro-batch(es) for {stages} pipeline stages, so "
            f"some stages always wait. Set global_batch_size to {stages * together} or more, or lower parallel.pp or "
            "micro_batch_size"
        )
    if global_batch_size % together == 0:
        return
    micro = [size for size in range(1, global_batch_size + 1) if global_batch_size % (ranks * size) == 0]
    below = global_batch_size // together * together
    fitting = [size for size in (below, below + together) if size]
    others = f", or micro_batch_size to {', '.join(map(str, micro))}" if micro else ""
    raise TuneError(
        f"global_batch_size={global_batch_size} is not a multiple of {together} (micro_batch_size={micro_batch_size} x "
        f"{ranks} data-parallel processes). Set global_batch_size to {' or '.join(map(str, fitting))}{others}"
    )
