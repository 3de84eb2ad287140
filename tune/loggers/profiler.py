"""A trace of a few optimizer steps by torch.profiler."""

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
    if start is None or not world.is_main:
        yield from batches
        return
    activities = [torch.profiler.ProfilerActivity.CPU]
    if world.device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    profiler = torch.profiler.profile(activities=activities, record_shapes=True)
    running = False

    def finish() -> None:
        profiler.stop()
        folder.mkdir(exist_ok=True)
        profiler.export_chrome_trace(str(folder / f"steps-{start}-to-{start + steps - 1}.json"))

    try:
        for step, batch in batches:
            if running and step >= start + steps:
                finish()
                running = False
            elif not running and start <= step < start + steps:
                profiler.start()
                running = True
            yield step, batch
    finally:
        if running:
            finish()
