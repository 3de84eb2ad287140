"""Blocks compile whole, with one graph per kind of block and not per layer."""

import pytest
import torch
from models.test_families import SMALL, VARIANTS, make_pair, random_tokens
from torch.testing import assert_close

from tune import peft
from tune.collators import Batch
from tune.distributed.activations import wrap_forward
from tune.losses import LinearCrossEntropy
from tune.models.context import Context
from tune.peft import set_dropout_keys

pytestmark = pytest.mark.weekly

transformers = pytest.importorskip("transformers")

LENGTHS = [[30, 50, 20], [100], [1, 99]]
DOCUMENTS = torch.tensor([[i for i, length in enumerate(row) for _ in range(length)] for row in LENGTHS])


@pytest.mark.parametrize(
    ("name", "kinds"), [("gemma2", 2), ("gemma3_text", 2), ("cohere2", 2), ("phi3-longrope", 1), ("qwen3_5_text", 2)]
)
def test_one_graph_per_kind_of_block(name, kinds, tmp_path):
    config_class, changes = VARIANTS[name]
    _, model = make_pair(getattr(transformers, config_class)(**SMALL | changes | {"num_hidden_layers": 3}), tmp_path)

    def loss_and_gradients(rows):
        tokens = random_tokens(1, 100)
        loss = model(Batch.of(tokens, tokens, DOCUMENTS[rows]), LinearCrossEntropy())
        return loss, *torch.autograd.grad(loss, list(model.parameters()))

    batches = [slice(0, 1), slice(1, 2), slice(2, 3)]
    expected = [loss_and_gradients(rows) for rows in batches]
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    for block in model.blocks:
        block.compile(fullgraph=True, backend="aot_eager")
    for rows, reference in zip(batches, expected, strict=True):
        assert_close(loss_and_gradients(rows), reference, atol=1e-4, rtol=1e-4)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == kinds


def test_all_layers_share_one_graph_despite_different_dropout_masks(tmp_path):
    """There is a second graph only because the input of the first block needs no gradient."""
    _, model = make_pair(transformers.LlamaConfig(**SMALL | {"num_hidden_layers": 4}), tmp_path)
    peft.add_adapters(model, peft.LoRA(rank=2, dropout=0.5))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    torch.nn.init.normal_(model.blocks[0].mlp.down.lora_b)
    tokens = random_tokens(1, 100)
    batch = Batch.of(tokens, labels=tokens).in_step(0, 1, tokens.numel())

    def loss_and_gradients():
        loss = model.train()(batch, LinearCrossEntropy())
        return loss, *torch.autograd.grad(loss, trained)

    expected = loss_and_gradients()
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    for block in model.blocks:
        block.compile(fullgraph=True, backend="aot_eager")
    assert_close(loss_and_gradients(), expected, atol=1e-4, rtol=1e-4)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2


@pytest.mark.weekly
def test_inductor_gives_the_same_gradients(tmp_path):
    """The block has features that are hard to compile: dropout, recomputation, offloaded parts of projections."""
    config_class, changes = VARIANTS["phi3"]
    _, model = make_pair(getattr(transformers, config_class)(**SMALL | changes | {"num_hidden_layers": 1}), tmp_path)
    peft.add_adapters(model, peft.LoRA(rank=2, dropout=0.3))
    block = model.train().blocks[0]
    for name, parameter in block.named_parameters():
        if name.endswith("lora_b"):
            torch.nn.init.normal_(parameter, std=0.05)
    tokens = random_tokens(2, 128)
    hidden = model.embedding(tokens).detach().requires_grad_()
    (rope,) = model.ropes.values()
    batch = Batch.of(tokens, tokens).in_step(0, 1, tokens.numel())
    set_dropout_keys(model, (batch,))
    context = Context(rope(batch.positions, None, torch.float32), batch.documents, batch.positions, None)
    inputs = [hidden, *(parameter for parameter in block.parameters() if parameter.requires_grad)]

    def gradients():
        output = block(hidden, context)[0]
        return torch.autograd.grad((output * torch.linspace(-1, 1, output.numel()).view_as(output)).sum(), inputs)

    expected = gradients()
    torch.compiler.reset()
    wrap_forward(block, "selective", compile=True, offload=True)
    assert_close(gradients(), expected, atol=1e-4, rtol=1e-4)
