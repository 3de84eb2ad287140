"""Run in each process as `sharded_vision.py TP FAMILY FOLDER ...`: pictures on some processes only change nothing.

Process 0 has the pictures, the others have text. Loss and gradients match transformers' in one process. Once with a
tower that is trained, once with a frozen one; without and with recomputation of activations; and with adapters. With
tensor parallelism, TP processes share the language model and have the same batch.
"""

import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.testing import assert_close
from transformers import AutoModelForImageTextToText

from tune import distributed
from tune.checkpointers import Pretrained
from tune.losses import LinearCrossEntropy
from tune.models import hf
from tune.peft import LoRA, add_adapters, initialize

sys.path.insert(0, str(Path(__file__).parents[1]))
from vision import batch_of, blank_of, inputs_of, pictures_of

PARTS = {"trained": ["language", "projector", "tower"], "frozen": ["language", "projector"], "language": ["language"]}


def compare(name: str, folder: str, world: distributed.World, tower: str, recompute: str, adapters: bool) -> None:
    with torch.device("meta"):
        model = hf(folder, parts=PARTS[tower])
    if adapters:
        add_adapters(model, LoRA(rank=2))
    weights = Pretrained(folder, model)
    distributed.parallelize(model, world, dtype="fp32", activation_checkpointing=recompute)
    weights.load(model)
    if adapters:
        initialize(model, seed=0)
    model.check(blank_of(name))

    with_pictures = [inputs_of(name, "What is in this image?", 1), inputs_of(name, "a cat", 2, 3)]
    without = [inputs_of(name, "It is a red square and the blue cat.")]
    mine = [(with_pictures, pictures_of(with_pictures)), (without, blank_of(name))][min(world.data_rank, 1)]
    for _ in range(2):  # a second step would hang if the first left a process behind
        model.zero_grad()
        loss = model(batch_of(*mine), LinearCrossEntropy())
        loss.backward()
    total = world.sum(loss.detach()).float()

    theirs = AutoModelForImageTextToText.from_pretrained(folder).eval()
    expected = torch.zeros(())
    for each in with_pictures + without * (world.data_size - 1):
        expected = expected + F.cross_entropy(theirs(**each).logits[0, :-1], each["input_ids"][0, 1:], reduction="sum")
    assert_close(total, expected.detach(), rtol=1e-6, atol=0)
    expected.backward()
    gradients = {each: parameter.grad for each, parameter in theirs.named_parameters(remove_duplicate=False)}
    gradients["head.weight"] = theirs.get_output_embeddings().weight.grad
    compared = set()
    for each, parameter in model.named_parameters():
        reference = gradients.get(each.removeprefix("body."))
        if parameter.grad is None:
            assert not parameter.requires_grad or reference is None, each
            continue
        ours = distributed.full_tensor(parameter.grad)
        compared.add(model.part_of(each))
        if adapters:
            assert "lora" in each
        elif reference is None:
            assert not ours.any(), each
        else:
            assert (ours - reference).norm() <= 1e-5 * reference.norm() + 1e-5, each
    assert compared == ({"language"} if adapters else {*PARTS[tower]})


if __name__ == "__main__":
    world = distributed.init("cpu", tp=int(sys.argv[1]))
    for name, folder in zip(sys.argv[2::2], sys.argv[3::2], strict=True):
        print(name, flush=True)
        compare(name, folder, world, "trained", "none", False)
        compare(name, folder, world, "trained", "full", False)
        compare(name, folder, world, "frozen", "selective", False)
        compare(name, folder, world, "language", "none", False)
        compare(name, folder, world, "language", "full", True)
    print(f"{world.size} processes agree")
