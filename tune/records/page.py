"""Write report.html: one page for a run, or for several runs overlaid. It needs no other files and no network."""

import json
import math
import shlex
from collections.abc import Iterator, Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, PackageLoader
from markupsafe import Markup

from tune import config
from tune.errors import TuneError
from tune.files import written_aside
from tune.lookup import in_shell
from tune.records.record import Record, differences, json_object, number, read
from tune.secrets import without_secrets
from tune.terminal import all_visible

POINTS = 100_000  # of all curves of a page together
SAMPLES = 4  # prompts shown from the first step and from the last
MARK = "<!-- written by tune report -->"
IN_TRANSFORMERS = """from transformers import AutoModelForCausalLM, AutoTokenizer
model = AutoModelForCausalLM.from_pretrained({0})
tokenizer = AutoTokenizer.from_pretrained({0})"""
TEMPLATES = Environment(
    loader=PackageLoader("tune.records", "assets"), autoescape=True, trim_blocks=True, lstrip_blocks=True,
    finalize=lambda value: without_secrets(value) if type(value) is str else value,
)  # fmt: skip
TEMPLATES.filters |= {
    "number": number,
    "date": lambda at: f"{datetime.fromtimestamp(at):%Y-%m-%d %H:%M}",
    "duration": lambda seconds: str(timedelta(seconds=round(seconds))),
    "setting": lambda value: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False),
    "command": lambda words: shlex.join(map(str, words)),
    "ending": lambda path: "/".join(Path(path).parts[-2:]),
    "mean": lambda values: values.mean() if len(values) else math.nan,
}


def write_report(folders: Sequence[Path], out: Path) -> int:
    """Write the page for the runs in `folders` to `out`; return its size in bytes.

    Raises:
        TuneError: a folder is not a run folder, or `out` cannot be written or is an existing file but no report.
    """
    runs = [read(folder) for folder in folders]
    known = [run.path.resolve().name for run in runs]
    names = [name if known.count(name) == 1 else str(run.path) for name, run in zip(known, runs, strict=True)]
    files = [file for file in Path(__file__).with_name("assets").iterdir() if file.suffix in (".js", ".css")]
    page = TEMPLATES.get_template("report.html").render(
        runs=[*zip(names, runs, strict=True)], mark=Markup(MARK), uses=uses,
        assets={file.name: Markup(file.read_text(encoding="utf-8")) for file in files},
        differences=differences([run.inputs for run in runs]), changed=changed, seconds=seconds, samples=samples,
        curves=Markup(json.dumps({"runs": names, "curves": _curves(runs)}).replace("<", "\\u003c")),
    )  # fmt: skip
    try:
        if out.exists() and MARK not in out.read_text(encoding="utf-8", errors="replace")[:200]:
            raise TuneError(f"--out {out}: this file exists and is not a report. Choose another name")
        with written_aside(out) as unfinished:
            unfinished.write_text(page, encoding="utf-8", errors="replace")
            return unfinished.stat().st_size
    except OSError as error:
        raise TuneError(f"{out} cannot be written: {error.strerror}. See `tune report --out FILE`") from error


def changed(run: Record) -> list[tuple[str, list[Any]]] | None:
    """Return the settings that differ from the recipe's defaults (key, [default, value]); None if these are unknown."""
    name = str(run.facts.get("recipe") or "")
    script = Path(str((run.facts.get("command") or [""])[0]) or name)
    if not name or name != Path(name).name or not script.name:  # a run names its recipe by a name, not by a file
        return None
    try:
        defaults = config.flat(config.read_file(config.find_default(script, name)))
    except TuneError:
        return None
    for key, value in defaults.items():
        if isinstance(value, str) and value.startswith("${"):
            defaults[key] = run.settings.get(value[2:-1])
    return [row for row in differences([defaults, run.settings]) if row[0] in run.settings]


def seconds(run: Record) -> dict[str, float]:
    """Return the run's time in seconds by activity. Time between an end and the next start is not counted."""
    if not {"time", "step_seconds"} <= run.columns.keys():
        return {}
    whole = np.nan_to_num(run.columns["step_seconds"])
    names = {"waiting for data": "data", "saving": "save", "rollout": "rollout"}
    parts = {part: float(np.nansum(run.columns.get(f"{name}_seconds", 0))) for part, name in names.items()}
    is_first = np.isin(run.columns["step"][1:] - 1, [each["step"] for each in run.facts.get("starts", [])])
    between = (np.diff(run.columns["time"]) - whole[1:])[~is_first].clip(min=0)
    parts = {"training": whole.sum() - sum(parts.values())} | parts | {"evaluation": float(np.nansum(between))}
    return {part: each for part, each in parts.items() if each}


