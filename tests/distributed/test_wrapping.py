"""Wrappers of a forward have one fixed order. Copies have their own; nothing else replaces a forward."""

import ast
import copy
import functools
import itertools
import random
import re
from pathlib import Path

import pytest
import torch
from distributed.test_tensor_parallel import model_of
from planned_module import PLAN
from planned_module import build as build_planned
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.device_mesh import init_device_mesh
from torch.testing import assert_close

import tune
from tune import distributed
from tune.checkpointers import Random, load_model
from tune.collators import Batch
from tune.distributed import local_shard, parallelize, repeated_blocks, share, share_experts, split, units_of
from tune.distributed.activations import wrap_forward
from tune.distributed.pace import count_time
from tune.distributed.wrapping import Wrap, wrap, wrappers_of
from tune.peft import LoRA, add_adapters

TOKENS = torch.arange(24).view(2, 12)
HOUSE = Path(tune.__file__).parent


def replaced(tree: ast.AST) -> list[int]:
    """Return the lines that replace a `forward` method on an object."""
    lines = []
    for node in ast.walk(tree):
        match node:
            case (
                ast.Attribute(attr="forward", ctx=ast.Store())
                | ast.Subscript(slice=ast.Constant(value="forward"), ctx=ast.Store())
                | ast.Call(func=ast.Name(id="setattr"), args=[_, ast.Constant(value="forward"), _])
                | ast.Call(func=ast.Attribute(attr="__setattr__"), args=[*_, ast.Constant(value="forward"), _])
            ):
                lines.append(node.lineno)
    return lines


@pytest.mark.slow
def test_one_file_replaces_forwards() -> None:
    lines = {str(file.relative_to(HOUSE)): replaced(ast.parse(file.read_text())) for file in HOUSE.rglob("*.py")}
    assert {file: len(numbers) for file, numbers in lines.items() if numbers} == {"distributed/wrapping.py": 1}


@pytest.mark.parametrize(
    "line",
    ["block.forward = other", "a.b, model.forward = 1, 2", "setattr(m, 'forward', f)", "vars(m)['forward'] = f",
     "m.forward: object = f", "object.__setattr__(m, 'forward', f)"],
)  # fmt: skip
def test_forms_of_replacing_are_detected(line: str) -> None:
    assert replaced(ast.parse(line)) == [1]


def test_order_does_not_depend_on_the_calls() -> None:
    """Compilation is inside the wrapper that shares parameters."""
    kinds = [kind for kind in Wrap if kind is not Wrap.COMPILE_INSIDE]
    inside = [Wrap.PLAN, Wrap.HEAD, Wrap.EXCHANGE]
    outside = [Wrap.TOKENS, Wrap.TIMING, Wrap.OFFLOAD, Wrap.CHECKPOINT, Wrap.SHARES]
    for seed in range(5):
        module, called = nn.Identity(), []

        def recording(kind, called=called):
            return lambda forward: lambda *arguments: (called.append(kind), forward(*arguments))[1]

        for kind in random.Random(seed).sample(kinds, len(kinds)):
            wrap(module, kind, recording(kind))
        assert module(3) == 3
        assert called == [*outside, Wrap.COMPILE, *inside]
        assert wrappers_of(module) == [*outside, Wrap.COMPILE_INSIDE, *inside]


def test_wrapper_replaces_an_earlier_one_of_its_kind() -> None:
    def adding(number):
        return lambda forward: lambda x: number + forward(x)

    module = nn.Identity()
    for number in (1, 10):
        wrap(module, Wrap.COMPILE, adding(number))
    assert module(0) == 10 and wrappers_of(module) == [Wrap.COMPILE]
    wrap(module, Wrap.SHARES, adding(100))  # compilation is then inside of it
    wrap(module, Wrap.COMPILE, adding(1000))
    assert module(0) == 1100 and wrappers_of(module) == [Wrap.SHARES, Wrap.COMPILE_INSIDE]


def test_docs_have_the_same_order() -> None:
    text = (HOUSE.parent / "docs" / "architecture.md").read_text()
    assert re.findall(r"^\| (\d+) \| `(\w+)` \|", text, re.M) == [(str(kind.value), kind.name) for kind in Wrap]


def test_compilation_is_inside_only_with_shares() -> None:
    def same(forward):
        return lambda *arguments: forward(*arguments)

    for kinds in itertools.permutations([Wrap.COMPILE, Wrap.SHARES, Wrap.CHECKPOINT]):
        module = nn.Identity()
        for kind in kinds:
            wrap(module, kind, same)
        assert wrappers_of(module) == [Wrap.CHECKPOINT, Wrap.SHARES, Wrap.COMPILE_INSIDE]
    module = nn.Identity()
    for kind in (Wrap.CHECKPOINT, Wrap.COMPILE):
        wrap(module, kind, same)
    assert wrappers_of(module) == [Wrap.COMPILE, Wrap.CHECKPOINT]


def apply_all_wrappers(model, plan):
    """Return the steps that put every wrapper around the blocks of `model`."""
    mesh, blocks = distributed.init("cpu").mesh["tp"], repeated_blocks(model)
    return {
        "shares": lambda: share(model, blocks, units_of(model, blocks), mesh, plan),
        "memory": lambda: [wrap_forward(block, "full", compile=True, offload=True) for block in blocks],
        "time": lambda: [count_time(block) for block in blocks],
    }


