"""Memory and speed that are planned, against torch's own accounts of real steps and closed formulas."""

import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from helpers import save_checkpoint
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from tune import config, distributed, peft
from tune.collators import Batch
from tune.devices import DEVICES
from tune.models import build
from tune.plan.memory import Layout, PlannedStage, _moments
from tune.plan.planning import Job
from tune.plan.trace import Recorder

ROWS, LENGTH = 2, 128


def job(
    path, lora=False, nf4=False, dtype="fp32", master="fp32", rows=ROWS, length=LENGTH, device="cpu", more=(),
    processes=1,
) -> Job:  # fmt: skip
    recipe, given = ("lora_finetune", ["adapter.rank=4"]) if lora else ("full_finetune", [])
    recipe = "pipeline_finetune" if any("parallel.pp" in each for each in more) else recipe
    given += ["model.quantization=nf4"] if nf4 else []
    sizes = [
        f"max_seq_len={length}",
        f"global_batch_size={rows}",
        f"compute.dtype={dtype}",
        f"compute.master_dtype={master}",
    ]
    cfg = config.load(recipe, [f"model.path={path}", "dataset.path=none", *sizes, *given, *more])
    return Job(cfg, DEVICES[device], processes, config.find_recipe(recipe))


def again(planned: Job, device, processes: int) -> Job:
    return Job(planned.cfg, device, processes, planned.recipe)


