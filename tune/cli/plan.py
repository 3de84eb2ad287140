"""Estimate the memory and time of a run, and find its best layout. It prints each process's memory by part, seconds of
a step, tokens per second, hours, cost and the bottleneck. --search finds the fastest layout that fits, --longest-row
the longest rows that fit, and --less-memory the settings that save memory. It only needs the model's config.json, and
downloads it for a Hugging Face Hub id. The dataset need not exist: all rows count as max_seq_len tokens.

    tune plan full_finetune model.path=./Llama-3.1-8B --world-size 8 --device h100 --search
"""

import atexit
import gc
import json
import sys
from argparse import ArgumentParser
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.table import Table

from tune import config, records
from tune.cli.hub import hub
from tune.cli.recipes import parse_options, recipe_of, settings
from tune.devices import DEVICES
from tune.devices import device as device_named
from tune.errors import TuneError
from tune.launchers import count
from tune.lookup import is_on_the_hub
from tune.rules import Facts, Level, judge
from tune.terminal import visible

MISSING = object()
LESS = "one of the settings that need less memory, or try --search"
# Bottlenecks of a step, and how to remove them.
BOUNDS = {
    "products": (
        "matrix products",
        "nothing: these products are needed; more devices make the run faster",
    ),
    "memory": ("memory bandwidth and small operations", "a larger micro_batch_size or packed=true"),
    "tensor": ("collectives within blocks", "a smaller parallel.tp, cp or ep"),
    "pipeline": ("stages that wait for other stages", "a larger global_batch_size, or a smaller parallel.pp"),
    "sharding": (
        "FSDP's communication",
        "a larger micro_batch_size, parallel.dp_replicate (copies within a node), or "
        "parallel.reduce_every_micro_batch=false",
    ),
    "optimizer": ("the optimizer's update", "a larger global_batch_size"),
    "rollout": (
        "sampling completions",
        "a larger sampling.max_rows, a smaller sampling.max_new_tokens, more devices, or vLLM as the engine",
    ),
    "input": ("assembling batches", "a larger model: assembling a batch takes longer than a step"),
    "offload": (
        "transfers to the host",
        "compute.activation_offload=false, compute.cpu_offload=false, or more devices",
    ),
}


def main(parser: ArgumentParser, arguments: list[str]) -> None:
    parser.usage = "tune plan RECIPE [--config FILE_OR_NAME] [key=value ...] --world-size N --device NAME [OPTIONS]"
    parser.add_argument("--world-size", metavar="N", type=count, default=1, help="processes (default: 1)")
    parser.add_argument("--device", metavar="NAME", required=True, help=f"{', '.join(DEVICES)} or a FILE")
    parser.add_argument("--search", action="store_true", help="find the fastest layout that fits")
    parser.add_argument("--less-memory", action="store_true", help="list the GiB that other settings save")
    parser.add_argument("--longest-row", metavar="KEY", help="find the largest KEY (such as max_seq_len) that fits")
    parser.add_argument("--price", metavar="X", type=float, help="price of a device per hour")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--calibrate", metavar="RUN", help="learn from a run on the device: RUN/device.json")
    parser.add_argument("recipe", metavar="RECIPE", nargs="?")
    options, rest = parse_options(parser, arguments)
    if not (options.recipe or options.calibrate):
        parser.error("RECIPE is missing")
    if not (options.price or 0) >= 0:
        parser.error(f"--price {options.price:g}: set 0 or more")

    gc.disable()  # imported objects stay; collecting among them takes a quarter of the import time
    from tune.plan import Job, calibrate, longest_rows, savings

    gc.freeze()  # skips them while layouts are traced (`tune.cli.main` unfreezes), and at exit
    atexit.register(gc.freeze)
    gc.enable()
    device = device_named(options.device)
    if options.calibrate:
        file, table = Path(options.calibrate) / "device.json", device
        recipe = recipe_of_run(file.parent, options.recipe)
        own: Any = None
        if options.recipe:  # the user trusts what these settings name
            own = OmegaConf.to_container(config.read(*recipe_of(options.recipe, rest), imports=False)[0])
        device = calibrate(file.parent, table, recipe, own)
        speed = device.product_share / table.product_share
        print(visible(f"wrote {file}: {speed:.3g} x {device.name}"), file=sys.stderr)
    if not options.recipe:
        return

    def changed(change: str = "", processes: int = options.world_size) -> Job:
        """Return the job with one more setting, if any."""
        cfg = without_data(options.recipe, [*rest, *([change] if change else [])])
        with_configs_of_the_hub(cfg)
        return Job(cfg, device, processes, file_of(options.recipe))

    job = changed()
    if job.cost:
        print(visible(f"note: model: {job.cost}"), file=sys.stderr)
    for warning in [*filter(None, [job.note]), *warnings_of(device, job.cfg, options.world_size)]:
        print(visible(f"warning: {warning}"), file=sys.stderr)
    searches = options.search or any(isinstance(group, DictConfig) and group.get("auto") for group in job.cfg.values())
    if searches and (given := [each for each in rest if each.partition("=")[0] in job.chosen]):
        print(f"warning: {' '.join(given)}: the search also tries other layouts", file=sys.stderr)
    if key := options.longest_row:
        start = OmegaConf.select(job.cfg, key, default=MISSING)
        if start is MISSING:
            raise TuneError(f"--longest-row {key}: is not a setting of {options.recipe}. Use max_seq_len")
        if type(start) is not int or start < 1:
            raise TuneError(f"--longest-row {key}: its value, {start}, is no number of tokens. Use max_seq_len")

        def with_rows(tokens: int) -> Job:
            print(f"planning {key}={tokens}", file=sys.stderr)
            return changed(f"{key}={tokens}")

        rows = longest_rows(start, with_rows, searches)
        kept = [] if searches else job.plan(job.layout()).overrides
        if rows and (note := changed(f"{key}={rows[-1].tokens}").note):
            print(f"warning: {note}", file=sys.stderr)
        return show_longest(key, rows, job, kept, options.json)
    plans = job.search() if searches else [job.plan(job.layout())]
    found = plans[0].as_dict() | of_the_run(job, plans[0], options.price)
    saved = dict[str, float]()
    if options.less_memory or not found["fits"]:
        saved = {change: plan.peak / 2**30 for change, plan in savings(job, plans[0].layout, changed)}
        found["less_memory_gib"] = saved
    if options.json:
        print(json.dumps(found | {"runners_up": [each.as_dict() for each in plans[1:6]]}, indent=2))
    else:
        show(found, plans)


