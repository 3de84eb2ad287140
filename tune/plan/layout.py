"""parallel=auto: the layout that `tune plan --search` puts first, for the processes that a run is started with."""

import os
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from omegaconf import DictConfig, OmegaConf

from tune import distributed, rehearsal
from tune.config import running
from tune.devices import DEVICES, Device, named
from tune.errors import TuneError
from tune.plan.planning import Job
from tune.types import as_given


def layout_of(parallel: DictConfig, cfg: DictConfig) -> dict[str, Any]:
    """The group `parallel` of the settings `cfg`, as `tune.distributed.init` takes it. With `parallel.auto`, `cfg` is
    given the fastest layout that fits, with its micro-batch, checkpointing and offload: on all processes what the first
    one finds, which tells it.

    Raises:
        TuneError: nothing fits, or the recipe, a setting or the device is not planned.
    """
    if parallel.get("auto"):
        here = distributed.join(cfg.get("device", "auto"), parallel.timeout)
        if rehearsal.current():  # no layout is looked for
            return {str(name): value for name, value in parallel.items() if name != "auto"}
        box: list[Any] = [None]
        if dist.get_rank() == 0:
            try:
                settings: Any = OmegaConf.to_container(cfg, resolve=True)
                # In a process of its own: planning makes groups of processes that are not there.
                with ProcessPoolExecutor(1, get_context("spawn")) as pool:
                    box = [pool.submit(best, settings, described(here), dist.get_world_size(), running()).result()]
                print("parallel=auto:", *(f"{key}={as_given(value)}" for key, value in box[0].items()), flush=True)
            except TuneError as error:
                box = [TuneError(f"parallel.auto: {error}")]
        dist.broadcast_object_list(box, src=0)
        if isinstance(box[0], TuneError):
            raise box[0]
        for key, value in box[0].items():
            OmegaConf.update(cfg, key, value)
        parallel.auto = False  # config.yaml says what was chosen
    return {str(name): value for name, value in parallel.items() if name != "auto"}


def best(settings: dict[str, Any], device: Device, processes: int, recipe: Path) -> dict[str, Any]:
    """The settings of the fastest layout of `recipe` that fits. Raises TuneError."""
    plan = Job(OmegaConf.create(settings), device, processes, recipe).search()[0]
    if not plan.fits:
        raise TuneError(
            f"no layout of {processes} processes fits {device.memory:,.1f} GiB: the smallest needs "
            f"{plan.peak / 2**30:,.1f} ({' '.join(plan.overrides)}). Start more processes, or lower max_seq_len"
        )
    return plan.settings


def described(here: torch.device) -> Device:
    """What planning knows of the device of this process, with its memory. Processes of a node share the host's. Raises
    TuneError if the device is not known."""
    beside = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / beside / 2**30
    if here.type == "cpu":
        return replace(DEVICES["cpu"], memory=host, host_memory=host, per_node=beside, cores=os.cpu_count() or 1)
    name = torch.cuda.get_device_name(here) if here.type == "cuda" else here.type
    if (known := named(name)) is None:
        raise TuneError(
            f"the speed of {name} is not known; known are {', '.join(DEVICES)}. Set the layout that "
            "`tune plan --search --device FILE` finds, with a description of the device"
        )
    memory = torch.cuda.get_device_properties(here).total_memory / 2**30
    return replace(known, memory=memory, host_memory=host, per_node=beside)
