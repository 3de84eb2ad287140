"""Print the growth in peak memory from loading the folder `sys.argv[1]`, and the size of the loaded parameters, in MB.

With a second argument, the linear layers are quantized to NF4 while they are read.
"""

import resource
import sys

import torch

from tune import checkpointers, distributed, models, quantization

if __name__ == "__main__":
    world = distributed.init("cpu")
    world.barrier()  # do not count the memory of the process group
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with torch.device("meta"):
        model = models.build(sys.argv[1])
    weights = checkpointers.Pretrained(sys.argv[1], model)
    if len(sys.argv) > 2:
        quantization.quantize_linears(model.requires_grad_(False), double=True)
    distributed.parallelize(model, world, dtype="fp32")
    weights.load(model)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 2**10
    held = sum(distributed.local_shard(parameter)[0].nbytes for parameter in model.parameters()) / 2**20
    print(grown, held)
