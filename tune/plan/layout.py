"""parallel=auto: the best layout of `tune plan --search` for the processes of a run."""

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch.distributed as dist
from omegaconf import OmegaConf

from tune import distributed, processor
from tune.devices import Device
from tune.errors import TuneError
from tune.plan.planning import Job
from tune.rules import Facts
from tune.run_settings import escaped


def layout_of(run: Facts) -> dict[str, Any]:
    """Return the settings of the fastest layout that fits, by key, and `parallel.auto` false.

    At the start of a run, the first process plans, and the others get its result. Otherwise no layout is searched.

    Raises:
        TuneError: nothing fits, or the recipe, a setting or the device is not planned.
    """
    if run.recipe is None:
        return {"parallel.auto": False}
    here = distributed.join(run("device", "auto"), run("parallel.timeout", 60))
    answer: list[Any] = [None]
    if dist.get_rank() == 0:
        settings: Any = OmegaConf.to_container(run.cfg, resolve=True)
        try:
            device = asdict(processor.described(here))
            answer = [_of_process(settings, device, dist.get_world_size(), str(run.recipe))]
        except Exception as error:  # whatever it is: the other processes wait for an answer
            named = "" if isinstance(error, TuneError) else f"parallel.auto: {type(error).__name__}: "
            answer = [{"error": f"{named}{error}"}]
    dist.broadcast_object_list(answer, src=0)
    if "error" in answer[0]:
        raise TuneError(answer[0]["error"])
    return {**answer[0]["settings"], "parallel.auto": False}


def _of_process(*job: Any) -> dict[str, Any]:
    """Plan in a process of its own, because planning makes groups of fake processes. `job`: arguments of `best`.

    The process does not read the main module again: a recipe may call its main function there.
    """
    outside = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-m", "tune.plan.layout"]
    done = subprocess.run(command, input=json.dumps(job), env=outside, capture_output=True, text=True)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"it ended with exit code {done.returncode}"]
        return {"error": f"parallel.auto: no layout can be planned: {lines[-1]}. Set the layout by hand"}
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def best(settings: dict[str, Any], device: Device, processes: int, recipe: Path) -> dict[str, Any]:
    """Return the settings of the fastest layout of `recipe` that fits. Raises TuneError."""
    plan = Job(OmegaConf.create(escaped(settings)), device, processes, recipe).search()[0]
    if not plan.fits:
        raise TuneError(
            f"no layout of {processes} processes fits {device.memory:,.1f} GiB: the smallest needs "
            f"{plan.peak / 2**30:,.1f} ({' '.join(plan.overrides)}). Start more processes, or lower max_seq_len"
        )
    return plan.settings


def main() -> None:
    """Read the job of `_of_process` from standard input, and print its answer as the last line."""
    settings, device, processes, recipe = json.load(sys.stdin)
    answer: dict[str, Any]
    capability = device["capability"] and tuple(device["capability"])
    try:
        answer = {"settings": best(settings, Device(**device | {"capability": capability}), processes, Path(recipe))}
    except TuneError as error:
        answer = {"error": str(error)}
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
