"""Teach a barely trained model home commands by rewards alone, and show the reward of its answers before and after.

    python examples/reinforcement/reinforce.py MODEL [--steps N] [--seed N]      from the top of the repository

MODEL is a chat model's folder; `make model` gets one. First, 24 steps of `lora_finetune` on mostly mismatched answers
show the model what commands look like. Then `grpo` teaches it which command a request means.
"""

import argparse
import json
import random
import shutil
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

HOME = Path("examples/home_commands")
Row = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", metavar="MODEL", type=Path)
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps of grpo")
    parser.add_argument("--seed", type=int, default=0, help="seed of the order of prompts and of sampling")
    parser.add_argument("--out", type=Path, default=Path(".demo/reinforcement"), help="the run folders, recreated")
    options = parser.parse_args()
    shutil.rmtree(options.out, ignore_errors=True)
    options.out.mkdir(parents=True)

    start, run = options.out / "start", options.out / "run"
    requests, mixed_up = write_data(options.out)
    tune(
        "lora_finetune", "--config", f"{HOME}/demo.yaml", f"model.path={options.model}", f"dataset.path={mixed_up}",
        "dataset.validation=null", "evaluate.every=null", "max_steps=24", "compute.dtype=bf16",
        "export.merge=true", f"output_dir={start}",
    )  # fmt: skip
    began = time.monotonic()
    tune(
        "grpo", "--config", "examples/reinforcement/grpo.yaml", f"model.path={start / 'model'}",
        f"dataset.path={requests}", f"max_steps={options.steps}", f"seed={options.seed}", f"output_dir={run}",
    )  # fmt: skip
    seconds = time.monotonic() - began
    steps = [json.loads(line) for line in (run / "metrics.jsonl").open(encoding="utf-8")]
    before, after = (step["validation_reward"] for step in (steps[0], steps[-1]))
    print("reward of the samples of each step:", *(f"{step['reward']:.2f}" for step in steps[1:]))
    print(f"mean reward on the held-out requests: {before:.2f} before, {after:.2f} after {seconds:.0f} s")


def write_data(folder: Path) -> tuple[Path, Path]:
    """Write training files of home commands, sampled so that each kind is as frequent as in the held-out rows: requests
    for `grpo`, and conversations for the first training, 90% of which have the answer to a random request."""
    train, held_out = (
        [json.loads(line) for line in (HOME / name).read_text(encoding="utf-8").splitlines()]
        for name in ("train.jsonl", "validation.jsonl")
    )
    have, want = Counter(map(kind, train)), Counter(map(kind, held_out))
    weights = [want[kind(row)] / have[kind(row)] for row in train]
    draw = random.Random(0)
    requests = draw.choices(train, weights, k=960)
    drawn = draw.choices(train, weights, k=700)
    answers = [row["messages"][-1] for row in drawn]
    mixed_up = [
        {"messages": [*row["messages"][:-1], draw.choice(answers) if draw.random() < 0.9 else row["messages"][-1]]}
        for row in drawn
    ]
    files = folder / "requests.jsonl", folder / "mixed_up.jsonl"
    for file, rows in zip(files, (requests, mixed_up), strict=True):
        file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return files


def kind(row: Row) -> tuple[bool, bool]:
    """Return whether a row's answer is an error, and whether it has a value."""
    answer = json.loads(row["messages"][-1]["content"])
    return "error" in answer, "value" in answer


def tune(*command: str) -> None:
    print("$ tune run", *command, flush=True)
    subprocess.run([sys.executable, "-m", "tune.cli", "run", *command], check=True)


if __name__ == "__main__":
    main()
