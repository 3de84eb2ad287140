"""Run in each process as `sharded_hf.py FOLDER ...`: check that sharded models match transformers."""

import sys

import torch
from torch.testing import assert_close
from transformers import AutoModelForCausalLM

from tune import distributed
from tune.checkpointers import Pretrained
from tune.models import hf


def compare(folder: str, world: distributed.World) -> None:
    with torch.device("meta"):
        model = hf(folder)
    weights = Pretrained(folder, model)
    distributed.parallelize(model, world, dtype="fp32")
    weights.load(model)
    reference = AutoModelForCausalLM.from_pretrained(folder).eval()
    tokens = torch.randint(3, 90, (2, 20), generator=torch.Generator().manual_seed(world.rank))
    with torch.no_grad():
        assert_close(model(tokens), reference(tokens).logits, atol=1e-6, rtol=1e-6)
    assert_close(dict(model.body.named_buffers()), dict(reference.named_buffers()), rtol=0, atol=0)


if __name__ == "__main__":
    world = distributed.init("cpu")
    for folder in sys.argv[1:]:
        compare(folder, world)
    print(f"{world.size} processes agree")
