"""A checkpoint of one layout loads in the others: every tensor is bit-identical."""

import pytest
from helpers import run_processes, save_checkpoint

SCRIPT = """
import itertools
import sys
from pathlib import Path

import torch

from tune import distributed, optimizers, peft
from tune.checkpointers import Checkpointer, Pretrained, hf_tensors
from tune.collators import Batch
from tune.losses import LinearCrossEntropy
from tune.models import build

LAYOUTS = [{"tp": tp, "dp_replicate": replicas} for tp, replicas in ((1, 1), (1, 2), (2, 1), (4, 1))]
LAYOUTS += [{"cp": 2, "dp_replicate": 2}, {"cp": 2, "tp": 2}, {"pp": 2}, {"pp": 2, "tp": 2}]
LAYOUTS += [{"zero_stage": 0}, {"zero_stage": 1, "tp": 2}, {"zero_stage": 2}, {"zero_stage": 0, "cp": 2}]
LAYOUTS += [{"pp": 2, "pp_schedule": "interleaved"}, {"tp": 2, "loss_parallel": False}]
KINDS = {"all": None, "adapter": peft.LoRA(rank=4, dora=True)}
path, folder = Path(sys.argv[1]), Path(sys.argv[2])
if path.name == "experts":
    LAYOUTS = [{}, {"ep": 2, "cp": 2}, {"pp": 2, "ep": 2}, {"tp": 2}, {"zero_stage": 0, "ep": 2}, {"ep": 2, "tp": 2}]
    del KINDS["adapter"]


class Nothing:
    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


def start(layout, lora, at):
    world = distributed.init("cpu", **layout)
    with torch.device("meta"):
        model = build(str(path))
    weights = Pretrained(str(path), model)
    if lora:
        peft.add_adapters(model, lora)
    distributed.parallelize(model, world, dtype="fp32")
    weights.load(model)
    if lora:
        peft.initialize(model, seed=0)
    optimizer = torch.optim.AdamW([parameter for parameter in model.parameters() if parameter.requires_grad], lr=1e-2)
    optimizer.turns = distributed.Pipeline(model, world)
    parts = {"model": model, "optimizer": optimizer, "schedule": Nothing(), "data": Nothing()}
    return world, model, optimizer, Checkpointer(at, world, **parts, async_=False)


def step(world, model, optimizer):
    draw = torch.Generator().manual_seed(1)
    tokens, labels = torch.randint(0, 300, (2, 4, 20), generator=draw)
    mine = slice(world.data_rank, None, world.data_size)
    total = torch.zeros(())
    for batch in optimizer.turns.turns([Batch.of(tokens[mine], labels[mine])]):
        loss = model(batch, LinearCrossEntropy()) / 80
        total += loss.detach()
        for due, is_last in optimizer.turns.due(loss):
            distributed.set_gradient_sync(model, is_last)
            due.backward()
    optimizer.step()
    optimizer.zero_grad()
    return world.fetch(loss=world.sum(total))["loss"]


def whole(world, model, optimizer):
    tensors = {name: tensor.clone() for name, tensor in hf_tensors(model)}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            tensors[name] = distributed.full_tensor(parameter.detach())
            state = optimizer.state[parameter]
            tensors |= {f"{name} {part}": distributed.full_tensor(value) for part, value in state.items()}
    every = {}  # of all stages
    for stage in world.from_all_ranks(tensors):
        for name, tensor in stage.items():
            assert torch.equal(every.setdefault(name, tensor), tensor), name
    return every


pairs = 0
for kind, lora in KINDS.items():
    LAYOUTS = LAYOUTS[:: 2 if lora else 1]
    started = [start(layout, lora, folder / f"{kind} {number}") for number, layout in enumerate(LAYOUTS)]
    saved, expected = [], []
    for world, model, optimizer, checkpointer in started:
        step(world, model, optimizer)
        checkpointer.save(1)
        saved.append(whole(world, model, optimizer))
        expected.append(step(world, model, optimizer))
    for number, layout in enumerate(LAYOUTS):
        for other in (LAYOUTS * 2)[number + 1 : number + (3 if path.name == "experts" else 2)]:
            world, model, optimizer, checkpointer = started[LAYOUTS.index(other)]  # they are after step 2
            assert checkpointer.resume(folder / f"{kind} {number}" / "step-00000001") == 1
            loaded = whole(world, model, optimizer)
            assert loaded.keys() == saved[number].keys()
            for name, tensor in saved[number].items():
                assert torch.equal(loaded[name], tensor), (kind, layout, other, name)
            assert abs(step(world, model, optimizer) / expected[number] - 1) < 1e-6, (kind, layout, other)
            pairs += 1
print(pairs, "pairs")
world.finish()
"""


EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 16}


@pytest.mark.weekly
@pytest.mark.parametrize(
    ("name", "kind", "shape", "pairs"),
    [("dense", "Qwen3Config", {"tie_word_embeddings": True}, 21), ("experts", "Qwen3MoeConfig", EXPERTS, 12)],
)
def test_checkpoints_move_between_layouts_of_four_processes(name, kind, shape, pairs, tmp_path):
    save_checkpoint(tmp_path / name, kind, num_hidden_layers=4, **shape)
    (tmp_path / "pairs.py").write_text(SCRIPT)
    output = run_processes(tmp_path / "pairs.py", 4, str(tmp_path / name), str(tmp_path))
    assert output.endswith(f"{pairs} pairs\n")
