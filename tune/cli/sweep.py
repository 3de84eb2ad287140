"""Run a recipe for each combination of values with Ray Tune, and compare the runs.

    tune sweep lora_finetune --over optimizer.lr=1e-5,2e-5 adapter.rank=8,16 --config my.yaml
    tune sweep full_finetune --over optimizer.lr=1e-5,2e-5,4e-5 --schedule asha --metric validation_loss model.path=...

Each run is a process with its own folder below --out. As many runs as the cluster has room for go on at once. Arguments
after RECIPE go to the recipe, except options of the sweep.
"""

import functools
import hashlib
import itertools
import json
import math
import os
import re
import shlex
import signal
import subprocess
import sys
from argparse import ArgumentParser
from collections.abc import Collection, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from tune import config, records
from tune.cli.output import print_table
from tune.cli.recipes import default_config, parse_options
from tune.errors import TuneError
from tune.lookup import did_you_mean, in_shell, local_path
from tune.ray_cluster import connect

POLL = 0.5  # seconds
LONGEST = 120  # characters of a folder's name


def main(parser: ArgumentParser, arguments: list[str]) -> None:
    parser.usage = "tune sweep RECIPE --over KEY=A,B[,...] [KEY=...] [OPTIONS] [--config FILE_OR_NAME] [key=value ...]"
    parser.add_argument("recipe", metavar="RECIPE")
    parser.add_argument("--over", nargs="+", required=True, metavar="KEY=A,B", help="each combination is a run")
    parser.add_argument("--schedule", choices=["all", "asha"], default="all", help="asha ends runs that fall behind")
    parser.add_argument("--metric", default="loss", help="to compare by (default: loss)")
    parser.add_argument(
        "--higher-is-better", choices=["true", "false"], help="for a --metric that neither tune nor a task defines"
    )
    parser.add_argument("--grace", type=int, default=10, help="asha: steps that every run gets (default: 10)")
    parser.add_argument("--out", type=local_path, help="default: runs/sweep-TIME")
    parser.add_argument("--address", help="of a Ray cluster (default: RAY_ADDRESS, or a new one on this machine)")
    parser.add_argument("--cpus-per-run", type=int, default=1)
    parser.add_argument("--gpus-per-run", type=int, help="default: 1 if the cluster has GPUs")
    options, settings = parse_options(parser, arguments)
    values, settings = swept(options.over, settings)
    recipe = config.find_recipe(options.recipe)
    out = (options.out or Path(f"runs/sweep-{datetime.now():%Y%m%d-%H%M%S}")).absolute()
    if out.exists() and not (out / "ray").is_dir() and (not out.is_dir() or any(out.iterdir())):
        raise TuneError(f"--out {out} is not a sweep folder. Name a folder that is absent or empty")
    runs = [dict(zip(values, each, strict=True)) for each in itertools.product(*values.values())]
    default = default_config(recipe)
    found = [  # report wrong keys and values before any run starts
        config.load(str(default), [*settings, *(f"{key}={value}" for key, value in run.items())])
        for run in (runs if default else ())
    ]
    is_more_better = direction(options.metric, options.higher_is_better, found)
    ray, resources = connect(options.address, os.cpu_count() or 1)
    gpus = int("GPU" in resources) if options.gpus_per_run is None else options.gpus_per_run
    from ray import tune as ray_tune
    from ray.tune.schedulers import ASHAScheduler

    mode = "max" if is_more_better else "min"
    place = {"recipe": str(recipe.absolute()), "settings": settings, "out": str(out), "metric": options.metric}
    scheduler = (
        ASHAScheduler("step", options.metric, mode, max_t=10**9, grace_period=options.grace)
        if options.schedule == "asha"
        else None
    )
    tuner = ray_tune.Tuner(
        ray_tune.with_resources(train, {"CPU": options.cpus_per_run, "GPU": gpus}),
        param_space={"run": ray_tune.grid_search(runs), "place": place | {"folder": os.getcwd()}},
        tune_config=ray_tune.TuneConfig(scheduler=scheduler),
        run_config=ray_tune.RunConfig(storage_path=str(out), name="ray", verbose=0),
    )
    try:
        failed = [name_of(result.config["run"]) for result in tuner.fit() if result.error]
    finally:
        ray.shutdown()
    sys.exit(compare(out, runs, options.metric, is_more_better, failed))


