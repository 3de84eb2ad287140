"""Run in each process as `sharded_log_probs.py FOLDER ...`: check log-probs and gradients against transformers."""

import sys

import torch
from torch.testing import assert_close
from transformers import AutoModelForCausalLM

from tune import distributed
from tune.checkpointers import Pretrained
from tune.collators import Batch
from tune.losses import LogProbs, per_document
from tune.models import build


def compare(folder: str, world: distributed.World, reshard: bool) -> None:
    with torch.device("meta"):
        model = build(folder)
    weights = Pretrained(folder, model)
    distributed.parallelize(model, world, dtype="fp32")
    weights.load(model)
    model.set_reshard_after_forward(reshard, recurse=False)  # if True, backward gathers the head's weight again
    rows = torch.randint(3, 90, (2 * world.size, 21), generator=torch.Generator().manual_seed(0))
    for index in range(2):  # micro-batches
        batch = Batch.of(rows[2 * world.rank + index, None, :-1], rows[2 * world.rank + index, None, 1:])
        distributed.set_gradient_sync(model, index == 1)
        per_document(model(batch, LogProbs(8)).log_probs, batch).square().sum().backward()

    reference = AutoModelForCausalLM.from_pretrained(folder).eval()
    log_probs = reference(rows[:, :-1]).logits.log_softmax(-1).gather(2, rows[:, 1:, None])
    log_probs.sum(dim=(1, 2)).square().sum().backward()
    for ours, exact in (
        (model.embedding.weight, reference.get_input_embeddings().weight),
        (model.norm.weight, reference.model.norm.weight),
        *(() if model.head is None else [(model.head.weight, reference.lm_head.weight)]),
    ):
        gradient = distributed.full_tensor(ours.grad)
        assert (gradient - exact.grad).norm() <= 1e-5 * exact.grad.norm()
    assert_close(distributed.full_tensor(model.norm.weight), reference.model.norm.weight)


if __name__ == "__main__":
    world = distributed.init("cpu")
    for folder in sys.argv[1:]:
        for reshard in (False, True):
            compare(folder, world, reshard)
    print(f"{world.size} processes agree")
