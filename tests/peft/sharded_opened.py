"""Run in each process as `sharded_opened.py LAYOUT NAME WHOLE`: check that the model opened as NAME has the logits of
the model in the folder WHOLE, frozen and sharded, or loaded by tensor-parallel peers."""

import sys

import torch
from torch.testing import assert_close

from tune import distributed
from tune.checkpointers import load_model
from tune.peft import open_model

axis, size = sys.argv[1].split("=")
name, whole = sys.argv[2:]
world = distributed.init("cpu", **{axis: int(size)})
tokens = torch.arange(5, 85).view(2, 40)
with torch.no_grad():
    expected = load_model(whole)(tokens)
    assert_close(open_model(name).shard(world)(tokens), expected, atol=1e-5, rtol=1e-5)
    if axis == "tp":
        shared = open_model(name).load("cpu", peers=world.mesh["tp"])
        assert_close(shared(tokens), expected, atol=1e-5, rtol=1e-5)
print(f"{world.size} processes agree")
world.finish()