def direction(metric: str, stated: str | None, found: Sequence[Any]) -> bool:
    """Return whether a higher value of the metric is better: as `stated`, as the settings `found` state it for
    `checkpointer.keep_best`, or as `keep_best` knows it. Raises TuneError if it is unknown."""
    from tune.checkpointers import more_is_better, unknown_direction

    is_more_better = None if stated is None else stated == "true"
    if is_more_better is None:
        kept = [cfg for cfg in found if OmegaConf.select(cfg, "checkpointer.keep_best") == metric]
        in_settings = {OmegaConf.select(cfg, "checkpointer.higher_is_better") for cfg in kept}
        is_more_better = in_settings.pop() if len(in_settings) == 1 else None
    is_more_better = more_is_better(metric, told_by_tasks(metric, found), is_more_better)
    if is_more_better is None:
        raise unknown_direction(f"--metric {metric}", metric, "--higher-is-better")
    return is_more_better


def compare(
    out: Path, runs: Sequence[dict[str, str]], metric: str, more_is_better: bool, failed: Collection[str]
) -> bool:
    """Write sweep.json and report.html, and print a table of the runs below `out`, the best first.

    `failed` are the folder names of failed runs. Returns whether a run failed. Raises TuneError if no run has the
    metric.
    """
    rows = [row(out / name_of(run), run, metric, name_of(run) in failed) for run in runs]
    if not any(row["state"] == "failed" or row["value"] is not None for row in rows):
        known = sorted({name for run in runs for name in records.read(out / name_of(run)).columns})
        hint = f"{did_you_mean(metric, known)} They have {', '.join(known)}"
        raise TuneError(
            f"--metric {metric}: no run has this metric.{hint}. tune report {in_shell(out)}/* compares them"
        )
    rows = ranked(rows, more_is_better)
    (out / "sweep.json").write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")
    measured = [each for each in rows if each["value"] is not None]
    if measured:
        records.write_report([Path(each["folder"]) for each in measured], out / "report.html")
    print_table(
        [(*runs[0], metric, "steps", "state", "run")]
        + [
            (*each["settings"].values(), value_of(each), str(each["steps"]), each["state"], each["folder"])
            for each in rows
        ]
    )
    best = f"the {'highest' if more_is_better else 'lowest'} {metric} is best and listed first; "
    if measured:
        is_ranked = measured[0]["state"] != "failed"
        print(f"{best if is_ranked else ''}all curves: {out / 'report.html'}")
    return any(each["state"] == "failed" for each in rows)


def swept(over: Sequence[str], settings: Sequence[str]) -> tuple[dict[str, list[str]], list[str]]:
    """Return the values of each `--over` key, and the recipe's own arguments.

    The first argument of `--over` with a single value, and all after it, belong to the recipe.
    """
    values: dict[str, list[str]] = {}
    for position, each in enumerate(over):
        key, equals, text = each.partition("=")
        found = [text] if Path(text).exists() else separated(text)
        if not (key and equals):
            raise TuneError(f"--over: '{each}' is not KEY=A,B")
        if len(found) < 2:
            if not values:
                raise TuneError(f"--over: {each} has one value. List several with commas: {key}=A,B")
            return values, [*over[position:], *settings]
        if key in values:
            raise TuneError(f"--over: {key} occurs twice. Give it once")
        if twice := [value for value in found if found.count(value) > 1]:
            raise TuneError(f"--over: {key} has the value {twice[0]} twice. List each value once")
        values[key] = found
    return values, list(settings)


def told_by_tasks(metric: str, found: Sequence[Any]) -> dict[str, bool | None]:
    """Return, for the task metrics of these settings, whether more is better; {} for other metrics."""
    told: dict[str, bool | None] = {}
    if "/" not in metric:
        return told
    seen: list[Any] = []
    for cfg in found:
        of_tasks = OmegaConf.select(cfg, "evaluate.tasks"), OmegaConf.select(cfg, "evaluate.include_path")
        if of_tasks[0] and of_tasks not in seen:
            from tune.evaluation import Tasks

            seen.append(of_tasks)
            told |= Tasks(of_tasks[0], config.instantiate(cfg.tokenizer), of_tasks[1]).higher_is_better
    return told


