"""The best checkpoint, early stopping, and answers to fixed prompts during training."""

import importlib
import json
import re
import shutil
from pathlib import Path

import distill
import full_finetune
import grpo
import lora_finetune
import ppo_finetune
import preference_finetune
import pytest
import reward_finetune
import torch
from helpers import REFUSED_BY, run_processes
from recipes.test_grpo import requests  # noqa: F401
from safetensors.torch import load_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from tune import records
from tune.checkpointers import load_model
from tune.checkpointers.best import HIGHER, LOWER, Best, more_is_better
from tune.errors import TuneError
from tune.generation import Sampler
from tune.peft import open_model
from tune.tokenizers import Tokenizer

RECIPES = {"full": full_finetune, "lora": lora_finetune}


@pytest.fixture(params=RECIPES)
def recipe(request):
    return RECIPES[request.param]


@pytest.fixture
def run(checkpoint, chats, tmp_path, run_recipe, recipe):
    def run(*settings: str, folder: str = "run") -> Path:
        common = [
            f"model.path={checkpoint}", f"dataset.path={chats}", f"dataset.validation={chats}", "device=cpu",
            "compute.dtype=fp32", "max_seq_len=128", "global_batch_size=8", "micro_batch_size=4", "evaluate.every=1",
            "checkpointer.keep_best=validation_loss", "schedule._component_=tune.optimizers.constant",
            "schedule.warmup=0", f"output_dir={tmp_path / folder}", *settings,
        ]  # fmt: skip
        assert run_recipe(common, recipe) == 0
        return tmp_path / folder

    return run


