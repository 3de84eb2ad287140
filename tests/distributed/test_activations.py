"""Recomputation and offloading change what is saved, never the gradients."""

import functools
from collections import Counter
from dataclasses import replace

import pytest
import torch
from flash_on_cpu import flash_path
from helpers import save_checkpoint, weekly_but
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from tune import peft
from tune.checkpointers import load_model
from tune.collators import Batch
from tune.distributed import activations, full_tensor, init, local_shard, parallelize, share, units_of
from tune.distributed.activations import Offloaded, wrap_forward
from tune.models import build
from tune.models.context import Context
from tune.peft import products

POSITIONS = torch.arange(40)[None]


class Count(TorchDispatchMode):
    """Counts matrix products, products with a narrow matrix, and attention calls."""

    supports_higher_order_operators = True

    def __init__(self):
        super().__init__()
        self.calls = Counter()

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        name = args[1].name() if operation.name() == "run_with_rng_state" else operation.name()
        if name in ("aten::mm", "aten::addmm"):
            rank = 2 in args[-1].shape
            self.calls["narrow" if rank else "products"] += 1
        elif name in ("aten::_scaled_dot_product_flash_attention_for_cpu", "aten::_flash_attention_forward"):
            self.calls["attentions"] += 1
        return operation(*args, **(kwargs or {}))


@pytest.fixture(scope="module")
def sparse_checkpoint(tmp_path_factory):
    """Return a checkpoint with experts."""
    sizes = {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    return save_checkpoint(tmp_path_factory.mktemp("qwen3_moe"), "Qwen3MoeConfig", **sizes)


def backward_of(checkpoint, checkpointing="none", offload=False, adapted=False, compile=False):
    """Return gradients, and the forward operations that the backward of the blocks repeated."""
    model = load_model(str(checkpoint))
    if adapted:
        peft.add_adapters(model, peft.LoRA(rank=2))
        peft.initialize(model, seed=0)
    for block in model.blocks:
        wrap_forward(block, checkpointing, compile, offload)
    loss = model(POSITIONS).square().sum()
    with Count() as count:
        loss.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}, count.calls


