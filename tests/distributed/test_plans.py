"""Tensor-parallel plans: invalid plans are reported before anything is loaded."""

import json
import re
from pathlib import Path

import pytest
import torch
from distributed.test_tensor_parallel import Mesh, line_of
from edited_recipes import with_edits
from helpers import run_processes, save_checkpoint
from planned_module import PLAN, build

from tune import distributed
from tune.distributed import tensor_parallel
from tune.distributed.parallelize import repeated_blocks, units_of
from tune.distributed.wrapping import wrappers_of
from tune.errors import TuneError
from tune.models import build as build_native
from tune.models import hf


def share(model, processes, plan=None):
    blocks = repeated_blocks(model)
    tensor_parallel.share(model, blocks, units_of(model, blocks), Mesh(processes), plan)


def own(heads=4):
    with torch.device("meta"):
        return build("", heads)


def test_one_process_checks_a_plan():
    distributed.parallelize(model := own(), distributed.init("cpu", plan=PLAN), dtype="fp32")
    assert not any(wrappers_of(module) for module in model.modules())
    with pytest.raises(TuneError, match=r"parallel\.plan: nonsense matches no layer"):
        distributed.parallelize(own(), distributed.init("cpu", plan={"nonsense": "colwise"}), dtype="fp32")


UP = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}
WRONG = [
    (PLAN | {"blocks.*.mlp.up": "colwise"}, 2,
     r"parallel\.plan: blocks\.\*\.mlp\.up matches no layer in a block of Mine.* like blocks\.0\.norms"),
    (PLAN | {"head": "colwise"}, 2, r"head matches no layer in a block of Mine"),
    (PLAN | {"blocks.*.up": "colwize"}, 2, r"blocks\.\*\.up .* 'colwize'.* Did you mean 'colwise'"),
    (PLAN | {"blocks.*.up": 2}, 2, r"blocks\.\*\.up has the unknown style 2; known: colwise, "),
    (PLAN | {"blocks.*.attention": "colwise"}, 2, r"colwise is for nn\.Linear; found Attention"),
    (PLAN | {"query_norm": "rowwise"}, 2, r"rowwise is for nn\.Linear; found LayerNorm"),
    (UP, 3, r"parallel\.tp: 3 does not divide blocks\.\*\.up \(128 outputs\), blocks\.\*\.down \(128 inputs\) "
            r"of this model\. Set it to 1 or 2 or 4 or 8"),
    (PLAN, 8, r"8 does not divide num_attention_heads=4 of this model\. Set it to 1 or 2 or 4$"),
    (None, 2, r"parallel\.tp: Mine .* parallel\.plan"),
]  # fmt: skip


@pytest.mark.parametrize(("plan", "processes", "message"), WRONG)
def test_invalid_plans_are_rejected_before_sharding(plan, processes, message):
    model = own()
    with pytest.raises(TuneError, match=message):
        share(model, processes, plan)
    assert not any(isinstance(parameter, torch.distributed.tensor.DTensor) for parameter in model.parameters())


@pytest.mark.slow
def test_invalid_plans_are_reported_before_the_run(checkpoint, chats, tmp_path, told_to):
    lines = {2: [], 3: [], 8: []}
    for number, (plan, processes, message) in enumerate(WRONG):
        message = message.replace("style 2", "style '2'")  # a number in a text setting is read as text
        file = tmp_path / f"{number}.yaml"
        file.write_text(json.dumps({"parallel": {"tp": processes, "plan": plan}}))
        module = "model._component_=planned_module.build", "model.heads=4", "edit=random"
        recipe, *settings = line_of(checkpoint, chats, "--config", str(file), *module)
        recipe, settings = with_edits(recipe, settings)
        lines[processes].append(([recipe, *settings], message))
    for processes, cases in lines.items():
        messages = told_to(processes, *(line for line, _ in cases))
        assert not [
            (text, message) for text, (_, message) in zip(messages, cases, strict=True) if not re.search(message, text)
        ]


def test_models_with_their_own_plan_take_no_other(checkpoint):
    with torch.device("meta"), pytest.raises(TuneError, match=r"parallel\.plan: Decoder .* Set it to null"):
        share(build_native(str(checkpoint)), 2, UP)


