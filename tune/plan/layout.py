"""parallel=auto: the best layout of `tune plan --search` for the processes of a run."""

from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch.distributed as dist
from omegaconf import OmegaConf

from tune import distributed, processor
from tune.devices import Device
from tune.errors import TuneError
from tune.plan.planning import Job
from tune.rules import Facts


def layout_of(run: Facts) -> dict[str, Any]:
    """Return the settings of the fastest layout that fits, by key, and `parallel.auto` false.

    At the start of a run, the first process plans, and the others get its result. Otherwise no layout is searched.

    Raises:
        TuneError: nothing fits, or the recipe, a setting or the device is not planned.
    """
    if run.recipe is None:
        return {"parallel.auto": False}
    here = distributed.join(run("device", "auto"), run("parallel.timeout", 60))
    box: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            settings: Any = OmegaConf.to_container(run.cfg, resolve=True)
            # In a separate process, because planning creates groups of fake processes.
            with ProcessPoolExecutor(1, get_context("spawn")) as pool:
                box = [
                    pool.submit(best, settings, processor.described(here), dist.get_world_size(), run.recipe).result()
                ]
        except TuneError as error:
            box = [error]
    dist.broadcast_object_list(box, src=0)
    if isinstance(box[0], TuneError):
        raise box[0]
    return {**box[0], "parallel.auto": False}


def best(settings: dict[str, Any], device: Device, processes: int, recipe: Path) -> dict[str, Any]:
    """Return the settings of the fastest layout of `recipe` that fits. Raises TuneError."""
    plan = Job(OmegaConf.create(settings), device, processes, recipe).search()[0]
    if not plan.fits:
        raise TuneError(
            f"no layout of {processes} processes fits {device.memory:,.1f} GiB: the smallest needs "
            f"{plan.peak / 2**30:,.1f} ({' '.join(plan.overrides)}). Start more processes, or lower max_seq_len"
        )
    return plan.settings
