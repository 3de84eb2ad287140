"""Whatever changes the meaning of a saved state is refused on resume, argument by argument: an argument of a component
whose state is compared is either refused when it differs, or listed here as free to change."""

import dataclasses
import inspect
import json
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from tune import distributed
from tune.checkpointers import Checkpointer, Pretrained
from tune.datasets import DataLoader, PromptLoader
from tune.errors import TuneError
from tune.models import build
from tune.peft import LoRA, add_adapters
from tune.quantization import quantize_linears


class Position:
    """Data without a state of their own."""

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


def checkpointer(folder, model, optimizer=torch.optim.AdamW, **parts):
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [{"params": trained}, *parts.pop("groups", [])]
    return Checkpointer(
        folder, distributed.init("cpu"), model=model, optimizer=optimizer(groups, lr=0.1), data=Position(), every=None,
        async_=False, **parts,
    )  # fmt: skip


class Block(nn.Module):
    """Layers whose names end alike, and a layer wider than the adapter's rank."""

    def __init__(self):
        super().__init__()
        self.first, self.second = (nn.ModuleDict({"query": nn.Linear(8, 8), "up": nn.Linear(8, 8)}) for _ in range(2))
        self.embedding, self.wide = nn.Embedding(16, 8), nn.Linear(32, 32)


# Settings of the saved adapter -> another value of each field. Several values are tried one after the other.
LORA = {
    "rank": 16, "alpha": 8.0, "target_modules": ["query", "wide"], "rank_pattern": {"wide": 4},
    "alpha_pattern": {"first.query": 4.0, "query": 2.0}, "trainable_tokens": [1, 2],
}  # fmt: skip
OTHER = {
    "rank": [4, 32],  # of the narrow layers, 32 gives the shapes of 16
    "alpha": [16.0], "target_modules": [["query", "wide", "up"], "first.*|wide"],
    "target_parameters": [["first.up.weight"]],
    "rank_pattern": [{"wide": 2}, {"wide": 4, "first.query": 2}],
    "alpha_pattern": [
        {"first.query": 4.0, "query": 1.0}, {"first.query": 4.0}, {"query": 2.0, "first.query": 4.0},
    ],
    "rank_stabilized": [True], "dora": [True], "init": ["pissa", "olora"], "modules_to_save": [["first.up"]],
    "trainable_tokens": [[1, 3], [2, 1], [1]],
}  # fmt: skip
FREE = {"dropout", "path"}  # neither changes what the adapter computes after the weights are restored


def adapted(folder, **settings):
    torch.manual_seed(0)
    model, lora = Block(), LoRA(**LORA | settings)
    add_adapters(model, lora)
    return checkpointer(folder, model, adapter=lora)


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(LoRA) if field.name not in FREE])
def test_adapters_that_differ_in_one_field(field, tmp_path):
    adapted(tmp_path).save(1)
    assert adapted(tmp_path, dropout=0.5).resume("auto") == 1
    for value in OTHER[field]:
        with pytest.raises(TuneError, match=r"^resume: "):
            adapted(tmp_path, **{field: value}).resume("auto")


# Arguments of a loader -> another value of each.
LOADERS = {
    DataLoader: ({"dataset": [4, 5, 7], "global_batch_size": 3, "seed": 7},
                 {"world", "micro_batch_size", "epochs", "max_steps", "pad_packed"}),
    PromptLoader: ({"dataset": [4, 5, 7], "prompts_per_step": 3, "seed": 7}, {"epochs", "max_steps"}),
}  # fmt: skip


class Rows:
    """As many rows as `values`, with a fingerprint of them."""

    def __init__(self, values):
        self.values, self.name, self.fingerprint = values, "rows", f"of {values}"

    def __len__(self):
        return len(self.values)


@pytest.mark.parametrize(
    ("kind", "argument"),
    [
        (kind, name)
        for kind, (_, free) in LOADERS.items()
        for name in inspect.signature(kind).parameters
        if name not in free
    ],
)
def test_data_that_differ_in_one_argument(kind, argument):
    size = "global_batch_size" if kind is DataLoader else "prompts_per_step"

    def loader(**changes):
        arguments = {"dataset": [4, 5, 6], size: 2, "seed": 0} | changes
        data = Rows(arguments.pop("dataset"))
        return kind(data, **({"world": distributed.init("cpu")} if kind is DataLoader else {}), **arguments)

    saved = json.loads(json.dumps(loader().state_dict()))
    loader().load_state_dict(saved)
    named = "fingerprint" if argument == "dataset" else argument
    with pytest.raises(TuneError, match=rf"{named} was .* and is now "):
        loader(**{argument: LOADERS[kind][0][argument]}).load_state_dict(saved)


def quantized(model, double):
    quantize_linears(model, "nf4", double=double)


BASES = {
    "weights": lambda folder: rewrite(folder, lambda tensors: tensors["model.norm.weight"].mul_(2)),
    "config.json": lambda folder: reconfigure(folder, rms_norm_eps=0.5),
    "nf4": lambda folder: partial(quantized, double=False),
    "nf4, double": lambda folder: partial(quantized, double=True),
}


def rewrite(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def reconfigure(folder, **fields):
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


@pytest.mark.parametrize("saved", [None, *BASES])
def test_bases_that_differ_in_one_respect(saved, checkpoint, tmp_path):
    states = {}
    for name in [None, *BASES]:
        folder = Path(shutil.copytree(checkpoint, tmp_path / str(name)))
        change = BASES[name](folder) if name else None
        with torch.device("meta"):
            model = build(str(folder))
        states[name] = Pretrained(str(folder), model)
        if change:
            change(model)
    state = json.loads(json.dumps(states[saved].state_dict()))
    for name, base in states.items():
        if name == saved:
            base.load_state_dict(state)
        else:
            with pytest.raises(TuneError, match=r"^resume: "):
                base.load_state_dict(state)


# What differs in the resumed training. The saved one has AdamW, one group, and the parts of `PARTS`.
PARTS = {"adapter": Position(), "extra": {"mean": Position()}}
TRAININGS = {
    "another optimizer": {"optimizer": torch.optim.Adagrad},
    "more parameter groups": {"groups": [{"params": []}]},
    "no adapter": {"adapter": None},
    "no part of its own": {"extra": {}},
    "another part of its own": {"extra": {"other": Position()}},
    "one more part": {"schedule": Position()},
}


def test_base_is_compared_where_weights_are_frozen(tmp_path):
    """Where all of them are trained, they are in the checkpoint."""
    for is_frozen in (False, True):
        model = nn.Linear(4, 4)
        model.bias.requires_grad_(not is_frozen)
        optimizer = torch.optim.AdamW([model.weight])
        made = Checkpointer(tmp_path, distributed.init("cpu"), model=model, optimizer=optimizer, base=Position())
        assert ("base" in made.small) == is_frozen


@pytest.mark.parametrize("difference", TRAININGS)
def test_trainings_that_differ_in_one_part(difference, tmp_path):
    first = checkpointer(tmp_path, nn.Linear(4, 4), **PARTS)
    first.model(torch.ones(1, 4)).sum().backward()
    first.optimizer.step()
    first.save(1)
    assert checkpointer(tmp_path, nn.Linear(4, 4), **PARTS).resume("auto") == 1
    parts = {name: part for name, part in {**PARTS, **TRAININGS[difference]}.items() if part is not None}
    with pytest.raises(TuneError, match=r"^resume: "):
        checkpointer(tmp_path, nn.Linear(4, 4), **parts).resume("auto")
