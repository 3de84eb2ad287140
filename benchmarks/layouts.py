"""Check whether the layout that `tune plan --search` ranks first is the fastest one on this machine.

    python benchmarks/layouts.py FOLDER [PROCESSES ...]

Trains a tiny Llama in fp32 on 1, 2 and 4 processes, which share the cores. The device is calibrated on one process with
the whole batch at once. TRIED of the layouts that fit are measured, chosen evenly from the planned order. All exist in
the same processes and take steps in turn, so other work on the machine slows all of them equally. The result is the
median over rounds of a layout's seconds relative to the first one's.
"""

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))
from helpers import save_checkpoint  # noqa: E402

from tune import checkpointers, config, distributed, optimizers  # noqa: E402
from tune.collators import Batch  # noqa: E402
from tune.devices import DEVICES  # noqa: E402
from tune.plan import layout_of  # noqa: E402

TRIED, ROUNDS = 12, 7
AXES = ("dp_replicate", "dp_shard", "cp", "tp", "ep", "pp")
SHAPE = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4, "num_attention_heads": 4}


def settings(folder: str, *overrides: str) -> Any:
    sizes = ["max_seq_len=128", "global_batch_size=8", "device=cpu", "compute.dtype=fp32", "checkpointer.async=false"]
    return config.load("pipeline_finetune", [f"model.path={folder}", "dataset.path=none", *sizes, *overrides])


def step_of(cfg: Any) -> Callable[[], None]:
    """Return a training step in the layout of `cfg`, like the recipe's."""
    world = distributed.init("cpu", max_seq_len=cfg.max_seq_len, **layout_of(cfg.parallel, cfg))
    with torch.device("meta"):
        model = config.instantiate(cfg.model)
    weights = checkpointers.Pretrained(cfg.model.path, model)
    distributed.parallelize(model, world, dtype="fp32", activation_checkpointing=cfg.compute.activation_checkpointing)
    weights.load(model)
    pipeline, loss_fn = distributed.Pipeline(model, world), config.instantiate(cfg.loss)
    optimizer = config.instantiate(cfg.optimizer, optimizers.parameter_groups(model, 1e-6))
    micro, length = cfg.micro_batch_size, cfg.max_seq_len
    ones = np.ones((1, micro * length), dtype=np.int64)
    batch = Batch.of(ones, labels=ones, documents=np.arange(micro).repeat(length)[None])

    def step() -> None:
        for turn in pipeline.turns([batch] * (cfg.global_batch_size // world.data_size // micro)):
            loss = model(turn, loss_fn)
            for due, is_last in pipeline.due(loss):
                distributed.set_gradient_sync(model, is_last)
                due.backward()
        distributed.clip_grad_norm_(model.parameters(), 1.0, pipeline)
        optimizer.step()
        optimizer.zero_grad()

    return step


def measure(folder: str, layouts: list[list[str]]) -> None:
    """Measure the seconds of each layout by round; the first process prints them as JSON."""
    steps = [step_of(settings(folder, *each)) for each in layouts]
    found = []
    for _ in range(1 + ROUNDS):
        found.append([])
        for step in steps:
            dist.barrier()
            start = time.perf_counter()
            step()
            dist.barrier()
            found[-1].append(time.perf_counter() - start)
    if dist.get_rank() == 0:
        print("found", json.dumps(found[1:]), flush=True)  # the first round warms up
    dist.barrier()


def ranks(values: list[float]) -> np.ndarray:
    return np.argsort(np.argsort(values))


def printed(arguments: list[str], *launcher: str) -> Any:
    """Run this file with these arguments, and parse the JSON in its output line that begins with `found`."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, *launcher, __file__, *arguments]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True, text=True)
    (line,) = (each for each in done.stdout.splitlines() if each.startswith("found "))
    return json.loads(line.removeprefix("found "))


def rounds_of(folder: str, processes: int, layouts: list[list[str]]) -> list[list[float]]:
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    os.environ["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // processes))  # like `tune run`
    return printed(["--measure", folder, json.dumps(layouts)], *launcher)


def main() -> None:
    folder, numbers = sys.argv[1], [int(each) for each in sys.argv[2:]] or [1, 2, 4]
    if not Path(folder, "config.json").exists():
        save_checkpoint(Path(folder), **SHAPE)
    known = min(each for (each,) in rounds_of(folder, 1, [["micro_batch_size=8"]]))
    for processes in numbers:
        plans = printed(["--plan", folder, str(processes), str(known)])  # creates fake process groups
        tried = [plans[round(at)] for at in np.linspace(0, len(plans) - 1, min(TRIED, len(plans)))]
        rounds = rounds_of(folder, processes, [each for _, each in tried])
        times = [statistics.median(each[at] / each[0] for each in rounds) for at in range(len(tried))]
        print(f"\n{processes} processes: {len(plans)} layouts fit, {len(tried)} tried; the first takes", end=" ")
        print(f"{statistics.median(each[0] for each in rounds):.3f} s ({tried[0][0]:.3f} planned)")
        for (planned, overrides), taken in zip(tried, times, strict=True):
            unused = ("=null", "=none", "=false", "zero_stage=3", *(f"{axis}=1" for axis in AXES))
            shown = " ".join(each for each in overrides if not each.endswith(unused))
            print(f"  planned {planned / tried[0][0]:5.2f}, measured {taken:5.2f}  {shown}")
        correlation = np.corrcoef(ranks([each for each, _ in tried]), ranks(times))[0, 1]
        print(f"  rank correlation {correlation:.2f}; the fastest takes {min(times):.2f} of the first", flush=True)


def plan(folder: str, processes: int, known: float) -> None:
    """Return seconds and overrides of the layouts that fit, fastest first; the whole batch takes `known` at once."""
    from tune.plan import Job

    once, cpu = settings(folder, "micro_batch_size=8"), DEVICES["cpu"]
    recipe = config.find_recipe("pipeline_finetune")
    job = Job(once, cpu, 1, recipe)
    found = Job(settings(folder), cpu.at_speed(job.plan(job.layout()).step_seconds / known), processes, recipe).search()
    print("found", json.dumps([(each.step_seconds, each.overrides) for each in found if each.fits]))


if __name__ == "__main__":
    if sys.argv[1] == "--measure":
        measure(sys.argv[2], json.loads(sys.argv[3]))
    elif sys.argv[1] == "--plan":
        plan(sys.argv[2], int(sys.argv[3]), float(sys.argv[4]))
    else:
        main()
