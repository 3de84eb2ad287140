import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers import result_of, run_processes, save_checkpoint
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.testing import assert_close

from tune import distributed
from tune.checkpointers import Pretrained, load_model
from tune.collators import Batch
from tune.distributed.parallelize import units_of
from tune.distributed.wrapping import Wrap, wrappers_of
from tune.errors import TuneError
from tune.losses import LinearCrossEntropy
from tune.models import build
from tune.peft import LoRA, add_adapters, initialize, products

TOKENS, LABELS = torch.arange(60).view(2, 30), torch.arange(60, 120).view(2, 30)


def parallel_model(folder, **options):
    with torch.device("meta"):
        model = build(str(folder))
    weights = Pretrained(str(folder), model)
    distributed.parallelize(model, distributed.init("cpu"), **{"dtype": "fp32"} | options)
    weights.load(model)
    return model


def adapted_model(folder, lora, **options):
    with torch.device("meta"):
        model = build(str(folder))
    weights = Pretrained(str(folder), model)
    add_adapters(model, lora)
    distributed.parallelize(model, distributed.init("cpu"), **options)
    weights.load(model)
    initialize(model, seed=0)
    return model


def loss_and_gradients(model):
    loss = model(Batch.of(TOKENS, LABELS), LinearCrossEntropy())
    loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.requires_grad}
    return loss, {name: distributed.full_tensor(gradient) for name, gradient in gradients.items()}


@pytest.mark.parametrize("cpu_offload", [True, False])  # with and without FSDP
@pytest.mark.parametrize("folder", ["checkpoint", "tied_checkpoint"])
def test_sharded_model_equals_the_model(folder, cpu_offload, request):
    folder = request.getfixturevalue(folder)
    model = parallel_model(folder, cpu_offload=cpu_offload)
    assert isinstance(next(model.parameters()), DTensor) == cpu_offload
    assert_close(loss_and_gradients(model), loss_and_gradients(load_model(str(folder))))


def test_bf16_computes_in_bf16_and_keeps_fp32(checkpoint):
    model = parallel_model(checkpoint, dtype="bf16")
    loss, gradients = loss_and_gradients(model)
    plain = load_model(str(checkpoint), dtype=torch.bfloat16)
    reference, reference_gradients = loss_and_gradients(plain)
    assert loss.dtype == torch.float32
    assert_close(loss, reference)
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())
    for name, gradient in gradients.items():
        assert gradient.dtype == torch.float32
        assert_close(gradient.bfloat16(), reference_gradients[name])


@pytest.mark.parametrize("cpu_offload", [True, False])  # with and without FSDP
def test_head_gets_the_values_of_a_batch_unchanged(checkpoint, cpu_offload):
    columns = {"ids": torch.full((2, 30, 1), 299.0), "reference": torch.tensor([-1.2345678, -3.1])}
    batch = Batch.of(TOKENS, LABELS, columns=columns, weights=torch.full((2, 30), 0.3))
    received = []
    model = parallel_model(checkpoint, dtype="bf16", cpu_offload=cpu_offload)
    model(batch, lambda hidden, weight, batch: received.extend([hidden.dtype, batch.columns, batch.weights]))
    assert received[0] == torch.bfloat16
    assert_close(received[1:], [columns, batch.weights], rtol=0, atol=0)


@pytest.mark.slow
def test_compiled_blocks(checkpoint):
    """Run the captured graphs: generating code for them takes minutes on a CPU."""
    torch.compiler.reset()
    with torch._dynamo.config.patch(error_on_recompile=False):
        model = parallel_model(checkpoint)
        for block in model.blocks:
            block.compile(fullgraph=True, backend="aot_eager")
        documents = torch.tensor([[0] * 10 + [1] * 20, [0] * 30])
        loss = model(Batch.of(TOKENS, LABELS, documents), LinearCrossEntropy())
    expected = load_model(str(checkpoint))(Batch.of(TOKENS, LABELS, documents), LinearCrossEntropy())
    assert_close(loss, expected)


def test_named_blocks_are_compiled(checkpoint, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda forward, **_: forward)
    for names, expected in ((["blocks.1"], [False, True, False]), (["*.[02]"], [True, False, True]), ([], [False] * 3)):
        blocks = parallel_model(checkpoint, compile=names).blocks
        assert [Wrap.COMPILE in wrappers_of(block) for block in blocks] == expected
    with pytest.raises(TuneError, match=r"compile: blocks\.3 .* blocks\.0, blocks\.1, blocks\.2$"):
        parallel_model(checkpoint, compile=["blocks.0", "blocks.3"])


