"""Experts that processes share: what cannot be shared is told before anything is loaded; what is waited for."""

import pytest
import torch
from distributed.test_tensor_parallel import Mesh, model_of
from helpers import save_checkpoint
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from tune import distributed
from tune.distributed.expert_parallel import share_experts
from tune.errors import TuneError
from tune.models import hf
from tune.models.context import Context

WRONG = [
    ("llama", {}, 2, "Decoder has no experts that processes can share"),
    ("mixtral", {}, 3, "3 processes cannot share 4 experts. Set it to 1 or 2 or 4"),
    ("granitemoe", {}, 4, "4 processes cannot share 6 experts. Set it to 1 or 2 or 3 or 6"),
    ("gpt_oss", {"num_local_experts": 5}, 2, "2 processes cannot share 5 experts. Set it to 1 or 5"),
    ("qwen3_moe", {"num_experts": 7}, 8, "8 processes cannot share 7 experts. Set it to 1 or 7"),
    ("deepseek_v3", {"n_routed_experts": 8}, 16, "16 processes cannot share 8 experts. Set it to 1 or 2 or 4 or 8"),
]


@pytest.mark.parametrize(("name", "changes", "processes", "message"), WRONG)
def test_what_processes_cannot_share(name, changes, processes, message, tmp_path):
    model = model_of(tmp_path, name, **changes)
    with pytest.raises(TuneError, match=r"^parallel\.ep: ") as refusal:
        share_experts(model, Mesh(processes))
    assert message in str(refusal.value)
    assert not any(isinstance(each, DTensor) for each in model.parameters())


def test_models_of_transformers(tmp_path):
    model = hf(str(save_checkpoint(tmp_path, "MixtralConfig", num_local_experts=4)))
    with pytest.raises(TuneError, match=r"parallel\.ep: HuggingFaceModel has no experts that processes can share"):
        share_experts(model, Mesh(2))


def test_a_frozen_model_beside_may_be_dense(tmp_path):
    share_experts(model_of(tmp_path, "llama").requires_grad_(False), Mesh(2))


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        ({"ep": 2}, r"parallel\.ep: 2 processes cannot be among the 1 of dp_shard x cp. Set it to 1, or start more$"),
        ({"ep": 2, "tp": 2}, r"parallel\.ep: it does not go with parallel\.tp=2.* Set one of both to 1"),
    ],
)
def test_axes_that_do_not_fit(axes, message):
    with pytest.raises(TuneError, match=message):
        distributed.init("cpu", **axes)


@pytest.fixture
def alone():
    """Processes that share experts, of which there is one."""
    world = distributed.init("cpu")
    return init_device_mesh(world.device.type, (1,), mesh_dim_names=("ep",))


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_meta_tensors_are_exchanged(name, alone, tmp_path, monkeypatch):
    """Nothing is left on the CPU where the device is another one, and sizes are all that is waited for."""
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
