"""Run the real vLLM in each process, with its own prompts and engine; started by test_vllm_itself.py."""

import sys

from tune import distributed
from tune.checkpointers import load_model
from tune.generation import VLLM, Sampler

if __name__ == "__main__":
    world, model = distributed.init("cpu"), load_model(sys.argv[1])
    common, prompts = {"max_new_tokens": 8, "temperature": 0}, [[[5, 6, 7, 30, 41]], [[9, 8]]][world.rank]
    ((expected,),) = Sampler(**common)(model, prompts)
    ((completion,),) = VLLM(**common, path=sys.argv[1], dtype="fp32", max_len=64, max_rows=8)(model, prompts)
    assert completion.tokens == expected.tokens
    (total,) = {sum(world.from_all_ranks(world.rank + 1))}  # the process group of training still works
    print("agrees in", total - 1, "processes")