def warnings_of(device: Any, cfg: DictConfig, processes: int) -> list[str]:
    """Return the warnings of the rules about the planned GPU."""
    if device.is_host:
        return []
    anywhere = {str(finding) for finding in judge(Facts(cfg, processes=processes))}
    there = judge(Facts(cfg, "cuda", processes, device.capability, is_here=False))
    return [str(finding) for finding in there if finding.level is Level.WARNING and str(finding) not in anywhere]


def with_configs_of_the_hub(cfg: DictConfig) -> None:
    """Replace models on the hub by folders with their config.json. Planning reads nothing else."""
    for key in ("model.path", "value.path", "teacher.path", "reference"):
        if is_on_the_hub(hub_id := str(OmegaConf.select(cfg, key))):
            with hub(hub_id) as huggingface_hub:
                file = huggingface_hub.hf_hub_download(hub_id, "config.json")
            OmegaConf.update(cfg, key, str(Path(file).parent))


def of_the_run(job: Any, plan: Any, price: float | None) -> dict[str, Any]:
    """Return what a plan says of the whole run."""
    hours = (job.max_steps or 1e9 / plan.tokens) * plan.step_seconds / 3600
    bottleneck = max(plan.seconds, key=lambda name: plan.seconds[name])
    return {
        "device": job.device.name,
        "devices": job.processes,
        "steps": job.max_steps,
        "tokens": job.max_steps * plan.tokens if job.max_steps else 1e9,
        "hours": hours,
        "cost": None if price is None else hours * price * job.processes,
        "checkpoint_gib": job.checkpoint_gib,
        "change": BOUNDS[bottleneck][1] if plan.fits else LESS,
    }


def file_of(recipe: str) -> Path:
    """Return the file of a recipe, or the recipe next to a config."""
    is_config = recipe.endswith((".yaml", ".yml"))
    return Path(recipe).with_suffix(".py") if is_config else config.find_recipe(recipe)


def recipe_of_run(run: Path, recipe: str | None) -> Path:
    """Return the file of a run's recipe if it is the library's, else of the planned one: a run folder may be another
    person's, and name any file. Raises TuneError if there is neither."""
    name = records.recipe_of(run)
    if name in config.list_recipes():
        return config.find_recipe(name)
    if recipe is None:
        raise TuneError(f"--calibrate: {run} is of the recipe {name}, which is not of the library. Name its RECIPE too")
    return file_of(recipe)


