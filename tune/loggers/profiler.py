"""A trace of a few optimizer steps by torch.profiler."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from tune.distributed import World
from tune.types import PositiveInt


@contextlib.contextmanager
def profile(
    folder: Path, world: World, start: PositiveInt | None = None, steps: PositiveInt = 3
) -> Iterator[Callable[[int], None]]:
    """Trace optimizer steps `start` to `start + steps - 1` of rank 0 into `folder` (for Perfetto or TensorBoard).

    Yields a function to call with the number of each step before it; `start=None` makes it do nothing.
    """
    if start is None or not world.is_main:
        yield lambda step: None
        return
    activities = [torch.profiler.ProfilerActivity.CPU]
    if world.device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    profiler = torch.profiler.profile(activities=activities, record_shapes=True)
    running = False

    def before(step: int) -> None:
        nonlocal running
        if not running and start <= step < start + steps:
            profiler.start()
            running = True
        elif running and step >= start + steps:
            running = finish()

    def finish() -> bool:
        profiler.stop()
        folder.mkdir(exist_ok=True)
        profiler.export_chrome_trace(str(folder / f"steps-{start}-to-{start + steps - 1}.json"))
        return False

    try:
        yield before
    finally:
        if running:
            finish()
