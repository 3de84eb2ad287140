"""Pipeline stages: their blocks, when backwards are due, what they send, and unsupported models."""

import itertools
import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from distributed.test_tensor_parallel import Mesh, model_of
from helpers import result_of, run_processes
from torch import nn

import tune
from tune import distributed
from tune.datasets.loader import require_batches
from tune.distributed import pipeline
from tune.distributed.pace import Pace
from tune.distributed.pipeline import stages_of
from tune.errors import TuneError
from tune.models import hf
from tune.quantization import quantize_linears


@pytest.mark.parametrize(
    ("blocks", "head", "sizes"),
    [
        ([1, 1, 1, 1], 0, [2, 2]),
        ([1, 1, 1, 1], 2, [3, 1]),  # the head counts
        ([1, 1, 1, 1], 9, [1, 1, 1, 1]),  # each stage has a block
        ([5, 1, 1, 1, 1, 1], 0, [1, 5]),
        ([3, 3, 1, 1, 1, 1, 1], 0, [1, 1, 2, 3]),
    ],
)
def test_stage_costs_are_balanced_optimally(blocks, head, sizes):
    stages = stages_of(blocks, head, len(sizes))
    assert [block for stage in stages for block in stage] == [*range(len(blocks))]

    def most(starts):
        return max(sum([*blocks, head][start:end]) for start, end in itertools.pairwise([*starts, len(blocks) + 1]))

    ways = itertools.combinations(range(1, len(blocks)), len(sizes) - 1)
    assert most([stage.start for stage in stages]) == min(most([0, *way]) for way in ways)
    assert most([0, *itertools.accumulate(sizes[:-1])]) == most([stage.start for stage in stages])


def test_block_costs(tmp_path):
    """The head counts, and the experts that a token is sent to; 4-bit weights count like frozen ones."""
    model = model_of(tmp_path / "experts", "qwen3_moe")
    attention = 6 * 2 * 4 * model.config.layers[0].attention.head_dim  # a token attends only to itself
    *blocks, head = model.costs()
    mlp = model.blocks[0].mlp
    whole, experts = (
        sum(parameter.numel() for parameter in part.parameters()) for part in (model.blocks[0], mlp.experts)
    )
    router = mlp.router.config
    active = whole - experts * (1 - router.chosen / router.num_experts)
    assert blocks[0] == pytest.approx(6 * active + attention)
    assert head == 6 * 128 * 64
    dense = model_of(tmp_path / "dense", "llama", intermediate_size=128)
    before = dense.requires_grad_(False).costs()
    with torch.device("meta"):
        quantize_linears(dense)
    assert dense.costs() == pytest.approx(before)


