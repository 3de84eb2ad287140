"""Shard a loaded model, ours and one of transformers, and compare the logits with those before.

`sys.argv[1]` is its folder and `sys.argv[2]` the number of processes that share its layers.
"""

import sys

import torch
import torch.distributed as dist
import transformers
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.testing import assert_close

from tune import distributed
from tune.checkpointers import load_model
from tune.generation import Sampler
from tune.models import hf

TOKENS = torch.arange(5, 45).view(2, 20)
FOLDER, TP = sys.argv[1], int(sys.argv[2])


def from_transformers():
    return transformers.AutoModelForCausalLM.from_pretrained(FOLDER)


def logits(model):
    with torch.no_grad():
        output = model(TOKENS)
    return getattr(output, "logits", output)


def custom_fsdp():
    """Check torch's FSDP around a transformers model: it computes and samples as in one process."""
    model, sampler = hf(from_transformers()), Sampler(max_new_tokens=5, temperature=0)
    expected, completions = logits(model), sampler(model, [[5, 6, 7]])
    for layer in model.body.model.layers:
        fully_shard(layer)
    fully_shard(model)
    for _ in range(2):
        assert_close(logits(model), expected, atol=1e-5, rtol=1e-5)
        assert sampler(model, [[5, 6, 7]])[0][0].tokens == completions[0][0].tokens
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())


if TP == 1:
    dist.init_process_group("gloo")
    world, models = None, [load_model(FOLDER), from_transformers(), hf(from_transformers())]
    custom_fsdp()
else:
    world, models = distributed.init("cpu", tp=TP), [load_model(FOLDER)]
for model in models:
    expected = logits(model)
    distributed.parallelize(model, world, dtype=torch.float32)
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    assert_close(logits(model), expected, atol=1e-5, rtol=1e-5)
dist.destroy_process_group()
