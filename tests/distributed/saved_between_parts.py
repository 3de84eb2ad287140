"""Print the bytes per token that blocks save for backward on one of TP processes: `MODEL TP CHECKPOINTING`."""

import sys

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from tune import distributed
from tune.models import build

path, size, checkpointing = sys.argv[1], int(sys.argv[2]), sys.argv[3]
dist.init_process_group("fake", rank=0, world_size=size, store=FakeStore())
dist.ProcessGroup.set_timeout = lambda *_: None  # this backend has no timeout
world = distributed.init("cpu", tp=size)
with torch.device("meta"):
    model = build(path)
distributed.parallelize(model, world, dtype="fp32", activation_checkpointing=checkpointing)
for parameter in model.parameters():
    torch.nn.init.zeros_(parameter)
weights = {distributed.local_shard(parameter)[0].untyped_storage()._cdata for parameter in model.parameters()}
kept = {}


def keep(tensor):
    storage = tensor.untyped_storage()
    if storage._cdata not in weights:
        kept[storage._cdata] = storage
    return tensor


positions = torch.arange(1024)[None]
with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
    model.run_blocks(model.embedding(positions % 300), positions, None)
print(sum(storage.nbytes() for storage in kept.values()) / 1024)
world.finish()
