"""Teach a small language model to turn requests into JSON commands, and show its answers before and after.

    python examples/home_commands/demo.py MODEL [--steps N] [--rows N]      from the top of the repository

MODEL is a chat model's folder; `make demo` gets one. `tune run` trains with the ordinary recipe.
"""

import argparse
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tune.checkpointers import load_model
from tune.generation import Sampler
from tune.tokenizers import Tokenizer

FOLDER = Path("examples/home_commands")
AT_A_TIME = 16  # requests that are answered together
REQUESTS = (
    "could you dim the bedroom lamp to about thirty percent?",
    "it's freezing, bring the office to 22 degrees",
    "who is the president of France?",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", metavar="MODEL", type=Path)
    parser.add_argument("--steps", type=int, help="stop after this many optimizer steps")
    parser.add_argument("--rows", type=int, help="answer, and validate with, only this many of the held-out rows")
    parser.add_argument("--out", type=Path, default=Path(".demo/run"), help="the run folder, recreated")
    options = parser.parse_args()
    console = Console(highlight=False, markup=False)  # replies are shown as they are

    conversations = [json.loads(line)["messages"] for line in (FOLDER / "validation.jsonl").open(encoding="utf-8")][
        : options.rows
    ]
    system = conversations[0][0]["content"]
    requests = [*REQUESTS, *(messages[1]["content"] for messages in conversations)]
    expected = [messages[2]["content"] for messages in conversations]

    console.rule("Before")
    held_out = f"{len(expected)} held-out ones"
    console.print(f"Asking {options.model} for commands: {len(REQUESTS)} requests to show and {held_out} ...")
    before = answers(options.model, system, requests, console)

    console.rule("Training")
    shutil.rmtree(options.out, ignore_errors=True)
    command = ["run", "lora_finetune", "--config", f"{FOLDER}/demo.yaml", "export.merge=true"]
    command += [f"model.path={options.model}", f"output_dir={options.out}"]
    if options.steps:
        command.append(f"max_steps={options.steps}")
    if options.rows:
        command.append(f"dataset.validation.take={options.rows}")
    console.print("$ tune", *command, soft_wrap=True)
    start = time.monotonic()
    train(command, console)
    seconds = time.monotonic() - start

    console.rule("After")
    after = answers(options.out / "model", system, requests, console)
    table = Table(show_lines=True)
    for title in ("Request", "Before", "After"):
        table.add_column(title, overflow="fold")
    for row in list(zip(requests, before, after, strict=True))[: len(REQUESTS)]:
        table.add_row(*(" ".join(text.split()) for text in row))
    console.print(table)
    losses = [json.loads(line)["loss"] for line in (options.out / "metrics.jsonl").open(encoding="utf-8")]
    console.print(f"Training: {len(losses)} steps in {seconds:.0f} s, loss {losses[0]:.2f} -> {losses[-1]:.2f}")
    right = {"before": matches(before, expected), "after": matches(after, expected), "of": len(expected)}
    console.print(f"Exactly right on {right['of']} held-out requests: {right['before']} before, {right['after']} after")
    (options.out / "results.json").write_text(json.dumps(right) + "\n", encoding="utf-8")
    console.print(f"The run folder is {options.out}. Talk to the result:")
    if not shutil.which("tune"):
        console.print("$ . .venv/bin/activate")
    console.print(f"$ tune chat {options.out} --system {json.dumps(system)}", soft_wrap=True)


def train(command: list[str], console: Console) -> None:
    """Run the `tune` command. If it fails or is interrupted, exit with its code."""
    with subprocess.Popen([sys.executable, "-m", "tune.cli", *command]) as process:
        try:
            code = process.wait()
        except KeyboardInterrupt:  # Ctrl-C also reached the training, which ends its step and saves a checkpoint
            code = process.wait()
    if code == 130:
        console.print("To continue the training:\n$ tune", *command, soft_wrap=True)
    if code:
        sys.exit(code)


def answers(folder: Path, system: str, requests: list[str], console: Console) -> list[str]:
    """Return the most likely reply of the model in `folder` to each request, at most 32 tokens."""
    tokenizer = Tokenizer(str(folder))
    prompts = []
    for request in requests:
        messages = [{"role": "system", "content": system}, {"role": "user", "content": request}]
        prompts.append(tokenizer.encode(tokenizer.apply_chat_template(messages, add_generation_prompt=True)))
    sampler = Sampler(max_new_tokens=32, temperature=0, stop_ids=tokenizer.stop_ids)
    model = load_model(str(folder))
    texts: list[str] = []
    for start in range(0, len(prompts), AT_A_TIME):
        for (reply,) in sampler(model, prompts[start : start + AT_A_TIME]):
            texts.append(tokenizer.decode(reply.tokens, skip_special_tokens=True))
        console.print(f"{len(texts)} of {len(prompts)} answered")
    return texts


def matches(replies: list[str], expected: list[str]) -> int:
    """Count replies to held-out rows that equal the expected text exactly."""
    return sum(reply == text for reply, text in zip(replies[len(REQUESTS) :], expected, strict=True))


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
