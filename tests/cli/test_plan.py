"""`tune plan` on its command line."""

import gc
import json
import re
from dataclasses import asdict

import pytest
from copied_recipe import exit_status
from docs_reader import ROOT
from helpers import run_verbs, save_checkpoint

from tune import config
from tune.checkpointers import load_model
from tune.cli import main
from tune.cli.plan import BOUNDS, three_digits
from tune.devices import DEVICES
from tune.generation import Sampler
from tune.plan import planning
from tune.plan.planning import INPUT
from tune.run import flops_per_token

COMPLETIONS = ["reward=cli.test_plan.zero", "sampling.max_rows=1024"]


def zero(row, completion):
    """A reward."""
    return 0.0


def plan(capsys, *arguments: str) -> str:
    main(["plan", *arguments])
    return capsys.readouterr().out


@pytest.mark.slow
def test_what_it_says(tmp_path, checkpoint, capsys):
    (tmp_path / "config.json").write_text((checkpoint / "config.json").read_text())  # no weights, no tokenizer, no data
    run = ["full_finetune", f"model.path={tmp_path}", "max_seq_len=128", "--device", "h100", "--world-size", "8"]
    found = json.loads(plan(capsys, *run, "max_steps=100", "--price", "2", "--json"))
    sizes = found["memory_gib"]
    assert sizes.pop("of") == 80 and abs(sum(sizes.values()) / 2 / sizes["total"] - 1) < 1e-6
    assert found["tokens"] == 100 * 16 * 128 and found["fits"]
    assert found["cost"] == pytest.approx(found["hours"] * 2 * 8)
    assert found["step_seconds"] == pytest.approx(sum(found["seconds"].values()))
    numbers = sum(each.numel() for each in load_model(str(checkpoint)).parameters())
    assert found["checkpoint_gib"] == pytest.approx(3 * 4 * numbers / 2**30, rel=1e-3)  # weights and AdamW's states
    assert found["bottleneck"] == "memory" and "packed=true" in found["change"]  # so small a model waits for launches
    assert " minutes; a checkpoint" in plan(capsys, *run, "max_steps=1")
    text = plan(capsys, *run)
    assert "it fits: 8 x h100" in text and "a billion tokens" in text


@pytest.mark.weekly
def test_a_step_that_takes_less_than_to_put_its_batch_together(checkpoint, capsys):
    run = ["full_finetune", f"model.path={checkpoint}", "max_seq_len=512", "micro_batch_size=256", "--json"]
    found = json.loads(plan(capsys, *run, "global_batch_size=256", "--device", "b200", "--world-size", "1"))
    assert found["step_seconds"] == pytest.approx(256 * 512 * INPUT) and found["seconds"]["input"] > 0
    assert json.loads(plan(capsys, *run, "global_batch_size=256", "--device", "cpu"))["seconds"]["input"] == 0


@pytest.mark.slow
def test_rows_beyond_the_positions_of_the_model_are_told(checkpoint, capsys):
    run = ["full_finetune", f"model.path={checkpoint}", "--device", "h100", "--world-size", "1"]
    short, long = [main(["plan", *run, f"max_seq_len={length}"]) or capsys.readouterr().err for length in (512, 600)]
    assert short == "" and long.startswith("warning: the longest row has 600 tokens, but the model supports")


@pytest.mark.slow
def test_experts_in_any_type(tmp_path, capsys):
    """torch's product of groups takes bf16 alone where tensors are fake."""
    save_checkpoint(tmp_path, "Qwen3MoeConfig", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64)
    run = ["full_finetune", f"model.path={tmp_path}", "max_seq_len=128", "--device", "cpu", "--world-size", "1"]
    assert json.loads(plan(capsys, *run, "compute.dtype=fp32", "--json"))["fits"]


@pytest.mark.slow
def test_utilisation_is_of_the_higher_peak(checkpoint, capsys):
    """A CPU computes in fp32 faster than in bf16: of the peak in bf16 a share would be above 1."""
    run = [
        "full_finetune",
        f"model.path={checkpoint}",
        "max_seq_len=128",
        "--device",
        "cpu",
        "compute.dtype=fp32",
        "--json",
    ]
    found, device = json.loads(plan(capsys, *run)), DEVICES["cpu"]
    flops = flops_per_token(load_model(str(checkpoint)), 128)
    assert device.tflops_fp32 > device.tflops
    assert found["mfu"] == pytest.approx(found["tokens_per_second"] * flops / (device.tflops_fp32 * 1e12))


