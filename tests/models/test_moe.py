"""The parts of a mixture of experts match transformers and plain loops."""

from collections import Counter

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from tune import fused
from tune.checkpointers import load_model
from tune.collators import Batch
from tune.errors import TuneError
from tune.losses import LinearCrossEntropy
from tune.models import block_kernels, build, moe
from tune.models.moe import Dispatch, combine, dispatch, grouped_product, product_by_group
from tune.models.routing import Router, RouterConfig

transformers = pytest.importorskip("transformers")
mixtral = pytest.importorskip("transformers.models.mixtral.modeling_mixtral")

SHAPE = {
    "vocab_size": 128, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2,
    "initializer_range": 0.2, "num_experts_per_tok": 2, "num_local_experts": 4, "pad_token_id": None,
}  # fmt: skip
COEFFICIENT = 0.7


def save_mixtral(folder, **changes):
    torch.manual_seed(0)
    config = transformers.MixtralConfig(**SHAPE | {"output_router_logits": True} | changes)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    model.save_pretrained(folder)
    return model, str(folder)


def shifted(tokens):
    labels = tokens.roll(-1, dims=1)
    labels[:, -1] = -100
    return labels


def loss_and_gradients(model, tokens, labels, documents=None):
    model.zero_grad()
    batch = Batch.of(tokens, labels, documents).in_step(0, 0, num_supervised=1)  # sums of both losses
    loss = model.train()(batch, LinearCrossEntropy())
    loss.backward()
    return loss, {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def product_by_loop(rows, weight, ends):
    starts = [0, *ends.tolist()]
    return torch.cat([rows[start:end] @ w for start, end, w in zip(starts, starts[1:], weight, strict=False)])


@pytest.mark.parametrize("product", [grouped_product, product_by_group])
@pytest.mark.parametrize("counts", [[10, 0, 25, 15], [0, 0, 0, 50], [50, 0, 0, 0]])
@pytest.mark.parametrize("shape", [(20, 24), (17, 33)])  # supported and unsupported by the kernel
@pytest.mark.parametrize("transposed", [True, False])
def test_grouped_product_multiplies_each_group(product, counts, shape, transposed):
    torch.manual_seed(0)
    rows, weight = torch.randn(50, shape[0], requires_grad=True), torch.randn(4, *shape)
    weight = (weight.mT.contiguous().mT if transposed else weight).requires_grad_()
    ends = torch.tensor(counts).cumsum(0).int()
    output, expected = product(rows, weight, ends), product_by_loop(rows, weight, ends)
    assert_close(output, expected)
    gradient = torch.randn_like(expected)
    gradients, references = (torch.autograd.grad(result, (rows, weight), gradient) for result in (output, expected))
    assert_close(gradients, references)


def launch_plainly(programs, name, grid, rows, other, output, ends, *sizes, **blocks):
    """Replace a kernel launch: check its arguments and write the results with plain operations."""
    lengths = ends.diff(prepend=ends.new_zeros(1))
    if name == "grouped_product":
        groups, *strides, inputs, outputs, power = sizes
        assert (groups, *strides) == (len(ends), *other.stride()) and power // 2 < groups <= power
        needed, lines = -(-lengths // blocks["ROWS"]), 1
        output.copy_(product_by_loop(rows, other, ends))
    else:
        (inputs, outputs), needed, lines = sizes, torch.ones_like(lengths), blocks["LINES"]
        pairs = zip(rows.split(lengths.tolist()), other.split(lengths.tolist()), strict=True)
        output.copy_(torch.stack([left.T @ right for left, right in pairs]))
    blocks_of_group = -(-outputs // blocks["COLUMNS"]) * (1 if lines == 1 else -(-inputs // lines))
    assert grid[0] >= needed.sum() * blocks_of_group and rows.is_contiguous() and output.is_contiguous()


@pytest.mark.parametrize("counts", [[10, 0, 25, 15], [0, 0, 0, 50], [300, 1, 200], [1, 1], [0, 0]])
@pytest.mark.parametrize("shape", [(20, 24), (16, 300), (300, 16)])
@pytest.mark.parametrize("trained", [True, False])
def test_grouped_kernel_wrapper_matches_plain_operations(counts, shape, trained, monkeypatch):
    monkeypatch.setattr(block_kernels, "has_products", lambda rows: True)
    monkeypatch.setattr(fused, "launch", launch_plainly)
    rows = torch.randn(sum(counts), shape[0], requires_grad=True)
    weight, ends = torch.randn(len(counts), *shape, requires_grad=trained), torch.tensor(counts).cumsum(0).int()
    output, expected = product_by_group(rows, weight, ends), product_by_loop(rows, weight, ends)
    inputs, gradient = [rows, weight] if trained else [rows], torch.randn(shape[1]).expand_as(expected)
    assert_close(output, expected)
    gradients, references = (torch.autograd.grad(result, inputs, gradient) for result in (output, expected))
    assert_close(gradients, references)


def test_frozen_experts_compute_no_gradient():
    rows, ends = torch.randn(50, 17, requires_grad=True), torch.tensor([20, 50]).int()
    output = product_by_group(rows, torch.randn(2, 17, 8), ends)
    with Operations() as operations:
        output.sum().backward()
    assert operations.names["tune::product_by_group"] == 1 and not operations.names["tune::product_by_group_weight"]


class Operations(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = Counter()

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        self.names[operation._schema.name] += 1
        return operation(*args, **kwargs or {})


@pytest.mark.parametrize(
    ("capability", "dtype", "width", "is_torchs"),
    [
        ((9, 0), torch.bfloat16, 24, True),
        ((10, 0), torch.bfloat16, 24, True),
        ((9, 0), torch.bfloat16, 20, False),
        ((9, 0), torch.float32, 24, False),
        ((8, 0), torch.bfloat16, 24, False),
        ((8, 9), torch.bfloat16, 24, False),
        ((12, 0), torch.bfloat16, 24, False),
    ],
)
def test_torch_grouped_product_is_used_where_it_is_one_kernel(capability, dtype, width, is_torchs, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    with FakeTensorMode():
        assert moe._fits(torch.empty(50, 16, dtype=dtype, device="cuda"), torch.empty(4, 16, width)) == is_torchs


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="Triton's kernels need a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("counts", [[10, 0, 25, 15], [0, 0, 0, 50], [700, 1, 200], [3] * 200])
@pytest.mark.parametrize("shape", [(20, 24), (17, 33), (16, 300), (300, 16), (256, 512)])
@pytest.mark.parametrize("transposed", [True, False])
def test_kernel_of_grouped_products(dtype, counts, shape, transposed):
    generator = torch.Generator("cuda").manual_seed(0)
    rows = torch.randn(sum(counts), shape[0], generator=generator, device="cuda", dtype=dtype).requires_grad_()
    weight = torch.randn(len(counts), *shape, generator=generator, device="cuda", dtype=dtype)
    weight = (weight.mT.contiguous().mT if transposed else weight).requires_grad_()
    ends = torch.tensor(counts, device="cuda").cumsum(0).int()
    exact = [tensor.detach().double().requires_grad_() for tensor in (rows, weight)]
    output, expected = product_by_group(rows, weight, ends), product_by_loop(*exact, ends)
    gradient = torch.randn(expected.shape, generator=generator, device="cuda", dtype=dtype)
    results = output, *torch.autograd.grad(output, (rows, weight), gradient)
    references = expected, *torch.autograd.grad(expected, exact, gradient.double())
    for ours, reference in zip(results, references, strict=True):
        limit = {torch.float32: 1e-5, torch.bfloat16: 3e-3, torch.float16: 1e-3}[dtype]
        assert (ours.double() - reference).norm() <= limit * reference.norm()


def test_process_may_have_no_rows():
    rows, weight = torch.empty(0, 16, requires_grad=True), torch.randn(4, 16, 24, requires_grad=True)
    output = grouped_product(rows, weight, torch.zeros(4, dtype=torch.int32))
    output.sum().backward()
    assert output.shape == (0, 24) and rows.grad.shape == (0, 16)
    assert_close(weight.grad, torch.zeros_like(weight))


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "shape"), [(torch.float32, (20, 24)), (torch.bfloat16, (16, 24))])
def test_grouped_product_compiles(dtype, shape):
    torch.compiler.reset()
    rows, weight = torch.randn(50, shape[0], dtype=dtype), torch.randn(4, *shape, dtype=dtype, requires_grad=True)
    compiled = torch.compile(grouped_product, fullgraph=True, backend="aot_eager")
    for counts in ([10, 0, 25, 15], [1, 2, 3, 44]):
        ends = torch.tensor(counts).cumsum(0).int()
        output, expected = compiled(rows, weight, ends), product_by_loop(rows, weight, ends)
        assert_close(output, expected)
        gradient, reference = (torch.autograd.grad(result.sum(), weight) for result in (output, expected))
        assert_close(gradient, reference)


def test_every_choice_of_a_token_gets_a_row():
    experts = torch.tensor([[2, 0], [2, 3], [2, 0]])
    weights, tokens = torch.rand(3, 2), torch.randn(3, 8, dtype=torch.double, requires_grad=True)
    plan = Dispatch.of(experts, num_experts=5)
    assert plan.ends.tolist() == [2, 2, 5, 6, 6]
    assert plan.experts.tolist() == [0, 0, 2, 2, 2, 3]
    assert plan.of_tokens(torch.arange(3)).tolist() == [0, 2, 0, 1, 2, 1]
    scaled = dispatch(tokens, plan) * (plan.experts[:, None] + 1)
    output = combine(scaled, weights, plan)
    assert_close(output, (weights * (experts + 1)).sum(dim=1, keepdim=True).double() * tokens)
    assert torch.autograd.gradcheck(lambda tokens: combine(dispatch(tokens, plan) ** 2, weights, plan), (tokens,))


def test_sigmoid_scores_are_in_fp32():
    """As in DeepSeek-V3; bf16 scores would choose other experts."""
    router = Router(RouterConfig(16, 3, scores="sigmoid"), 64).bfloat16()
    tokens = torch.randn(50, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    torch.nn.init.normal_(router.weight, generator=torch.Generator().manual_seed(1))
    weights, experts, _ = router(tokens)
    best, chosen = (tokens.float() @ router.weight.float().T).sigmoid().topk(3)
    assert_close(weights, best / best.sum(dim=1, keepdim=True))
    assert_close(experts, chosen)


def test_router_correction_stays_in_fp32():
    with torch.device("meta"):
        router = Router(RouterConfig(4, 2, scores="sigmoid", correction=True), 8)
    router.to(torch.bfloat16).to_empty(device="cpu")
    assert (router.weight.dtype, router.correction.dtype) == (torch.bfloat16, torch.float32)
    router.correction.copy_(values := torch.tensor([1.001, 1.002, 1.003, 1.004]))
    assert torch.equal(router.to(torch.bfloat16).correction, values)


def test_one_document_and_one_layer_train_like_transformers(tmp_path):
    theirs, folder = save_mixtral(tmp_path, num_hidden_layers=1, router_aux_loss_coef=COEFFICIENT)
    ours = load_model(folder)
    tokens = torch.randint(128, (1, 60))
    expected = theirs.train()(tokens, labels=tokens)
    expected.loss.backward()
    loss, gradients = loss_and_gradients(ours, tokens, shifted(tokens))
    assert_close(loss / 59 + COEFFICIENT * expected.aux_loss, expected.loss)  # the loss itself is the cross-entropy
    references = dict(theirs.named_parameters())
    router = references["model.layers.0.mlp.gate.weight"].grad
    assert_close(gradients["blocks.0.mlp.router.weight"] / 59, router, atol=1e-6, rtol=1e-4)
    embedding = references["model.embed_tokens.weight"].grad
    assert_close(gradients["embedding.weight"] / 59, embedding, atol=1e-6, rtol=1e-4)
    assert expected.aux_loss > 2.01


def test_router_loss_averages_layers_and_weights_documents_by_tokens(tmp_path):
    theirs, folder = save_mixtral(tmp_path, num_hidden_layers=3)
    ours = load_model(folder).train()
    lengths, supervised = [20, 7, 33], [19, 2, 0]
    tokens = torch.randint(128, (1, 60))
    labels, balances = torch.full((1, 60), -100), []
    for document, start, count in zip(tokens.split(lengths, dim=1), [0, 20, 27], supervised, strict=True):
        labels[:, start : start + count] = 5
        logits = theirs(document, output_router_logits=True).router_logits
        balances.append(torch.stack([mixtral.load_balancing_loss_func((layer,), 4, 2) for layer in logits]).mean())
    documents = torch.tensor([[i for i, length in enumerate(lengths) for _ in range(length)]])
    ours(Batch.of(tokens, labels, documents), LinearCrossEntropy())
    rows = ours.routing.take()
    assert_close(rows[:, -3].mean(), 19 * balances[0] + 2 * balances[1])
    assert rows[:, -2:].tolist() == [[27, 21]] * 3
    assert rows[:, :-4].sum(dim=1).tolist() == [54] * 3  # two choices per token


def test_packing_and_padding_do_not_change_the_gradients(tmp_path):
    ours = load_model(save_mixtral(tmp_path, num_hidden_layers=2, router_aux_loss_coef=COEFFICIENT)[1])
    one, other = torch.randint(128, (1, 20)), torch.randint(128, (1, 12))
    alone = [loss_and_gradients(ours, tokens, shifted(tokens)) for tokens in (one, other)]
    padding = torch.zeros(1, 8, dtype=torch.long)
    packed = torch.cat([one, other, padding], dim=1)
    labels = torch.cat([shifted(one), shifted(other), padding - 100], dim=1)
    documents = torch.tensor([[0] * 20 + [1] * 12 + [2] * 8])
    loss, gradients = loss_and_gradients(ours, packed, labels, documents)
    assert_close(loss, alone[0][0] + alone[1][0])
    for name, gradient in gradients.items():
        assert_close(gradient, alone[0][1][name] + alone[1][1][name], atol=1e-5, rtol=1e-4)


@pytest.mark.weekly
def test_compiled_blocks_give_the_same_gradients(tmp_path):
    ours = load_model(save_mixtral(tmp_path, num_hidden_layers=2, router_aux_loss_coef=COEFFICIENT)[1])
    torch.compiler.reset()
    batches = []
    for lengths in ([24, 24], [5, 19, 24], [11, 13, 2, 22]):
        tokens = torch.randint(128, (2, 24))
        documents = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths)).view(2, 24)
        batches.append((tokens, shifted(tokens), documents))
    expected = [loss_and_gradients(ours, *batch) for batch in batches]
    for block in ours.blocks:
        block.compile(fullgraph=True, backend="aot_eager")
    for batch, reference in zip(batches, expected, strict=True):
        assert_close(loss_and_gradients(ours, *batch), reference, atol=1e-5, rtol=1e-5)


def test_router_loss_is_an_option(tmp_path):
    folder = save_mixtral(tmp_path, num_hidden_layers=1, router_aux_loss_coef=COEFFICIENT, output_router_logits=False)[
        1
    ]
    assert build(folder).config.router_loss == 0
    assert build(folder, router_loss=0.1).config.router_loss == 0.1
    assert build(save_mixtral(tmp_path, num_hidden_layers=1)[1]).config.router_loss == 0.001
    assert build(save_mixtral(tmp_path, num_hidden_layers=1)[1], router_loss=0).config.router_loss == 0


def test_dense_model_refuses_router_loss(checkpoint):
    with pytest.raises(TuneError, match=r"^router_loss: .* has no experts"):
        build(str(checkpoint), router_loss=0.1)
