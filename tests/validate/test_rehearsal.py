"""`tune validate` runs a recipe or any copy to the end of its first step. It finds errors in the copy's own lines and
leaves no files behind."""

import inspect
import io
import json
import os
import re
import sys
from contextlib import nullcontext, redirect_stdout
from pathlib import Path

import pytest
from helpers import run_verbs, save_checkpoint, weekly_but

from tune import cli, rehearsal
from tune.validate import hooks
from tune.validate.stand_ins import STAND_INS

SETTINGS = [
    "model.path=model", "dataset.path=chats.jsonl", "device=cpu", "compute.dtype=fp32", "max_seq_len=128",
    "global_batch_size=8", "micro_batch_size=2",
]  # fmt: skip
PROMPTS = [
    "model.path=model",
    "dataset.path=prompts.jsonl",
    "reward=rewarding.length",
    "device=cpu",
    "compute.dtype=fp32",
]
PROMPTS += ["prompts_per_step=4"]
PAIRS = [setting.replace("chats", "pairs") for setting in SETTINGS]


@pytest.fixture
def here(checkpoint, chats, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    Path("rewarding.py").write_text("def length(row, completion):\n    return float(len(completion) % 5)\n")
    Path("model").symlink_to(checkpoint)
    Path("chats.jsonl").symlink_to(chats)
    words = ("cat", "dog", "mat", "rug", "the", "sat", "ran", "big")
    pairs = ({"instruction": word, "chosen": f"{word} sat", "rejected": "no"} for word in words)
    Path("pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    Path("prompts.jsonl").write_text("".join(json.dumps({"prompt": word}) + "\n" for word in words))
    return tmp_path


@pytest.fixture
def mine(here):
    """Return a function that copies a recipe to mine.py with replacements."""

    def copy(recipe: str, *changes: tuple[str, str]) -> None:
        cli.main(["cp", recipe, "mine.py"])
        text = Path("mine.py").read_text()
        for old, new in changes:
            assert text.count(old) == 1, old
            text = text.replace(old, new)
        Path("mine.py").write_text(text)

    return copy


def findings_of(*arguments: str) -> list[dict]:
    with redirect_stdout(io.StringIO()) as shown, pytest.raises(SystemExit):
        cli.main(["validate", *arguments, "--json"])
    return json.loads(shown.getvalue())["findings"]


def errors(*arguments: str) -> list[str]:
    return [
        f"{finding['place']}: {finding['message']}"
        for finding in findings_of(*arguments)
        if finding["level"] == "error"
    ]


def line_of(text: str) -> int:
    """Return the number of the line of mine.py that contains the text."""
    (line,) = [number for number, line in enumerate(Path("mine.py").read_text().split("\n"), 1) if text in line]
    return line


def test_custom_class_keeps_its_methods_over_those_of_a_stand_in():
    class Sink:
        def log(self):
            return ["written"]

    class StandIn(Sink):
        def log(self):
            return []

    class Own(Sink):
        def log(self):
            return ["own", *super().log()]

    with rehearsal.start(rehearsal.Rehearsal(print, print, None, nullcontext, print, {Sink: StandIn})):
        assert rehearsal.stand_in(Own)().log() == ["own"]
        assert rehearsal.stand_in(Sink) is StandIn and rehearsal.stand_in(dict) is dict
    assert rehearsal.stand_in(Own) is Own and rehearsal.stand_in(Sink) is Sink


@pytest.mark.weekly
def test_rules_that_are_skipped_since_a_copy_renamed_their_settings_are_counted(mine):
    mine("full_finetune")
    found = findings_of("mine.py", *SETTINGS)
    assert not [finding for finding in found if "rules" in finding["message"]]
    for file in ("mine.py", "mine.yaml"):
        text = Path(file).read_text()
        Path(file).write_text(re.sub(r"\bcfg\.optimizer\b", "cfg.updates", re.sub("(?m)^optimizer:", "updates:", text)))
    found = [finding["message"] for finding in findings_of("mine.py", *SETTINGS) if finding["level"] == "info"]
    (line,) = [message for message in found if "rules" in message]
    assert "`optimizer`" in line and int(re.search(r"(\d+) rules", line)[1]) > 5


@pytest.mark.slow
def test_argument_of_a_component_of_your_own_is_not_judged(mine):
    mine("full_finetune")
    text = Path("mine.py").read_text()
    own = "from tune import evaluation\n\n\nclass Evaluator(evaluation.Evaluator):\n    pass\n\n\n@config.entrypoint"
    Path("mine.py").write_text(text.replace("@config.entrypoint", own, 1))
    warned = [each["place"] for each in findings_of("mine.py", *SETTINGS, "evaluate.every=2")]
    assert warned == ["evaluate.every"]
    assert findings_of("mine.py", *SETTINGS, "evaluate.every=2", "evaluate._component_=mine.Evaluator") == []


# Ten errors in a copy's own lines: the replacement and the expected message.
FAULTS = [
    ("loss.backward()", "loss.backwards()", "backwards"),
    ("schedule.step()", "scheduel.step()", "scheduel"),
    ("optimizer.zero_grad()", "optimizer.zero_grads()", "zero_grads"),
    ("cfg.max_grad_norm", "cfg.max_gradnorm", "max_gradnorm"),
    ("metrics |= evaluator(step)", "metrics |= evaluator()", "step"),
    ("loss_fn = instantiate(cfg.loss)", "loss_fn = instantiate(cfg.los)", "los"),
    ("total_loss += loss.detach()", "total_loss += loss.detach() + torch.ones(2)[5]", "index 5"),
    ("/ batch.num_supervised", "/ batch.supervised", "supervised"),
    ("run.log(step, batch, metrics)", "run.log(step, batch, metrics['learning_rate'])", "learning_rate"),
    ("weights.load(model)", "weights.load(model)[0]", "0"),
]


# The others are found in one pass, below.
@pytest.mark.weekly(but_one=True)
@pytest.mark.parametrize(
    ("right", "wrong", "says"), weekly_but(FAULTS[::6], FAULTS), ids=[wrong for _, wrong, _ in FAULTS]
)
def test_error_in_a_line_of_a_copied_recipe(right, wrong, says, mine):
    mine("full_finetune", (right, wrong))
    (error,) = errors("mine.py", *SETTINGS)
    assert f"mine.py:{line_of(wrong)}" in error and says in error


@pytest.mark.slow
def test_all_independent_errors_are_found_in_one_pass(mine):
    apart = [FAULTS[at] for at in (1, 2, 3, 5, 9)]
    mine("full_finetune", *((right, wrong) for right, wrong, _ in apart))
    (places) = {re.search(r"mine\.py:(\d+)", error)[1] for error in errors("mine.py", *SETTINGS)}
    assert places == {str(line_of(wrong)) for _, wrong, _ in apart}


def test_file_that_is_not_python(mine):
    mine("full_finetune", ("def main(cfg):", "def main(cfg:"))
    (error,) = errors("mine.py", *SETTINGS)
    assert error.startswith("mine.py:") or f"mine.py:{line_of('def main(cfg:')}" in error


@pytest.mark.weekly
def test_undefined_name_in_a_branch_of_later_steps(mine):
    line = "                loss.backward()\n"
    mine("full_finetune", (line, f"{line}            if step > 10**6:\n                averge.update(model)\n"))
    (error,) = errors("mine.py", *SETTINGS)
    assert error.startswith(f"mine.py:{line_of('averge.update')}: ") and "'averge'" in error
    right = Path("mine.py").read_text()
    Path("mine.py").write_text(right.replace("averge.update(model)", "print(cfg.optimizer.lrr)"))
    (error,) = errors("mine.py", *SETTINGS)
    assert error.startswith(f"optimizer.lrr: mine.py:{line_of('cfg.optimizer.lrr')} ") and "'lr'" in error
    Path("mine.py").write_text(right)
    reached = Path("mine.py").read_text().replace("if step > 10**6:", "if step:")
    Path("mine.py").write_text(reached)
    (error,) = errors("mine.py", *SETTINGS)  # once, although the first step comes there
    assert error.startswith(f"mine.py:{line_of('averge.update')}: ")


@pytest.mark.slow
def test_setting_that_no_line_reads(mine):
    mine("full_finetune", ("loss_fn = instantiate(cfg.loss)", "loss_fn, bonus = instantiate(cfg.loss), cfg.bonus"))
    with Path("mine.yaml").open("a") as file:
        file.write("bonus: 1\nbasis: 2\nbonus_unused: ${basis}\n")
    warnings = [found for found in findings_of("mine.py", *SETTINGS) if found["level"] == "warning"]
    assert [found["place"] for found in warnings] == ["bonus_unused"]


@pytest.mark.slow
def test_metrics_that_are_no_numbers_or_are_not_measured(mine, here):
    line = "metrics |= evaluator(step)"
    mine("full_finetune", (line, f"{line}\n            metrics['lengths'] = [1, 2]"))
    (error,) = errors("mine.py", *SETTINGS)
    assert "lengths is a list" in error
    best = ["dataset.validation=prompts.jsonl", "evaluate.every=1", "checkpointer.keep_best=validation_rewrad"]
    (error,) = errors("grpo", *PROMPTS, *best)
    assert error.startswith("checkpointer.keep_best: ") and "'validation_reward'" in error


def test_missing_module(mine):
    mine("full_finetune", ("import torch\n", "import torch\nimport not_there\n"))
    (error,) = errors("mine.py", *SETTINGS)
    assert f"mine.py:{line_of('import not_there')}" in error and "not_there" in error


@pytest.mark.slow
def test_key_with_another_name_in_the_script_than_in_its_yaml(mine):
    mine("full_finetune")
    file = Path("mine.yaml")
    file.write_text(file.read_text().replace("max_grad_norm:", "max_gradnorm:"))
    (error,) = errors("mine.py", *SETTINGS)
    assert error.startswith("max_grad_norm: ") and "mine.py:" in error


@pytest.mark.slow
def test_error_in_a_function_of_a_custom_module(mine):
    Path("own.py").write_text("def loss(hidden, weight, batch, **softcap):\n    return hidden.not_there\n")
    mine("full_finetune", ("loss_fn = instantiate(cfg.loss)", "from own import loss as loss_fn"))
    (error,) = errors("mine.py", *SETTINGS)
    assert error.startswith("own.py:2: ") and "not_there" in error


@pytest.mark.slow
def test_mismatched_shapes(mine):
    mine("full_finetune", ("total_loss += loss.detach()", "total_loss += loss.detach() * torch.ones(3)"))
    (error,) = errors("mine.py", *SETTINGS)
    assert f"mine.py:{line_of('torch.ones(3)')}" in error


@pytest.mark.slow
def test_five_errors_of_different_kinds_in_one_pass(mine):
    """An unknown setting, a rule, the data, a line of the copy, and the layout."""
    mine("full_finetune", ("schedule.step()", "scheduel.step()"))
    Path("bad.jsonl").write_text('{"messages": 1}\n')
    more = ["lrr=1", "compute.activation_offload=true", "dataset.path=bad.jsonl", "parallel.tp=3"]
    run = ["validate", "mine.py", *SETTINGS, *more, "--world-size", "2"]
    (done,) = run_verbs(run)
    places = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("error ")]
    mine_py = f"mine.py:{line_of('scheduel')}:"
    assert done.returncode == 1 and "bad.jsonl:1" in done.stdout
    assert places == ["compute.activation_offload:", "dataset:", "lrr:", mine_py, "parallel:"]


@pytest.mark.weekly
def test_invalid_tasks_and_prompts_are_both_reported(here):
    messages = errors("full_finetune", *SETTINGS, "evaluate.tasks=[chioce]", "evaluate.prompts=none.txt")
    assert len(messages) == 2 and "chioce" in " ".join(messages) and "none.txt" in " ".join(messages)


@pytest.mark.slow
def test_general_data_causes_no_warning(here):
    assert findings_of("full_finetune", *SETTINGS, "evaluate.general=shipped") == []


@pytest.mark.slow
def test_prints_of_a_copied_recipe_stay_out_of_the_report(mine):
    mine("full_finetune", ("schedule.step()", "print('here'); schedule.step()"))
    assert errors("mine.py", *SETTINGS) == []


@pytest.mark.slow
def test_nothing_is_written_and_existing_files_are_kept(mine):
    Path("mine.pt").write_text("precious")
    line = "run.finish()  # last measurements; with keep_best, the best weights; after Ctrl-C the process exits here"
    mine("full_finetune", (line, f"{line}\n        torch.save(model.state_dict(), 'mine.pt')"))
    before = sorted(os.listdir())
    assert errors("mine.py", *SETTINGS, "output_dir=runs/new/one") == []
    assert sorted(os.listdir()) == before and Path("mine.pt").read_text() == "precious"


@pytest.mark.parametrize("kind", STAND_INS, ids=lambda kind: kind.__name__)
def test_stand_ins_have_the_signatures_of_the_originals(kind):
    for name, method in vars(STAND_INS[kind]).items():
        if not name.startswith("_") and hasattr(kind, name):
            assert [*inspect.signature(method).parameters] == [*inspect.signature(getattr(kind, name)).parameters], name


@pytest.mark.slow
def test_run_of_a_custom_class(mine):
    own = "class MyRun(Run):\n    def log(self, step, batch, metrics):\n        super().log(step, batch, metrics)\n\n\n"
    mine("full_finetune", ("@config.entrypoint", f"{own}@config.entrypoint"), ("run = Run(", "run = MyRun("))
    assert errors("mine.py", *SETTINGS, "output_dir=runs/new") == [] and not Path("runs").exists()


@pytest.mark.slow
def test_unavailable_number_is_not_an_error(mine):
    mine("full_finetune", ("total_loss += loss.detach()", "total_loss += loss.detach().numpy().sum()"))
    findings = findings_of("mine.py", *SETTINGS)
    assert not [finding for finding in findings if finding["level"] == "error"]
    (limit,) = [finding for finding in findings if finding["level"] == "info"]
    assert f"{limit['place']}: {limit['message']}".count("mine.py:") == 1


@pytest.mark.slow
def test_reading_numbers_in_the_loop(mine):
    mine("full_finetune", ("total_loss += loss.detach()", "total_loss += float(loss.detach()) + loss.item()"))
    assert errors("mine.py", *SETTINGS) == []


@pytest.mark.slow
def test_only_processor_time_ends_a_loop_and_the_warning_names_its_line(mine, monkeypatch):
    monkeypatch.setattr(hooks, "SECONDS", 1.0)
    waiting = "for _ in map(time.sleep, [0.6] * 3):  # waits, without the processor\n        pass\n    "
    busy = "for _ in iter(lambda: sum(range(1_000_000)), None):  # computes\n        pass\n    "
    mine(
        "full_finetune",
        ("import torch\n", "import time\n\nimport torch\n"),
        ("    with run:", f"    {waiting}{busy}with run:"),
    )
    lines = Path("mine.py").read_text().splitlines()
    waits, computes = (
        next(f"mine.py:{number}" for number, text in enumerate(lines, 1) if text.endswith(comment))
        for comment in ("# waits, without the processor", "# computes")
    )
    found = {finding["place"]: finding["level"] for finding in findings_of("mine.py", *SETTINGS)}
    assert found[computes] == "warning" and waits not in found


@pytest.mark.slow
def test_rules_that_were_not_checked_are_counted_for_copies_alone(mine):
    assert not [finding for finding in findings_of("full_finetune", *SETTINGS) if finding["level"] == "info"]
    mine("full_finetune")
    settings = Path("mine.yaml").read_text()
    Path("mine.yaml").write_text(re.sub(r"(?m)^schedule:\n( .*\n)+", "", settings))
    (info,) = [finding for finding in findings_of("mine.py", *SETTINGS) if finding["level"] == "info"]
    assert "`schedule`" in info["message"]


CASES = [
    ("full_finetune", SETTINGS),
    ("lora_finetune", [*SETTINGS, "compute.dtype=bf16"]),
    ("lora_finetune", [*SETTINGS, "model.float8=rowwise_with_gw_hp"]),
    ("full_finetune", [*SETTINGS, "optimizer._component_=torchao.optim.AdamW8bit"]),
    ("full_finetune", [*SETTINGS, "model._component_=tune.models.hf", "compute.activation_checkpointing=full"]),
    ("pipeline_finetune", SETTINGS),
    ("preference_finetune", PAIRS),
    ("reward_finetune", PAIRS),
    ("distill", [*SETTINGS, "teacher.path=model"]),
    ("distill", [*SETTINGS, "teacher.path=model", "teacher.top_k=4"]),
    ("distill", [*SETTINGS, "teacher.path=model", "on_policy.share=0.5", "on_policy.max_new_tokens=8"]),
    ("grpo", PROMPTS),
    ("ppo_finetune", [*PROMPTS, "value.path=model"]),
    ("evaluate", SETTINGS[:3]),
    ("evaluate", [*SETTINGS[:1], "dataset.path=prompts.jsonl", "score=rewarding.length"]),
]


@pytest.mark.weekly(but_one=True)
@pytest.mark.parametrize(
    ("recipe", "settings"), weekly_but([CASES[0], CASES[11], CASES[13]], CASES),
    ids=lambda value: value if isinstance(value, str) else " ".join(value[2:])[-40:],
)  # fmt: skip
def test_every_recipe(recipe, settings, here):
    assert errors(recipe, *settings) == []


@pytest.mark.weekly(but_one=True)
@pytest.mark.parametrize("part", [slice(1, None, 3), pytest.param(slice(None), marks=pytest.mark.weekly)])
def test_layouts_of_processes_that_do_not_exist(part, here, told_to):
    save_checkpoint(
        here / "experts", "Qwen3MoeConfig", num_experts=4, num_experts_per_tok=2, head_dim=16,
        moe_intermediate_size=32, num_hidden_layers=2,
    )  # fmt: skip
    ways = [
        ["full_finetune", *SETTINGS],
        ["full_finetune", *SETTINGS, "parallel.tp=2"],
        ["full_finetune", *SETTINGS, "parallel.cp=2"],
        ["full_finetune", *SETTINGS, "parallel.dp_replicate=2", "parallel.zero_stage=1"],
        ["full_finetune", *SETTINGS, "compute.cpu_offload=true", "compute.compile=true"],
        ["full_finetune", *SETTINGS, "optimizer._component_=tune.optimizers.Muon"],
        ["full_finetune", *SETTINGS, "model.path=experts", "model.router_loss=0.01", "parallel.ep=2"],
        ["pipeline_finetune", *SETTINGS, "parallel.pp=2"],
        ["pipeline_finetune", *SETTINGS, "parallel.pp=2", "parallel.pp_schedule=zero_bubble", "global_batch_size=32"],
        ["lora_finetune", *SETTINGS, "model.quantization=nf4"],
        ["lora_finetune", *SETTINGS, "adapter.dora=true"],
        ["preference_finetune", *PAIRS, "parallel.tp=2"],
        ["grpo", *PROMPTS],
        ["ppo_finetune", *PROMPTS, "value.path=model"],
    ]  # fmt: skip
    assert told_to(4, *ways[part]) == [""] * len(ways[part])


@pytest.mark.slow
def test_sixty_four_processes(here, told_to):
    settings = [setting for setting in SETTINGS if "batch" not in setting]
    Path("many.jsonl").write_text(Path("chats.jsonl").read_text() * 2)
    sizes = ["dataset.path=many.jsonl", "global_batch_size=64", "micro_batch_size=1"]
    assert told_to(64, ["full_finetune", *settings, *sizes]) == [""]
