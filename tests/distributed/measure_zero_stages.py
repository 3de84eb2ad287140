"""Prints what a process holds of weights, gradients and states, to those of the model, with ZeRO 0 to 3: between the
micro-batches of a step, and between steps.

measure_zero_stages.py FOLDER: with config.json.
"""

import gc
import json
import sys

import torch

from tune import distributed
from tune.checkpointers import Random
from tune.collators import Batch
from tune.distributed.parallelize import reshard
from tune.losses import LinearCrossEntropy
from tune.models import build


def bytes_of(tensors):
    """Of the memory behind them, each part of it once."""
    memory = [distributed.local_shard(each)[0].untyped_storage() for each in tensors]
    return sum({each.data_ptr(): each.nbytes() for each in memory}.values())


def alive():
    """Bytes of all tensors of this process."""
    gc.collect()
    return bytes_of(each for each in gc.get_objects() if type(each) in (torch.Tensor, torch.nn.Parameter))


def measure(path, stage):
    before = alive()
    world = distributed.init("cpu", zero_stage=stage, reduce_every_micro_batch=True)
    with torch.device("meta"):
        model = build(path)
    whole = sum(each.nbytes for each in model.parameters())
    distributed.parallelize(model, world, dtype="fp32")
    Random(seed=0).load(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    found = {}

    def note(moment):
        everything = alive() - before
        reshard(model)
        kept = alive() - before
        states = bytes_of(each for state in optimizer.state.values() for name, each in state.items() if name != "step")
        weights = bytes_of(each.data for each in model.parameters())
        sizes = {"gathered": everything - kept, "weights": weights, "gradients": kept - weights - states}
        found[moment] = {name: size / whole for name, size in (sizes | {"states": states / 2}).items()}

    tokens = torch.arange(24)[None] + world.data_rank
    for has_states in (False, True):
        for index in range(2):
            distributed.set_gradient_sync(model, index == 1)
            (model(Batch.of(tokens, tokens), LinearCrossEntropy()) / 96).backward()
            if index == 0 and has_states:  # to look through all objects takes a second
                note("in a step")
        optimizer.step()
        optimizer.zero_grad()
    note("between steps")
    return found


world = distributed.init("cpu")
print(json.dumps([measure(sys.argv[1], stage) for stage in range(4)]))
world.finish()
