"""Dropout matches its definition: each element is independently zeroed or scaled up."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from tune.checkpointers import load_model
from tune.collators import Batch
from tune.peft import LoRA, add_adapters
from tune.peft.dropout import dropout, prepare_dropout, set_dropout_keys

SAMPLES, LENGTH, WIDTH = 2, 100, 50
COUNT = SAMPLES * LENGTH * WIDTH


def mask(probability=0.3, name="layer", seed=0, step=1, sample=0, position=0):
    """The dropout mask for tokens of two samples, starting at `sample` and `position`."""
    batch = Batch.of(torch.zeros(SAMPLES, LENGTH, dtype=torch.long), samples=range(sample, sample + SAMPLES))
    layer = nn.Module()
    prepare_dropout(layer, name, probability, WIDTH)
    batch = replace(batch, positions=batch.positions + position).in_step(seed, step, num_supervised=1)
    set_dropout_keys(layer, (batch,))
    return dropout(torch.ones(SAMPLES, LENGTH, WIDTH), probability, layer.dropout_keys, layer.dropout_features)


@pytest.mark.parametrize("probability", [0.05, 0.3, 0.5, 0.9])
def test_dropout_zeroes_a_share_and_scales_up_the_rest(probability):
    values = mask(probability)
    assert values.unique().tolist() == pytest.approx([0, 1 / (1 - probability)])
    deviation = (probability * (1 - probability) / COUNT) ** 0.5
    assert abs((values == 0).float().mean().item() - probability) < 4 * deviation


OTHERS = {
    "step": mask(step=2), "seed": mask(seed=1), "sample": mask(sample=10), "position": mask(position=LENGTH),
    "name": mask(name="other"), "step and seed": mask(seed=2, step=0), "next feature": mask().roll(1, 2),
    "next position": mask().roll(1, 1), "next sample": mask().roll(1, 0), "next step": mask(step=11),
}  # fmt: skip


@pytest.mark.parametrize("other", OTHERS)
def test_masks_are_independent(other):
    """Two masks agree as often as expected by chance."""
    chance = 0.3**2 + 0.7**2
    agreed = ((mask() == 0) == (OTHERS[other] == 0)).float().mean().item()
    assert abs(agreed - chance) < 5 * (chance * (1 - chance) / COUNT) ** 0.5


def test_mask_depends_on_the_token_not_its_place_in_the_batch():
    torch.testing.assert_close(mask(sample=1)[0], mask()[1])
    torch.testing.assert_close(mask(position=40)[:, :60], mask()[:, 40:])


@pytest.mark.parametrize("name", ["q_proj", "lm_head"])
def test_dora_scales_the_input_after_dropout(name, checkpoint):
    """As in PEFT: y = W x + (m / n - 1) W d + m / n s B A d, where d is x with dropout and n the norms of W + s B A."""
    model = load_model(str(checkpoint))
    add_adapters(model, LoRA(rank=4, alpha=12, dropout=0.5, dora=True, target_modules=[name]))
    layer = model.head if name == "lm_head" else model.blocks[0].attention.query
    keys, input = torch.arange(6, dtype=torch.int32)[None] * 977, torch.randn(1, 6, layer.in_features)
    layer.train().dropout_keys = keys
    with torch.no_grad():
        layer.lora_b.normal_(std=0.1)
        layer.magnitude.mul_(1.5)
        dropped = dropout(input, 0.5, keys, layer.dropout_features)
        assert 0.3 < (dropped == 0).float().mean() < 0.7
        low_rank = 12 / 4 * layer.lora_b @ layer.lora_a
        ratio = layer.magnitude / (layer.weight + low_rank).norm(dim=1)
        expected = input @ layer.weight.T + dropped @ (ratio[:, None] * (layer.weight + low_rank) - layer.weight).T
        torch.testing.assert_close(layer(input), expected)
        inputs, weight = layer.operands(input)
        torch.testing.assert_close(inputs @ weight.T, expected)


def test_shard_of_the_features_uses_its_part_of_the_mask(checkpoint):
    model = load_model(str(checkpoint))
    add_adapters(model, LoRA(rank=4, dropout=0.5, target_modules=["down_proj"]))
    layer = model.blocks[0].mlp.down.train()
    keys, input = torch.arange(9, dtype=torch.int32) * 977, torch.ones(9, layer.in_features)
    half = layer.in_features // 2
    layer.dropout_keys = keys
    whole = layer._dropped(input, lambda keys: keys)
    layer.first_input = half  # as in a process that has the second half
    assert not torch.equal(whole[:, half:], whole[:, :half])
    assert torch.equal(layer._dropped(input[:, half:], lambda keys: keys), whole[:, half:])