@pytest.mark.slow
@pytest.mark.slow
def test_more_processes_than_key_heads(checkpoint):
    """Two processes then have the same key head, and torch wraps the exchange of their gradients."""
    run = ["plan", "full_finetune", f"model.path={checkpoint}", "max_seq_len=128", "--device", "h100", "--json"]
    two, four = (run_verbs([*run, "--world-size", str(count), f"parallel.tp={count}"], ["ls"])[0] for count in (2, 4))
    assert (four.returncode, four.stderr) == (0, "")
    two, four = (json.loads(planned.stdout)["seconds"]["tensor"] for planned in (two, four))
    assert 0 < two < four  # more processes exchange as much


@pytest.mark.weekly
def test_search_prints_overrides_that_the_recipe_takes(checkpoint, capsys):
    run = ["lora_finetune", f"model.path={checkpoint}", "max_seq_len=128", "--device", "a100"]
    found = json.loads(plan(capsys, *run, "--search", "--json"))
    again = json.loads(plan(capsys, *run, *found["overrides"], "--json"))
    assert again["step_seconds"] == pytest.approx(found["step_seconds"], rel=0.1)
    assert again["overrides"] == found["overrides"] and len(found["runners_up"]) == 5
    text = plan(capsys, *run, "--search")
    assert "micro_batch_size=" in text and "slower (" in text


@pytest.mark.slow
def test_half_precision_of_a_gpu_without_bf16(checkpoint, capsys):
    """A T4 computes fp16 in its tensor cores and emulates bf16, about which `tune run` warns too."""
    t4 = DEVICES["t4"]
    assert t4.seconds(1e12, 0, "bf16") / t4.seconds(1e12, 0, "fp16") == pytest.approx(65 / 8.1)
    run = ["full_finetune", f"model.path={checkpoint}", "max_seq_len=128", "--device", "t4", "--json"]
    main(["plan", *run])
    warned = capsys.readouterr()
    assert "warning: compute.dtype: bf16 " in warned.err and "compute.dtype=fp16" in warned.err
    main(["plan", *run, "compute.dtype=fp16"])
    half = capsys.readouterr()
    assert half.err == ""
    seconds = [json.loads(shown.out)["step_seconds"] for shown in (warned, half)]
    assert seconds[1] < seconds[0]


@pytest.fixture
def small(tmp_path):
    """The file of a CPU with 0.43 GiB of memory, of which 0.4 are reserved."""
    file = tmp_path / "small.json"
    file.write_text(json.dumps(asdict(DEVICES["cpu"]) | {"memory": 0.43}))
    return str(file)


@pytest.mark.weekly
def test_savings_are_those_of_plans_with_the_changes(checkpoint, small, capsys):
    run = ["full_finetune", f"model.path={checkpoint}", "micro_batch_size=8", "max_seq_len=1024", "--device", small]
    found = json.loads(plan(capsys, *run, "--json"))
    assert not found["fits"]
    savings = found["less_memory_gib"]
    devices = savings.pop("2 devices")
    assert {"micro_batch_size=1", "compute.activation_checkpointing=full", "max_seq_len=512"} <= {*savings}
    assert not any("offload" in change for change in savings)  # a CPU's memory is the host's
    for change in ("compute.activation_checkpointing=full", "max_seq_len=512"):
        size = savings[change]
        other = json.loads(plan(capsys, *run, change, "--json"))
        assert other["memory_gib"]["total"] == pytest.approx(size) and size < found["memory_gib"]["total"]
    other = json.loads(plan(capsys, *run, "--world-size", "2", "--json"))
    assert devices == pytest.approx(other["memory_gib"]["total"])
    run += ["micro_batch_size=1", "compute.activation_checkpointing=full"]
    fits = json.loads(plan(capsys, *run, "--json"))
    assert fits["fits"] and "less_memory_gib" not in fits
    asked = json.loads(plan(capsys, *run, "--less-memory", "--json"))["less_memory_gib"]
    assert "max_seq_len=512" in asked and "micro_batch_size=1" not in asked


