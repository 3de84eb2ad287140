"""Print the average bytes of tokens that processes send to each other's experts: `count_exchanged.py MODEL`."""

import json
import sys

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tune import distributed
from tune.checkpointers import Random
from tune.collators import Batch
from tune.losses import LinearCrossEntropy
from tune.models import build


class Exchanged(TorchDispatchMode):
    bytes = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        output = operation(*args, **kwargs or {})
        if str(operation) == "_c10d_functional.all_to_all_single.default" and args[0].is_floating_point():
            self.bytes += args[0].nbytes
        return output


world = distributed.init("cpu", ep=2)
with torch.device("meta"):
    model = build(sys.argv[1])
expected = distributed.bytes_sent(model, world, "fp32", "fp32", tokens=120, micro_batches=1)
distributed.parallelize(model, world, dtype="fp32")
Random(seed=0).load(model)
tokens = torch.randint(0, 256, (1, 120), generator=torch.Generator().manual_seed(world.rank))
with Exchanged() as exchanged:
    model(Batch.of(tokens, tokens), LinearCrossEntropy()).backward()
counted = sum(world.from_all_ranks(exchanged.bytes)) / 2
print(json.dumps({"expected": expected, "counted": counted / 2}))  # half stays local when experts are equally popular
world.finish()
