"""Time requests of lm-evaluation-harness with `tune.evaluation` and with the harness's own model class `HFLM`.

    python benchmarks/evaluate.py MODEL [--questions 20 --rounds 1 --batch-size 16] [--only "whole texts"] [--exact]

Questions are pieces of this repository's documentation, 16 to 192 tokens long, with four choices each: the next words
(2 to 16 tokens), or one letter. Whole texts have 100 to 600 tokens. Answers are the 24 most likely tokens after half as
many questions. The two alternate in one process with all cores. Prints medians, and the largest difference of a
log-likelihood or the number of different answers; with `--exact`, also the distance of each from transformers in fp64.
"""

import argparse
import random
import statistics
import time
from pathlib import Path

import torch
import transformers
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM

from tune import distributed
from tune.evaluation.harness import HarnessModel
from tune.peft import open_model


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("--questions", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--batch-size", type=int, default=16, help="requests per forward of HFLM")
    parser.add_argument("--cpu-time", action="store_true", help="measure CPU time of the process, for a busy machine")
    parser.add_argument("--only", choices=("four choices", "four letters", "whole texts", "answers"))
    parser.add_argument("--exact", action="store_true", help="compare both with transformers in fp64")
    args = parser.parse_args()
    if args.questions < 4:
        parser.error("--questions must be at least 4: there is a whole text for every four")
    clock = time.process_time if args.cpu_time else time.perf_counter

    world = distributed.init()
    dtype = "fp32" if world.device.type == "cpu" else "bf16"
    opened = open_model(args.model)
    model, tokenizer = opened.load(device=world.device, dtype=dtype), opened.tokenizer()
    theirs_dtype = {"fp32": "float32", "bf16": "bfloat16"}[dtype]
    models = {
        "tune": HarnessModel(model, tokenizer, world, None, None),
        "HFLM": HFLM(args.model, device=str(world.device), dtype=theirs_dtype, batch_size=args.batch_size),
    }
    ids = tokenizer.encode(" ".join(file.read_text(encoding="utf-8") for file in sorted(Path("docs").glob("*.md"))))
    draw = random.Random(0)

    def piece(low, high):
        start, length = draw.randrange(len(ids) - high), draw.randint(low, high)
        return tokenizer.decode(ids[start : start + length]).strip()

    exact = transformers.AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float64) if args.exact else None

    @torch.no_grad()
    def in_fp64(context, text=None):
        """Return the log-prob of the text after its context, or of a whole text."""
        prefix = [models["tune"].prefix_token_id] if text is None else tokenizer.encode(context)
        ids = [*prefix, *tokenizer.encode(context)] if text is None else tokenizer.encode(context + text)
        found = exact(torch.tensor([ids])).logits[0].log_softmax(-1)
        return sum(found[at - 1, ids[at]].item() for at in range(len(prefix), len(ids)))

    contexts = [piece(16, 192) for _ in range(args.questions)]
    tasks = {
        "four choices": [(context, f" {piece(2, 16)}") for context in contexts for _ in range(4)],
        "four letters": [(context, f" {letter}") for context in contexts for letter in "ABCD"],
        "whole texts": [(piece(100, 600),) for _ in range(args.questions // 4)],
        "answers": [(context, {"until": [], "max_gen_toks": 24}) for context in contexts[::2]],
    }
    kinds = {"whole texts": "loglikelihood_rolling", "answers": "generate_until"}
    for name, arguments in tasks.items():
        if args.only not in (None, name):
            continue
        kind = kinds.get(name, "loglikelihood")
        requests = [Instance(kind, {}, each, index) for index, each in enumerate(arguments)]
        seconds, found = {each: [] for each in models}, {}
        for _ in range(args.rounds):
            for each, lm in models.items():
                start = clock()
                answers = getattr(lm, kind)(requests, disable_tqdm=True)
                seconds[each].append(clock() - start)
                found[each] = [answer[0] if isinstance(answer, tuple) else answer for answer in answers]
        medians = {each: statistics.median(times) for each, times in seconds.items()}
        if kind == "generate_until":
            apart = sum(ours != theirs for ours, theirs in zip(*found.values(), strict=True))
            difference = f"{apart} answers differ"
        else:
            found = {each: torch.tensor(values, dtype=torch.float64) for each, values in found.items()}
            difference = f"largest difference {(found['tune'] - found['HFLM']).abs().max():.1e}"
        if exact is not None and kind != "generate_until":
            expected = torch.tensor([in_fp64(*each) for each in arguments], dtype=torch.float64)
            apart = {each: f"{(answers - expected).abs().max():.1e}" for each, answers in found.items()}
            print(f"{name}: largest distance from fp64 {apart}, for values up to {expected.abs().max():.0f}")
        print(
            f"{name}: {len(requests)} requests, "
            + ", ".join(f"{each} {median:.2f} s" for each, median in medians.items())
            + f": {medians['HFLM'] / medians['tune']:.2f}x; {difference}",
            flush=True,
        )
    world.finish()


if __name__ == "__main__":
    main()