@pytest.mark.weekly
def test_the_longest_row_fits_and_a_longer_one_does_not(checkpoint, small, capsys):
    run = ["lora_finetune", f"model.path={checkpoint}", "--device", small, "--json"]
    longest = json.loads(plan(capsys, *run, "--longest-row", "max_seq_len"))["longest"]
    lengths = [row["max_seq_len"] for row in longest]
    assert lengths == sorted(lengths) and len(lengths) >= 2
    row = longest[-1]
    for length, fits in ((row["max_seq_len"], True), (int(1.03 * row["max_seq_len"]) + 128, False)):
        assert json.loads(plan(capsys, *run, *row["overrides"], f"max_seq_len={length}"))["fits"] is fits
    whole = {tuple(row["overrides"]) for row in longest}
    assert any("compute.activation_checkpointing=full" in overrides for overrides in whole)


@pytest.mark.slow
@pytest.mark.parametrize("key", ["max_len", "dataset", "packed"])
def test_the_longest_row_of_what_is_no_number_of_tokens(checkpoint, key, capsys):
    run = ["full_finetune", f"model.path={checkpoint}", "--device", "cpu"]
    assert exit_status("plan", *run, "--longest-row", key) == 2
    assert f"--longest-row {key}: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("value", "shown"), [(0, "0"), (0.0001809, "0.000181"), (0.5, "0.5"), (795.94, "796"), (12345.6, "12,346")]
)
def test_seconds_have_three_digits(value, shown):
    assert three_digits(value) == shown


@pytest.mark.weekly
def test_host_memory_must_suffice(tmp_path, checkpoint, capsys):
    (tmp_path / "small.json").write_text(json.dumps(asdict(DEVICES["h100"]) | {"host_memory": 1e-4}))
    run = ["full_finetune", f"model.path={checkpoint}", "max_seq_len=128", "--device"]
    run += [str(tmp_path / "small.json"), "checkpointer.async=false"]  # else a checkpoint is copied there
    assert "it fits" in plan(capsys, *run)
    assert "it DOES NOT FIT" in plan(capsys, *run, "compute.cpu_offload=true")
    assert "compute.cpu_offload=false" in " ".join(json.loads(plan(capsys, *run, "--search", "--json"))["overrides"])


@pytest.mark.slow
def test_calibration_gives_the_run_that_it_learned_from(tmp_path, checkpoint, capsys):
    settings = [f"model.path={checkpoint}", "max_seq_len=96", "global_batch_size=4", "compute.dtype=fp32", "device=cpu"]
    cfg = config.load("full_finetune", [*settings, "dataset.path=none"])
    config.save(cfg, tmp_path)
    step = {"step_seconds": 3.0, "data_seconds": 0.5, "tokens": 4 * 96, "peak_memory_gib": 1.5}
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(step | {"step": n}) + "\n" for n in range(4)))
    (tmp_path / "run.json").write_text('{"processes": 1, "recipe": "full_finetune"}')
    plan(capsys, "--calibrate", str(tmp_path), "--device", "cpu")
    found = json.loads(plan(capsys, "full_finetune", *settings, "--device", str(tmp_path / "device.json"), "--json"))
    assert found["step_seconds"] == pytest.approx(2.5, rel=1e-3)
    assert found["memory_gib"]["total"] == pytest.approx(1.5, rel=1e-3)


@pytest.mark.slow
def test_calibration_with_steps_that_wait_for_their_input(tmp_path, checkpoint, capsys, monkeypatch):
    """The wait is in data_seconds, and not in what the device computes."""
    monkeypatch.setattr(planning, "INPUT", 1.0)
    settings = [f"model.path={checkpoint}", "max_seq_len=96", "global_batch_size=4", "compute.dtype=fp32", "device=cpu"]
    config.save(config.load("full_finetune", [*settings, "dataset.path=none"]), tmp_path)
    step = {"step_seconds": 400.0, "data_seconds": 384.0, "tokens": 4 * 96, "peak_memory_gib": 1.5}
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(step | {"step": n}) + "\n" for n in range(4)))
    (tmp_path / "run.json").write_text('{"processes": 1, "recipe": "full_finetune"}')
    plan(capsys, "--calibrate", str(tmp_path), "--device", "cpu")
    found = json.loads(plan(capsys, "full_finetune", *settings, "--device", str(tmp_path / "device.json"), "--json"))
    assert found["seconds"]["input"] == pytest.approx(384 - 16, rel=1e-3)