@pytest.mark.parametrize("length", [32, 4096])
def test_stages_with_unequal_blocks(length, tmp_path):
    """Gemma 3 has windows in most blocks; DeepSeek-V3 has no experts in the first ones. The test compares costs with a
    formula, and the split with a search over all splits."""
    kinds = ["full_attention"] * 2 + ["sliding_attention"] * 4
    settings = {"num_hidden_layers": 6, "head_dim": 24, "sliding_window": 16, "layer_types": kinds}
    gemma = model_of(tmp_path / "gemma", "gemma3_text", **settings)
    weights = 64 * 24 * (4 + 2 + 2 + 4) + 3 * 64 * 96 + 4 * 64 + 2 * 24
    pairs = [sum(min(at, 16 if "sliding" in kind else at) for at in range(1, length + 1)) / length for kind in kinds]
    of_gemma = [*(6 * (weights + 2 * 4 * 24 * attended) for attended in pairs), 6 * 128 * 64]
    settings = {"num_hidden_layers": 6, "first_k_dense_replace": 2, "intermediate_size": 1024}
    deepseek = model_of(tmp_path / "deepseek", "deepseek_v3", **settings)
    config = json.loads((tmp_path / "deepseek" / "config.json").read_text())
    rank, queries, plain, turned, values = (
        config[name] for name in ("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    )
    latent = 64 * queries + queries + queries * 4 * (plain + turned) + 64 * (rank + turned) + rank
    latent += rank * 4 * (plain + values) + 4 * values * 64 + 2 * 64
    shared, experts = (config[name] for name in ("n_shared_experts", "num_experts_per_tok"))
    sparse = 64 * config["n_routed_experts"] + 3 * 64 * config["moe_intermediate_size"] * (shared + experts)
    mlps = [3 * 64 * 1024] * 2 + [sparse] * 4
    attention = 4 * (plain + turned + values) * (length + 1) / 2
    of_deepseek = [*(6 * (latent + mlp_cost + attention) for mlp_cost in mlps), 6 * 128 * 64]
    for model, costs in ((gemma, of_gemma), (deepseek, of_deepseek)):
        assert model.costs(length) == pytest.approx(costs, rel=1e-3)  # a router's bias

        def most(starts, costs=costs):
            return max(sum(costs[start:end]) for start, end in itertools.pairwise([*starts, len(costs)]))

        best = min(most([0, *way]) for way in itertools.combinations(range(1, 6), 2))
        assert most([stage.start for stage in pipeline.split_blocks(model, 3, length=length)]) == pytest.approx(best)
    # For long documents, the two blocks without a window cost most.
    assert pipeline.split_blocks(gemma, 2, length=length)[1].start == {32: 3, 4096: 1}[length]


class Turns(pipeline.Pipeline):
    """A pipeline whose backwards, also those for weights, record their turn and micro-batch."""

    def _split(self, loss, received):
        weights = pipeline.Work(lambda: [("W", *loss)])
        return pipeline.Work(lambda: self.later.append(weights) or [("B", *loss)])

    def _reduce(self):
        return []


def order_of(schedule, processes, place, count, virtual=1):
    """Return the operations of a process in a step of `count` micro-batches: F, B, or W; its stage; the micro-batch."""
    mesh = SimpleNamespace(size=lambda: processes, get_local_rank=lambda: place, get_group=lambda: None)
    stages = SimpleNamespace(turn=None)
    model = SimpleNamespace(config=SimpleNamespace(tied_head=False), stages=stages)
    world = SimpleNamespace(mesh={"pp": mesh}, num_stages=processes, pp_schedule=schedule, pp_virtual=virtual)
    turns = Turns(model, world)
    done, ends = [], []
    for index in turns.turns(range(count)):
        done.append(("F", stages.turn, index))
        stages.received = place + stages.turn or None
        for due, is_last in turns.due((stages.turn, index)):
            whole = [("B", *due), ("W", *due)][: 1 + turns.splits] if isinstance(due, tuple) else []
            done += whole or due.backward()
            ends.append(is_last)
    assert stages.turn is None and ends[-1] and not any(ends[:-1])
    return done


@pytest.mark.parametrize(
    ("schedule", "place", "order"),
    [
        ("gpipe", 0, "F0 F1 F2 F3 F4 B0 B1 B2 B3 B4"),
        ("1f1b", 0, "F0 F1 F2 B0 F3 B1 F4 B2 B3 B4"),
        ("1f1b", 1, "F0 F1 B0 F2 B1 F3 B2 F4 B3 B4"),
        ("1f1b", 2, "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4"),
    ],
)
def test_schedules_match_published_figures(schedule, place, order):
    """One step of figures 3 and 4 of Narayanan et al., 2021."""
    assert " ".join(f"{kind}{index}" for kind, _, index in order_of(schedule, 3, place, 5)) == order


def waits(schedule, processes, count, virtual=1):
    """Return the share of a step that a process waits. A backward takes as long as two forwards, each half of it as
    long as one, and sending takes no time."""
    lasts = {"F": 1, "B": 1 if schedule == "zero_bubble" else 2, "W": 1}
    orders = [order_of(schedule, processes, place, count, virtual) for place in range(processes)]
    last, clock, done, at = processes * virtual - 1, [0] * processes, {}, [0] * processes
    while any(at[place] < len(orders[place]) for place in range(processes)):
        moved = False
        for place, order in enumerate(orders):
            while at[place] < len(order):
                kind, turn, index = order[at[place]]
                stage = turn * processes + place
                needs = [("F", stage - 1, index)] if kind == "F" and stage else []
                if kind == "B":
                    needs = [("F", stage, index), *([("B", stage + 1, index)] if stage < last else [])]
                if not all(need in done for need in needs):
                    break
                assert kind != "W" or ("B", stage, index) in done
                begin = max([clock[place], *(done[need] for need in needs)])
                clock[place] = done[kind, stage, index] = begin + lasts[kind]
                at[place] += 1
                moved = True
        assert moved, "the processes wait for each other"
    assert len(done) == sum(map(len, orders))
    return 1 - 3 * virtual * count / max(clock)


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, 3, 4, 8])
def test_idle_time_of_schedules(processes):
    """Narayanan et al., 2021, section 2.2: (p - 1) / v of a micro-batch's time. Qi et al., 2023, section 2.3: the
    forward plus the backward for inputs minus the backward for weights, a third of their sum."""
    several = [(schedule, virtual) for schedule in ("interleaved", "zero_bubble") for virtual in (2, 3, 4)]
    for schedule, virtual in (("gpipe", 1), ("1f1b", 1), ("zero_bubble", 1), *several):
        for count in range(processes, 4 * processes + 1):
            share = waits(schedule, processes, count, virtual)
            idle = (processes - 1) / virtual / (3 if schedule == "zero_bubble" else 1)
            assert share == pytest.approx(idle / (count + idle)), (schedule, virtual, count)