def test_custom_module_with_blocks(checkpoint):
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint)
    expected = model(TOKENS).logits
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    distributed.parallelize(model, distributed.init("cpu"), dtype="fp32", cpu_offload=True)
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.to_local().copy_(state[name])
        for name, buffer in model.named_buffers():
            buffer.copy_(buffers[name])
    assert_close(model(TOKENS).logits, expected)


def test_module_without_blocks_is_rejected():
    with pytest.raises(TuneError, match=r"Linear has no nn\.ModuleList of blocks"):
        distributed.parallelize(nn.Linear(2, 2), distributed.init("cpu"))


def test_scalar_parameter_is_rejected(checkpoint):
    model = load_model(str(checkpoint))
    model.temperature = torch.nn.Parameter(torch.ones(()))
    world = distributed.init("cpu")
    with pytest.raises(TuneError, match=r"parameter temperature is a scalar"):
        distributed.parallelize(model, world, dtype="bf16")


@pytest.mark.parametrize("max_norm", [None, 0.1, 1e9])
def test_clip_grad_norm(checkpoint, max_norm):
    model = parallel_model(checkpoint)
    _, gradients = loss_and_gradients(model)
    norm = torch.cat([gradient.flatten() for gradient in gradients.values()]).double().norm().float()
    assert_close(distributed.clip_grad_norm_(model.parameters(), max_norm), norm)
    clipped = (
        torch.cat([distributed.full_tensor(parameter.grad).flatten() for parameter in model.parameters()])
        .double()
        .norm()
        .float()
    )
    assert_close(clipped, norm if max_norm is None else norm.clamp(max=max_norm), rtol=1e-4, atol=0)


class WithBuffers(nn.Module):
    def __init__(self, device, persistent):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(4, 4)])
        self.register_buffer("turns", torch.arange(4.0, device=device), persistent=persistent)


def test_buffers_keep_their_values(checkpoint):
    with torch.device("meta"):
        model = WithBuffers("cpu", persistent=False)
    distributed.parallelize(model, distributed.init("cpu"), dtype="bf16")
    assert torch.equal(model.turns, torch.arange(4.0)) and not model.blocks[0].weight.is_meta


def test_shared_buffer_stays_shared():
    with torch.device("meta"):
        model = WithBuffers("cpu", persistent=False)
        model.blocks[0].register_buffer("turns", model.turns, persistent=False)
    distributed.parallelize(model, distributed.init("cpu"), dtype="bf16")
    assert torch.equal(model.blocks[0].turns, torch.arange(4.0)) and model.blocks[0].turns is model.turns


def test_buffer_without_values_is_rejected():
    """Otherwise its values would be silently undefined."""
    with torch.device("meta"):
        lost, saved = WithBuffers("meta", persistent=False), WithBuffers("meta", persistent=True)
    with pytest.raises(TuneError, match="the buffer turns"):
        distributed.parallelize(lost, distributed.init("cpu"), dtype="fp32")
    distributed.parallelize(saved, distributed.init("cpu"), dtype="fp32")
    assert not saved.turns.is_meta


ADAPTERS = {
    "LoRA": LoRA(rank=4),
    "DoRA from PiSSA": LoRA(rank=4, dora=True, init="pissa"),
    "embedding and head": LoRA(rank=4, target_modules=["embed_tokens", "lm_head", "q_proj"]),
    "head with DoRA": LoRA(rank=4, target_modules=["lm_head", "q_proj"], dora=True),
    "tokens": LoRA(rank=4, trainable_tokens=[7, 3]),
}


@pytest.mark.parametrize("kind", ADAPTERS)
def test_adapters_on_one_process_match_with_and_without_fsdp(checkpoint, kind):
    """A and B are cast at use; DoRA's magnitude, norm, and ratio are fp32 in both."""
    results = []
    for cpu_offload in (False, True):
        model = adapted_model(checkpoint, ADAPTERS[kind], dtype="bf16", cpu_offload=cpu_offload)
        assert isinstance(next(model.parameters()), DTensor) == cpu_offload
        for name, parameter in model.named_parameters():
            assert parameter.dtype == (torch.float32 if parameter.requires_grad else torch.bfloat16), name
        results.append(loss_and_gradients(model))
    assert results[0][0].dtype == torch.float32
    assert_close(
        results[0], results[1], atol=1e-4, rtol=1e-2
    )  # bits of bf16 products depend on the memory layout of weights