def logged(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def steps(folder):
    return [int(path.name.removeprefix("step-")) for path in sorted((folder / "checkpoints").iterdir())]


def exported(folder):
    (file,) = [*folder.glob("model/model.safetensors"), *folder.glob("adapter/adapter_model.safetensors")]
    return load_file(file)


# A learning rate at which the validation loss rises, and the step where it does.
WAVES = {"full_finetune": ("optimizer.lr=0.05", 3), "lora_finetune": ("optimizer.lr=0.3", 2)}


@pytest.mark.slow
def test_best_checkpoint_is_kept_and_exported(run, recipe, checkpoint):
    wave, last = WAVES[recipe.__name__]
    folder = run(wave, f"max_steps={last}", "checkpointer.every=1", "checkpointer.keep=1")
    losses = [line["validation_loss"] for line in logged(folder)]
    best = losses.index(min(losses)) + 1
    assert best < last and steps(folder) == [best, last]
    log = (folder / "log.txt").read_text()
    assert f"using the weights with the best validation_loss, {losses[best - 1]:.4g} at step {best}" in log
    kind = "model" if recipe is full_finetune else "adapter"
    message = f"The {kind} is in {folder / kind}, with the weights of step {best}, the best by validation_loss."
    assert message in (folder / "report.html").read_text()

    record = records.read(folder)
    assert record.result("validation_loss") == (best, losses[best - 1]) and record.exported_step == best

    plain = run(wave, f"max_steps={last}", "checkpointer.keep_best=null", folder="plain")
    assert records.read(plain).result("validation_loss") == (last, losses[-1])
    message = f"The {kind} is in {plain / kind}, with the weights of step {last}, the last one."
    assert message in (plain / "report.html").read_text()
    assert logged(plain)[-1]["validation_loss"] == losses[-1]  # training is unchanged
    dcp_to_torch_save(folder / "checkpoints" / f"step-0000000{best}", folder / "state.pt")
    weights = torch.load(folder / "state.pt", weights_only=True)["model"]
    if recipe is full_finetune:
        tensors = dict(load_model(str(folder / "model")).named_parameters())
    else:
        tensors = {name: tensor for name, tensor in open_model(folder).load().named_parameters() if "lora_" in name}
    assert tensors.keys() == weights.keys()
    assert all(torch.equal(weights[name], tensor) for name, tensor in tensors.items())
    assert any(not torch.equal(tensor, exported(plain)[name]) for name, tensor in exported(folder).items())


SAMPLED = ["dataset.path={requests}", "dataset.validation={requests}", "max_prompt_len=64", "optimizer.lr=3e-2"]
SAMPLED += ["reward=recipes.test_grpo.share_of_a", "sampling.max_new_tokens=6", "prompts_per_step=4", "epochs=2"]
PAIRS = ["dataset.path={pairs}", "dataset.validation={pairs}", "max_seq_len=256", "epochs=3"]
METHODS = {
    preference_finetune: ("validation_loss", [*PAIRS, "optimizer.lr=0.3", "loss._component_=tune.losses.ORPO"]),
    reward_finetune: ("validation_loss", [*PAIRS, "optimizer.lr=0.3"]),
    distill: (
        "validation_loss",
        [
            "dataset.path={chats}",
            "dataset.validation={chats}",
            "max_seq_len=128",
            "teacher.path={tied}",
            "max_steps=2",
        ],
    ),
    grpo: ("validation_reward", [*SAMPLED, "group_size=4"]),
    ppo_finetune: ("validation_reward", [*SAMPLED, "adapter.rank=4", "optimizer.lr=0.1", "max_steps=6"]),
}


@pytest.mark.slow
@pytest.mark.parametrize("recipe", METHODS, ids=lambda recipe: recipe.__name__)
def test_best_of_every_method(recipe, checkpoint, tied_checkpoint, pairs, chats, requests, tmp_path, run_recipe):  # noqa: F811
    metric, settings = METHODS[recipe]
    data = {"pairs": pairs, "chats": chats, "requests": requests, "tied": tied_checkpoint}
    folder = tmp_path / "run"
    common = [
        f"model.path={checkpoint}", "device=cpu", "compute.dtype=fp32", "optimizer.lr=0.03", "schedule.warmup=0",
        "max_steps=4", "evaluate.every=1", f"checkpointer.keep_best={metric}", "checkpointer.every=1",
        "checkpointer.keep=null", *(["global_batch_size=8"] if "reward=" not in str(settings) else []),
        *(setting.format(**data) for setting in settings), f"output_dir={folder}",
    ]  # fmt: skip
    assert run_recipe(common, recipe) == 0
    values = [line[metric] for line in logged(folder)]
    best = values.index((min if "loss" in metric else max)(values)) + 1
    assert best < steps(folder)[-1], values
    message = f"using the weights with the best {metric}, {values[best - 1]:.4g} at step {best}"
    assert message in (folder / "log.txt").read_text()
    dcp_to_torch_save(folder / "checkpoints" / f"step-0000000{best}", folder / "state.pt")
    weights = torch.load(folder / "state.pt", weights_only=True)["model"]
    if recipe is reward_finetune:
        assert torch.equal(weights["head.weight"], exported(folder)["score.weight"])
        return
    weights = {name.removeprefix("policy."): tensor for name, tensor in weights.items()}
    parameters = dict(open_model(folder).load().named_parameters())
    trained = weights.keys() & parameters.keys()
    assert trained and all(torch.equal(weights[name], parameters[name]) for name in trained)


@pytest.mark.slow
def test_stopped_run_stays_stopped_and_resumes_its_patience(run):
    settings = ["optimizer.lr=0", "max_steps=8", "checkpointer.patience=3", "checkpointer.every=1"]  # learns nothing
    folder = run(*settings, "checkpointer.keep=null")
    first = exported(folder)
    assert [line["step"] for line in logged(folder)] == [1, 2, 3, 4] == steps(folder)
    log = (folder / "log.txt").read_text()
    assert "stopped: the best is validation_loss, " in log and "at step 1; the last 3 values were no better" in log
    run(*settings, "checkpointer.keep=null")
    assert [line["step"] for line in logged(folder)] == [1, 2, 3, 4]
    assert all(torch.equal(first[name], tensor) for name, tensor in exported(folder).items())
    resumed = run(*settings, f"resume={folder}/checkpoints/step-00000002", folder="resumed")
    assert [line["step"] for line in logged(resumed)][-1] == 4  # patience is resumed too


@pytest.mark.slow
def test_best_is_resumed_bitwise(run, recipe):
    wave, last = WAVES[recipe.__name__]
    settings = [wave, "max_steps=8", "checkpointer.patience=1", "checkpointer.every=1"]
    whole = run(*settings, "checkpointer.keep=null")
    assert logged(whole)[-1]["step"] == last
    resumed = run(*settings, f"resume={whole}/checkpoints/step-0000000{last - 1}", folder="resumed")
    assert logged(resumed)[-1]["validation_loss"] == logged(whole)[-1]["validation_loss"]
    assert [line["step"] for line in logged(resumed)] == [last]
    states = [
        json.loads((folder / "checkpoints" / f"step-{last:08d}" / "state.json").read_text())
        for folder in (whole, resumed)
    ]
    assert states[0]["best"] == states[1]["best"]


@pytest.mark.slow
def test_failed_final_validation_loses_no_step(checkpoint, chats, tmp_path, run_recipe, recipe, monkeypatch):
    settings = [
        f"model.path={checkpoint}", f"dataset.path={chats}", f"dataset.validation={chats}", "device=cpu",
        "compute.dtype=fp32", "max_seq_len=128", "global_batch_size=8", "max_steps=2", "checkpointer.every=null",
        "checkpointer.keep_best=validation_loss", f"output_dir={tmp_path / 'run'}",
    ]  # fmt: skip

    def fails(*_):
        raise TuneError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr("tune.evaluation.evaluator.evaluate", fails)
        assert run_recipe(settings, recipe) == 2
        shutil.copytree(tmp_path / "run", tmp_path / "failed")
        assert steps(tmp_path / "failed") == [2]
    assert run_recipe(settings, recipe) == 0  # and exports its result
    assert exported(tmp_path / "run")


@pytest.mark.slow
def test_answers_to_fixed_prompts(run, recipe, checkpoint, tmp_path):
    (tmp_path / "prompts.txt").write_text("the cat\na very big dog and\nit was\n")
    settings = ["optimizer.lr=1e-2", f"evaluate.prompts={tmp_path}/prompts.txt", "evaluate.max_new_tokens=9"]
    settings += ["checkpointer.keep_best=null", "max_steps=5"]
    folder = run(*settings, "evaluate.every=2")
    rows = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    assert [(row["step"], row["index"]) for row in rows] == [(at, index) for at in (0, 2, 4, 5) for index in range(3)]
    assert rows[1]["prompt"] == "a very big dog and"
    assert "step 4, the first of 3 prompts: " in (folder / "log.txt").read_text()
    tokenizer = Tokenizer(str(checkpoint))
    for start, model in ((0, load_model(str(checkpoint))), (9, open_model(folder).load())):
        chats = [[{"role": "user", "content": row["prompt"]}] for row in rows[:3]]
        prompts = [tokenizer.encode(tokenizer.apply_chat_template(chat, add_generation_prompt=True)) for chat in chats]
        expected = Sampler(max_new_tokens=9, temperature=0, stop_ids=tokenizer.stop_ids)(model, prompts)
        assert [row["tokens"] for row in rows[start : start + 3]] == [completion.tokens for (completion,) in expected]
    plain = run("optimizer.lr=1e-2", "checkpointer.keep_best=null", "max_steps=5", folder="plain")
    losses = [[line["loss"] for line in logged(run_folder)] for run_folder in (folder, plain)]
    assert losses[0] == losses[1] and not (plain / "samples.jsonl").exists()


@pytest.mark.slow
def test_two_processes(checkpoint, chats, tmp_path):
    (tmp_path / "prompts.txt").write_text("the cat\na very big dog and\nit was\n")
    common = [
        f"model.path={checkpoint}", f"dataset.path={chats}", f"dataset.validation={chats}", "device=cpu",
        "compute.dtype=fp32", "max_seq_len=128", "global_batch_size=8", "micro_batch_size=2", "max_steps=6",
        "evaluate.every=1", "checkpointer.keep_best=validation_loss", "checkpointer.patience=1", "checkpointer.keep=1",
        "optimizer.lr=0.05", f"evaluate.prompts={tmp_path}/prompts.txt", "evaluate.max_new_tokens=5",
        "schedule.warmup=0", "schedule._component_=tune.optimizers.constant",
    ]  # fmt: skip
    script = Path(full_finetune.__file__)
    for count in (1, 2):
        run_processes(script, count, *common, f"output_dir={tmp_path / str(count)}")
    assert steps(tmp_path / "1") == steps(tmp_path / "2") == [2, 3]
    assert logged(tmp_path / "1")[-1]["step"] == logged(tmp_path / "2")[-1]["step"] == 3
    one, two = ((tmp_path / processes / "samples.jsonl").read_text().splitlines()[:3] for processes in ("1", "2"))
    assert one == two
    for name, tensor in exported(tmp_path / "1").items():  # Adam amplifies the smallest differences
        assert (exported(tmp_path / "2")[name] - tensor).norm() < 1e-3 * tensor.norm()


WRONG = {
    "patience alone": (["checkpointer.patience=2"], "checkpointer.patience: it counts values of a metric"),
    "a metric of a step": (["checkpointer.keep_best=loss"], "checkpointer.keep_best: loss is "),
    "nothing to validate on": (
        ["checkpointer.keep_best=validation_loss"],
        "checkpointer.keep_best: the run has no validation data",
    ),
    "no patience": (["checkpointer.patience=0", "checkpointer.keep_best=a/b"], "checkpointer.patience: 0 is not"),
    "no file": (["evaluate.prompts=none.txt"], "evaluate.prompts: none.txt: there is no such file"),
    "no tokens": (["evaluate.max_new_tokens=0"], "evaluate.max_new_tokens: 0 is not a positive integer"),
}


@pytest.mark.parametrize(*REFUSED_BY)
@pytest.mark.parametrize("name", WRONG)
def test_wrong_settings(name, by, checkpoint, chats, tmp_path, run_recipe, recipe, told, capsys):
    settings, message = WRONG[name]
    common = [f"model.path={checkpoint}", f"dataset.path={chats}", "device=cpu", f"output_dir={tmp_path / 'run'}"]
    if by == "validate":
        assert message in told(recipe.__name__, [*common, *settings])
        return
    assert run_recipe([*common, *settings], recipe) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


TASKS = {"mine/loss_avoided": True, "mine/brier_score": False, "own/": None}


def test_which_metrics_are_better_when_higher():
    more = ["reward", "validation_reward", "reward/avoids_loss", "rewards/margins", "validation_rewards/accuracies",
            "token_accuracy", "validation_token_accuracy", "rewards/chosen", "logps/chosen", "tokens_per_second", "mfu",
            "all_right_groups", "mine/loss_avoided"]  # fmt: skip
    less = ["loss", "validation_loss", "validation_loss/chats", "value_loss", "kl", "validation_kl", "mismatch_kl",
            "rewards/rejected", "validation_logps/rejected", "grad_norm", "dead_groups", "step_seconds", "general_kl",
            "peak_memory_gib", "truncated_share", "mine/brier_score"]  # fmt: skip
    assert {name: more_is_better(name, TASKS) for name in more + less} == dict.fromkeys(more, True) | dict.fromkeys(
        less, False
    )
    assert Best("validation_rewards/margins", None, TASKS).sign == 1  # not a task's metric


# Names that resemble metrics whose direction is known, and metrics without a direction.
UNKNOWN = ["validation_error_rate", "validation_wer", "validation_accuracy", "validation_perplexity", "wer", "own_loss",
           "lossless", "lr", "entropy", "hellaswag/acc", "wiki/word_perplexity", "own/loss"]  # fmt: skip


@pytest.mark.parametrize("metric", UNKNOWN)
def test_direction_of_a_metric_is_stated_and_never_guessed(metric):
    assert more_is_better(metric, {"own/": None}) is None
    assert more_is_better("reward/mine", {"reward/": None}) is None  # a task with the name of a metric
    with pytest.raises(TuneError, match=rf"keep_best: .*{metric}.*checkpointer\.higher_is_better"):
        Best(metric, None, {})
    for stated in (True, False):
        best = Best(metric, None, {}, stated)
        assert [best.take(step, value) for step, value in enumerate([0.5, 0.4, 0.6], 1)] == [True, not stated, stated]


def test_table_of_directions_has_the_names_of_the_docs():
    page = (Path(__file__).parents[2] / "docs" / "runs.md").read_text()
    documented = {name for row in re.findall(r"(?m)^\| (`.+?) \|", page) for name in re.findall("`([^`]+)`", row)}
    assert documented >= HIGHER | LOWER and not HIGHER & LOWER


def test_state_without_later_fields():
    """Of a checkpoint from before `sign`, `taken` and `values` were stored."""
    best = Best("validation_loss", 3, {})
    best.load_state_dict({"metric": "validation_loss", "value": -2.0, "step": 4, "stale": 1})
    assert (best.step, best.value, best.stale, best.taken, best.values) == (4, -2.0, 1, 0, {4: -2.0})


def test_values_of_the_other_direction_are_not_continued():
    first = Best("validation_wer", 3, {}, True)
    first.take(1, 0.5)
    same, other = Best("validation_wer", 3, {}, True), Best("validation_wer", 3, {}, False)
    for best in (same, other):
        best.load_state_dict(first.state_dict())
    assert (same.step, other.step) == (1, 0)


OWN_METRIC = """
    errors = iter([0.5, 0.2, 0.4, 0.3])
    evaluator.add(lambda: {"validation_wer": next(errors)})
"""


@pytest.mark.weekly
def test_run_keeps_the_lowest_value_of_a_metric_of_its_own(
    checkpoint, chats, tmp_path, monkeypatch, run_recipe, told, capsys
):
    monkeypatch.chdir(tmp_path)
    script = Path(full_finetune.__file__).read_text()
    made = "    evaluator = instantiate(cfg.evaluate, run, model, tokenizer, data, loss_fn)\n"
    assert made in script
    (tmp_path / "mine.py").write_text(script.replace(made, made + OWN_METRIC).replace('("full_finetune"', '("mine"'))
    shutil.copy(Path(full_finetune.__file__).parents[1] / "configs" / "full_finetune.yaml", tmp_path / "mine.yaml")
    settings = [
        f"model.path={checkpoint}", f"dataset.path={chats}", f"dataset.validation={chats}", "device=cpu",
        "compute.dtype=fp32", "max_seq_len=128", "global_batch_size=8", "max_steps=4", "evaluate.every=1",
        "checkpointer.keep_best=validation_wer", f"output_dir={tmp_path / 'run'}",
    ]  # fmt: skip
    assert "checkpointer.higher_is_better" in told("mine.py", settings)
    assert told("mine.py", [*settings, "checkpointer.higher_is_better=false"]) == ""
    monkeypatch.syspath_prepend(tmp_path)
    mine = importlib.import_module("mine")
    assert run_recipe(settings, mine) == 2 and "checkpointer.higher_is_better" in capsys.readouterr().err
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
    assert run_recipe([*settings, "checkpointer.higher_is_better=false"], mine) == 0
    log = (tmp_path / "run" / "log.txt").read_text()
    assert "lowest validation_wer" in log and "0.2 at step 2" in log


def test_best_tracks_the_value_and_patience():
    loss, score = Best("validation_loss", 2, {}), Best("hellaswag/acc", None, {}, True)
    taken = [loss.take(step, value) for step, value in enumerate([2.0, float("nan"), 1.5, 1.5, 1.6], 1)]
    assert taken == [True, False, True, False, False] and loss.is_over and str(loss) == "validation_loss, 1.5 at step 3"
    assert [score.take(step, value) for step, value in enumerate([0.2, 0.1, 0.3], 1)] == [True, False, True]
    custom = Best("mine/loss_avoided", None, TASKS), Best("mine/brier_score", None, TASKS)
    assert [[best.take(step, value) for step, value in enumerate([0.2, 0.3], 1)] for best in custom] == [
        [True, True],
        [True, False],
    ]
    own = Best("own/length", None, TASKS, True)
    assert not score.is_over and not Best(None, None, {}).is_over
    assert own.is_in(["own/length"])  # its code decides what it measures
    with pytest.raises(TuneError, match=r"does not measure own/lenght, only own/length\. Did you mean 'own/length'\?"):
        Best("own/lenght", None, TASKS, True).is_in(["loss", "own/length"])
    other = Best("validation_loss", 2, {})
    other.load_state_dict(score.state_dict())
    assert other.step == 0
    other.load_state_dict(loss.state_dict())
    assert other.is_over and other.state_dict() == loss.state_dict()


@pytest.mark.parametrize("last", [2.5, 1.5, float("nan")])
def test_value_of_a_step_counts_once(last: float) -> None:
    """A run that ends before its next checkpoint measures the same step again when it continues."""
    best, again = Best("validation_loss", 2, {}), Best("validation_loss", 2, {})
    best.take(1, 2.0)
    best.take(2, last)
    again.load_state_dict(best.state_dict())
    again.take(2, last)
    assert again.state_dict() == best.state_dict() and not again.is_over
    assert again.take(3, 1.0) and again.stale == 0


@pytest.mark.parametrize("metric", ["validation_loss", "validation_rewards/margins"])
def test_values_that_are_not_finite_are_never_the_best(metric: str) -> None:
    best, worse = Best(metric, 3, {}), Best(metric, 3, {})
    broken = [float("nan"), float("inf"), -float("inf")]
    assert [best.take(step, value) for step, value in enumerate([2.0, *broken], 1)] == [True, False, False, False]
    assert best.is_over and best.values == {1: 2.0 * best.sign}
    assert [worse.take(step, value) for step, value in enumerate(broken[:2], 1)] == [False, False]
    continued = Best(metric, 3, {})
    continued.load_state_dict(worse.state_dict())
    assert (continued.stale, continued.step, continued.values) == (2, 0, {})  # patience counts them after a resume too
    assert not continued.take(3, float("nan")) and continued.is_over
