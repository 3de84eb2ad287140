"""Add a column that a model computes once before training, such as log-probs of a reference or rewards."""

import hashlib
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from tune import rehearsal
from tune.collators import Batch
from tune.datasets.dataset import Dataset
from tune.datasets.kept_files import TELL, hash_of
from tune.datasets.loader import validation_batches
from tune.datasets.mix import Mixture
from tune.datasets.stream import Stream
from tune.errors import TuneError
from tune.files import written_aside

if TYPE_CHECKING:
    from tune.distributed import World

SUMMED = 1 << 16  # rows at a time


def require_kept(name: str, *parts: Any) -> None:
    """Raise TuneError if one of `parts` is a stream, whose rows are not available before training."""
    for stream in (part for part in parts if isinstance(part, Stream)):
        raise TuneError(
            f"{name}: the rows of {stream.name} are streamed and cannot be scored before training. Set streaming=false"
        )


@torch.no_grad()
def add_scores(
    dataset: Dataset | Mixture | Stream,
    name: str,
    score: Callable[[Batch], torch.Tensor],
    world: "World",
    *,
    micro_batch_size: int,
    pad_to: int | None,
    folder: Path,
    made_of: Any,
) -> None:
    """Add the column `name` with the results of `score` on each batch, in fp32.

    `score` returns a value for each document, `[documents]`, or values for each supervised token,
    `[num_supervised, values]`; other tokens get zeros.

    The values are stored in `folder` under a hash of the data and of `made_of`, JSON values that determine the scores,
    and reused. All processes must call this. Raises TuneError for a stream.
    """
    require_kept(name, dataset)

    def values_of(part: Dataset) -> np.ndarray:
        values = torch.zeros(())  # on the host: scores of a teacher can be tens of GB
        starts = torch.from_numpy(np.cumsum(part.lengths) - part.lengths).to(world.device)
        last, done = time.monotonic(), 0
        for _, batch in validation_batches(part, world, micro_batch_size, pad_to):
            scores, places, count = score(batch).float(), batch.documents.samples, len(starts)
            if scores.ndim > 1:
                places = (starts[places][batch.documents.ids] + batch.positions).flatten()[batch.supervised]
                count = int(part.lengths.sum())
            if not values.ndim:
                values = torch.zeros(count, *scores.shape[1:])
            values.index_add_(0, places.cpu(), scores.cpu())  # 0 for padding
            done += world.data_size * micro_batch_size
            if world.is_main and time.monotonic() - last > TELL:
                last = time.monotonic()
                print(f"computing {name}: {min(done, len(part)):,} of {len(part):,} rows", file=sys.stderr, flush=True)
        return torch.cat([world.sum(each).float().cpu() for each in values.split(SUMMED)]).numpy()

    for part in dataset.parts.values():
        if rehearsal.current():
            part.add_column(name, _rehearsed(part, score, world, micro_batch_size, pad_to))
            continue
        file = scores_file(folder, name, part, made_of)
        values = world.broadcast(_kept(file) if world.is_main else None)
        if values is None:
            values = values_of(part)
            if world.is_main:
                folder.mkdir(parents=True, exist_ok=True)
                with written_aside(file) as unfinished, unfinished.open("wb") as stream:
                    np.save(stream, values)
                    stream.write(_digest(values))
        part.add_column(name, values)


def scores_file(folder: Path, name: str, part: Dataset, made_of: Any) -> Path:
    """The file in `folder` with the column `name` of `part`: see `add_scores`."""
    return folder / f"{name}-{hash_of(part.fingerprint, made_of)}.npy"


def is_stored(file: Path) -> bool:
    """Whether the file has values that are not damaged."""
    return _kept(file) is not None


def _rehearsed(
    part: Dataset, score: Callable[[Batch], torch.Tensor], world: "World", micro_batch_size: int, pad_to: int | None
) -> np.ndarray:
    """Zeros in the shape of the scores; `score` runs on one batch only."""
    for _, batch in validation_batches(part, world, micro_batch_size, pad_to):
        scores = score(batch)
        count = len(part.lengths) if scores.ndim == 1 else int(part.lengths.sum())
        return np.zeros((count, *scores.shape[1:]), np.float32)
    return np.zeros(len(part.lengths), np.float32)


def _kept(file: Path) -> np.ndarray | None:
    """The values in a file; None if it is missing, unreadable or damaged, so that they are computed again."""
    try:
        with file.open("rb") as stream:
            values = np.load(stream)
            if stream.read() != _digest(values):
                raise ValueError("its digest differs")
            return values
    except FileNotFoundError:
        return None
    except Exception as error:  # NumPy raises many errors for a damaged header: a bad zip file, a huge array
        print(f"warning: {file} is damaged ({error}): computing its values again", file=sys.stderr, flush=True)
        return None


def _digest(values: np.ndarray) -> bytes:
    """The digest that follows the array in its file."""
    digest = hashlib.sha256(f"{values.dtype.str} {values.shape}".encode())
    digest.update(np.ascontiguousarray(values).data)
    return digest.digest()