def gradients_of(model):
    """Return gradients with weights that are a function of their names."""
    model.to_empty(device="cpu")
    for name, parameter in model.named_parameters():
        draw = torch.Generator().manual_seed(len(name))
        local_shard(parameter.detach())[0].normal_(std=0.1, generator=draw)
    model(Batch.of(TOKENS, TOKENS)).square().sum().backward()
    return {name: distributed.full_tensor(parameter.grad) for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("order", [["shares", "memory", "time"], ["time", "memory", "shares"]], ids="-".join)
@pytest.mark.parametrize("planned", [False, True])
def test_block_with_all_wrappers(planned, order, tmp_path, monkeypatch):
    compiled = []

    def compile(forward, **_):
        compiled.append(forward)
        return lambda *arguments, **named: forward(*arguments, **named)

    monkeypatch.setattr(torch, "compile", compile)

    def made():
        with torch.device("meta"):
            return build_planned("") if planned else model_of(tmp_path, "olmo2")

    expected, model = gradients_of(made()), made()
    steps = apply_all_wrappers(model, PLAN if planned else None)
    for step in order:
        steps[step]()
    blocks = [Wrap.TIMING, Wrap.OFFLOAD, Wrap.CHECKPOINT, Wrap.SHARES, Wrap.COMPILE_INSIDE]
    blocks += [Wrap.PLAN] if planned else []
    assert all(wrappers_of(block) == blocks for block in repeated_blocks(model))
    assert wrappers_of(model) == ([Wrap.SHARES] if planned else [Wrap.SHARES, Wrap.HEAD])
    block = model.blocks[0]
    layer = block.attention.query if planned else block.attention
    assert wrappers_of(layer) == [Wrap.EXCHANGE]
    assert "checkpointed" not in {forward.__name__ for forward in compiled[-len(model.blocks) :]}
    assert_close(gradients_of(model), expected, rtol=1e-4, atol=1e-4)


def parallel_model(folder):
    model = load_model(str(folder))
    parallelize(model, distributed.init("cpu"), dtype="fp32", activation_checkpointing="full")
    return model


def test_copy_of_a_wrapped_model_uses_its_own_weights(checkpoint):
    """Regression: it used the original's forward and weights."""
    model = parallel_model(checkpoint)
    expected, other = model(TOKENS), copy.deepcopy(model)
    assert [*map(wrappers_of, other.blocks)] == [[Wrap.CHECKPOINT]] * 3
    assert_close(other(TOKENS), expected, rtol=0, atol=0)
    with torch.no_grad():
        other.blocks[0].mlp.up.weight.zero_()
    zeroed = load_model(str(checkpoint))
    with torch.no_grad():
        zeroed.blocks[0].mlp.up.weight.zero_()
    assert_close(other(TOKENS), zeroed(TOKENS))
    assert_close(model(TOKENS), expected, rtol=0, atol=0)
    other(TOKENS).sum().backward()
    assert model.blocks[1].mlp.up.weight.grad is None and other.blocks[1].mlp.up.weight.grad is not None


def test_copy_gathers_its_own_shares(checkpoint):
    model = load_model(str(checkpoint))
    steps = apply_all_wrappers(model, None)
    steps["shares"](), steps["time"]()
    model.to_empty(device="cpu")
    Random(seed=0).load(model)
    other = copy.deepcopy(model)
    for parameter in other.parameters():
        local_shard(parameter.detach())[0].zero_()
    assert not other(Batch.of(TOKENS)).any() and model(Batch.of(TOKENS)).any()


def test_user_hooks_are_outermost(checkpoint):
    """They see the arguments and results of `block(...)`, whenever they are registered."""
    model, seen = load_model(str(checkpoint)), []
    kinds = ("before", "after")
    handle = model.blocks[0].register_forward_hook(lambda *_: seen.append("before"))
    wrap(
        model.blocks[0], Wrap.TIMING, lambda forward: lambda *arguments: (seen.append("inside"), forward(*arguments))[1]
    )
    model.blocks[0].register_forward_hook(lambda *_: seen.append("after"))
    model(TOKENS)
    assert seen == ["inside", *kinds]
    handle.remove()


@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "planned"])
def test_modules_get_no_undeclared_attributes(name, tmp_path):
    """Attributes set from outside are fields of the class, `forward`, or the record of `parallelize`."""
    with torch.device("meta"):
        model = build_planned("") if name == "planned" else model_of(tmp_path, name)
        add_adapters(model, LoRA(rank=2, target_modules=["query", "down"]))
    world = distributed.init("cpu")
    before = {module: {*vars(module)} for module in model.modules()}
    blocks = repeated_blocks(model)
    if name == "qwen3_moe":
        share_experts(model, init_device_mesh("cpu", (1,), mesh_dim_names=("ep",)))
    else:
        share(model, blocks, units_of(model, blocks), world.mesh["tp"], PLAN if name == "planned" else None)
    if name != "planned":
        split(model, world.mesh["cp"])
    parallelize(model, world, dtype="fp16", activation_checkpointing="selective")
    for module, names in before.items():
        hung = {name for name in vars(module).keys() - names if not hasattr(type(module), name)}
        assert hung <= {"parallelism", "wrapped"}, (type(module), hung)


class Part(nn.Module):
    """A block with a part that is also wrapped."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Linear(4, 4)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.mlp(hidden)


def doubled(forward):
    def twice(hidden):
        return 2 * forward(hidden)

    return twice


def test_block_with_wrapped_parts_is_compiled_once(monkeypatch) -> None:
    counter = CompileCounterWithBackend("eager")
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=counter))
    blocks = [Part() for _ in range(3)]
    hidden = torch.ones(2, 4)
    for block in blocks:
        expected = 2 * block(hidden)
        wrap(block.mlp, Wrap.EXCHANGE, doubled)
        wrap_forward(block, "none", True, False)
        assert_close(block(hidden), expected)
    assert counter.frame_count == 1
