"""Time 64 new tokens after each of 32 prompts, greedily, with `tune.generation` and `transformers.generate`.

    python benchmarks/sampling.py MODEL [--prompts 32 --new 64 --rounds 5]
    python benchmarks/sampling.py MODEL --chats examples/home_commands/train.jsonl      answers may end early

The prompts are pieces of this repository's documentation, 16 to 192 tokens long; with `--chats`, the requests of
conversations, with answers of at most 64 tokens. transformers gets one batch, padded on the left. The two alternate in
one process with all cores. Prints the times of each round, their medians, and the number of equal answers.
"""

import argparse
import json
import random
import statistics
import time
from pathlib import Path

import torch
import transformers

from tune.checkpointers import load_model
from tune.generation import Sampler
from tune.tokenizers import Tokenizer


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--chats", help="a JSONL file with messages: their requests are the prompts")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--cpu-time", action="store_true", help="measure CPU time of the process, for a busy machine")
    args = parser.parse_args()
    dtype, clock = getattr(torch, args.dtype), time.process_time if args.cpu_time else time.perf_counter
    tokenizer, ends = Tokenizer(args.model), set()
    if args.chats:
        chats = [
            json.loads(line)["messages"]
            for line in Path(args.chats).read_text(encoding="utf-8").splitlines()[: args.prompts]
        ]
        asked = [tokenizer.apply_chat_template(chat[:-1], add_generation_prompt=True) for chat in chats]
        prompts, ends = [tokenizer.encode(each) for each in asked], tokenizer.stop_ids
    else:
        ids = tokenizer.encode(" ".join(file.read_text(encoding="utf-8") for file in sorted(Path("docs").glob("*.md"))))
        draw = random.Random(0)
        lengths = [draw.randint(16, 192) for _ in range(args.prompts)]
        prompts = [ids[start : start + length] for length in lengths for start in [draw.randrange(len(ids) - length)]]
    lengths = [len(each) for each in prompts]

    ours = load_model(args.model, dtype=dtype).to(args.device)
    sampler = Sampler(max_new_tokens=args.new, temperature=0, max_rows=args.prompts, stop_ids=ends)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(args.model, dtype=dtype).to(args.device)
    longest = max(lengths)
    padded = torch.tensor([[0] * (longest - len(each)) + each for each in prompts], device=args.device)
    mask = torch.tensor([[0] * (longest - length) + [1] * length for length in lengths], device=args.device)

    def tune():
        return [completion.tokens for (completion,) in sampler(ours, prompts)]

    def generate():
        end = {"eos_token_id": [*ends]} if ends else {"min_new_tokens": args.new}
        settings = {"max_new_tokens": args.new, "do_sample": False, "pad_token_id": 0, **end}
        found = theirs.generate(padded, attention_mask=mask, **settings)[:, longest:].tolist()
        last = [next((at for at, token in enumerate(each, 1) if token in ends), len(each)) for each in found]
        return [each[:end] for each, end in zip(found, last, strict=True)]

    seconds = {tune: [], generate: []}
    for _ in range(args.rounds):
        results = []
        for run in seconds:
            start = clock()
            results.append(run())
            seconds[run].append(clock() - start)
        same = sum(left == right for left, right in zip(*results, strict=True))
        times = "   ".join(f"{run.__name__} {seconds[run][-1]:6.2f} s" for run in seconds)
        print(f"{times}   {same} of {args.prompts} equal", flush=True)
    mine, other = (statistics.median(each) for each in seconds.values())
    print(f"median: tune {mine:.2f} s, transformers {other:.2f} s, {other / mine:.2f} times as fast")


if __name__ == "__main__":
    main()