def samples(run: Record) -> list[tuple[str, str, str]]:
    """Return prompts of samples.jsonl, each with its answers at the first and the last step with samples."""
    sides: list[dict[str, str]] = []
    steps = set()
    for is_first in (True, False):
        lines = run.text("samples.jsonl", 1 << 20, is_first).splitlines()
        found = [each for line in lines if {"step", "text"} <= (each := all_visible(json_object(line))).keys()]
        step = found[0 if is_first else -1]["step"] if found else None
        steps.add(step)
        sides.append({_prompt(each): str(each["text"]) for each in found if each["step"] == step})
    first, last = sides if len(steps) > 1 else (sides[0], {})
    asked = [prompt for prompt in first if prompt in last] or [*list(first)[:SAMPLES], *list(last)[:SAMPLES]]
    return [(prompt, first.get(prompt, ""), last.get(prompt, "")) for prompt in asked[: 2 * SAMPLES]]


def uses(run: Record) -> Iterator[tuple[str, list[str]]]:
    """Yield a sentence for each output of the run, with the step it is from, and commands to use it."""
    folders = [run.path / kind for kind in ("model", "adapter") if (run.path / kind).is_dir()]
    if not folders:
        again = f"To continue the run: the same command with output_dir={in_shell(run.path)} resume=auto"
        advice = f". {again}. Without checkpoints it starts over. If you do not need it, delete {run.path}."
        yield f"There is no model{' yet: it is written at the end.' if run.goes_on else advice}", []
    step = run.exported_step or 0
    is_best = run.best or step < run.last("step")
    best = f"the best by {run.settings.get('checkpointer.keep_best')}" if is_best else "the last one"
    of_step = f", with the weights of step {number(step)}, {best}" if step > 0 else ""
    for folder in folders:
        base, place = in_shell(str(run.settings.get("model.path"))), in_shell(folder)
        merge = f"tune merge {base} {place} {in_shell(run.path / 'merged')}"
        commands = [
            merge if folder.name == "adapter" else IN_TRANSFORMERS.format(json.dumps(str(folder), ensure_ascii=False))
        ]
        if run.facts.get("recipe") != "reward_finetune":
            commands += [f"tune generate {place} --prompt TEXT", f"tune eval {place} --data FILE"]
            gguf = in_shell(run.path / "model.gguf")
            commands.append(f"tune export {in_shell(run.path)} --to gguf --out {gguf}")
        yield f"The {folder.name} is in {folder}{of_step}.", commands


def _prompt(sample: dict[str, Any]) -> str:
    """Return the prompt of a sample, if its row has a common format."""
    prompt = sample.get("row", sample.get("prompt"))
    for key in ("messages", "prompt"):
        prompt = prompt.get(key, prompt) if isinstance(prompt, dict) else prompt
    turns = [each["content"] for each in prompt if "content" in each] if isinstance(prompt, list) else [prompt]
    return "\n".join(each if isinstance(each, str) else json.dumps(each, ensure_ascii=False) for each in turns)


def thin(steps: np.ndarray, values: np.ndarray, most: int) -> tuple[np.ndarray, np.ndarray]:
    """Reduce to about `most` points: of each segment the first, the lowest, the highest, and a gap if there is one."""
    if len(steps) <= most:
        return steps, values
    gaps = np.isnan(values)
    low, high = np.where(gaps, np.inf, values), np.where(gaps, -np.inf, values)
    kept = [len(steps) - 1]
    for part in np.array_split(np.arange(len(steps)), most // 4):
        kept += part[[0, low[part].argmin(), high[part].argmax(), gaps[part].argmax()]].tolist()
    places = np.unique(kept)
    return steps[places], values[places]


def _curves(runs: list[Record]) -> list[dict[str, Any]]:
    """Return the thinned metrics of all runs for report.js."""
    hidden = ("step", "time", "epoch")
    shown = [(at, run, name) for at, run in enumerate(runs) for name in run.columns if name not in hidden]
    curves = []
    for at, run, name in shown:
        steps, values = run.columns["step"], np.where(np.isfinite(run.columns[name]), run.columns[name], np.nan)
        known = ~np.isnan(values)
        is_sparse = bool(known.mean() < 0.5)  # e.g. validations: steps without a value are not gaps
        if is_sparse:
            steps, values = steps[known], values[known]
        steps, values = thin(steps, values, POINTS // len(shown))
        points = [None if np.isnan(value) else float(f"{value:.6g}") for value in values]
        curves.append({"run": at, "metric": name, "sparse": is_sparse, "steps": steps.tolist(), "values": points})
    return curves
