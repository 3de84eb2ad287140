"""Teach a small language model to be terse from pairs of answers, and count terse answers before and after.

    python examples/preferences/terse.py MODEL [--steps N] [--rows N] [--loss NAME]   from the top of the repository

MODEL is a chat model's folder; `make demo` gets one. `tune run` trains with the ordinary recipe.
"""

import argparse
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

from tune.checkpointers import load_model
from tune.generation import Sampler
from tune.tokenizers import Tokenizer

FOLDER = Path("examples/preferences")
TERSE = 8  # maximal number of words


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", metavar="MODEL", type=Path)
    parser.add_argument("--steps", type=int, help="stop after this many optimizer steps")
    parser.add_argument("--rows", type=int, help="answer only this many of the held-out requests")
    parser.add_argument("--loss", default="CPO", help="DPO, IPO, SimPO, CPO (default), ORPO or KTO")
    parser.add_argument("--out", type=Path, default=Path(".demo/preferences"), help="the run folder, recreated")
    options = parser.parse_args()

    requests = [json.loads(line)["instruction"] for line in (FOLDER / "validation.jsonl").open(encoding="utf-8")][
        : options.rows
    ]
    before = answers(options.model, requests)
    shutil.rmtree(options.out, ignore_errors=True)
    command = ["run", "preference_finetune", "--config", f"{FOLDER}/terse.yaml", "export.merge=true"]
    command += [
        f"model.path={options.model}",
        f"output_dir={options.out}",
        f"loss._component_=tune.losses.{options.loss}",
    ]
    command += ["dataset.kind=labelled"] if options.loss == "KTO" else []
    command += [f"max_steps={options.steps}"] if options.steps else []
    print("$ tune", *command, flush=True)
    start = time.monotonic()
    subprocess.run([sys.executable, "-m", "tune.cli", *command], check=True)
    seconds = time.monotonic() - start
    after = answers(options.out / "model", requests)
    for request, first, last in list(zip(requests, before, after, strict=True))[:3]:
        print(f"\n{request}\n  before: {' '.join(first.split())}\n  after:  {' '.join(last.split())}")
    steps = [json.loads(line) for line in (options.out / "metrics.jsonl").open(encoding="utf-8")]
    print(f"\nTraining: {steps[-1]['step']} steps in {seconds:.0f} s")
    print(f"Held-out pairs ranked right: {steps[-1].get('validation_rewards/accuracies', float('nan')):.0%}")
    terse = {"before": count(before), "after": count(after), "of": len(requests)}
    print(f"Terse answers to {terse['of']} held-out requests: {terse['before']} before, {terse['after']} after")
    (options.out / "results.json").write_text(json.dumps(terse) + "\n", encoding="utf-8")


def answers(folder: Path, requests: list[str]) -> list[str]:
    """Return the most likely reply of the model in `folder` to each request, at most 24 tokens."""
    tokenizer = Tokenizer(str(folder))
    chats = [[{"role": "user", "content": request}] for request in requests]
    prompts = [tokenizer.encode(tokenizer.apply_chat_template(chat, add_generation_prompt=True)) for chat in chats]
    replies = Sampler(max_new_tokens=24, temperature=0, stop_ids=tokenizer.stop_ids)(load_model(str(folder)), prompts)
    return [tokenizer.decode(reply.tokens, skip_special_tokens=True) for (reply,) in replies]


def count(replies: list[str]) -> int:
    """Count the replies of few words."""
    return sum(0 < len(reply.split()) <= TERSE for reply in replies)


if __name__ == "__main__":
    main()
