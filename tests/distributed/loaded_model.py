"""Shards a model that is loaded, of ours and of transformers, and compares its logits with those before.

`sys.argv[1]` is its folder, and `sys.argv[2]` the number of processes that share its layers.
"""

import sys

import torch
import transformers
from torch.distributed.tensor import DTensor
from torch.testing import assert_close

from tune import distributed
from tune.checkpointers import load_model
from tune.models import hf

TOKENS = torch.arange(5, 45).view(2, 20)
folder, tp = sys.argv[1], int(sys.argv[2])
world = distributed.init("cpu", tp=tp) if tp > 1 else None
models = [load_model(folder)]
if tp == 1:
    models.append(hf(transformers.AutoModelForCausalLM.from_pretrained(folder)))
for model in models:
    with torch.no_grad():
        expected = model(TOKENS)
        if world is None and not torch.distributed.is_initialized():
            torch.distributed.init_process_group("gloo")
        distributed.parallelize(model, world, dtype=torch.float32)
        assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
        assert_close(model(TOKENS), expected, atol=1e-5, rtol=1e-5)
torch.distributed.destroy_process_group()
