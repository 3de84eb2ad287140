"""Print what one process sends in a step and holds, without starting the others.

Usage: `count_collectives.py MODEL AXIS SIZE [STAGE]`. With a ZeRO stage, the step has two micro-batches.
"""

import json
import sys
from collections import Counter

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from tune import distributed
from tune.collators import Batch
from tune.losses import LinearCrossEntropy
from tune.models import build


class Collectives(TorchDispatchMode):
    """Counts calls, and the elements of the larger of input and output. FSDP's collectives are c10d's own."""

    def __init__(self):
        super().__init__()
        self.calls, self.numbers, self.of_fsdp = Counter(), Counter(), Counter()

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        output = operation(*args, **kwargs or {})
        name = str(operation)
        if name.startswith("_c10d_functional.") and ("gather" in name or "reduce" in name):
            self.calls[operation.__name__] += 1
            self.numbers[operation.__name__] += max(args[0].numel(), output.numel())
        if name in ("c10d.send.default", "c10d.recv_.default"):
            self.calls[operation.__name__] += 1
            self.numbers[operation.__name__] += sum(tensor.numel() for tensor in args[0])
        if name in ("c10d._allgather_base_.default", "c10d._reduce_scatter_base_.default"):
            kind = "gathered" if "gather" in name else "scattered"
            if args[0].numel() != args[1].numel():
                self.count_of_fsdp(kind, max(args[:2], key=torch.numel))
                self.of_fsdp["bytes"] += max(args[0].nbytes, args[1].nbytes)
        if name == "c10d.allreduce_.default":
            self.count_of_fsdp("summed", args[0][0])
        return output

    def count_of_fsdp(self, kind, tensor):
        self.of_fsdp[kind] += tensor.nbytes
        self.of_fsdp[f"{kind} calls"] += 1


path, axis, size = sys.argv[1], sys.argv[2], int(sys.argv[3])
stage, count = (int(sys.argv[4]), 2) if len(sys.argv) > 4 else (None, 1)
dist.init_process_group("fake", rank=size // 2, world_size=size, store=FakeStore())
dist.ProcessGroup.set_timeout = lambda *_: None  # this backend has no timeout
layouts = {"HSDP": {"dp_replicate": size // 2}, "whole head": {"tp": size, "loss_parallel": False}}
layout = layouts.get(axis, {axis: size})
world = distributed.init("cpu", **layout, zero_stage=stage, reduce_every_micro_batch=True)
with torch.device("meta"):
    model = build(path)
expected = distributed.bytes_sent(model, world, "fp32", "fp32", tokens=120, micro_batches=count)
distributed.parallelize(model, world, dtype="fp32")
for parameter in model.parameters():
    torch.nn.init.zeros_(parameter)
tokens = torch.arange(120)[None]
with Collectives() as counted:
    pipeline = distributed.Pipeline(model, world)
    for batch in pipeline.turns([Batch.of(tokens, tokens)] * count):
        for due, is_last in pipeline.due(model(batch, LinearCrossEntropy())):
            distributed.set_gradient_sync(model, is_last)
            due.backward()
whole, here = (
    sum(count(parameter) for parameter in model.parameters()) for count in (torch.numel, lambda p: p.to_local().numel())
)
gradients = sum(parameter.grad.to_local().numel() for parameter in model.parameters())
result = {"calls": counted.calls, "numbers": counted.numbers, "share": here / whole, "gradients": gradients / whole}
result |= {"bytes": 4 * whole, "expected": expected, "of_fsdp": counted.of_fsdp}
print(json.dumps(result))
world.finish()
