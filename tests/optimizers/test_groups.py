import pytest
import torch

from tune.checkpointers import load_model
from tune.errors import TuneError
from tune.optimizers import parameter_groups
from tune.peft import LoRA, add_adapters


def test_vectors_are_not_decayed(biased_checkpoint):
    model = load_model(str(biased_checkpoint))
    optimizer = torch.optim.AdamW(parameter_groups(model, 1e-3), lr=1e-3, weight_decay=0.1)
    for group in optimizer.param_groups:
        assert group["lr"] == 1e-3
        for parameter in group["params"]:
            assert group["weight_decay"] == (0.1 if parameter.ndim == 2 else 0.0)
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(list(model.parameters()))
    assert all("weight_decay" not in group for group in parameter_groups(model, 1e-3, decay_vectors=True))


def test_frozen_parameters_are_left_out_and_ratios_multiply(checkpoint):
    """LoRA+: B learns faster than A."""
    model = load_model(str(checkpoint))
    add_adapters(model, LoRA(rank=4, dora=True))
    groups = parameter_groups(model, 1e-3, lr_ratios={"lora_b": 16})
    rates = {id(p): group.get("lr", 1e-3) for group in groups for p in group["params"]}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert rates.pop(id(parameter)) == (16e-3 if name.endswith("lora_b") else 1e-3)
    assert not rates


def test_a_pattern_without_match_is_refused(checkpoint):
    with pytest.raises(TuneError, match="'lora_b' is in the name of no trained parameter; they are called like blocks"):
        parameter_groups(load_model(str(checkpoint)), 1e-3, lr_ratios={"lora_b": 16})


def test_a_tied_embedding_is_one_parameter_and_no_matrix_of_a_block(tied_checkpoint):
    model = load_model(str(tied_checkpoint))
    groups = parameter_groups(model, 1e-3, lr_ratios={"embedding": 0.1})
    (slow,) = [group for group in groups if "lr" in group]
    assert [id(parameter) for parameter in slow["params"]] == [id(model.embedding.weight)]
    assert slow["lr"] == 1e-4 and "weight_decay" not in slow and not slow["in_blocks"]
    for group in groups:
        if group["in_blocks"]:
            assert all(parameter.ndim == 2 for parameter in group["params"]) and "weight_decay" not in group