@pytest.mark.slow
def test_axes_that_share_blocks(checkpoint, capsys):
    """In a process that has no group of processes yet, as one that is not there is planned with."""
    of, device = f"model.path={checkpoint}", ["--device", "h100", "--json"]
    runs = {"full": ["full_finetune", of, *device, "max_seq_len=128"], "grpo": ["grpo", of, *device, *COMPLETIONS]}
    tp = ["--world-size", "2", "parallel.tp=2"]
    two, wrong_tp, wrong_ep, sampling = run_verbs(
        ["plan", *runs["full"], *tp],
        ["plan", *runs["full"], "--world-size", "3", "parallel.tp=3", "global_batch_size=3"],
        ["plan", *runs["full"], "--world-size", "2", "parallel.ep=2"],
        ["plan", *runs["grpo"], *tp],  # it shares the vocabulary too
    )
    for shared, name in ((two, "full"), (sampling, "grpo")):
        two, one = json.loads(shared.stdout), json.loads(plan(capsys, *runs[name]))
        assert 0 < two["memory_gib"]["weights"] < 0.6 * one["memory_gib"]["weights"]
        assert two["seconds"]["tensor"] > 0 == one["seconds"]["tensor"]
    assert wrong_tp.returncode == 2 and "does not divide num_heads=4, num_kv_heads=2" in wrong_tp.stderr
    assert "Set it to 1 or 2 or 4" in wrong_tp.stderr
    assert wrong_ep.returncode == 2 and "has no experts" in wrong_ep.stderr


@pytest.mark.slow
def test_what_a_search_chooses_is_rehearsed(checkpoint, tmp_path):
    """In a process that has no group of processes yet."""
    text = config.find_recipe("full_finetune").read_text()
    refuses = '        raise TuneError(f"mine: not on {world.size} processes")\n\n    with torch.device("meta"):\n'
    text = text.replace('    with torch.device("meta"):\n', f"    if world.size > 1:\n{refuses}", 1)
    (tmp_path / "mine.py").write_text(
        text.replace("import torch\n", "import torch\nfrom tune.errors import TuneError\n", 1)
    )
    (tmp_path / "mine.yaml").write_text(config.find_config("full_finetune").read_text())
    run = [
        "plan",
        str(tmp_path / "mine.py"),
        f"model.path={checkpoint}",
        "max_seq_len=64",
        "--device",
        "h100",
        "--search",
    ]
    one, two = run_verbs([*run, "--world-size", "1"], [*run, "--world-size", "2"])
    assert one.returncode == 0 and two.returncode == 2 and "mine: not on 2 processes" in two.stderr


WRONG = {
    "no run": (["--device", "cpu", "--calibrate", "docs"], "docs is not a run folder"),
    "device": (["--device", "h10"], "Did you mean 'h100'?"),
    "file": (["--device", "pyproject.toml"], "--device: pyproject.toml must be"),
    "processes": (["--device", "h100", "--world-size", "3", "parallel.dp_replicate=2"], "--world-size 3"),
    "batch": (["--device", "h100", "--world-size", "3"], "global_batch_size=16 is not a multiple of 3"),
    "batch of a search": (["--device", "h100", "--world-size", "3", "--search"], "Set it to 15 or 18"),
    "a layout beside a search": (
        ["--device", "h100", "--world-size", "3", "--search", "parallel.tp=3", "seed=1"],
        "warning: parallel.tp=3: ",
    ),
    "folder": (["--device", "h100", "model.path=none"], "model.path: none does not exist"),
    "no config": (["--device", "h100", "model.path=tests"], "has no config.json"),
    "experts of axes": (["--device", "h100", "--world-size", "2", "parallel.ep=3"], "parallel.ep: 3 does not divide"),
    "a price below 0": (["--device", "h100", "--price", "-2"], "--price -2: set 0 or more"),
    "key": (["--device", "h100", "model.pat=x"], "model.pat"),
}