def saved_by_torch(path, lora: bool) -> int:
    """Bytes of the different storages that a real forward and loss keep for backward, without the parameters."""
    model = build(str(path))
    if lora:
        peft.add_adapters(model, peft.LoRA(rank=4))
    model.train()
    weights = {each.untyped_storage().data_ptr() for each in model.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    tokens = torch.ones(ROWS, LENGTH, dtype=torch.int64)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(Batch.of(tokens, labels=tokens), lambda hidden, weight, batch: hidden.sum())
    return sum(each.untyped_storage().nbytes() for place, each in kept.items() if place not in weights)


@pytest.mark.slow
def test_what_is_kept_for_backward(checkpoint, tied_checkpoint):
    for path in (checkpoint, tied_checkpoint):
        for lora in (False, True):
            found = job(path, lora).trace(ROWS, (1, 1, 1), "none", True, False).trained
            ours = found.embed.live + found.saved
            assert abs(ours / saved_by_torch(path, lora) - 1) < 0.05, (path, lora)


@pytest.mark.slow
def test_checkpointing_keeps_less_and_computes_more(checkpoint):
    planned = job(checkpoint)
    kinds = ("none", "selective", "full")
    traces = {kind: planned.trace(ROWS, (1, 1, 1), kind, True, False).trained for kind in kinds}
    kept = [each.blocks[0].forward.live for each in traces.values()]
    work = [each.blocks[0].backward.products for each in traces.values()]
    assert kept == sorted(kept, reverse=True) and work == sorted(work)
    assert kept[-1] == ROWS * LENGTH * 64 * 4  # of a block only its result: hidden_size 64 in fp32


@pytest.mark.slow
def test_blocks_with_adapters_are_not_taken_for_the_first_one(checkpoint):
    """Which computes no gradients of its input: a product less for each frozen weight."""
    (blocks,) = job(checkpoint, lora=True).trace(ROWS, (1, 1, 1), "none", True, False).trained.blocks
    assert blocks.number == 3 and blocks.backward.products > blocks.forward.products


@pytest.mark.slow
def test_weights_gradients_and_states_of_a_process(checkpoint):
    numbers = sum(each.numel() for each in build(str(checkpoint)).parameters())
    whole = job(checkpoint, dtype="bf16", rows=8).plan(Layout(1, 4, 1, 1))
    assert whole.memory["weights"] == numbers * 4 / 4  # in fp32 over four processes
    assert whole.memory["optimizer"] == pytest.approx(numbers * 8 / 4, rel=1e-3)  # and the number of the step
    assert whole.memory["gradients"] == numbers * 4 / 4  # of two micro-batches: all, at any time
    halved = job(checkpoint, dtype="bf16", master="bf16").plan(Layout(micro_batch_size=ROWS))
    assert halved.memory["optimizer"] == pytest.approx(numbers * 4, rel=1e-3)  # states have the type of the weights
    adapted = job(checkpoint, lora=True, dtype="bf16", rows=8)
    assert adapted.plan(Layout()).memory["weights"] < numbers * 2.5


@pytest.mark.slow
def test_gradients_are_there_before_a_backward_from_the_second_micro_batch_on(checkpoint):
    numbers = sum(each.numel() for each in build(str(checkpoint)).parameters())
    for rows, gradients in ((ROWS, 0), (2 * ROWS, numbers * 4)):
        planned = job(checkpoint, rows=rows, more=["checkpointer.async=false"]).plan(Layout(micro_batch_size=ROWS))
        assert (planned.moment, planned.memory["gradients"]) == ("head and loss", gradients)


@pytest.mark.slow
def test_four_bits(checkpoint):
    linears = [m for name, m in build(str(checkpoint)).named_modules() if isinstance(m, nn.Linear) and name != "head"]
    weights = sum(each.weight.numel() for each in linears)
    whole, quantized = (
        job(checkpoint, lora=True, nf4=nf4).trace(1, (1, 1, 1), "none", True, False).trained.whole.stored
        for nf4 in (False, True)
    )
    assert 4 - (whole - quantized) / weights < 0.7  # half a byte, and the scales


@pytest.mark.slow
def test_states_of_optimizers(checkpoint):
    """Bytes for a trained parameter, from the recipe's own step."""

    def states(component: str, *more: str) -> float:
        return job(checkpoint, more=[f"optimizer={{_component_: {component}, lr: 1e-3}}", *more]).states

    assert 8 <= states("torch.optim.AdamW") < 8.1
    assert states("torch.optim.SGD") == 0
    assert states("torch.optim.SGD", "optimizer.momentum=0.9") == 4
    assert states("tune.optimizers.Adafactor") < 0.2


@pytest.mark.slow
def test_a_checkpoint_is_written_of_a_copy_in_host_memory(checkpoint):
    """The peak of a run on a CPU with few activations: the weights and states twice."""
    numbers = sum(each.numel() for each in build(str(checkpoint)).parameters())
    sizes = {}
    for settings in ("every=null",), ("every=500",), ("every=null", "async=false"):
        given = [f"checkpointer.{each}" for each in settings]
        found = job(checkpoint, length=1, more=[*given, "max_steps=1000"]).plan(Layout(micro_batch_size=ROWS))
        sizes[settings] = found.memory["checkpoint"], found.moment
    assert sizes["every=null",] == (pytest.approx(numbers * 12, rel=1e-3), "checkpoint")
    copy, moment = sizes["every=500",]
    assert copy == pytest.approx(numbers * 12, rel=1e-3) and moment != "checkpoint"  # it is written beside steps
    assert sizes["every=null", "async=false"][0] == 0
    elsewhere = job(checkpoint, device="h100").plan(Layout(micro_batch_size=ROWS))
    assert elsewhere.memory["checkpoint"] == 0 and elsewhere.host == pytest.approx(numbers * 12, rel=1e-3)


@pytest.mark.slow
def test_offload(checkpoint):
    one, offloaded = (
        job(checkpoint, dtype="bf16", rows=4).plan(Layout(1, 1, 1, 1, cpu_offload=offload)) for offload in (False, True)
    )
    assert offloaded.host >= one.memory["weights"] + one.memory["optimizer"]
    assert offloaded.memory["optimizer"] == 0


@pytest.mark.slow
def test_offloaded_activations_of_two_blocks_are_on_the_device(checkpoint):
    trace = job(checkpoint).trace(ROWS, (1, 1, 1), "none", True, False).trained
    (blocks,) = trace.blocks
    stayed, offloaded = (
        {name: alive for name, alive, *_ in _moments(PlannedStage(trace), Layout(activation_offload=offload), False)}
        for offload in (False, True)
    )
    of_others = (blocks.number - 2) * blocks.forward.live
    for moment in ("forward of the last block", "backward of the last block"):
        assert stayed[moment] - offloaded[moment] == pytest.approx(of_others, rel=1e-9) and of_others > 0
    of_others += blocks.forward.live  # what the last block saves stays until its backward
    assert stayed["head and loss"] - offloaded["head and loss"] == pytest.approx(of_others, rel=1e-9)


@pytest.mark.slow
def test_a_line_through_one_and_two_rows_gives_four(checkpoint):
    layout = Layout(micro_batch_size=4)
    exact, line = (job(checkpoint, rows=4).plan(layout, line) for line in (False, True))
    assert abs(line.peak / exact.peak - 1) < 0.01
    assert abs(line.step_seconds / exact.step_seconds - 1) < 0.1


@pytest.mark.slow
@pytest.mark.parametrize(("device", "share"), [("cpu", 2), ("h100", 1)])
def test_processes_share_a_cpu(device, share, checkpoint):
    known = replace(DEVICES[device], launch=0.0)
    one, two = (again(job(checkpoint, rows=ROWS * each), known, each) for each in (1, 2))
    alone, half = one.plan(one.layout()), two.plan(two.layout())
    assert half.seconds["products"] == pytest.approx(share * alone.seconds["products"], rel=0.02)
    assert half.device.memory == alone.device.memory  # of each process


@pytest.mark.slow
def test_the_search_is_the_best_of_all(checkpoint):
    planned = job(checkpoint, rows=6, dtype="bf16", processes=3)
    found = planned.search()
    fitting = [each.step_seconds for each in found if each.fits]
    assert fitting == sorted(fitting) and len(fitting) > 10
    assert {each.layout.size for each in found} == {3}
    assert found == planned.search()


@pytest.mark.slow
def test_a_search_tries_stages_where_the_recipe_has_them(checkpoint):
    alone = replace(DEVICES["h100"], per_node=1)  # without tp
    for more, stages in (([], {1}), (["parallel.pp_schedule=1f1b"], {1, 2})):
        planned = again(job(checkpoint, rows=4, dtype="bf16", more=more), alone, 2)
        assert {each.layout.pp for each in planned.search()} == stages
        assert ("parallel.pp" in planned.chosen) == (stages != {1})


@pytest.mark.slow
def test_what_a_search_puts_first_is_not_on_a_line(checkpoint):
    """Its memory and time are those of `tune plan` with its overrides."""
    planned = job(checkpoint, rows=32, dtype="bf16", device="h100")
    first = planned.search()[0]
    assert first.layout.micro_batch_size > 2 and first == planned.plan(first.layout)


def test_time_is_that_of_operations_which_run(monkeypatch):
    """Autograd also asks each tensor for its device: that reads nothing and launches nothing."""
    monkeypatch.setattr("torch.distributed.get_process_group_ranks", lambda group: [*range(8)])
    device, bytes_of = replace(DEVICES["h100"], launch=0.0), 64 * 64 * 4
    group = distributed.init("cpu").mesh.get_group("tp").group_name
    recorder = Recorder(device, "fp32", fused=False)
    with FakeTensorMode(), recorder:
        matrix = torch.empty(64, 64, requires_grad=True)
        (matrix * 2).sum().backward()
        computed = recorder.compute
        torch.ops._c10d_functional.all_reduce(matrix.detach(), "sum", group)
        of_hidden_states = recorder.exchange
        torch.distributed.all_reduce(matrix.detach(), group=torch.distributed.new_group(backend="fake"))
        of_losses = recorder.exchange - of_hidden_states  # another operation, c10d.allreduce_
    moved = 2 * bytes_of + (bytes_of + 4) + 2 * 4 + 2 * bytes_of  # product, sum, its gradient of one, and the product's
    assert computed == pytest.approx(moved / (device.bandwidth * 1e9 * device.bandwidth_share))
    ring = 2 * bytes_of * 7 / 8  # each process sends a share of an all-reduce so often
    for seconds in (of_hidden_states, of_losses):
        assert seconds == pytest.approx(ring / (device.link * 1e9 * device.link_share) + 2e-5)


def test_time_of_a_cpu():
    """Its cores launch, compute and exchange one after the other; what a stage waits for, others compute."""
    cpu = replace(DEVICES["cpu"], cores=2, tflops_fp32=0.1, bandwidth=20, cache=1, launch=10, latency=1000, link=1)
    shares = {name: 1.0 for name in ("product_share", "bandwidth_share", "link_share")}
    two, four = (replace(cpu, **shares).shared_by(processes) for processes in (2, 4))
    assert (two.crowd, four.crowd) == (1, 2) and two.tflops_fp32 == 0.05
    assert two.seconds(5e9, 0, "fp32") == pytest.approx(0.1 + 1e-5)
    assert two.seconds(0, 1e7, "fp32") == pytest.approx(1e-3 + 1e-5)
    assert two.seconds(0, 1e6, "fp32") == pytest.approx(0.4e-4 + 1e-5)  # from its cache
    assert two.transfer(1e6, 2) == pytest.approx(0.5e-3 + 1e-3) and four.transfer(1e6, 2) == pytest.approx(3e-3)


@pytest.mark.slow
def test_stages_that_wait_leave_their_core_to_others(checkpoint):
    """Of two stages with four micro-batches one waits for a fifth of the step, if nobody takes its core."""
    alone, crowded = (
        again(each, replace(DEVICES["cpu"], cores=cores), 2)
        for cores in (2, 1)
        for each in [job(checkpoint, rows=4, more=["parallel.pp=2"], processes=2)]
    )
    waited, left = (each.plan(each.layout()).seconds for each in (alone, crowded))
    sent = left["pipeline"] / 2  # two on one core exchange as much more slowly
    assert sent > 0
    assert waited["pipeline"] - sent == pytest.approx(0.25 * (waited["products"] + waited["memory"]), rel=1e-6)


@pytest.mark.slow
def test_products_in_eight_bits_take_half_the_time(checkpoint):
    """Three of each linear layer of the blocks. A compiler casts in one pass, after one that finds the scales."""
    gpu = replace(DEVICES["h100"], launch=0.0, tflops=1.0, float8=2.0, product_share=1.0)
    model = build(str(checkpoint))
    numbers = sum(each.weight.numel() for each in model.blocks.modules() if isinstance(each, nn.Linear))
    casts = {}
    for compiled in (False, True):
        slow, fast = (
            planned.plan(planned.layout()).seconds
            for kind in ("null", "rowwise")
            for more in [[f"compute.compile={compiled}", f"model.float8={kind}"]]
            for planned in [again(job(checkpoint, dtype="bf16", more=more), gpu, 1)]
        )
        saved = slow["products"] - fast["products"]
        assert saved == pytest.approx(3 * 2 * numbers * ROWS * LENGTH / 2 / 1e12, rel=1e-6)
        casts[compiled] = fast["memory"] - slow["memory"]
    assert 0 < casts[True] < casts[False] / 2


def test_time_is_that_of_elements_which_are_touched():
    """Of a table or a cache those rows that are indexed; `out=` is not read; a view is free."""
    device = replace(DEVICES["h100"], launch=0.0)
    with FakeTensorMode():
        table, rows, ids = torch.empty(1000, 8), torch.empty(4, 8), torch.zeros(4, dtype=torch.int64)
        ids_size, rows_size, table_size = 4 * 8, 4 * 8 * 4, 1000 * 8 * 4
        for run, moved in {
            lambda: nn.functional.embedding(ids, table): 2 * (ids_size + rows_size),
            lambda: table[ids]: 2 * (ids_size + rows_size),
            lambda: table.index_put_((ids,), rows): 2 * (ids_size + rows_size),
            lambda: torch.exp(table, out=table): 2 * table_size,
            lambda: torch.ops.aten._unsafe_view(table, [8, 1000]): 0,
            lambda: table.add_(1): 2 * table_size,
        }.items():
            with Recorder(device, "fp32", fused=False) as recorder:
                run()
            assert recorder.compute == pytest.approx(moved / (device.bandwidth * 1e9 * device.bandwidth_share))


@pytest.mark.slow
def test_weights_in_four_bits_take_time_to_read(checkpoint):
    """Each time those of the block become whole ones: read as bytes, written in the type of the computation."""
    at_once = replace(DEVICES["h100"], launch=0.0, product_share=1e9, attention_share=1e9)
    linears = [m for name, m in build(str(checkpoint)).named_modules() if isinstance(m, nn.Linear) and name != "head"]
    written = 2 * sum(each.weight.numel() for each in linears) / (at_once.bandwidth * 1e9 * at_once.bandwidth_share)
    times = []
    for nf4 in (False, True):
        planned = job(checkpoint, lora=True, nf4=nf4, dtype="bf16")
        found = again(planned, at_once, 1).trace(1, (1, 1, 1), "none", True, False).trained
        times.append(sum(kind.number * kind.forward.compute for kind in found.blocks))
    assert 1.2 * written < times[1] - times[0] < 1.3 * written  # a quarter of it is read


TRACKED = """
import sys
sys.path.insert(0, "benchmarks")
from planned_memory import compare
for *case, most in eval(sys.argv[2]):
    found, planned, moment = compare(sys.argv[1], *case)
    assert abs(planned / found - 1) < most, (case, moment, planned / found)
"""
DENSE = [
    (4, 1, 512, "none", 0.01), (8, 4, 128, "full", 0.01), (4, 1, 512, "none", {"tp": 2}, 0.01),
    (4, 1, 512, "none", {"tp": 2, "loss_parallel": False}, 0.01),
    (4, 1, 512, "none", {"cp": 2}, 0.01), (4, 1, 512, "none", {"pp": 2}, 0.05),
    (8, 1, 512, "full", {"pp": 2, "cp": 2, "tp": 2}, 0.05), (4, 1, 64, "full", {"zero_stage": 0}, 0.05),
    (4, 1, 512, "none", {"zero_stage": 1}, 0.02), (4, 1, 512, "none", {"zero_stage": 2}, 0.01),
    (4, 1, 512, "none", {"model.float8": "rowwise"}, 0.01),
    (4, 1, 512, "none", {"rounded": "int4"}, 0.01),
]  # fmt: skip
EXPERTS = [(4, 1, 512, "none", {"ep": 2}, 0.05), (4, 1, 512, "full", {"ep": 4}, 0.05)]


def tracked(path, cases) -> None:
    """In a process of its own: it is the first of several that are not there."""
    subprocess.run([sys.executable, "-c", TRACKED, str(path), repr(cases)], check=True)


@pytest.mark.weekly
def test_moments_of_layouts_against_the_tracker_of_torch(checkpoint, tied_checkpoint):
    tracked(checkpoint, DENSE)
    tracked(tied_checkpoint, [(4, 1, 512, "none", {"pp": 2}, 0.05)])


@pytest.mark.slow
def test_moments_of_experts_against_the_tracker_of_torch(tmp_path):
    sizes = {"num_local_experts": 8, "hidden_size": 256, "intermediate_size": 256}
    tracked(save_checkpoint(tmp_path, "MixtralConfig", **sizes), EXPERTS)
