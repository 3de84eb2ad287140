"""A trace of a few optimizer steps by torch.profiler."""

import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TypeVar

import torch

from tune.distributed import World
from tune.types import PositiveInt

T = TypeVar("T")


def profile(
    batches: Iterable[tuple[int, T]],
    folder: Path,
    world: World,
    start: PositiveInt | None = None,
    steps: PositiveInt = 3,
) -> Iterator[tuple[int, T]]:
    """Iterate over `batches`, and trace optimizer steps `start` to `start + steps - 1` of rank 0 into `folder` (for
    Perfetto or TensorBoard); `start=None` traces nothing."""
    remaining = iter(batches)
    for step, batch in remaining:
        if start is None or not start <= step < start + steps or not world.is_main:
            yield step, batch
            continue
        profiler = torch.profiler.profile(record_shapes=True)  # of the host, and of a GPU if there is one
        try:
            with profiler:
                yield step, batch
                yield from itertools.islice(remaining, start + steps - 1 - step)
        finally:
            folder.mkdir(exist_ok=True)
            profiler.export_chrome_trace(str(folder / f"steps-{start}-to-{start + steps - 1}.json"))
