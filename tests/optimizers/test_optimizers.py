"""Our optimizers match torch's."""

import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

from tune import distributed
from tune.errors import TuneError
from tune.optimizers import Adafactor, InBackward, Muon, cosine, parameter_groups


class Model(nn.Module):
    """Blocks between an embedding and a head."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(7, 6)
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.head = nn.Linear(6, 7, bias=False)

    def forward(self, tokens):
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = torch.tanh(block(hidden))
        return self.head(hidden)


def train(model, optimizers, steps=4):
    for step in range(steps):
        tokens = torch.arange(step, step + 5) % 7
        nn.functional.cross_entropy(model(tokens), (tokens + 1) % 7).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return model.state_dict()


def assert_equal(ours, theirs):
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def test_muon_matches_torch_muon_for_block_matrices_and_adamw_for_others():
    ours, theirs = Model(), Model()
    optimizer = Muon(parameter_groups(ours, 0.02), 0.02)
    matrices = [block.weight for block in theirs.blocks]
    vectors = [block.bias for block in theirs.blocks]
    embeddings = [theirs.embedding.weight, theirs.head.weight]
    muon = torch.optim.Muon(matrices, lr=0.02, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW(
        [{"params": embeddings, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
        lr=0.02,
        betas=(0.9, 0.95),
    )
    assert_equal(train(ours, [optimizer]), train(theirs, [muon, adamw]))


@pytest.mark.parametrize("sharded", [False, True])
def test_muon_treats_a_stack_as_separate_matrices(sharded):
    mesh = distributed.init("cpu").mesh["dp_shard"]
    draw = torch.Generator().manual_seed(0)
    start, gradients = torch.randn(3, 4, 6, generator=draw), torch.randn(4, 3, 4, 6, generator=draw)
    apart = [nn.Parameter(matrix.clone()) for matrix in start]
    stack = nn.Parameter(distribute_tensor(start.clone(), mesh, [Shard(0)]) if sharded else start.clone())
    theirs = torch.optim.Muon(apart, lr=0.02, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    ours = Muon([{"params": [stack], "in_blocks": True}], lr=0.02)
    for step, gradient in enumerate(gradients):
        stack.grad = distribute_tensor(gradient.clone(), mesh, [Shard(0)]) if sharded else gradient.clone()
        for matrix, its_gradient in zip(apart, gradient, strict=True):
            matrix.grad = its_gradient.clone()
        ours.step()
        theirs.step()
        if step == 1:
            saved, ours = ours.state_dict(), Muon([{"params": [stack], "in_blocks": True}], lr=0.02)
            ours.load_state_dict(saved)
    assert_equal(distributed.full_tensor(stack.detach()), torch.stack(apart).detach())
    assert len(ours.state) == 1


def test_all_settings_of_muon_take_effect():
    """No setting has its default, and `eps` is as large as the root of a second moment."""
    ours, theirs = Model(), Model()
    settings = {"momentum": 0.6, "nesterov": False, "ns_steps": 2}
    optimizer = Muon(parameter_groups(ours, 0.02), 0.02, weight_decay=0.3, betas=(0.8, 0.9), eps=0.05, **settings)
    matrices = [block.weight for block in theirs.blocks]
    vectors = [block.bias for block in theirs.blocks]
    embeddings = [theirs.embedding.weight, theirs.head.weight]
    muon = torch.optim.Muon(matrices, lr=0.02, weight_decay=0.3, adjust_lr_fn="match_rms_adamw", **settings)
    groups = [{"params": embeddings, "weight_decay": 0.3}, {"params": vectors, "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(groups, lr=0.02, betas=(0.8, 0.9), eps=0.05)
    assert_equal(train(ours, [optimizer]), train(theirs, [muon, adamw]))


def test_muon_with_no_parameters_for_adamw():
    ours, theirs = Model().requires_grad_(False), Model().requires_grad_(False)
    for model in (ours, theirs):
        model.blocks[1].weight.requires_grad_()
    muon = torch.optim.Muon([theirs.blocks[1].weight], lr=0.02, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    assert_equal(train(ours, [Muon(parameter_groups(ours, 0.02), 0.02)]), train(theirs, [muon]))


def test_muon_refuses_parts_of_matrices():
    mesh = distributed.init("cpu").mesh["dp_shard"]
    whole, cut = (nn.Parameter(distribute_tensor(torch.zeros(2, 4, 6), mesh, [Shard(dim)])) for dim in (0, 1))
    Muon([{"params": [whole], "in_blocks": True}])
    with pytest.raises(TuneError, match=r"Muon needs whole matrices of experts.* Raise parallel\.dp_replicate"):
        Muon([{"params": [cut], "in_blocks": True}])


def test_muon_refuses_matrices_without_in_blocks():
    """Bare parameters would all get AdamW, and embedding and head are matrices too."""
    model = Model()
    with pytest.raises(TuneError, match=r"group 0 has 4 matrices, the first of shape \[7, 6\]"):
        Muon(model.parameters(), 0.02)
    with pytest.raises(TuneError, match=r"group 1 has in_blocks=True but a parameter of shape \[6\]"):
        Muon([{"params": [model.head.weight], "in_blocks": False}, {"params": model.blocks[0].bias, "in_blocks": True}])


def test_muon_with_custom_groups_matches_torch_muon():
    """Vectors need no in_blocks, and a group may be added later."""
    ours, theirs = Model(), Model()
    optimizer = Muon([block.bias for block in ours.blocks], 0.02, weight_decay=0.1)
    optimizer.add_param_group({"params": [block.weight for block in ours.blocks], "in_blocks": True})
    optimizer.add_param_group({"params": [ours.embedding.weight, ours.head.weight], "in_blocks": False})
    matrices = [block.weight for block in theirs.blocks]
    others = [*(block.bias for block in theirs.blocks), theirs.embedding.weight, theirs.head.weight]
    muon = torch.optim.Muon(matrices, lr=0.02, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW(others, lr=0.02, weight_decay=0.1, betas=(0.9, 0.95))
    assert_equal(train(ours, [optimizer]), train(theirs, [muon, adamw]))


@pytest.mark.parametrize("make", [Muon, Adafactor])
def test_resumed_from_its_state(make):
    def start():
        model = Model()
        return model, make(parameter_groups(model, 0.02), lr=0.02)

    whole, optimizer = start()
    expected = dict(train(whole, [optimizer], steps=3))
    first, second = start(), start()
    train(first[0], [first[1]], steps=2)
    second[0].load_state_dict(first[0].state_dict())
    second[1].load_state_dict(first[1].state_dict())
    tokens = torch.arange(2, 7) % 7
    nn.functional.cross_entropy(second[0](tokens), (tokens + 1) % 7).backward()
    second[1].step()
    assert_equal(second[0].state_dict(), expected)


def test_adafactor_of_sharded_parameters_matches_torch():
    mesh = distributed.init("cpu").mesh["dp_shard"]
    start = [torch.randn(5, 3, generator=torch.Generator().manual_seed(0)), torch.ones(4)]
    gradients = [torch.full((5, 3), 0.1).cumsum(0), torch.arange(4.0)]  # multiplied by the number of the step
    whole = [nn.Parameter(tensor.clone()) for tensor in start]
    sharded = [nn.Parameter(distribute_tensor(tensor, mesh, [Shard(0)])) for tensor in start]
    theirs = torch.optim.Adafactor(whole, lr=0.1, weight_decay=0.1)
    ours = Adafactor(sharded, lr=0.1, weight_decay=0.1)
    for step in (1, 2, 3):
        for gradient, parameter, shards in zip(gradients, whole, sharded, strict=True):
            parameter.grad = gradient * step
            shards.grad = distribute_tensor(gradient * step, mesh, [Shard(0)])
        theirs.step()
        ours.step()
    assert_equal([parameter.full_tensor() for parameter in sharded], whole)
    assert len(ours.state) == len(theirs.state) == 2
    assert [ours.state[shards]["step"] for shards in sharded] == [3, 3]


@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.SGD, Adafactor, Muon])
def test_updates_in_backward_match_a_step(make):
    """The groups differ in learning rate and decay and have a schedule."""
    models, norms = (Model(), Model()), ([], [])
    for model, norms_of_model in zip(models, norms, strict=True):
        groups = parameter_groups(model, 0.02, lr_ratios={"embedding": 0.1})
        optimizer = make(groups, lr=0.02, weight_decay=0.1)
        in_backward = InBackward(optimizer) if model is models[1] else None
        schedule = cosine(optimizer, 4)
        for step in range(4):
            tokens = torch.arange(step, step + 5) % 7
            nn.functional.cross_entropy(model(tokens), (tokens + 1) % 7).backward()
            if in_backward:
                assert all(parameter.grad is None for parameter in model.parameters())
                norms_of_model.append(in_backward.norm())
            else:
                norms_of_model.append(distributed.clip_grad_norm_(model.parameters(), None).item())
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        if in_backward:
            assert in_backward.norm() == 0
    assert_equal(models[1].state_dict(), models[0].state_dict())
    assert norms[1] == pytest.approx(norms[0], rel=1e-6)


def test_second_backward_before_the_norm_is_refused():
    """The first backward has already updated the parameters, so gradients do not accumulate."""
    model = Model()
    in_backward = InBackward(torch.optim.SGD(model.parameters(), lr=0.1))
    model(torch.arange(5)).sum().backward()
    in_backward.norm()
    model(torch.arange(5)).sum().backward()
    with pytest.raises(TuneError, match=r"global_batch_size: .*micro_batch_size"):
        model(torch.arange(5)).sum().backward()


def test_parameters_offloaded_to_the_host_are_refused(monkeypatch):
    distributed.init("cpu")
    model = fully_shard(Model(), mesh=init_device_mesh("cpu", (1,)))
    InBackward(torch.optim.SGD(model.parameters(), lr=0.1))
    monkeypatch.setattr(DeviceMesh, "device_type", property(lambda mesh: "cuda"))
    with pytest.raises(TuneError, match=r"compute\.cpu_offload"):
        InBackward(torch.optim.SGD(model.parameters(), lr=0.1))


@pytest.mark.slow
def test_importing_torchao_prints_nothing():
    pytest.importorskip("torchao")
    code = "from tune.config.instantiate import locate; locate('torchao.optim.AdamW8bit')"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stderr == ended.stdout == ""
