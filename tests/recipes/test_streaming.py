"""A recipe on a stream resumes at the row, and counts the rows at the end."""

import json

import pytest


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
