"""A recipe on a stream resumes at the row, and counts the rows at the end."""

import json
from pathlib import Path

import full_finetune
import pytest
from helpers import run_processes


def curve(run):
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [tuple(line[name] for name in ("step", "loss", "grad_norm", "tokens")) for line in lines]


@pytest.mark.slow
def test_stream_resumes_at_the_row_where_it_stopped(inputs, run_recipe):
    chats = inputs.rows.read_text()
    inputs.rows.write_text(chats * 3)  # 144 rows: three windows
    settings = [
        *inputs.settings("dataset.streaming=true", "dataset.shuffle_buffer=64", "packed=true", "global_batch_size=2"),
        f"dataset.validation={{path: {inputs.rows}, streaming: true}}",
        "schedule._component_=tune.optimizers.constant", "optimizer.lr=1e-3", "checkpointer.every=null",
    ]  # fmt: skip
    whole, stopped = inputs.folder / "whole", inputs.folder / "stopped"
    assert run_recipe([*settings, "max_steps=30", f"output_dir={whole}"]) == 0
    assert run_recipe([*settings, "max_steps=17", f"output_dir={stopped}"]) == 0
    assert run_recipe([*settings, "max_steps=30", f"output_dir={stopped}"]) == 0
    assert curve(stopped) == curve(whole)
    data = json.loads((whole / "data.json").read_text())
    assert data["rows"] == data["kept"] == 128  # two windows
    assert "rows read in this run" in (whole / "log.txt").read_text()


@pytest.mark.weekly
def test_mixture_of_streams_resumes_and_does_not_depend_on_processes(inputs, run_recipe):
    lines = inputs.rows.read_text().splitlines(keepends=True)
    sources = []
    for name, rows, weight in (("few", lines[:20], 1), ("many", lines[20:] * 4, 3)):
        file = inputs.folder / f"{name}.jsonl"
        file.write_text("".join(rows))
        sources.append(f"{name}: {{path: {file}, weight: {weight}, streaming: true, shuffle_buffer: 64, workers: 1}}")
    settings = [setting for setting in inputs.settings() if not setting.startswith("dataset.path")]
    settings += [
        "dataset._component_=tune.datasets.mix", f"dataset.sources={{{', '.join(sources)}}}",
        "schedule._component_=tune.optimizers.constant", "schedule.warmup=0", "optimizer.lr=1e-3",
        "checkpointer.every=null",
    ]  # fmt: skip
    whole, stopped, two = (inputs.folder / name for name in ("whole", "stopped", "two"))
    assert run_recipe([*settings, "max_steps=16", f"output_dir={whole}"]) == 0
    assert run_recipe([*settings, "max_steps=9", f"output_dir={stopped}"]) == 0
    assert run_recipe([*settings, "max_steps=16", f"output_dir={stopped}"]) == 0
    assert curve(stopped) == curve(whole)
    run_processes(Path(full_finetune.__file__), 2, *settings, "max_steps=16", f"output_dir={two}")
    for one, other in zip(curve(two), curve(whole), strict=True):
        assert one == pytest.approx(other, rel=1e-4)  # sums in another order
        assert one[3] == other[3]
    data = json.loads((whole / "data.json").read_text())
    drawn = {name: of["rows"] for name, of in data["run"].items()}
    assert sum(drawn.values()) >= 64 and abs(drawn["many"] - 3 * drawn["few"]) < 30
    assert "rows drawn in this run" in (whole / "log.txt").read_text()