WRONG_STAGES = {
    "stages": (["--world-size", "4", "parallel.pp=4"], "4 stages cannot share 3 blocks"),
    "batch of stages": (["--world-size", "2", "parallel.pp=2", "micro_batch_size=16"], "2 pipeline stages"),
    "schedule": (
        ["--world-size", "2", "parallel.pp=2", "parallel.pp_schedule=zero_bubble"],
        "does not support zero_bubble",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", [*WRONG, *WRONG_STAGES])
def test_wrong_inputs(name, checkpoint, capsys):
    recipe, device = ("pipeline_finetune", ["--device", "h100"]) if name in WRONG_STAGES else ("full_finetune", [])
    arguments, message = (WRONG | WRONG_STAGES)[name]
    with pytest.raises(SystemExit) as exit:
        main(["plan", recipe, f"model.path={checkpoint}", *device, *arguments])
    assert exit.value.code == 2 and message in capsys.readouterr().err


@pytest.mark.weekly
def test_completions(checkpoint, capsys):
    """The steps of sampling grow with what is sampled; a process has the cache of its own prompts. The last token of a
    completion is a label alone."""
    common = ["grpo", f"model.path={checkpoint}", "--device", "h100", *COMPLETIONS]

    def planned(*arguments):
        return json.loads(plan(capsys, *arguments, "--json"))

    one, longer = planned(*common), planned(*common, "sampling.max_new_tokens=512")
    assert longer["seconds"]["rollout"] == pytest.approx(2 * one["seconds"]["rollout"], rel=0.1)
    assert one["tokens_per_step"] == 8 * 8 * (1024 + 256 - 1) and one["bottleneck"] == "rollout"
    assert planned(*common, "updates=3")["seconds"]["products"] == 3 * one["seconds"]["products"]
    two = planned(*common, "--world-size", "2", "micro_batch_size=1")
    assert two["memory_gib"]["activations"] < 0.6 * one["memory_gib"]["activations"]
    found = planned(*common, "--search")
    assert found["fits"] and "parallel.pp" not in " ".join(found["overrides"])


@pytest.mark.slow
def test_the_shortest_rows_of_pairs(checkpoint, capsys):
    assert "it fits" in plan(
        capsys, "preference_finetune", f"model.path={checkpoint}", "max_seq_len=1", "--device", "h100"
    )


@pytest.mark.slow
def test_another_engine_is_not_planned(checkpoint, capsys):
    with pytest.raises(SystemExit):
        engine = "sampling._component_=cli.test_plan.Other"
        main(["plan", "grpo", f"model.path={checkpoint}", *COMPLETIONS, engine, "--device", "a100"])
    assert "sampling._component_" in capsys.readouterr().err


class Other(Sampler):
    """An engine of one's own."""

    def complete(self, model, rows):
        super().complete(model, rows)


NOT_PLANNED = {
    "evaluate": ([], "evaluate"),
    "full_finetune": (["model.float8=rowwise"], "a100 does not support float8"),
}


@pytest.mark.parametrize("recipe", NOT_PLANNED)
def test_what_is_not_planned(recipe, checkpoint, capsys):
    settings, message = NOT_PLANNED[recipe]
    with pytest.raises(SystemExit):
        main(["plan", recipe, f"model.path={checkpoint}", *settings, "--device", "a100"])
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_garbage_is_collected_after_a_verb(checkpoint, chats, capsys):
    """A process that runs several verbs would keep the files of all their data open."""
    run = ["full_finetune", f"model.path={checkpoint}", f"dataset.path={chats}", "max_steps=1"]
    assert exit_status("plan", *run, "--device", "cpu") in (0, None)
    assert exit_status("validate", *run, "device=cpu") in (0, None)
    assert gc.get_freeze_count() == 0


def test_advice_is_what_was_measured() -> None:
    """compute.compile=true is not advised as long as the benchmarks are slower with it."""
    measured = re.findall(
        r"`(?:compute\.)?compile=true` † \(without it ([\d,]+) at that time\) \| ([\d,]+) \|",
        (ROOT / "docs" / "benchmarks.md").read_text(),
    )
    rates = [[int(rate.replace(",", "")) for rate in pair] for pair in measured]
    assert len(rates) >= 2
    (slow,) = re.findall(r"\n## Slow\n(.*?)\n## ", (ROOT / "docs" / "troubleshooting.md").read_text(), re.DOTALL)
    advice = [change for _, change in BOUNDS.values()] + slow.splitlines()
    if all(compiled < eager for eager, compiled in rates):
        assert not [line for line in advice if "compile" in line]
