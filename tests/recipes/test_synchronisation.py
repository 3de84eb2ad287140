"""A step waits for the device once. Any other read of a tensor's values on the host would leave a GPU idle."""

import threading
from collections import Counter
from dataclasses import replace

import distill
import full_finetune
import lora_finetune
import preference_finetune
import pytest
import torch
from helpers import save_checkpoint, weekly_but
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

from tune import distributed
from tune.distributed import World

WAITS = {
    torch.ops.aten._local_scalar_dense.default,  # item(), float(), bool()
    torch.ops.aten.nonzero.default,
    torch.ops.aten.masked_select.default,
    torch.ops.aten.equal.default,
    torch.ops.aten.unique_consecutive.default,
    torch.ops.aten._unique2.default,
}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True}


EXCHANGED = ["optimizer._component_=torch.optim.SGD"]  # one process has all experts


class Waits(TorchDispatchMode):
    """Count the operations of this thread that would wait for a device."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter = Counter()

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        masks = [mask for mask in args[1] or [] if mask is not None] if operation is torch.ops.aten.index.Tensor else []
        unknown_size = operation is torch.ops.aten.repeat_interleave.Tensor and kwargs.get("output_size") is None
        if operation in WAITS or unknown_size or any(mask.dtype == torch.bool for mask in masks):
            self.found[str(operation)] += 1
        return operation(*args, **kwargs)


CASES = [
    (full_finetune, ["packed=true"], {}),
    (full_finetune, ["max_grad_norm=null", "micro_batch_size=2"], {}),
    (full_finetune, ["compute.dtype=bf16"], {"config_class": "MixtralConfig", **EXPERTS}),
    (lora_finetune, ["adapter.dropout=0.1", "model.quantization=nf4", "adapter.trainable_tokens=[5,7]"], {}),
    (lora_finetune, ["adapter.dora=true", "compute.dtype=bf16"], {}),
    (distill, ["teacher.path=${model.path}", "packed=true", "loss.cross_entropy=0.5"], {}),
    (distill, ["teacher.path=${model.path}", "teacher.top_k=9", "loss._component_=tune.losses.ReverseKL"], {}),
    (full_finetune, EXCHANGED, {"config_class": "MixtralConfig", **EXPERTS}),
    (preference_finetune, ["micro_batch_size=2"], {}),
    (preference_finetune, ["loss._component_=tune.losses.KTO", "dataset.kind=labelled", "packed=true"], {}),
    (preference_finetune, ["adapter.rank=4", "reference=adapter_off"], {}),
]


@pytest.mark.weekly
@pytest.mark.parametrize(("recipe", "settings", "model"), weekly_but(CASES[::4], CASES))
def test_one_wait_per_step(recipe, settings, model, chats, pairs, run_recipe, tmp_path, monkeypatch):
    folder = save_checkpoint(tmp_path / "model", hidden_size=128, **model)
    rows = pairs if recipe is preference_finetune else chats
    waits, before_fetch = Waits(), []
    main, fetch, tolist = threading.main_thread(), World.fetch, torch.Tensor.tolist

    def counted(world, **values):
        before_fetch.append(dict(waits.found))
        result = fetch(world, **values)
        waits.found.clear()
        return result

    def counted_tolist(tensor):
        if threading.current_thread() is main:
            waits.found["tolist"] += 1
        return tolist(tensor)

    monkeypatch.setattr(World, "fetch", counted)
    monkeypatch.setattr(torch.Tensor, "tolist", counted_tolist)
    if settings is EXCHANGED:
        init = distributed.init
        mesh = init_device_mesh(init("cpu").device.type, (1, 1, 1), mesh_dim_names=("dp_replicate", "dp_shard", "ep"))
        monkeypatch.setattr(distributed, "init", lambda *args, **others: replace(init(*args, **others), experts=mesh))
    with waits:
        code = run_recipe(
            [
                f"model.path={folder}", f"dataset.path={rows}", f"output_dir={tmp_path / 'run'}", "max_seq_len=128",
                "device=cpu", "compute.dtype=fp32", "global_batch_size=4", "max_steps=3", "epochs=2",
                "checkpointer.every=null", *settings,
            ],
            recipe,
        )  # fmt: skip
    assert code == 0
    # The sizes of the expert exchange, once per layer (3) and micro-batch (4).
    assert before_fetch[1:] == [{"tolist": 12} if settings is EXCHANGED else {}] * 2
