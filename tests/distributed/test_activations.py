"""Recomputing and offloading change what is kept, never the gradients."""

from collections import Counter

import pytest
import torch
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from tune import peft
from tune.checkpointers import load_model
from tune.distributed.activations import save_less


class Count(TorchDispatchMode):
    """Counts matrix products, those of them by a narrow matrix, and attentions."""

    def __init__(self):
        super().__init__()
        self.calls = Counter()

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        name = operation.name()
        if name in ("aten::mm", "aten::addmm"):
            rank = 2 in args[-1].shape
            self.calls["narrow" if rank else "products"] += 1
        elif name == "aten::_scaled_dot_product_flash_attention_for_cpu":
            self.calls["attentions"] += 1
        return operation(*args, **(kwargs or {}))


def backward_of(checkpoint, checkpointing="none", offload=False, adapted=False):
    """Gradients, and the operations of the forward that the backward of the blocks repeated."""
    model = load_model(str(checkpoint))
    if adapted:
        peft.add_adapters(model, peft.LoRA(rank=2))
        peft.initialize(model, seed=0)
    for block in model.blocks:
        save_less(block, checkpointing, offload)
    loss = model(torch.arange(40)[None]).square().sum()
    with Count() as count:
        loss.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}, count.calls


@pytest.mark.parametrize(
    ("checkpointing", "products", "attentions"),
    # Of 3 blocks of 7 products and 1 attention; backward has no use for the result of the last product of a block.
    [("none", 0, 0), ("selective", 9, 0), ("full", 18, 3)],
)
def test_what_is_recomputed(checkpoint, checkpointing, products, attentions):
    expected, plain = backward_of(checkpoint)
    gradients, counted = backward_of(checkpoint, checkpointing)
    assert_close(gradients, expected, rtol=1e-4, atol=1e-3)
    assert counted["products"] - plain["products"] == products
    assert counted["attentions"] == attentions


def test_the_narrow_products_of_lora_do_not_count(checkpoint):
    expected, plain = backward_of(checkpoint, adapted=True)
    gradients, counted = backward_of(checkpoint, "selective", adapted=True)
    assert_close(gradients, expected, rtol=1e-4, atol=1e-3)
    assert counted["products"] - plain["products"] == 9  # as without adapters
    assert counted["narrow"] - plain["narrow"] == 3 * 6  # by B, but for the last of a block; those by A are kept


@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_offloaded_activations_come_back(checkpoint, checkpointing):
    expected, _ = backward_of(checkpoint)
    gradients, _ = backward_of(checkpoint, checkpointing, offload=True)
    assert_close(gradients, expected, rtol=1e-4, atol=1e-3)
