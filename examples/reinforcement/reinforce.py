"""Teach a barely trained model home commands by rewards alone, and show what its answers are worth before and after.

    python examples/reinforcement/reinforce.py MODEL [--steps N] [--seed N]      from the top of the repository

MODEL is a chat model's folder; `make model` gets one. 24 steps of `lora_finetune` on answers most of which are those of
other requests show it what commands look like; which one a request means it learns by `grpo`.
"""

import argparse
import json
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", metavar="MODEL", type=Path)
    parser.add_argument("--steps", type=int, default=26, help="optimizer steps of grpo")
    parser.add_argument("--seed", type=int, default=0, help="of the prompts' order and of what is sampled")
    parser.add_argument("--out", type=Path, default=Path(".demo/reinforcement"), help="the run folders, made anew")
    options = parser.parse_args()
    shutil.rmtree(options.out, ignore_errors=True)
    options.out.mkdir(parents=True)

    start, run = options.out / "start", options.out / "run"
    tune(
        "lora_finetune", "--config", "examples/home_commands/demo.yaml", f"model.path={options.model}",
        f"dataset.path={mixed_up(options.out / 'mixed_up.jsonl')}", "validation_dataset.path=null",
        "validate_every=null", "max_steps=24", "export.merge=true", f"output_dir={start}",
    )  # fmt: skip
    began = time.monotonic()
    tune(
        "grpo", "--config", "examples/reinforcement/grpo.yaml", f"model.path={start / 'model'}",
        f"max_steps={options.steps}", f"seed={options.seed}", f"output_dir={run}",
    )  # fmt: skip
    seconds = time.monotonic() - began
    steps = [json.loads(line) for line in (run / "metrics.jsonl").open()]
    before, after = (step["validation_reward"] for step in (steps[0], steps[-1]))
    print("reward of the samples of each step:", *(f"{step['reward']:.2f}" for step in steps[1:]))
    print(f"mean reward on the held-out requests: {before:.2f} before, {after:.2f} after {seconds:.0f} s")


def mixed_up(file: Path) -> Path:
    """Writes the home commands to `file`, of 75% of which the answer is that of another one."""
    rows = [json.loads(line) for line in Path("examples/home_commands/train.jsonl").read_text().splitlines()]
    answers = [row["messages"][-1] for row in rows]
    draw = random.Random(0)
    draw.shuffle(answers)
    for row, answer in zip(rows, answers, strict=True):
        if draw.random() < 0.75:
            row["messages"][-1] = answer
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def tune(*command: str) -> None:
    print("$ tune run", *command, flush=True)
    subprocess.run([sys.executable, "-m", "tune.cli", "run", *command], check=True)


if __name__ == "__main__":
    main()