@pytest.mark.parametrize("cpu_offload", [False, True])
@pytest.mark.parametrize("master_dtype", ["fp32", "bf16"])
def test_dora_magnitude_is_used_in_fp32(checkpoint, master_dtype, cpu_offload, monkeypatch):
    """A change below bf16 precision reaches the ratio, as in PEFT's formula."""
    options = {"dtype": "bf16", "master_dtype": master_dtype, "cpu_offload": cpu_offload}
    model = adapted_model(checkpoint, LoRA(rank=4, dora=True), **options)
    layer, seen, outputs_of = model.blocks[0].attention.query, [], products.outputs_of

    def watched(layers, input):
        seen.append(layers[0].magnitude.detach().float() / layers[0].norm(layers[0].a, layers[0].b))
        return outputs_of(layers, input)

    monkeypatch.setattr(products, "outputs_of", watched)
    with torch.no_grad():
        distributed.local_shard(layer.magnitude)[0].mul_(1 + 2**-12)
    model(TOKENS)
    norm = distributed.full_tensor(layer.weight.detach()).float().norm(dim=1)  # B is zero
    assert_close(seen[0], distributed.full_tensor(layer.magnitude.detach()) / norm, atol=0, rtol=1e-6)
    assert_close(seen[0], torch.full_like(seen[0], 1 + 2**-12), atol=0, rtol=2e-5)


def test_magnitudes_in_modules_that_fsdp_casts_are_rejected(checkpoint):
    with pytest.raises(TuneError, match=r"adapter\.dora .* adapter\.modules_to_save"):
        adapted_model(checkpoint, LoRA(dora=True, rank=4, modules_to_save=["input_layernorm"]), dtype="bf16")
    adapted_model(checkpoint, LoRA(dora=True, rank=4, modules_to_save=["lm_head", "model.norm"]), dtype="bf16")


@pytest.mark.parametrize("max_norm", [None, 0.5])
def test_clipping_accepts_parameters_on_several_meshes(max_norm):
    """FSDP shards, some with tensor parallelism, and plain parameters: the norm is over all of them."""
    world = distributed.init("cpu")
    torch.manual_seed(0)
    plain = [nn.Parameter(torch.zeros(3, 4)) for _ in range(4)]
    for parameter in plain:
        parameter.grad = torch.randn(3, 4)
    meshes = [world.mesh["dp_shard"], world.mesh["dp_shard"], world.mesh["tp"], None]
    others = []
    for parameter, mesh in zip(plain, meshes, strict=True):
        value, gradient = parameter.detach().clone(), parameter.grad.clone()
        if mesh is not None:
            value, gradient = (distribute_tensor(tensor, mesh, [Shard(0)]) for tensor in (value, gradient))
        others.append(nn.Parameter(value))
        others[-1].grad = gradient
    others.append(nn.Parameter(torch.zeros(2)))  # without a gradient
    norm = distributed.clip_grad_norm_(others, max_norm)
    expected = nn.utils.clip_grad_norm_(plain, max_norm or torch.inf)
    assert_close(norm, expected)
    for parameter, reference in zip(others, plain, strict=False):
        assert_close(distributed.full_tensor(parameter.grad), reference.grad)


