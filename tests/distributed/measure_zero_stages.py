"""Print the shares of the model's weights, gradients, and states that a process holds with ZeRO 0 to 3.

It measures between the micro-batches of a step and between steps.

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
    """Return the bytes of memory that the tensors use, counting shared memory once."""
    memory = [distributed.local_shard(tensor)[0].untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in memory}.values())


def alive():
    """Return the bytes of all tensors of this process."""
    gc.collect()
    tensors = (item for item in gc.get_objects() if type(item) in (torch.Tensor, torch.nn.Parameter))
    return bytes_of(tensor for tensor in tensors if not tensor.is_meta)  # which has a size and no memory


def measure(path, stage):
    before = alive()
    world = distributed.init("cpu", zero_stage=stage, reduce_every_micro_batch=True)
    with torch.device("meta"):
        model = build(path)
    whole = sum(parameter.nbytes for parameter in model.parameters())
    distributed.parallelize(model, world, dtype="fp32")
    Random(seed=0).load(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    shares = {}

    def note(moment):
        everything = alive() - before
        reshard(model)
        kept = alive() - before
        states = bytes_of(
            tensor for state in optimizer.state.values() for name, tensor in state.items() if name != "step"
        )
        weights = bytes_of(parameter.data for parameter in model.parameters())
        sizes = {"gathered": everything - kept, "weights": weights, "gradients": kept - weights - states}
        shares[moment] = {name: size / whole for name, size in (sizes | {"states": states / 2}).items()}

    tokens = torch.arange(24)[None] + world.data_rank
    for has_states in (False, True):
        for index in range(2):
            distributed.set_gradient_sync(model, index == 1)
            (model(Batch.of(tokens, tokens), LinearCrossEntropy()) / 96).backward()
            if index == 0 and has_states:  # searching all objects takes a second
                note("in a step")
        optimizer.step()
        optimizer.zero_grad()
    note("between steps")
    return shares


world = distributed.init("cpu")
print(json.dumps([measure(sys.argv[1], stage) for stage in range(4)]))
world.finish()
