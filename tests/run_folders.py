"""Run folders like those of real runs, written in no time."""

import json
import math
from pathlib import Path

SETTINGS = "model:\n  path: llama\ndataset:\n  path: chats.jsonl\noptimizer:\n  lr: {lr}\nmax_steps: {steps}\nseed: 0\n"
DATA = {
    "source": "chats.jsonl", "format": "chat", "rows": 50, "dropped": {"nothing to learn": 2}, "kept": 48,
    "truncated": 0, "remarks": {}, "tokens": 900, "supervised_tokens": 300, "supervised_share": 1 / 3,
    "lengths": {"p50": 20, "max": 40}, "packing_efficiency": None, "warnings": ["4 of 50 rows are copies"],
}  # fmt: skip


def write_run(
    parent: Path, name: str = "one", steps: int = 12, lr: float = 1e-3, state: str | None = "done", **facts
) -> Path:
    """Write a run folder like that of a real run; `state` goes into run.json, which is omitted without a state."""
    folder = parent / name
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(SETTINGS.format(lr=lr, steps=steps))
    (folder / "data.json").write_text(json.dumps(DATA))
    (folder / "first_row.txt").write_text("<|user|>why?\n<|assistant|>⟦because ⟧<b>⟦<script>alert(1)</script>⟧")
    (folder / "log.txt").write_text("model: 3 parameters\nwarning: the data are few\n")
    started = {"starts": [{"step": 0, "time": 1000.0}], "steps": steps, "recipe": "full_finetune"}
    place = {"command": ["full_finetune.py", "max_steps=12"], "processes": 1, "device": "cpu", "torch": "2.13"}
    if state:
        (folder / "run.json").write_text(json.dumps(started | place | {"state": state} | facts))
    with (folder / "metrics.jsonl").open("w") as lines:
        for step in range(1, steps + 1):
            values = {"step": step, "time": 1000.0 + 3 * step, "loss": 2 / step, "grad_norm": 1 + math.sin(step)}
            values |= {"tokens": 80, "supervised_tokens": 20, "tokens_per_second": 40.0, "lr": lr}
            values |= {"epoch": step / 50, "step_seconds": 2.0, "data_seconds": 0.5}
            values |= {"save_seconds": 0.25, "peak_memory_gib": 1.5}
            values |= {"validation_loss": 2.1 / step} if step % 4 == 0 else {}
            lines.write(json.dumps(values) + "\n")
    return folder
