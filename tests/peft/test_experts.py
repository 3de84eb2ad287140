"""LoRA on experts is one LoRA per expert, and PEFT reads it from its files."""

import json
from dataclasses import replace

import pytest
import torch
from helpers import save_checkpoint
from safetensors.torch import save_file
from torch.testing import assert_close

from tune.checkpointers import load_model
from tune.collators import Batch
from tune.models.moe import Dispatch, ExpertLinear
from tune.peft.dropout import set_dropout_keys
from tune.peft.lora import LoRA, LoRAExperts

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

TOKENS = torch.arange(80).view(2, 40)
PLAN = Dispatch.of(torch.tensor([[3, 0], [1, 3], [0, 3], [3, 1], [0, 1]]), num_experts=4)


def adapted(layer, **settings):
    lora = LoRA(**{"rank": 4, "alpha": 8} | settings)
    LoRAExperts.adapt(layer, "experts.up", *lora.at("experts.up"), lora)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, start in layer.initial_values(generator).items():
            getattr(layer, name).copy_(start)
    return layer


@pytest.fixture(params=[False, True], ids=["out in", "in out"])
def layer(request):
    torch.manual_seed(0)
    layer = ExpertLinear(4, 12, 20, bias=True, transposed=request.param).requires_grad_(False)
    for parameter in layer.parameters():
        parameter.normal_()
    return layer


def test_new_adapter_changes_nothing(layer):
    rows = torch.randn(10, 12)
    before = layer(rows, PLAN)
    assert_close(adapted(layer)(rows, PLAN), before)


@pytest.mark.parametrize("rank", [4, 3])  # supported and unsupported by the grouped kernel
def test_each_expert_has_its_own_matrices(layer, rank):
    adapted(layer, rank=rank, alpha=6)
    torch.nn.init.normal_(layer.lora_b)
    rows = torch.randn(10, 12, requires_grad=True)
    weights = layer.weight.mT if layer.transposed else layer.weight
    weights = weights + 6 / rank * layer.lora_b @ layer.lora_a
    expected = torch.stack([weights[e] @ row + layer.bias[e] for row, e in zip(rows, PLAN.experts, strict=True)])
    output = layer(rows, PLAN)
    assert_close(output, expected, atol=1e-5, rtol=1e-5)
    inputs, gradient = (rows, layer.lora_a, layer.lora_b), torch.randn_like(output)
    gradients, references = (torch.autograd.grad(result, inputs, gradient) for result in (output, expected))
    assert_close(gradients, references, atol=1e-4, rtol=1e-5)
    assert layer.weight.grad is None


def test_dropout_follows_a_token_and_its_expert(layer):
    adapted(layer, dropout=0.5)
    torch.nn.init.normal_(layer.lora_b)
    experts = torch.tensor([[3, 0], [1, 3], [0, 3], [3, 1], [0, 1], [2, 1]])
    tokens = torch.randn(6, 12)

    def outputs(order):
        """The outputs of each token's two experts, with the tokens in this order."""
        plan = Dispatch.of(experts[order], num_experts=4)
        batch = replace(Batch.of(torch.zeros(1, 6, dtype=torch.long)), positions=order[None])
        set_dropout_keys(layer, (batch.in_step(0, 1, num_supervised=1),))
        return layer(plan.of_tokens(tokens[order]), plan)[plan.places].view(6, 2, -1)

    order = torch.tensor([4, 2, 0, 5, 1, 3])
    assert_close(outputs(order), outputs(torch.arange(6))[order])


def test_dropout_differs_between_tokens_and_between_experts(layer):
    adapted(layer, dropout=0.5).lora_a.data.fill_(1)
    layer.lora_b.data.fill_(1)
    rows = torch.ones(12, 12)
    plan = Dispatch.of(torch.tensor([[0, 1]] * 6), num_experts=4)
    set_dropout_keys(layer, (Batch.of(torch.zeros(1, 6, dtype=torch.long)).in_step(0, 1, num_supervised=1),))
    added = (layer(rows, plan) - layer.eval()(rows, plan))[plan.places, 0].view(6, 2)
    assert (added[0, 0] - added[:, 0]).abs().max() > 1
    assert (added[:, 0] - added[:, 1]).abs().max() > 1  # more than rounding


def adapt_all(model):
    """Add a random adapter to all experts of a model and return the layers by name."""
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, ExpertLinear)}
    for name, layer in layers.items():
        lora = LoRA(rank=4, alpha=8)
        LoRAExperts.adapt(layer, name, 4, 8, lora)
        torch.nn.init.normal_(layer.lora_a, std=0.1)
        torch.nn.init.normal_(layer.lora_b, std=0.1)
    return layers


def assert_peft_reads(folder, base, tensors, ours, **targets):
    settings = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 8, **targets}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    save_file(
        {f"base_model.model.{name}": tensor for name, tensor in tensors.items()}, folder / "adapter_model.safetensors"
    )
    reference = transformers.AutoModelForCausalLM.from_pretrained(base)
    before = reference(TOKENS).logits
    theirs = peft.PeftModel.from_pretrained(reference, folder)
    assert_close(theirs(TOKENS).logits, ours(TOKENS), atol=1e-5, rtol=1e-5)
    assert (ours(TOKENS) - before).abs().max() > 0.01


@pytest.mark.parametrize(
    ("config_class", "changes", "modules"),
    [
        ("MixtralConfig", {"num_local_experts": 4}, ["w1", "w2", "w3"]),
        ("Qwen3MoeConfig", {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
         ["gate_proj", "up_proj", "down_proj"]),
    ],
)  # fmt: skip
def test_peft_reads_an_adapter_for_each_expert(config_class, changes, modules, tmp_path):
    base = save_checkpoint(tmp_path / "base", config_class, **changes)
    ours = load_model(str(base))
    tensors = {}
    for name, layer in adapt_all(ours).items():
        for expert, disk_name in enumerate(ours.names.on_disk[f"{name}.weight"]):
            module = disk_name.removesuffix(".weight")
            tensors[f"{module}.lora_A.weight"] = layer.lora_a[expert].detach().clone()
            tensors[f"{module}.lora_B.weight"] = layer.lora_b[expert].detach().clone()
    assert_peft_reads(tmp_path, base, tensors, ours, target_modules=modules)
