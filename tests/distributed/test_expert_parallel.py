"""Expert parallelism: unsupported layouts are reported before loading; synchronizations are counted."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from distributed.test_tensor_parallel import Mesh, checkpoint_of, line_of, model_of
from helpers import result_of, run_processes, save_checkpoint
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import tune
from tune import distributed
from tune.distributed.expert_parallel import share_experts
from tune.errors import TuneError
from tune.models import hf
from tune.models.context import Context
from tune.peft import LoRA, add_adapters

WRONG = [
    ("llama", {}, 2, "Decoder has no experts"),
    ("mixtral", {}, 3, "3 does not divide 4 experts. Set it to 1 or 2 or 4"),
    ("granitemoe", {}, 4, "4 does not divide 6 experts. Set it to 1 or 2 or 3 or 6"),
    ("gpt_oss", {"num_local_experts": 5}, 2, "2 does not divide 5 experts. Set it to 1 or 5"),
    ("qwen3_moe", {"num_experts": 7}, 8, "8 does not divide 7 experts. Set it to 1 or 7"),
    ("deepseek_v3", {"n_routed_experts": 8}, 16, "16 does not divide 8 experts. Set it to 1 or 2 or 4 or 8"),
]


@pytest.mark.parametrize(("name", "changes", "processes", "message"), WRONG)
def test_unsupported_layouts_are_rejected(name, changes, processes, message, tmp_path):
    model = model_of(tmp_path, name, **changes)
    with pytest.raises(TuneError, match=r"^parallel\.ep: ") as refusal:
        share_experts(model, Mesh(processes))
    assert message in str(refusal.value)
    assert not any(isinstance(parameter, DTensor) for parameter in model.parameters())


@pytest.mark.slow
def test_unsupported_layouts_are_reported_before_the_run(chats, tmp_path, told_to):
    for name, changes, processes, message in WRONG:
        folder = checkpoint_of(tmp_path / f"{name} {processes}", name, **changes)
        (output,) = told_to(processes, line_of(folder, chats, f"parallel.ep={processes}"))
        assert f"parallel.ep: {message}" in output


def test_models_loaded_through_transformers(tmp_path):
    model = hf(str(save_checkpoint(tmp_path, "MixtralConfig", num_local_experts=4)))
    with pytest.raises(TuneError, match=r"parallel\.ep: HuggingFaceModel has no experts"):
        share_experts(model, Mesh(2))


def test_additional_frozen_model_may_be_dense(tmp_path):
    share_experts(model_of(tmp_path, "llama").requires_grad_(False), Mesh(2))


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        ({"ep": 2}, r"parallel\.ep: 2 does not divide dp_shard x cp = 1\. Set it to 1"),
    ],
)
def test_axes_that_do_not_divide_the_processes(axes, message):
    with pytest.raises(TuneError, match=message):
        distributed.init("cpu", **axes)


@pytest.fixture
def alone():
    """Share experts among one process."""
    world = distributed.init("cpu")
    return init_device_mesh(world.device.type, (1,), mesh_dim_names=("ep",))


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_meta_tensors_are_exchanged(name, alone, tmp_path, monkeypatch):
    """Nothing stays on the CPU when the device is another one, and only sizes are waited for."""
    model = model_of(tmp_path, name)
    share_experts(model, alone)
    mixture, waits = model.blocks[0].mlp, []

    def tolist(tensor):
        waits.append(tensor.shape)
        return [[14 * mixture.router.config.chosen]] * 2

    monkeypatch.setattr(torch.Tensor, "tolist", tolist)
    hidden = torch.empty(2, 7, 64, device="meta", requires_grad=True)
    output, _ = mixture(hidden, Context(None, None, None, None))
    output.sum().backward()
    assert output.shape == hidden.grad.shape == (2, 7, 64)
    assert waits == [(2, 1)]


def test_frozen_experts_have_the_compute_dtype(tmp_path):
    model = model_of(tmp_path, "qwen3_moe")
    with torch.device("meta"):
        add_adapters(model, LoRA(rank=2, target_modules=".*experts.*"))
    mesh = init_device_mesh("cpu", (1, 1, 1), mesh_dim_names=("dp_replicate", "dp_shard", "ep"))
    distributed.parallelize(model, replace(distributed.init("cpu"), experts=mesh), dtype="bf16")
    experts = dict(model.blocks[0].mlp.experts.named_parameters())
    assert {name: parameter.to_local().dtype for name, parameter in experts.items()} == {
        name: torch.float32 if "lora" in name else torch.bfloat16 for name in experts
    }


SENT = """
import json
import sys
from collections import Counter

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tune import distributed
from tune.checkpointers import Random
from tune.collators import Batch
from tune.losses import LinearCrossEntropy
from tune.models import build


class Sent(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.calls, self.numbers = Counter(), Counter()

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        if str(operation).startswith("_c10d_functional.all_to_all"):
            kind = str(args[0].dtype)
            self.calls[kind] += 1
            self.numbers[kind] += args[0].numel()
        return operation(*args, **kwargs or {})


world = distributed.init("cpu", ep=2)
with torch.device("meta"):
    model = build(sys.argv[1])
distributed.parallelize(model, world, dtype="fp32")
Random(0).load(model)
tokens = torch.randint(0, 300, (2, 1, 120), generator=torch.Generator().manual_seed(1))[world.data_rank]
with Sent() as sent:
    loss = model(Batch.of(tokens, tokens), LinearCrossEntropy())
    forward = dict(sent.calls), dict(sent.numbers)
    loss.backward()
whole, here = (sum(map(count, model.parameters())) for count in (torch.numel, lambda part: part.to_local().numel()))
results = world.from_all_ranks([*forward, dict(sent.calls), dict(sent.numbers), here / whole])
print(json.dumps(results) if world.is_main else "")
world.finish()
"""


@pytest.mark.slow
def test_sent_sizes_match_the_docs(tmp_path):
    shape = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16}
    save_checkpoint(tmp_path / "model", "Qwen3MoeConfig", num_hidden_layers=3, **shape)
    (tmp_path / "sent.py").write_text(SENT)
    measured = result_of(run_processes(tmp_path / "sent.py", 2, str(tmp_path / "model")))
    exchanged, sizes = 2 * 3 * 120 * 2 * 64, 3 * 8
    for in_forward, numbers_in_forward, calls, numbers, share in measured:
        assert in_forward == {"torch.float32": 6, "torch.int32": 3}
        assert calls == {"torch.float32": 12, "torch.int32": 3}
        assert numbers["torch.float32"] == 2 * numbers_in_forward["torch.float32"]
        assert numbers["torch.int32"] == sizes
        assert share == pytest.approx(1 / 2, rel=0.02)
    assert sum(numbers["torch.float32"] for _, numbers, *_ in measured) == 2 * exchanged  # sum over both processes
    text = (Path(tune.__file__).parents[1] / "docs" / "layouts.md").read_text()
    for row in ("tokens to their experts and back, in forward", "their gradients, in backward"):
        assert f"| {row} | 2 L T k D | 6 | {exchanged:,} |" in text
    assert f"| how many tokens each expert gets | L E | 3 | {sizes} |" in text