@pytest.fixture
def force_eager_compile(monkeypatch):
    """Trace compiled code and partition it into forward and backward, but run it in torch's own kernels."""
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("checkpointing", "products", "attentions", "compile"),
    # 3 blocks of 7 products and 1 attention; backward does not need the result of a block's last product.
    [
        ("none", 0, 0, False), ("selective", 9, 0, False), ("full", 18, 3, False), ("selective", 9, 0, True),
        pytest.param("none", 0, 0, True, marks=pytest.mark.slow),
        pytest.param("full", 18, 3, True, marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_recomputed_operations(checkpoint, checkpointing, products, attentions, compile, force_eager_compile):
    expected, plain = backward_of(checkpoint)
    gradients, counted = backward_of(checkpoint, checkpointing, compile=compile)
    assert_close(gradients, expected, rtol=1e-4, atol=1e-3)
    assert counted["products"] - plain["products"] == products
    assert counted["attentions"] == attentions
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == compile


def test_narrow_lora_products_do_not_count(checkpoint, monkeypatch):
    monkeypatch.setattr(products, "is_watched", lambda: True)  # also without checkpointing
    expected, plain = backward_of(checkpoint, adapted=True)
    gradients, counted = backward_of(checkpoint, "selective", adapted=True)
    assert_close(gradients, expected, rtol=1e-4, atol=1e-3)
    assert counted["products"] - plain["products"] == 9  # the same as without adapters
    assert counted["narrow"] - plain["narrow"] == 3 * 6  # by B, except the last of a block; products by A are saved


TWO_FORWARDS = [("selective", False), ("full", False)]


@pytest.mark.parametrize(
    ("checkpointing", "compile"), weekly_but(TWO_FORWARDS, [*TWO_FORWARDS, ("selective", True), ("full", True)])
)
@pytest.mark.parametrize("experts", [False, True])
def test_two_forwards_with_their_own_dropout_share_a_backward(
    checkpointing, compile, experts, checkpoint, sparse_checkpoint, force_eager_compile
):
    """As in R-Drop, or a consistency loss. Recomputation restores each forward's own masks."""

    def gradients_of(checkpointing, compile=False):
        model = load_model(str(sparse_checkpoint if experts else checkpoint)).train()
        peft.add_adapters(model, peft.LoRA(rank=4, dropout=0.5))
        peft.initialize(model, seed=0)
        torch.manual_seed(0)
        for name, parameter in model.named_parameters():
            if name.endswith("lora_b"):
                torch.nn.init.normal_(parameter, std=0.1)
        for block in model.blocks:
            wrap_forward(block, checkpointing, compile, offload=False)
        first, second = (model(Batch.of(POSITIONS).in_step(0, step, num_supervised=1)) for step in (1, 2))
        assert not torch.equal(first, second)
        (first * second.sin()).sum().backward()
        return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.requires_grad}

    assert_close(gradients_of(checkpointing, compile), gradients_of("none"), rtol=1e-4, atol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", ["selective", "full"])
@pytest.mark.parametrize("sharded", [False, True])
def test_two_forwards_keep_their_own_routing(sharded, checkpointing, sparse_checkpoint):
    """Two batches of different lengths share a backward: gradients with the router losses of both, and the statistics
    of experts, are those without recomputation, and the sums of two steps with a backward each."""

    def trained(checkpointing, together=True):
        model = load_model(str(sparse_checkpoint)).train()
        model.config = replace(model.config, router_loss=5.0)
        peft.add_adapters(model, peft.LoRA(rank=4, dropout=0.5))
        peft.initialize(model, seed=0)
        for name, parameter in model.named_parameters():
            if name.endswith("lora_b"):
                torch.nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(0))
            if "router" in name:
                parameter.requires_grad_()
        how = {"dtype": "fp32", "activation_checkpointing": checkpointing, "cpu_offload": sharded}  # offload: with FSDP
        parallelize(model, init("cpu"), **how)
        losses = []
        for step, length in enumerate((40, 25), 1):
            tokens = (7 * step * POSITIONS[:, :length]) % 90
            logits = model(Batch.of(tokens, labels=tokens).in_step(0, step, num_supervised=65))
            losses.append(logits.sin().sum())
            if not together:
                losses.pop().backward()
        if together:
            sum(losses).backward()
        gradients = {name: each.grad for name, each in model.named_parameters() if each.requires_grad}
        return {name: full_tensor(gradient) for name, gradient in gradients.items()} | {"stats": model.routing.take()}

    expected = trained("none", together=False)
    assert expected["stats"][:, :4].sum() == 3 * 2 * 65  # layers, choices and tokens
    assert all(value.abs().max() > 0 for value in expected.values())
    for found in (trained("none"), trained(checkpointing)):
        assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("compile", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_offloaded_activations_are_restored(checkpoint, checkpointing, compile, force_eager_compile):
    expected, _ = backward_of(checkpoint, checkpointing, compile=compile)
    gradients, _ = backward_of(checkpoint, checkpointing, offload=True, compile=compile)
    assert_close(gradients, expected, rtol=1e-4, atol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("is_shared", [False, True])
@pytest.mark.parametrize(
    ("checkpointing", "compile"),
    [
        ("none", False), ("full", False), ("selective", True),
        pytest.param("none", True, marks=pytest.mark.slow), pytest.param("full", True, marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_everything_but_weights_is_offloaded(
    checkpoint, checkpointing, compile, is_shared, force_eager_compile, monkeypatch
):
    """Tensors that autograd saves go to the host, except weights, which stay on the device anyway. This includes
    sharded weights (here, one process has all of them)."""
    kept, moved = [], []

    def record(pack, unpack):
        def recording(tensor):
            packed = pack(tensor)
            (kept if packed is tensor else moved).append(tensor)
            return packed

        return saved_tensors_hooks(recording, unpack)

    def run(offload):
        model = load_model(str(checkpoint))
        if is_shared:
            share(model, [*model.blocks], units_of(model, [*model.blocks]), init("cpu").mesh["tp"])
            model.to_empty(device="cpu")
            with torch.no_grad():
                for parameter in model.parameters():
                    torch.nn.init.normal_(local_shard(parameter)[0], std=0.05)
        rotation = model.ropes[model.config.layers[0].attention.rope](POSITIONS, None, torch.float32)
        wrap_forward(model.blocks[0], checkpointing, compile, offload)
        with record(lambda tensor: tensor, lambda packed: packed):
            model.blocks[0](torch.randn(1, 40, 64, requires_grad=True), Context(rotation, None, POSITIONS, None))
        saved = [kept.copy(), moved.copy()]
        kept.clear(), moved.clear()
        return {local_shard(parameter)[0].untyped_storage().data_ptr() for parameter in model.parameters()}, saved

    def sizes(tensors, weights, of_weights):
        held = [tensor for tensor in tensors if (tensor.untyped_storage().data_ptr() in weights) == of_weights]
        return sorted(tensor.shape for tensor in held)

    weights, (autograd, _) = run(offload=False)
    monkeypatch.setattr(activations, "saved_tensors_hooks", record)
    new_weights, (stayed, offloaded) = run(offload=True)
    assert sizes(stayed, new_weights, True) == sizes(autograd, weights, True)
    assert sizes(offloaded, new_weights, False) == sizes(autograd, weights, False) and len(offloaded)


class Product(nn.Module):
    def forward(self, first, second):
        return first * second


def test_tensor_that_is_changed_in_place_is_saved_again():
    saved, tensor = Offloaded(set()), torch.ones(3)
    first, again = saved.pack(tensor), saved.pack(tensor)
    tensor.add_(1)
    second = saved.pack(tensor)
    assert first == again != second
    saved.leave_device()
    tensor.zero_()
    assert [saved.unpack(number).tolist() for number in (first, again, second)] == [[1.0] * 3, [1.0] * 3, [2.0] * 3]


def test_offloaded_views_of_one_storage_are_several_tensors():
    square = torch.arange(9.0).view(3, 3)
    views = [square, square.T, square[1:], square[:2], square.flatten(), square.expand(2, 3, 3)]
    views.append(square.view(torch.int32))
    saved = Offloaded(set())
    numbers = [saved.pack(view) for view in views]
    assert len({*numbers}) == len(views)
    saved.leave_device()
    for number, view in zip(numbers, views, strict=True):
        tensor = saved.unpack(number)
        assert torch.equal(tensor, view) and tensor.stride() == view.stride() and tensor.dtype == view.dtype


def test_offloaded_activations_keep_their_strides():
    """Compiled backwards expect the strides of the forward."""
    block = Product()
    wrap_forward(block, "none", compile=False, offload=True)
    halves = torch.randn(2, 3, 8, requires_grad=True).transpose(0, 1).chunk(2, dim=-1)
    expanded = torch.randn(3, 1, 4, requires_grad=True).expand(3, 2, 4)
    for first, second in (halves, (halves[0], expanded)):
        node = block(first, second).grad_fn
        block(first, second)  # until then, the tensors of the first forward are on the device
        for saved, expected in ((node._saved_self, first), (node._saved_other, second)):
            assert torch.equal(saved, expected) and saved.stride() == expected.stride()
            assert saved.data_ptr() != expected.data_ptr()


def test_activations_of_two_blocks_are_on_the_device():
    blocks = [Product() for _ in range(4)]
    for block in blocks:
        wrap_forward(block, "none", compile=False, offload=True)
    hidden, saved = torch.randn(8, requires_grad=True), []
    on_device = lambda: [sum(tensor is not None for tensor in block.on_device) for block in saved]  # noqa: E731
    outputs = [hidden]
    for block in blocks:
        outputs.append(block(outputs[-1], outputs[-1]))  # one tensor, saved twice
        saved.append(Offloaded.newest())
    assert [len(block.on_host) for block in saved] == [1] * 4 and on_device() == [0, 0, 0, 1]
    seen = []
    for output in outputs[1:]:
        output.register_hook(lambda _: seen.append(on_device()))
    outputs[-1].sum().backward(retain_graph=True)
    assert seen == [[0, 0, 0, 1], [0, 0, 1, 0], [0, 1, 0, 0], [1, 0, 0, 0]] and on_device() == [0] * 4
    expected = 16 * hidden.detach() ** 15  # x to the power of 16
    assert_close(hidden.grad, expected)
    outputs[-1].sum().backward()  # backward through the retained graph
    assert_close(hidden.grad, 2 * expected)


@pytest.mark.parametrize(("checkpointing", "attentions"), [("none", 0), ("selective", 0), ("full", 3)])
def test_gpu_attention_is_recomputed_only_in_full_mode(checkpoint, checkpointing, attentions):
    """On the meta device, where results have everything but values."""
    with torch.device("meta"):
        model = build(str(checkpoint))
    for block in model.blocks:
        wrap_forward(block, checkpointing, compile=False, offload=False)
    with flash_path():
        loss = model(Batch.of([[0] * 40]).to("meta")).square().sum()
    with Count() as count, flash_path():  # recomputes
        loss.backward()
    assert count.calls["attentions"] == attentions
