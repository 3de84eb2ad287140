"""Parameters of a loss: a second head, or a learned temperature, in every layout."""

import json
from pathlib import Path

import pytest
import torch
from helpers import result_of, run_processes, save_checkpoint
from torch import nn
from torch.distributed.fsdp import fully_shard

from tune import distributed
from tune.distributed.context_parallel import WholeHead
from tune.errors import TuneError

SCRIPT = Path(__file__).with_name("own_head.py")
ON_TWO = [
    {"cp": 2}, {"tp": 2}, {"dp_shard": 2}, {"dp_replicate": 2}, {"cp": 2, "zero_stage": 0}, {"cp": 2, "zero_stage": 1},
]  # fmt: skip
ON_FOUR = [{"cp": 2, "tp": 2}, {"cp": 2, "dp_shard": 2}, {"tp": 2, "dp_replicate": 2}, {"cp": 4}]


@pytest.mark.weekly(but_one=True)
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("layouts", [ON_TWO, pytest.param(ON_FOUR, marks=pytest.mark.weekly)], ids=["two", "four"])
def test_gradients_and_norm_match_one_process(layouts, tied, tmp_path):
    folder = save_checkpoint(tmp_path / "model", num_hidden_layers=2, tie_word_embeddings=tied)
    processes = 2 if layouts is ON_TWO else 4
    apart, errors = result_of(run_processes(SCRIPT, processes, str(folder), json.dumps(layouts)))
    assert max(most for most, _ in apart) < 1e-5, [*zip(layouts, apart, strict=True)]
    of_block, outside, by_name = errors
    assert "parallel.cp" in of_block and "blocks.1" in of_block
    assert "Outside" in outside and "temperature" in outside and by_name == outside


@pytest.mark.parametrize("trained", [["weight", "bias"], ["bias"], []])
def test_heads_may_only_call_frozen_units(trained):
    """One trained parameter of a block is enough, such as that of an adapter: its gradient would count twice."""
    mesh = distributed.init("cpu").mesh["dp_shard"]
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for name, parameter in model[1].named_parameters():
        parameter.requires_grad_(name in trained)
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    if trained:
        with WholeHead(model, 2), pytest.raises(TuneError, match=r"Linear \(1\)"):
            model[1](torch.zeros(1, 4))
    else:
        with WholeHead(model, 2):
            model[1](torch.zeros(1, 4))
