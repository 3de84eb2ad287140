"""Measure tokens and time of dataset.turns=as_seen, compared with whole conversations and with a row per answer.

    python benchmarks/turns.py [--hidden 1024 --layers 2 --max-seq-len 8192 --device cpu]

The conversations are made of words, with reasoning that the template drops from earlier answers; the model is a Qwen3
with random weights. `together` renders a conversation once and supervises only the last answer's reasoning. `as_seen`
supervises all reasoning, and computes the common beginning of its samples once. `by_hand` has the same samples, each in
a separate forward.
"""

import argparse
import json
import random
import sys
import tempfile
import time
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).parents[1] / "tests"))
from helpers import WORDS, save_checkpoint
from reasoning import DROPS_REASONING, ask, think

from tune.checkpointers import load_model
from tune.collators import collate
from tune.datasets import load
from tune.losses import LinearCrossEntropy
from tune.tokenizers import Tokenizer

SHAPES = [(4, 0, 60), (4, 100, 60), (4, 400, 60), (4, 100, 300), (8, 100, 60)]  # turns; words of thoughts and answers


def seconds(model, rows, device):
    """Return the better of two times of a forward and backward of all rows. On a CPU this is the process's CPU time."""
    clock = time.process_time if device == "cpu" else time.perf_counter
    times = []
    for _ in range(2):
        start = clock()
        for row in rows:
            model(collate([row]).to(device), LinearCrossEntropy()).backward()
            model.zero_grad()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(clock() - start)
    return min(times)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--max-seq-len", type=int, default=8192)
    parser.add_argument("--conversations", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp())
    save_checkpoint(
        folder, "Qwen3Config", hidden_size=args.hidden, intermediate_size=3 * args.hidden, head_dim=64,
        num_hidden_layers=args.layers, num_attention_heads=args.hidden // 64, num_key_value_heads=args.hidden // 128,
        max_position_embeddings=32768,
    )  # fmt: skip
    (folder / "chat_template.jinja").write_text(DROPS_REASONING, encoding="utf-8")
    tokenizer, model = Tokenizer(str(folder)), load_model(str(folder)).to(args.device)
    draw = random.Random(0)

    def words(count):
        return " ".join(draw.choices(WORDS, k=count))

    options = {"max_seq_len": args.max_seq_len, "cache_dir": str(folder / "cache"), "workers": 1}
    for turns, thought, answer in SHAPES:
        talks = [
            [each for _ in range(turns) for each in (ask(words(30)), think(words(thought), words(answer)))]
            for _ in range(args.conversations)
        ]
        file = folder / f"{turns}-{thought}-{answer}.jsonl"
        file.write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in talks), encoding="utf-8")
        together, seen = (load(tokenizer, str(file), turns=each, **options) for each in ("together", "as_seen"))
        rows = [seen.row(index) for index in range(len(seen))]
        batches = [collate([row]) for row in rows]
        computed = sum((batch.shared or batch).tokens.numel() for batch in batches)
        times = {
            "together": seconds(model, [together.row(index) for index in range(len(together))], args.device),
            "as_seen": seconds(model, rows, args.device),
            "by_hand": seconds(model, [[sample] for row in rows for sample in row], args.device),
        }
        tokens = [each // len(talks) for each in (together.accounting.tokens, seen.accounting.tokens, computed)]
        print(
            f"{turns} turns, {thought} words of thought, {answer} of answer: tokens together {tokens[0]:,}, as seen "
            f"{tokens[1]:,}, computed {tokens[2]:,}, rows {len(rows) / len(talks):.1f}; seconds "
            + ", ".join(f"{name} {value / len(talks):.2f}" for name, value in times.items()),
            flush=True,
        )


if __name__ == "__main__":
    main()