@pytest.mark.slow
def test_sent_sizes_match_the_docs(checkpoint):
    """The figures of docs/layouts.md and of its formulas, for the middle stage."""
    sent = result_of(run_processes(Path(__file__).with_name("count_collectives.py"), 1, str(checkpoint), "pp", "3"))
    assert sent["calls"] == {"send.default": 2, "recv_.default": 2}
    assert sent["numbers"] == {"send.default": 2 * 120 * 64, "recv_.default": 2 * 120 * 64}
    text = (Path(tune.__file__).parents[1] / "docs" / "layouts.md").read_text()
    assert len(re.findall(rf"\| T D \| 1 \| {120 * 64:,} \|", text[text.index("## Pipeline") :])) == 2


class Unknown(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(4, 4)])


def test_stages_with_equal_computation_are_not_reported_as_slow(tmp_path, monkeypatch):
    """The last stage has the head instead of blocks: block times do not measure its process."""
    took = {}
    for slow in (None, 1):
        pace, seconds = Pace(), []
        for place in range(2):
            model = model_of(tmp_path, "llama", num_hidden_layers=6, vocab_size=4096)
            mesh = Mesh(2)
            mesh.get_local_rank = lambda place=place: place
            monkeypatch.setattr(pipeline, "PACE", pace)
            world = SimpleNamespace(mesh={"pp": mesh}, num_stages=2, pp_virtual=1, max_seq_len=8, links=[None] * 4)
            pipeline.cut(model, world, torch.float32)
            blocks = len(list(model.blocks.parameters())) / len(list(model.blocks[-1 if place else 0].parameters()))
            took[place] = blocks
            for _ in range(round(blocks)):
                pace.intervals.append((0.0, 1.5 if slow == place else 1.0, pace.scale))
            seconds.append(pace.take())
        pace.add(seconds)
        expected = {} if slow is None else {"slowest_rank": 1, "slowest_excess": pytest.approx(0.5)}
        assert pace.slowest() == expected
    assert took[0] >= 2 * took[1]  # the head costs as much as several blocks


def test_unsupported_models_are_rejected(checkpoint, tmp_path):
    pytest.importorskip("transformers")
    world = SimpleNamespace(mesh={"pp": Mesh(4)}, num_stages=4, pp_virtual=1, max_seq_len=8)
    frozen = model_of(tmp_path, "llama", num_hidden_layers=4)
    frozen.blocks[:2].requires_grad_(False)
    extended = model_of(tmp_path, "llama", num_hidden_layers=4)
    extended.topic_head = torch.nn.Linear(64, 3, device="meta")
    refused = [
        (Unknown(), r"parallel\.pp: .* Unknown .* Set it to 1"),
        (hf(str(checkpoint)), r"parallel\.pp: .* HuggingFaceModel"),
        (model_of(tmp_path, "llama"), r"parallel\.pp: 4 stages cannot share 3 blocks\. Set parallel\.pp to at most 3$"),
        (frozen, r"parallel\.pp: blocks 0 to 0"),
        (extended, r"parallel\.pp: topic_head\.weight .* Set it to 1"),
    ]
    with pytest.raises(TuneError, match=r"4 stages .*parallel\.pp_virtual=2.* at most 1, or lower"):
        pipeline.split_blocks(refused[2][0], 2, 2)
    for model, message in refused:
        names = [name for name, _ in model.named_parameters()]
        with pytest.raises(TuneError, match=message):
            pipeline.cut(model, world, torch.float32)
        assert [name for name, _ in model.named_parameters()] == names


def test_too_few_micro_batches():
    require_batches(16, 2, 2, 4)
    with pytest.raises(
        TuneError, match=r"parallel\.pp: .* 2 micro-batch\(es\) .* 4 .* global_batch_size to 16 or more"
    ):
        require_batches(8, 2, 2, 4)


def test_pipeline_needs_at_least_two_processes():
    with pytest.raises(TuneError, match=r"tp=1 x pp=2 .* 1 processes\. dp_replicate x cp x tp x pp must"):
        distributed.init("cpu", pp=2)
    for schedule, virtual in (("1f1b", 3), ("gpipe", 2), ("interleaved", 1)):
        refused = rf"pp_virtual: {virtual} .* parallel\.pp_schedule={schedule}: .* Set it to null"
        with pytest.raises(TuneError, match=refused):
            distributed.init("cpu", pp_schedule=schedule, pp_virtual=virtual)