@pytest.mark.slow
def test_norm_of_many_elements_matches_fp64():
    """torch sums sequentially on a CPU: its norm of a small embedding is 0.15% too low."""
    parameter = nn.Parameter(torch.empty(28_000_000 // 64, 64))
    parameter.grad = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0))
    expected = parameter.grad.double().norm()
    assert_close(distributed.clip_grad_norm_([parameter], None).double(), expected, rtol=1e-5, atol=0)
    in_backward = distributed.sum_of_squares([parameter.grad]).sqrt()
    assert_close(in_backward.double(), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("rows", [3, 1024, 1025, 262_144])
def test_squares_of_many_rows_match_fp64(rows):
    gradient = torch.rand(rows, 2, generator=torch.Generator().manual_seed(0))
    expected = gradient.double().square().sum()
    assert_close(distributed.sum_of_squares([gradient]).double(), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", ["fp32", torch.float32, "bf16", torch.bfloat16], ids=str)
@pytest.mark.parametrize("cpu_offload", [True, False])  # with and without FSDP
def test_loaded_weights_are_kept(cpu_offload, dtype, checkpoint):
    """Regression: they were replaced by uninitialized memory."""
    model, reference = load_model(str(checkpoint)), load_model(str(checkpoint), dtype=dtype)
    add_adapters(model, LoRA(rank=4, modules_to_save=["norm"]))
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    distributed.parallelize(model, dtype=dtype, cpu_offload=cpu_offload)
    for name, parameter in model.named_parameters():
        assert_close(distributed.full_tensor(parameter.detach()), before[name].to(parameter.dtype), rtol=0, atol=0)
    assert_close(model(TOKENS), reference(TOKENS))


@pytest.mark.slow
@pytest.mark.parametrize("tp", [1, 2])
def test_loaded_weights_are_kept_on_two_processes(tp, checkpoint):
    run_processes(Path(__file__).with_name("loaded_model.py"), 2, str(checkpoint), str(tp))


def test_dtypes_have_two_spellings(checkpoint):
    for spelling in ("bf16", torch.bfloat16):
        assert next(load_model(str(checkpoint), dtype=spelling).parameters()).dtype == torch.bfloat16
    for wrong in ("bfloat", torch.int8, 16):
        with pytest.raises(TuneError, match=str(wrong)):
            distributed.as_dtype(wrong)


def test_loaded_model_cannot_be_split_into_stages(checkpoint):
    world = replace(distributed.init("cpu"), experts=init_device_mesh("cpu", (1,)))
    with pytest.raises(TuneError, match="meta"):
        distributed.parallelize(load_model(str(checkpoint)), world)


@pytest.mark.parametrize("tied", [True, False])
def test_other_linear_children_are_not_heads(tmp_path, tied):
    """With a tied head, the embedding stays in the root, which is gathered while the loss reads it."""
    folder = save_checkpoint(tmp_path / "model", num_hidden_layers=2, tie_word_embeddings=tied)
    with torch.device("meta"):
        model = build(str(folder))
        before = units_of(model, [*model.blocks])
        model.topic_head = torch.nn.Linear(64, 3)
    assert (model.embedding in before) is not tied
    assert units_of(model, [*model.blocks]) == before


AUXILIARY = """
import sys
import torch
from tune import distributed, losses
from tune.checkpointers import Pretrained
from tune.collators import Batch
from tune.models import build

world = distributed.init("cpu")
with torch.device("meta"):
    model = build(sys.argv[1])
weights = Pretrained(sys.argv[1], model)
model.topic_head = torch.nn.Linear(64, 3, device="meta")
distributed.parallelize(model, world, dtype="fp32")
weights.load(model)
tokens = torch.randint(0, 256, (2, 12), generator=torch.Generator().manual_seed(0))[world.data_rank :: world.data_size]
total = world.sum(model(Batch.of(tokens, labels=tokens), losses.LinearCrossEntropy()).detach())
if world.is_main:
    print(f"loss {total.item()}")
world.finish()
"""


@pytest.mark.slow
def test_custom_head_next_to_a_tied_head_does_not_change_the_loss(tmp_path):
    folder = save_checkpoint(tmp_path / "model", num_hidden_layers=2, tie_word_embeddings=True)
    (tmp_path / "script.py").write_text(AUXILIARY)
    one, two = (float(run_processes(tmp_path / "script.py", n, str(folder)).split("loss ")[1]) for n in (1, 2))
    assert two == pytest.approx(one, rel=1e-5)


WHOLE = """
import json
import sys

import torch

from tune import distributed
from tune.distributed import Parallelism
from tune.models import build
from tune.peft import LoRA, add_adapters

found = {}
for axis in ("dp_shard", "tp", "pp"):
    for adapted in (False, True):
        world = distributed.init("cpu", **{axis: 2})
        with torch.device("meta"):
            model = build(sys.argv[1])
        if adapted:
            add_adapters(model, LoRA(rank=4))
        expected = {name: [*each.shape] for name, each in model.named_parameters()}
        trained = [name for name, each in model.named_parameters() if each.requires_grad]
        distributed.parallelize(model, world, dtype="fp32")
        whole = Parallelism.of(model).whole
        assert {name: [*each.shape] for name, each in whole.named_parameters()} == expected
        assert [name for name, each in whole.named_parameters() if each.requires_grad] == trained
        assert all(each.is_meta for each in whole.parameters())
        here = [getattr(each, "_local_tensor", each) for each in model.parameters()]
        assert not any(each.is_meta for each in here)
        found[f"{axis} {adapted}"] = [
            sum(each.numel() for each in whole.parameters()), world.from_all_ranks(sum(each.numel() for each in here))
        ]
print(json.dumps(found))
world.finish()
"""


@pytest.mark.slow
def test_whole_model_is_kept_on_meta(checkpoint, tmp_path):
    """Its parameters are counted before processes cut it; each process has only a part."""
    (tmp_path / "script.py").write_text(WHOLE)
    found = result_of(run_processes(tmp_path / "script.py", 2, str(checkpoint)))
    plain = sum(each.numel() for each in load_model(str(checkpoint)).parameters())
    for name, (count, parts) in found.items():
        assert count == plain if "False" in name else count > plain, name
        assert all(part < 0.7 * count for part in parts), name


def test_model_that_cannot_be_copied_has_no_whole(checkpoint):
    model = load_model(str(checkpoint))
    model.lock = threading.Lock()
    distributed.parallelize(model, distributed.init("cpu"), dtype="fp32")
    assert distributed.Parallelism.of(model).whole is None
    assert not any(parameter.is_meta for parameter in model.parameters())
