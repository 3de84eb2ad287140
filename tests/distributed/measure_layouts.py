"""Train in several layouts; print losses, gradient norms, and the share of the model that a process holds.

measure_layouts.py MODELS_JSON LAYOUTS_JSON STEPS [SEED]: folders with config.json by name; lists of a model name and
axes; the seed of the weights.
"""

import json
import sys

import torch

from tune import distributed
from tune.checkpointers import Random
from tune.collators import Batch
from tune.errors import TuneError
from tune.losses import LinearCrossEntropy
from tune.models import build

ROWS = 16


def held(tensors):
    """Return the bytes of memory that local tensors use."""
    memory = (distributed.local_shard(tensor)[0].untyped_storage() for tensor in tensors)
    return sum({storage.data_ptr(): storage.nbytes() for storage in memory}.values())


def measure(path, axes, steps, seed=0):
    world = distributed.init("cpu", **axes)
    with torch.device("meta"):
        model = build(path, router_loss=1.0) if path.endswith("moe") else build(path)
    whole = sum(parameter.nbytes for parameter in model.parameters())
    try:
        distributed.parallelize(model, world, dtype="fp32")
    except TuneError as error:
        return {"refused": str(error)}
    Random(seed).load(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    pipeline = distributed.Pipeline(model, world)
    draw, measured = torch.Generator().manual_seed(0), []
    for _ in range(steps):
        tokens, labels = torch.randint(0, model.config.vocab_size, (2, ROWS, 24), generator=draw)
        labels[torch.rand(labels.shape, generator=draw) < 0.4] = -100
        optimizer.zero_grad()
        micro_batches = torch.arange(world.data_rank, ROWS, world.data_size).chunk(2)
        loss = torch.zeros(())
        for rows in pipeline.turns(micro_batches):
            supervised = int((labels != -100).sum())
            batch = Batch.of(tokens[rows], labels[rows]).in_step(0, 0, supervised)
            one = model(batch, LinearCrossEntropy()) / supervised
            loss += one.detach()
            for due, is_last in pipeline.due(one):
                distributed.set_gradient_sync(model, is_last)
                due.backward()
        norm = distributed.clip_grad_norm_(model.parameters(), 1.0, pipeline)
        measured += world.fetch(loss=world.sum(loss), norm=norm).values()
        optimizer.step()
    states = [tensor for state in optimizer.state.values() for name, tensor in state.items() if name != "step"]
    kinds = held(model.parameters()), held(parameter.grad for parameter in model.parameters()), held(states) / 2
    shares = torch.tensor(world.from_all_ranks([size / whole for size in kinds]))
    return {"measured": measured, "shares": shares.amax(dim=0).tolist()}


models, layouts, *options = map(json.loads, sys.argv[1:])
world = distributed.init("cpu")
print(json.dumps([measure(models[name], axes, *options) for name, axes in layouts]))
world.finish()
