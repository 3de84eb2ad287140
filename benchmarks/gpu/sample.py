"""Time three calls that sample the same number of tokens for each prompt. Prints JSON.

python benchmarks/gpu/sample.py MODEL --rows 64 --new 128 [--library transformers --device cuda]
"""

import argparse
import json
import random
import time
from collections.abc import Callable

import torch

CALLS = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--new", type=int, default=128, help="tokens for each prompt")
    parser.add_argument("--library", choices=("tune", "transformers"), default="tune")
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    draw = random.Random(0)
    prompts = [[draw.randrange(3, 900) for _ in range(draw.randint(64, 192))] for _ in range(options.rows)]
    load = tune if options.library == "tune" else transformers
    sample = load(options.model, prompts, options.new, options.device)
    seconds = []
    for _ in range(CALLS):
        begin = time.perf_counter()
        sample()
        if options.device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
    peak = torch.cuda.max_memory_allocated() / 2**30 if options.device == "cuda" else None
    print(json.dumps({"seconds": seconds, "peak_gib": peak}))


def tune(path: str, prompts: list[list[int]], new: int, device: str) -> Callable[[], object]:
    from tune.checkpointers import load_model
    from tune.generation import Sampler

    model = load_model(path, device, "bf16")
    sampler = Sampler(max_new_tokens=new, max_rows=len(prompts))
    return lambda: sampler(model, prompts)


def transformers(path: str, prompts: list[list[int]], new: int, device: str) -> Callable[[], object]:
    """Sample with transformers: prompts form one batch, padded on the left."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).to(device)
    longest = max(map(len, prompts))
    tokens = torch.tensor([[2] * (longest - len(prompt)) + prompt for prompt in prompts], device=device)
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=device)
    settings = {"min_new_tokens": new, "max_new_tokens": new, "do_sample": True, "top_k": 0, "pad_token_id": 2}
    return lambda: model.generate(tokens, attention_mask=mask, **settings)


if __name__ == "__main__":
    main()
