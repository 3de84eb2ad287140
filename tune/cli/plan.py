"""Say what a run needs before it starts: memory of each process by part, seconds of a step, tokens per second, hours
and cost, and what bounds it; with --search, the fastest layout that fits. Of the model config.json is enough; the
dataset need not exist: all rows count as max_seq_len tokens long.

    tune plan full_finetune model.path=./Llama-3.1-8B --world-size 8 --device h100 --search
"""

import json
import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.table import Table

from tune.cli.prepare import settings
from tune.errors import TuneError
from tune.lookup import locate

PLANNED = "full_finetune and lora_finetune"
LESS = (
    "memory.activation_checkpointing=full, a smaller micro_batch_size or max_seq_len, more devices; --search finds out"
)
NAMES = {
    "products": "matrix products",
    "memory": "memory bandwidth and small operations",
    "tensor": "collectives of tensor parallelism",
    "sharding": "FSDP's communication",
    "optimizer": "the optimizer's update",
    "offload": "transfers to the host",
}


def main(parser: ArgumentParser, arguments: Sequence[str]) -> None:
    parser.formatter_class = RawDescriptionHelpFormatter
    parser.usage = "tune plan RECIPE [--config FILE_OR_NAME] [key=value ...] --world-size N --device NAME [OPTIONS]"
    parser.add_argument("--world-size", metavar="N", type=int, default=1, help="processes (default: 1)")
    parser.add_argument("--device", metavar="NAME", required=True, help="h100, h200, a100, b200, mi300x, cpu or a FILE")
    parser.add_argument("--search", action="store_true", help="find the fastest layout that fits")
    parser.add_argument("--price", metavar="X", type=float, help="of a device for an hour")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--calibrate", metavar="RUN", help="learn from a run on such a device: RUN/device.json")
    parser.add_argument("recipe", metavar="RECIPE", nargs="?")
    options, rest = parser.parse_known_args(arguments)
    if options.world_size < 1:
        parser.error(f"argument --world-size: {options.world_size} is not a positive integer")
    if not (options.recipe or options.calibrate):
        parser.error("RECIPE is missing")

    from tune.preflight import devices

    device = devices.device(options.device)
    if options.calibrate:
        device = calibrate(Path(options.calibrate), device)
    if not options.recipe:
        return
    cfg = without_data(options.recipe, rest)
    job = job_of(cfg, device)
    if options.search:
        plans = job.search(options.world_size)
    else:
        plans = [job.plan(layout_of(cfg, options.world_size))]
    facts = facts_of(cfg, job, plans[0], options.price)
    if options.json:
        print(
            json.dumps(plans[0].as_dict() | facts | {"runners_up": [each.as_dict() for each in plans[1:6]]}, indent=2)
        )
        return
    show(plans, facts)


def calibrate(run: Path, device: Any) -> Any:
    """The device as it was in `run`, which is written there: its speed, and the memory that is not for tensors."""
    from tune.preflight import devices

    files = {name: run / name for name in ("run.json", "config.yaml", "metrics.jsonl")}
    if missing := [name for name, file in files.items() if not file.is_file()]:
        raise TuneError(f"--calibrate: {run} has no {' and no '.join(missing)}: it is not the folder of a run")
    lines = [json.loads(line) for line in files["metrics.jsonl"].read_text().splitlines()]
    steps = [each for each in lines if "step_seconds" in each][1:]  # the first one warms up
    if not steps:
        raise TuneError(f"--calibrate: {run} has not two steps to measure")
    cfg = OmegaConf.load(files["config.yaml"])
    assert isinstance(cfg, DictConfig)
    cfg.max_seq_len = round(median(each["tokens"] for each in steps) / cfg.global_batch_size)
    found = devices.calibrated(
        job_of(cfg, device).plan(layout_of(cfg, json.loads(files["run.json"].read_text())["processes"])),
        seconds=median(each["step_seconds"] - each["data_seconds"] for each in steps),
        gib=max(each["peak_memory_gib"] for each in steps),
    )
    devices.save(found, run / "device.json")
    speed = found.product_share / device.product_share
    print(f"{run / 'device.json'} is written: {speed:.3g} x {device.name}", file=sys.stderr)
    return found


def without_data(recipe: str, rest: list[str]) -> DictConfig:
    """The settings; a dataset need not be named."""
    try:
        return settings(recipe, rest)
    except TuneError as error:
        if "dataset.path: is missing" not in str(error):
            raise
    return settings(recipe, [*rest, "dataset.path=none"])


def job_of(cfg: DictConfig, device: Any) -> Any:
    """What the settings train. Raises TuneError for a recipe that is not planned."""
    import torch

    from tune import peft, quantization
    from tune.config import instantiate
    from tune.loggers import flops_per_token
    from tune.losses.chunks import default_chunk_tokens
    from tune.preflight.optimizer import bytes_of_states
    from tune.preflight.planning import Job

    component = cfg.get("loss", {}).get("_component_")
    if not component or getattr(locate(component), "rows", None) or {"max_prompt_len", "teacher"} & set(cfg):
        raise TuneError(
            f"plan: this recipe does more than a forward and a backward of one model; planned are {PLANNED}"
        )
    if cfg.get("quantization", {}).get("qat"):
        raise TuneError("quantization.qat: what rounded weights take is not planned yet; plan without it")
    with torch.device("meta"):
        model = instantiate(cfg.model)
    if cfg.get("quantization", {}).get("weights"):
        quantization.quantize_linears(model, double=cfg.quantization.double)
    if "adapter" in cfg:
        peft.add_adapters(model, instantiate(cfg.adapter))
    if device.name != "cpu" and "chunk_tokens" in cfg.loss and cfg.loss.chunk_tokens is None:
        cfg.loss.chunk_tokens = default_chunk_tokens(torch.empty(model.config.vocab_size, 1, device="meta"))
    return Job(
        model, instantiate(cfg.loss), device,
        seq_len=cfg.max_seq_len, global_batch_size=cfg.global_batch_size, dtype=cfg.dtype,
        master_dtype=cfg.master_dtype, compile=cfg.compile, states=bytes_of_states(instantiate, cfg.optimizer),
        flops=flops_per_token(model, cfg.max_seq_len),
    )  # fmt: skip


