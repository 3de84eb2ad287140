"""Run in each process as `sharded_sampling.py FOLDER PROMPTS`: sample before training steps and print the samples of
all processes."""

import sys

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from tune import distributed
from tune.checkpointers import Pretrained
from tune.collators import Batch
from tune.generation import Sampler
from tune.losses import LinearCrossEntropy
from tune.models import build


def train(model: torch.nn.Module) -> float:
    """Compute a loss and its gradients, discard the gradients and return the loss."""
    batch = Batch.of([[1, 2, 3, 4]], labels=[[2, 3, 4, 5]])
    loss = model(batch, LinearCrossEntropy())
    loss.backward()
    assert all(isinstance(each, DTensor) and each.grad is not None for each in model.parameters())
    model.zero_grad()
    return float(loss)


def main(folder: str, prompts: list[list[int]]) -> None:
    world = distributed.init("cpu")
    with torch.device("meta"):
        model = build(folder)
    weights = Pretrained(folder, model)
    distributed.parallelize(model, world, dtype="fp32")
    weights.load(model)
    sampler = Sampler(max_new_tokens=10, stop_ids=range(9))
    outputs: list = [None] * len(prompts)
    losses = []
    # First without a forward before; then one process samples everything.
    for shares in (range(world.rank, len(prompts), world.size), range(len(prompts) if world.rank == 1 else 0)):
        sampled = sampler(model, [prompts[index] for index in shares], samples=2, indices=shares)
        assert all(isinstance(each, DTensor) for each in model.parameters())
        everyone: list = [None] * world.size
        dist.all_gather_object(everyone, {index: row for index, row in zip(shares, sampled, strict=True)})
        completions = [{**{k: v for part in everyone for k, v in part.items()}}[index] for index in range(len(prompts))]
        tokens = [[completion.tokens for completion in row] for row in completions]
        assert outputs in ([None] * len(prompts), tokens)
        outputs = tokens
        losses.append(train(model))
    assert losses[0] == losses[1]
    if world.rank == 0:
        print(outputs)


if __name__ == "__main__":
    main(sys.argv[1], eval(sys.argv[2]))