@pytest.mark.parametrize(
    ("kind", "changes", "processes", "message"),
    [
        ("LlamaConfig", {}, 4, r"4 does not divide num_key_value_heads=2 of this model\. Set it to 1 or 2$"),
        ("LlamaConfig", {"intermediate_size": 99}, 2, r"layers\.\*\.mlp\.up_proj \(99 outputs\), .* Set it to 1$"),
        ("Phi3Config", {"pad_token_id": 0, "hidden_size": 63, "num_attention_heads": 3, "num_key_value_heads": 1,
                        "intermediate_size": 126}, 2, r"qkv_proj \(105 outputs\).*o_proj \(63 inputs\)"),
        ("MambaConfig", {"state_size": 4}, 2, r"parallel.tp: MambaForCausalLM"),
    ],
)  # fmt: skip
def test_plans_of_transformers_models(kind, changes, processes, message, tmp_path):
    pytest.importorskip("transformers")
    model = hf(str(save_checkpoint(tmp_path, kind, **changes)))
    with pytest.raises(TuneError, match=message):
        share(model, processes)


def test_style_that_only_transformers_supports(tmp_path):
    pytest.importorskip("transformers")
    model = hf(str(save_checkpoint(tmp_path)))
    model.tp_plan = {"layers.*.mlp.up_proj": "all_reduce"}
    with pytest.raises(TuneError, match=r"parallel\.tp: .* Llama.* parallel\.plan"):
        share(model, 2)


CHECKED = """
from dataclasses import replace

import torch
from planned_module import PLAN, build

from tune import checkpointers, distributed
from tune.errors import TuneError

world = distributed.init("cpu", tp=2)
named = torch.nn.Module.named_parameters


def check(plan, heads=None, dtype="fp32"):
    with torch.device("meta"):
        model = build("")
    for block in model.blocks if heads else ():
        block.attention.forward = fixed(block.attention, heads)
    distributed.parallelize(model, replace(world, plan=plan), dtype=dtype)
    whole = {name: torch.randn(value.shape, generator=torch.Generator().manual_seed(0)) for name, value in named(model)}
    for name, tensor in named(model):
        shard, place = distributed.local_shard(tensor.detach())
        shard.copy_(whole[name][place] * 0.1)
    try:
        checkpointers.check_forward(model)
        print("fine")
    except TuneError as error:
        print(error)


def fixed(attention, heads):
    def forward(hidden, mask):
        query, key, value = (
            layer(hidden).unflatten(-1, (heads, -1)).transpose(1, 2)
            for layer in (attention.query, attention.key, attention.value)
        )
        output = torch.nn.functional.scaled_dot_product_attention(query, key, value, mask[:, None])
        return attention.output(output.transpose(1, 2).flatten(2))

    return forward


without = {pattern: style for pattern, style in PLAN.items() if style != "replicated_with_grad_allreduce"}
check(PLAN)
check(without)
check(without, heads=4)
check({"blocks.*.up": "colwise"})
check({"blocks.*.up": "colwise_gather_output", "blocks.*.down": "rowwise_split_input"})
check(PLAN | {"blocks.*.up": "packed_colwise"})
check(PLAN | {"norms.mlp": "replicated_with_grad_allreduce"})
check(PLAN, dtype="bf16")
world.finish()
"""


@pytest.mark.slow
def test_plans_that_change_the_results_are_rejected(tmp_path, monkeypatch):
    """A few tokens reveal a head norm whose gradient is not summed, a forward that counts heads itself, and a layer
    that gets only a part of its input."""
    (tmp_path / "checked.py").write_text(CHECKED)
    monkeypatch.syspath_prepend(Path(__file__).parents[1])
    monkeypatch.setenv("PYTHONPATH", f"{Path(__file__).parents[1]}:{Path(tensor_parallel.__file__).parents[2]}")
    output = run_processes(tmp_path / "checked.py", 2).splitlines()
    right, norm, heads, alone, gathered, packed, summed, rounded = output[-8:]
    assert right == gathered == rounded == "fine"
    assert norm.startswith("parallel.plan: the model computes something else with this plan: the gradient of blocks.")
    assert "query_norm" in norm and "replicated_with_grad_allreduce" in norm
    assert "computes something else" in heads and "view(..., -1, head_dim)" in heads
    assert alone.startswith("parallel.plan: the model fails with it at blocks.0.down: mat1 and mat2 shapes ")
    assert "its hidden states differ by " in packed and "two projections in one weight" in packed
    assert re.search(r"the gradient of blocks\.\d\.norms\.mlp\.weight differs by", summed)