def layout_of(cfg: DictConfig, processes: int) -> Any:
    from tune.preflight.memory import Layout

    if others := [f"{axis}={cfg.parallel[axis]}" for axis in ("cp", "ep", "pp") if cfg.parallel.get(axis, 1) != 1]:
        raise TuneError(
            f"parallel.{others[0]}: this axis is not planned yet; planned are dp_replicate, dp_shard and tp"
        )
    copies, tp, shards = cfg.parallel.dp_replicate, cfg.parallel.tp, cfg.parallel.dp_shard
    shards = processes // (copies * tp) if shards == "auto" else shards
    if copies * tp * shards != processes:
        raise TuneError(
            f"parallel: dp_replicate={copies} x dp_shard={cfg.parallel.dp_shard} x tp={tp} does not make "
            f"--world-size {processes}"
        )
    return Layout(
        copies, shards, tp, cfg.micro_batch_size, 1, cfg.memory.activation_checkpointing,
        cfg.memory.activation_offload, cfg.memory.cpu_offload, cfg.parallel.reduce_every_micro_batch,
        cfg.optimizer_in_backward,
    )  # fmt: skip


def facts_of(cfg: DictConfig, job: Any, plan: Any, price: float | None) -> dict[str, Any]:
    """What follows for the whole run, or for a billion tokens where its steps are not known."""
    from tune.preflight.planning import REMEDIES

    steps = cfg.max_steps
    hours = (steps or 1e9 / plan.tokens) * plan.seconds.total / 3600
    return {
        "device": job.device.name,
        "devices": plan.layout.size,
        "steps": steps,
        "tokens": steps * plan.tokens if steps else 1e9,
        "hours": hours,
        "cost": None if price is None else hours * price * plan.layout.size,
        "checkpoint_gib": job.checkpoint_bytes(plan.layout) / 2**30,
        "change": REMEDIES[plan.bottleneck] if plan.fits else LESS,
    }


def show(plans: list[Any], facts: dict[str, Any]) -> None:
    console, best = Console(soft_wrap=True), plans[0]
    title = f"memory at its peak, in: {best.memory.moment}"
    sizes = Table("GiB of each process", "", title=title, title_justify="left")
    for part, size in best.memory.parts.items():
        sizes.add_row(part.replace("_", " "), f"{size / 2**30:,.2f}")
    sizes.add_section()
    sizes.add_row("total", f"{best.memory.total / 2**30:,.2f} of {best.device.memory:,.0f}")
    if best.memory.host:
        sizes.add_row("and host memory", f"{best.memory.host / 2**30:,.2f} of {best.device.host_memory:,.0f}")
    times = Table("seconds of a step", "", title="time", title_justify="left")
    for name, value in vars(best.seconds).items():
        times.add_row(NAMES[name], f"{value:,.4g}")
    times.add_section()
    times.add_row("total", f"{best.seconds.total:,.4g}")
    console.print(sizes, times)
    what = f"the run ({facts['steps']:,} steps)" if facts["steps"] else "a billion tokens"
    cost = "" if facts["cost"] is None else f", cost {facts['cost']:,.2f}"
    verdict = "fits" if best.fits else "DOES NOT FIT"
    for line in (
        f"it {verdict}: {facts['devices']} x {facts['device']}, {best.tokens:,} tokens a step",
        f"{best.tokens_per_second:,.0f} tokens/s per device, MFU {best.mfu:.1%}",
        f"{what}: {facts['hours']:,.2f} hours{cost}; a checkpoint {facts['checkpoint_gib']:,.2f} GiB",
        f"bound by {NAMES[best.bottleneck]}" if best.fits else "too little memory",
        f"to change: {facts['change']}",
    ):
        console.print(line, highlight=False)
    if len(plans) > 1:
        console.print("\nthe fastest layout that fits:" if best.fits else "\nno layout fits; the smallest:")
        console.print(f"  {' '.join(best.as_dict()['overrides'])}", highlight=False)
        console.print("and why others are not:")
        for other in (*plans[1:4], *[each for each in plans if not each.fits][:3]):
            console.print(f"  {' '.join(other.as_dict()['overrides'])}: {_why(other, best)}", highlight=False)


def _why(other: Any, best: Any) -> str:
    if other.memory.host > other.device.host_memory * 2**30:
        return f"needs {other.memory.host / 2**30:,.1f} GiB of host memory"
    if not other.fits:
        return f"needs {other.memory.total / 2**30:,.1f} GiB ({other.memory.moment})"
    more = {name: value - getattr(best.seconds, name) for name, value in vars(other.seconds).items()}
    name = max(more, key=lambda each: more[each])
    return f"{other.seconds.total / best.seconds.total - 1:.1%} slower ({NAMES[name]})"
