"""Compare fp16 gradients in layouts of this group's processes with fp32 gradients in one process.

The loss is so small that gradients would be zero without a scale. Prints the largest relative error of a parameter's
gradient.
"""

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
    named = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    return {name: distributed.full_tensor(parameter.grad) for name, parameter in named.items()}


def error(gradients, expected):
    """Return the largest relative error over all parameters, by norms."""
    norms = {name: (gradients[name].float() - gradient).norm() / gradient.norm() for name, gradient in expected.items()}
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
        with torch.no_grad():  # B is zero, and so are the gradients of A
            for name, parameter in model.named_parameters():
                if "lora_b" in name:
                    parameter.fill_(0.01)
    return model


def main(folder, layouts):
    expected = gradients(load_model(folder))
    for layout in layouts:
        world = distributed.init("cpu", **layout)
        model = model_of(folder, world)
        for is_last in (False, True):  # gradients of micro-batches add up
            distributed.set_gradient_sync(model, is_last)
            scaled_up = gradients(model, SMALL)
        scaled = {name: gradient / SMALL / world.data_size / 2 for name, gradient in scaled_up.items()}
        if world.rank == 0:
            print(json.dumps([layout, error(scaled, expected)]))


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