def without_data(recipe: str, rest: list[str]) -> DictConfig:
    """Return the settings; the dataset may be missing."""
    try:
        return settings(recipe, rest)
    except TuneError as error:
        if "dataset.path: is missing" not in str(error):
            raise
    return settings(recipe, [*rest, "dataset.path=none"])


def show(found: dict[str, Any], plans: list[Any]) -> None:
    """Print the first plan, described by `found`, and why the other `plans` are worse."""
    from tune.run import size_in_words

    console, best = Console(soft_wrap=True, highlight=False, markup=False), plans[0]
    title = f"peak memory, during: {found['peak_at']}"
    sizes = Table("GiB of each process", "", title=title, title_justify="left")
    for part in best.memory:
        if part != "frozen" or found["memory_gib"][part]:
            name = "other frozen models" if part == "frozen" else part.replace("_", " ")
            sizes.add_row(name, f"{found['memory_gib'][part]:,.2f}")
    sizes.add_section()
    sizes.add_row("total", f"{found['memory_gib']['total']:,.2f} of {best.device.memory:,.0f}")
    if best.host:
        sizes.add_row("and host memory", f"{found['host_gib']:,.2f} of an assumed {best.device.host_memory:,.0f}")
    times = Table("seconds of a step", "", title="time", title_justify="left")
    for name, value in best.seconds.items():
        times.add_row(BOUNDS[name][0], three_digits(value))
    times.add_section()
    times.add_row("total", three_digits(best.step_seconds))
    what = f"the run ({found['steps']:,} steps)" if found["steps"] else "a billion tokens"
    cost = "" if found["cost"] is None else f", cost {found['cost']:,.2f}"
    duration = f"{found['hours']:,.2f} hours" if found["hours"] >= 1 else f"{60 * found['hours']:,.2f} minutes"
    verdict = "fits" if best.fits else "DOES NOT FIT"
    console.print(sizes, times)
    console.print(visible(f"it {verdict}: {found['devices']} x {found['device']}, {best.tokens:,} tokens a step"))
    console.print(f"{found['tokens_per_second']:,.0f} tokens/s per device, MFU {found['mfu']:.1%}")
    console.print(f"{what}: {duration}{cost}; a checkpoint {size_in_words(found['checkpoint_gib'] * 2**30)}")
    console.print(f"bound by {BOUNDS[found['bottleneck']][0]}" if best.fits else "too little memory")
    console.print(f"to change: {found['change']}")
    if saved := found.get("less_memory_gib"):
        changes = Table("changed", "GiB", "saved", "fits", title="less memory", title_justify="left")
        for change, size in saved.items():
            fits = "yes" if size <= best.device.memory else ""
            changes.add_row(change, f"{size:,.2f}", f"{found['memory_gib']['total'] - size:,.2f}", fits)
        console.print(changes)
    if len(plans) > 1:
        console.print("\nthe fastest layout that fits:" if best.fits else "\nno layout fits; the smallest:")
        console.print(f"  {' '.join(best.overrides)}")
        console.print("and why others are not:")
        for other in (*plans[1:4], *[each for each in plans if not each.fits][:3]):
            console.print(f"  {' '.join(other.overrides)}: {_why(other, best)}")


def three_digits(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def show_longest(key: str, rows: list[Any], job: Any, kept: list[str], as_json: bool) -> None:
    """Print the longest rows that fit, and the settings of their layouts except those `kept`."""
    if as_json:
        print(json.dumps({"longest": [{key: tokens} | plan.as_dict() for tokens, plan in rows]}, indent=2))
        return
    if not rows:
        print(f"no row fits {job.processes} x {job.device.name}: even the shortest one needs more memory")
        return
    table = Table(key, "GiB", "tokens/s", "with", title=f"longest rows, {job.processes} x {job.device.name}")
    for tokens, plan in rows:
        row, changes = plan.as_dict(), [each for each in plan.overrides if each not in kept]
        table.add_row(
            f"{tokens:,}", f"{row['memory_gib']['total']:,.2f}", f"{row['tokens_per_second']:,.0f}", "\n".join(changes)
        )
    Console(soft_wrap=True, highlight=False, markup=False).print(table)


def _why(other: Any, best: Any) -> str:
    if other.host > other.device.host_memory * 2**30:
        return f"needs {other.host / 2**30:,.1f} GiB of host memory"
    if not other.fits:
        return f"needs {other.peak / 2**30:,.1f} GiB ({other.moment})"
    more = {name: value - best.seconds[name] for name, value in other.seconds.items()}
    return f"{other.step_seconds / best.step_seconds - 1:.1%} slower ({BOUNDS[max(more, key=lambda n: more[n])][0]})"
