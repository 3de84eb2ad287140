import pytest
import torch
from helpers import save_checkpoint
from torch import nn

from tune.checkpointers import load_model
from tune.errors import TuneError
from tune.optimizers import learning_rates, parameter_groups
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


def test_frozen_parameters_are_skipped_and_ratios_multiply_rates(checkpoint):
    """LoRA+: B learns faster than A."""
    model = load_model(str(checkpoint))
    add_adapters(model, LoRA(rank=4, dora=True))
    groups = parameter_groups(model, 1e-3, lr_ratios={"lora_b": 16})
    rates = {id(p): group.get("lr", 1e-3) for group in groups for p in group["params"]}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert rates.pop(id(parameter)) == (16e-3 if name.endswith("lora_b") else 1e-3)
    assert not rates


def test_first_matching_pattern_wins(checkpoint):
    model = load_model(str(checkpoint))
    for ratios, expected in (({"norm": 2, "blocks": 3}, 2e-3), ({"blocks": 3, "norm": 2}, 3e-3)):
        groups = parameter_groups(model, 1e-3, lr_ratios=ratios)
        rates = {id(p): group.get("lr", 1e-3) for group in groups for p in group["params"]}
        of_norms = [rates[id(p)] for name, p in model.blocks.named_parameters() if "norm" in name]
        assert of_norms and of_norms == pytest.approx([expected] * len(of_norms))


def test_learning_rate_of_every_group_is_reported():
    def rates(*groups):
        parameters = [torch.nn.Parameter(torch.zeros(1)) for _ in groups]
        groups = [{"params": [parameter], **group} for parameter, group in zip(parameters, groups, strict=True)]
        return learning_rates(torch.optim.SGD(groups, lr=0.1))

    assert rates({}, {}) == {"lr": 0.1}
    assert rates({"lr": 0.2, "name": "a"}, {}, {"lr": 0.2, "name": "a"}) == {"lr": 0.1, "lr/a": 0.2}
    assert rates({"lr": 0.2, "name": "a"}) == {"lr": 0.2, "lr/a": 0.2}
    assert rates({}, {"lr": torch.tensor(0.25)}) == {"lr": 0.1, "lr/1": 0.25}


def test_pattern_without_a_match_is_refused(checkpoint):
    with pytest.raises(TuneError, match=r"'lora_b' matches no trained parameter. .* like blocks"):
        parameter_groups(load_model(str(checkpoint)), 1e-3, lr_ratios={"lora_b": 16})


def test_tied_embedding_is_one_parameter_outside_the_blocks(tied_checkpoint):
    model = load_model(str(tied_checkpoint))
    groups = parameter_groups(model, 1e-3, lr_ratios={"embedding": 0.1})
    (slow,) = [group for group in groups if "lr" in group]
    assert [id(parameter) for parameter in slow["params"]] == [id(model.embedding.weight)]
    assert slow.get("weight_decay") is None  # embeddings decay like other matrices
    assert slow["lr"] == 1e-4 and "weight_decay" not in slow and not slow["in_blocks"]
    for group in groups:
        if group["in_blocks"]:
            assert all(parameter.ndim == 2 for parameter in group["params"]) and "weight_decay" not in group


def test_weight_decay_depends_on_the_role_of_a_parameter(tmp_path):
    """In gpt-oss, the biases of experts are a matrix and their weights a stack of matrices."""
    model = load_model(str(save_checkpoint(tmp_path, "GptOssConfig", num_local_experts=4, head_dim=16)))
    groups = {id(p): group for group in parameter_groups(model, 1e-3) for p in group["params"]}
    for name, parameter in model.named_parameters():
        group, kind = groups[id(parameter)], name.rpartition(".")[2]
        is_weight = kind == "weight" and "norm" not in name
        assert ("weight_decay" not in group) == is_weight, name
        assert group["in_blocks"] == (is_weight and name.startswith("blocks")), name
    assert model.blocks[0].mlp.experts.down.bias.ndim == 2 and model.blocks[0].mlp.experts.down.weight.ndim == 3


def test_convolutions_decay_but_head_norms_do_not():
    model = nn.Module()
    model.blocks = nn.ModuleList([nn.Conv1d(6, 6, 4, groups=6, bias=False), nn.LayerNorm((2, 3), bias=False)])
    (of_kernels, of_norms) = parameter_groups(model, 1e-3)
    assert of_kernels["params"] == [model.blocks[0].weight] and "weight_decay" not in of_kernels
    assert of_norms["params"] == [model.blocks[1].weight] and of_norms["weight_decay"] == 0
    assert not of_kernels["in_blocks"] and not of_norms["in_blocks"]
