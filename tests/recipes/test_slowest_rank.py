"""The rank that computes longest is reported, however the others wait for it."""

import json
from pathlib import Path

import pytest
from helpers import run_processes, save_checkpoint

from tune.distributed.pace import Pace

ONE_SLOW_RANK = Path(__file__).with_name("one_slow_rank.py")
LAYOUTS = {
    2: {"tp": ["parallel.tp=2"]},
    4: {"dp": [], "dp, tp": ["parallel.tp=2"], "cp, pp": ["parallel.cp=2", "parallel.pp=2"], "ep": ["parallel.ep=2"]},
}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True}


def test_slowest_of_several_ranks():
    pace = Pace()
    for seconds, expected in (
        ([], {}),
        ([1.0], {}),
        ([1.0, 1.0, 1.05], {}),
        ([1.0, 2.0, 1.0], {"slowest_rank": 1, "slowest_excess": 1.0}),
        ([0.0, 2.0], {}),
    ):
        pace.add(seconds)
        assert pace.slowest() == pytest.approx(expected)
    assert not pace.slowest()  # it is reported once


@pytest.mark.parametrize("count", LAYOUTS)
@pytest.mark.weekly
def test_one_slow_rank_is_named(count, checkpoint, chats, tmp_path):
    mixture = tmp_path / "mixture"
    if "ep" in LAYOUTS[count]:
        save_checkpoint(mixture, "MixtralConfig", **EXPERTS)
    common = [
        f"dataset.path={chats}", "max_seq_len=64", "packed=true", "global_batch_size=12", "max_steps=4", "epochs=9",
        "device=cpu", "compute.dtype=fp32", "checkpointer.every=null",
    ]  # fmt: skip
    variants = {
        name: [*layout, f"model.path={mixture if name == 'ep' else checkpoint}"]
        for name, layout in LAYOUTS[count].items()
    }
    run_processes(ONE_SLOW_RANK, count, str(tmp_path), json.dumps(common), json.dumps(variants), "1")
    for name in variants:
        steps = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        assert [step.get("slowest_rank") for step in steps[1:]] == [1] * 3, (name, steps)  # from the previous step
        assert min(step["slowest_excess"] for step in steps[1:]) > 0.3, name
        print(name, [round(step["slowest_excess"], 2) for step in steps[1:]])
