"""Print whether tensor-parallel parameters sharded by FSDP, evenly or not, are gathered unchanged."""

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tune import distributed
from tune.distributed import shards

shards.LARGE = 0
world = distributed.init("cpu", tp=2)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 10), nn.Linear(10, 7), nn.Linear(7, 3))
expected = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
parallelize_module(model, world.mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
fully_shard(model, mesh=world.shards)
same = [
    torch.equal(distributed.full_tensor(parameter.detach()), expected[name])
    for name, parameter in model.named_parameters()
]
print(len(same), all(same))
world.finish()