def ranked(rows: list[dict[str, Any]], more_is_better: bool) -> list[dict[str, Any]]:
    """Sort rows, the best first. Failed runs and runs without a value come last."""
    sign = -1 if more_is_better else 1
    return sorted(rows, key=lambda row: (row["state"] == "failed", row["value"] is None, sign * (row["value"] or 0)))


def value_of(row: dict[str, Any]) -> str:
    """Return the value of the metric, with its step if it is not the last step."""
    late = f" (step {row['step']})" if row["step"] not in (None, row["steps"]) else ""
    return "" if row["value"] is None else f"{row['value']}{late}"


def separated(text: str) -> list[str]:
    """Split A,B into values. A list, a group or a double-quoted text is one value: "a,b",c."""
    values = re.findall(r'(?:"(?:[^"\\]|\\.)*"|\[[^]]*\]|\{[^}]*\}|[^,])+', text)
    for place, value in enumerate(values):
        with suppress(ValueError):
            if value.startswith('"'):
                values[place] = json.loads(value)
    return values


def train(parameters: dict[str, Any]) -> None:
    """Start the run as a process in a Ray Tune worker and report its metrics. It saves if Ray ends it early."""
    from ray import tune as ray_tune

    from tune.distributed import end_with_parent

    place, run = parameters["place"], parameters["run"]
    os.chdir(place["folder"])
    folder, seen = Path(place["out"]) / name_of(run), 0
    folder.mkdir(parents=True, exist_ok=True)
    settings = [*place["settings"], *(f"{key}={value}" for key, value in run.items()), f"output_dir={folder}"]
    dies_too = functools.partial(end_with_parent, signal.SIGKILL)
    command = [sys.executable, place["recipe"], *settings]
    with (folder / "output.txt").open("ab") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, preexec_fn=dies_too)
    try:
        ended = False
        while not ended:
            with suppress(subprocess.TimeoutExpired):
                ended = process.wait(POLL) is not None
            for step, value in measured(folder, place["metric"]):
                if step > seen:
                    seen = step
                    ray_tune.report({"step": step, place["metric"]: value})
    finally:
        process.terminate()
        process.wait()
    if process.returncode:
        output_lines = (folder / "output.txt").read_text(encoding="utf-8", errors="replace").splitlines()
        reason = next((f": {line}" for line in reversed(output_lines) if "error" in line.lower()), "")
        raise TuneError(
            f"{shlex.join(settings)} exited with code {process.returncode}{reason}. See {folder / 'output.txt'}"
        )


def measured(folder: Path, metric: str) -> list[tuple[int, float]]:
    """Return the steps of a run that have a metric, with its values."""
    if not (folder / "metrics.jsonl").exists():
        return []
    steps, values = records.read(folder).known(metric)
    return [*zip(steps.astype(int).tolist(), values.tolist(), strict=True)]


def name_of(run: dict[str, str]) -> str:
    """Return a run's folder name from its values, with a digest if the name cannot hold them all unchanged."""
    name = ",".join(f"{key.rpartition('.')[2]}={value}" for key, value in run.items())
    if len(name) <= LONGEST and all(re.fullmatch(r"[\w.+-]*", value, re.ASCII) for value in run.values()):
        return name
    digest = hashlib.sha256(json.dumps(run).encode()).hexdigest()[:8]
    return f"{re.sub('[^a-zA-Z0-9_.=,+-]', '_', name)[:LONGEST]}-{digest}"


def row(folder: Path, run: dict[str, str], metric: str, failed: bool) -> dict[str, Any]:
    """Return a run's result: the metric of the exported weights, with its step. A run that Ray ended early may not have
    recorded its end; its result is the last value."""
    state, step, value, steps = "ended early", None, math.nan, 0
    if folder.exists() and records.is_run(folder):
        record = records.read(folder)
        state = "done" if record.state == "done" else state
        step, value = record.result(metric)
        steps = int(max(record.columns["step"], default=0))
    return {
        "settings": run, "value": None if math.isnan(value) else value, "step": step, "steps": steps,
        "state": "failed" if failed else state, "folder": str(folder),
    }  # fmt: skip
