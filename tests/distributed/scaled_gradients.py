"""Compares gradients in fp16 with those of fp32 in one process, in layouts of the processes of this group. The loss is
so small that without a scale they would be zero. Prints the largest relative error of a parameter's gradient."""

import json
import sys

import torch

from tune import distributed
from tune.checkpointers import Pretrained, load_model
from tune.collators import Batch
from tune.losses import LinearCrossEntropy
from tune.models import build
from tune.peft import LoRA, add_adapters, initialize

TOKENS = torch.arange(120).view(4, 30)
BATCH = Batch.of(TOKENS, TOKENS + 1, documents=torch.tensor([[0] * 10 + [1] * 20] * 4))
SMALL = 1e-7


def gradients(model, factor=1.0):
    (model(BATCH, LinearCrossEntropy()) * factor).backward()
    named = {name: each for name, each in model.named_parameters() if each.requires_grad}
    return {name: distributed.full_tensor(each.grad) for name, each in named.items()}


def error(found, expected):
    """The largest of all parameters, by norms."""
    norms = {name: (found[name].float() - each).norm() / each.norm() for name, each in expected.items()}
    return max(float(norm) for norm in norms.values())


def model_of(folder, world, adapted=False, dtype="fp16", **execution):
    with torch.device("meta"):
        model = build(folder)
    weights = Pretrained(folder, model)
    if adapted:
        add_adapters(model, LoRA(rank=4, alpha=8))
    distributed.parallelize(model, world, dtype=dtype, **execution)
    weights.load(model)
    if adapted:
        initialize(model, seed=0)
        with torch.no_grad():  # B is zero, and with it the gradients of A
            for name, each in model.named_parameters():
                if "lora_b" in name:
                    each.fill_(0.01)
    return model


def main(folder, layouts):
    expected = gradients(load_model(folder))
    for layout in layouts:
        world = distributed.init("cpu", **layout)
        model = model_of(folder, world)
        for is_last in (False, True):  # gradients of micro-batches add up
            distributed.set_gradient_sync(model, is_last)
            found = gradients(model, SMALL)
        scaled = {name: each / SMALL / world.data_size / 2 for name, each in found.items()}
        if world.rank == 0:
            print(json.dumps([layout, error(scaled, expected)]))


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
