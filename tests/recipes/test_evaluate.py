"""`tune eval`, its recipe, and evaluation during training. Numbers match transformers and lm-evaluation-harness
(tests/evaluation)."""

import json
import math
import random
import re
import shutil
import sys
from pathlib import Path

import distill
import full_finetune
import grpo
import lora_finetune
import numpy as np
import ppo_finetune
import preference_finetune
import pytest
import torch
from evaluation.task_files import write_task, write_tasks
from helpers import run_processes
from recipes.test_grpo import requests  # noqa: F401
from safetensors.torch import load_file, save_file

from tune import distributed
from tune.cli import main
from tune.evaluation import Tasks
from tune.peft import open_model

pytest.importorskip("lm_eval")
transformers = pytest.importorskip("transformers")

RECIPE = Path(full_finetune.__file__).with_name("evaluate.py")
SCORES = """\
def length(row, completion):
    return len(completion)

def fails(row, completion):
    raise ValueError("no such row")

def alone(row):
    return 1
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tasks(tmp_path_factory.mktemp("tasks"))


@pytest.fixture
def prompts(tmp_path, monkeypatch):
    """A file of prompts, next to the user's functions."""
    (tmp_path / "my_scores.py").write_text(SCORES)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    rows = [{"prompt": "the cat" + " sat" * at, "completion": "on the mat"} for at in range(5)]
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def evaluated(out: Path) -> dict:
    return json.loads(out.read_text())["results"]


def metrics_of(results: dict, task: str) -> dict:
    """Return the metrics of a task, without standard errors."""
    values = results[task].items()
    return {name: value for name, value in values if "," in name and "stderr" not in name}


@pytest.mark.slow
def test_tasks(checkpoint, folder, tmp_path, capsys):
    out = tmp_path / "results" / "all.json"
    options = ["--include-path", str(folder), "--limit", "6", "--batch-size", "4", "--num-fewshot", "1"]
    files = ["--out", str(out), "--log-samples", "--device", "cpu"]
    main(["eval", str(checkpoint), "--tasks", "choice,answer", *options, *files])
    opened = open_model(checkpoint)
    model, tokenizer = opened.load(), opened.tokenizer()
    tasks = Tasks(["choice", "answer"], tokenizer, str(folder), limit=6, num_fewshot=1)
    expected = tasks(model, distributed.init("cpu"), log_samples=True)
    results = json.loads(out.read_text())
    assert results["results"] == json.loads(json.dumps(expected["results"]))
    assert results.keys() == expected.keys() - {"samples"}
    assert results["config"]["limit"] == 6 and results["config"]["model_args"] == {"pretrained": str(checkpoint)}
    for name in ("choice", "answer"):
        samples = [json.loads(line) for line in (out.parent / f"all_samples_{name}.jsonl").read_text().splitlines()]
        text = json.dumps(expected["samples"][name], default=str)
        assert samples == json.loads(text, parse_float=lambda number: pytest.approx(float(number), abs=1e-4))
    accuracy = metrics_of(expected["results"], "choice")["acc,none"]
    assert f"choice/acc {accuracy:.4f}" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(("dtype", "within"), [("float32", 1e-5), ("float16", 1e-2)])
def test_loss_matches_transformers(dtype, within, checkpoint, tmp_path):
    texts = ["the cat sat", "a big red dog ran under the mat and then it was slow", "it was"]
    data, out = tmp_path / "texts.jsonl", tmp_path / "out.json"
    data.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    main(["eval", str(checkpoint), "--data", str(data), "--out", str(out), "--dtype", dtype.replace("float", "fp")])
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=dtype).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint)
    total = right = count = 0
    for text in texts:
        ids = torch.tensor([[*tokenizer(text)["input_ids"], tokenizer.eos_token_id]])
        with torch.no_grad():
            logits = model(ids).logits[0, :-1].float()
        total += torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum").item()
        right += int((logits.argmax(-1) == ids[0, 1:]).sum())
        count += ids.shape[1] - 1
    expected = {"loss": total / count, "perplexity": math.exp(total / count), "token_accuracy": right / count}
    metrics = metrics_of(evaluated(out), "texts")
    assert metrics == pytest.approx({f"{name},none": value for name, value in expected.items()}, rel=within)


@pytest.mark.slow
def test_results_as_json(checkpoint, chats, capfd):
    main(["eval", str(checkpoint), "--data", str(chats), "--limit", "4", "--device", "cpu", "--json"])
    (metrics,) = json.loads(capfd.readouterr().out)["results"].values()
    assert metrics["loss,none"] > 0


@pytest.mark.slow
def test_loss_matches_validation_loss(checkpoint, chats, tmp_path, run_recipe):
    """`tune eval` uses the masks and the template of training."""
    out, run = tmp_path / "out.json", tmp_path / "run"
    main(["eval", str(checkpoint), "--data", str(chats), "--out", str(out), "--batch-size", "5"])
    settings = [
        f"model.path={checkpoint}", f"dataset.path={chats}", f"dataset.validation={chats}", "evaluate.first=true",
        f"output_dir={run}", "max_steps=1", "device=cpu", "compute.dtype=fp32", "max_seq_len=512",
    ]  # fmt: skip
    assert run_recipe(settings) == 0
    first = json.loads((run / "metrics.jsonl").read_text().splitlines()[0])
    assert metrics_of(evaluated(out), "chats")["loss,none"] == pytest.approx(first["validation_loss"], rel=1e-5)


@pytest.mark.slow
def test_answers_are_scored(checkpoint, prompts, tmp_path, capsys):
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint)
    tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint)
    rows = [json.loads(line) for line in prompts.read_text().splitlines()]
    answers = []
    for row in rows:
        ids = tokenizer(row["prompt"], return_tensors="pt").input_ids
        new = model.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=0)[0, ids.shape[1] :]
        answers.append(tokenizer.decode(new, skip_special_tokens=True))
    options = ["--data", str(prompts), "--max-new-tokens", "6", "--out", str(tmp_path / "out.json"), "--log-samples"]
    main(["eval", str(checkpoint), *options, "--score", "my_scores:length"])
    metrics = metrics_of(evaluated(tmp_path / "out.json"), "prompts")
    assert metrics["length,none"] == pytest.approx(sum(map(len, answers)) / len(answers))
    samples = [json.loads(line) for line in (tmp_path / "out_samples_prompts.jsonl").read_text().splitlines()]
    assert [sample["text"] for sample in samples] == answers and [sample["row"] for sample in samples] == rows

    for at, (row, answer) in enumerate(zip(rows, answers, strict=True)):
        row["completion"] = f" {answer}\n" if at % 2 else "no"
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    main(["eval", str(checkpoint), *options, "--score", "tune.evaluation.exact_match"])
    assert metrics_of(evaluated(tmp_path / "out.json"), "prompts")["exact_match,none"] == pytest.approx(2 / 5)
    main(["eval", str(checkpoint), *options, "--score", "tune.evaluation.exact_match", "--limit", "2"])
    assert metrics_of(evaluated(tmp_path / "out.json"), "prompts")["exact_match,none"] == pytest.approx(1 / 2)
    main(["eval", str(checkpoint), "--data", str(prompts), "--limit", "2"])
    assert re.search("rows +2\n", capsys.readouterr().out)


def test_data_settings_apply_when_answers_are_scored(checkpoint, prompts, tmp_path):
    prompts.write_text(json.dumps({"question": "the cat", "completion": "sat"}) + "\n")
    options = ["--data", str(prompts), "--max-new-tokens", "2", "--score", "my_scores:length", "--log-samples"]
    main(["eval", str(checkpoint), *options, "dataset.columns={prompt: question}", "--out", str(tmp_path / "out.json")])
    (sample,) = map(json.loads, (tmp_path / "out_samples_prompts.jsonl").read_text().splitlines())
    assert sample["row"]["question"] == "the cat"


@pytest.mark.weekly
def test_adapter_and_run_folder(checkpoint, chats, folder, tmp_path, run_recipe):
    run = tmp_path / "run"
    settings = [
        f"model.path={checkpoint}", f"dataset.path={chats}", f"output_dir={run}", "max_steps=2", "device=cpu",
        "compute.dtype=fp32", "max_seq_len=512", "optimizer.lr=0.1", "evaluate.tasks=[choice,rolling]",
        f"evaluate.include_path={folder}",
    ]  # fmt: skip
    assert run_recipe(settings, recipe=lora_finetune) == 0
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    common = ["--tasks", "rolling", "--include-path", str(folder), "--out", str(tmp_path / "out.json")]
    for model in ([str(run)], [str(checkpoint), "--adapter", str(run / "adapter")]):
        main(["eval", *model, *common])
        bits_per_byte = metrics_of(evaluated(tmp_path / "out.json"), "rolling")["bits_per_byte,none"]
        assert bits_per_byte == pytest.approx(last["rolling/bits_per_byte"], rel=1e-4)
    main(["eval", str(checkpoint), *common])
    assert metrics_of(evaluated(tmp_path / "out.json"), "rolling")["bits_per_byte,none"] != pytest.approx(
        bits_per_byte, rel=1e-3
    )


@pytest.mark.weekly
def test_quantized_base(checkpoint, folder, tmp_path):
    out = tmp_path / "out.json"
    common = ["--tasks", "rolling", "--include-path", str(folder), "--out", str(out)]
    main(["eval", str(checkpoint), *common, "--quantization", "nf4"])
    opened = open_model(checkpoint)
    model, tokenizer = opened.load(quantization="nf4"), opened.tokenizer()
    expected = Tasks(["rolling"], tokenizer, str(folder))(model, distributed.init("cpu"))
    metrics = metrics_of(evaluated(out), "rolling")
    assert metrics == pytest.approx(metrics_of(expected["results"], "rolling"))
    main(["eval", str(checkpoint), *common])
    assert metrics["bits_per_byte,none"] != pytest.approx(
        metrics_of(evaluated(out), "rolling")["bits_per_byte,none"], rel=1e-4
    )


@pytest.mark.weekly
@pytest.mark.parametrize(("count", "tp"), [(2, 1), pytest.param(4, 2, id="two times two")])
def test_several_processes(count, tp, checkpoint, chats, folder, prompts, tmp_path):
    def same(*settings):
        out = tmp_path / "one.json", tmp_path / "several.json"
        for size, file, *more in (1, out[0]), (count, out[1], f"parallel.tp={tp}"):
            more += ["device=cpu", "log_samples=true", f"out={file}", *settings]
            run_processes(RECIPE, size, f"model.path={checkpoint}", *more)
        one, two = map(evaluated, out)
        assert one.keys() == two.keys()
        for alone in tmp_path.glob("one_samples_*.jsonl"):
            together = tmp_path / alone.name.replace("one", "several")
            assert len(alone.read_text().splitlines()) == len(together.read_text().splitlines())
        for task in one:
            assert metrics_of(two, task) == pytest.approx(metrics_of(one, task), rel=1e-6)

    same("tasks=[choice,answer,rolling]", f"include_path={folder}", f"dataset.path={chats}")
    same(f"dataset.path={prompts}", "score=my_scores.length", "generation.max_new_tokens=5")


@pytest.mark.slow
def test_evaluation_during_training(checkpoint, chats, folder, tmp_path, run_recipe, monkeypatch):
    """Evaluation does not change training, and its last numbers match the exported model."""
    common = [
        f"model.path={checkpoint}", f"dataset.path={chats}", "max_steps=3", "device=cpu", "compute.dtype=fp32",
        "max_seq_len=128", "optimizer.lr=1e-2",
    ]  # fmt: skip
    middle = (folder / "letters.yaml").read_text().replace("letters\n", "middle\n")
    (tmp_path / "middle.yaml").write_text(middle.replace("metric: acc", "metric: acc, aggregation: median"))
    shutil.copy(folder / "choice.yaml", tmp_path)
    settings = ["evaluate.tasks=[choice,middle]", f"evaluate.include_path={tmp_path}", "evaluate.every=2"]
    monkeypatch.setattr("lm_eval.api.metrics.bootstrap_stderr", lambda *_, **__: pytest.fail("it draws random numbers"))
    drawn = {}
    for name, more in {"plain": [], "evaluated": settings}.items():
        random.seed(5)
        np.random.seed(5)
        assert run_recipe([*common, f"output_dir={tmp_path / name}", *more]) == 0
        drawn[name] = random.random(), np.random.random()
    assert drawn["plain"] == drawn["evaluated"]
    plain, evaluated_ = (
        [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("plain", "evaluated")
    )
    assert [line["loss"] for line in plain] == [line["loss"] for line in evaluated_]
    assert ["choice/acc" in line for line in evaluated_] == [False, True, True]
    out = tmp_path / "out.json"
    trained = str(tmp_path / "evaluated")
    main(["eval", trained, "--tasks", "choice", "--include-path", str(folder), "--out", str(out)])
    metrics = metrics_of(evaluated(out), "choice")
    assert metrics["acc_norm,none"] == pytest.approx(evaluated_[-1]["choice/acc_norm"])


@pytest.mark.weekly
def test_best_checkpoint_by_a_metric_to_minimize(checkpoint, chats, folder, tmp_path, run_recipe, told, capsys):
    """Use the Brier score, which the task declares as better when lower. It falls, then rises."""
    body = (folder / "choice.yaml").read_text().replace("metric_list: [", "metric_list: [{metric: brier_score}, ")
    (tmp_path / "choice.yaml").write_text(body)
    run = tmp_path / "run"
    settings = [
        f"model.path={checkpoint}", f"dataset.path={chats}", f"output_dir={run}", "device=cpu", "compute.dtype=fp32",
        "max_seq_len=128", "optimizer.lr=0.3", "schedule._component_=tune.optimizers.constant", "schedule.warmup=0",
        "evaluate.tasks=[choice]", f"evaluate.include_path={tmp_path}", "evaluate.every=1", "max_steps=9",
        "global_batch_size=4", "packed=false",
        "checkpointer.patience=1", "checkpointer.keep=1", "checkpointer.every=1",
    ]  # fmt: skip
    assert run_recipe([*settings, "checkpointer.keep_best=choice/brier_score"]) == 0
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    scores = [line["choice/brier_score"] for line in lines]
    best = scores.index(min(scores)) + 1
    assert best == len(scores) - 1 < 8  # the run ends at the first value that is no better
    assert sorted(int(path.name[5:]) for path in (run / "checkpoints").iterdir()) == [best, best + 1]
    main(["checkpoints", str(run)])
    shown = [line.split() for line in capsys.readouterr().out.splitlines()[-3:]]
    assert "choice/brier_score" in shown[0] and [row[2] for row in shown[1:]] == ["best", "complete"]
    for metric, message in {
        "chioce/acc": "no task measures chioce/acc. Did you mean 'choice/acc'? Available: choice/...",
        "choice/brier": "no task measures choice/brier. Did you mean 'choice/brier_score'? Available: choice/acc, ",
        "choice/acc,strict": "no task measures choice/acc,strict. Did you mean 'choice/acc'? Available: choice/acc, ",
    }.items():
        wrong = [*settings, f"checkpointer.keep_best={metric}", f"output_dir={tmp_path / 'wrong'}"]
        assert f"checkpointer.keep_best: {message}" in told("full_finetune", wrong)
        assert run_recipe(wrong) == 2 and message in capsys.readouterr().err
        assert not (tmp_path / "wrong" / "metrics.jsonl").exists()  # before the first step


SAMPLED = [
    "max_prompt_len=64",
    "sampling.max_new_tokens=5",
    "reward=recipes.test_grpo.share_of_a",
    "prompts_per_step=4",
]
METHODS = {
    preference_finetune: ["dataset.path={pairs}", "max_seq_len=128", "global_batch_size=8"],
    distill: ["dataset.path={chats}", "max_seq_len=128", "teacher.path={model}"],
    grpo: ["dataset.path={requests}", *SAMPLED, "group_size=4"],
    ppo_finetune: ["dataset.path={requests}", *SAMPLED],
}


@pytest.mark.weekly
@pytest.mark.parametrize("recipe", METHODS, ids=lambda recipe: recipe.__name__)
def test_evaluation_during_training_of_every_method(
    recipe, checkpoint, chats, pairs, requests, folder, prompts, tmp_path, run_recipe, told  # noqa: F811
):  # fmt: skip
    """As in supervised fine-tuning, the last numbers and answers match the exported model."""
    names = {"model": checkpoint, "chats": chats, "pairs": pairs, "requests": requests}
    settings = [
        f"model.path={checkpoint}", f"output_dir={tmp_path / 'run'}", "max_steps=2", "device=cpu", "compute.dtype=fp32",
        "optimizer.lr=1e-3", "evaluate.tasks=[choice]", f"evaluate.include_path={folder}", "evaluate.every=1",
        f"evaluate.prompts={prompts}", "evaluate.max_new_tokens=6",
        *(setting.format(**names) if "{" in setting else setting for setting in METHODS[recipe]),
    ]  # fmt: skip
    assert run_recipe(settings, recipe) == 0
    steps = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    opened = open_model(tmp_path / "run" / "model")
    model, tokenizer = opened.load(), opened.tokenizer()
    results = Tasks(["choice"], tokenizer, str(folder))(model, distributed.init("cpu"))
    expected = {f"choice/{name[:-5]}": value for name, value in metrics_of(results["results"], "choice").items()}
    assert expected and ["choice/acc" in step for step in steps] == [True, True]
    assert {name: steps[-1][name] for name in expected} == pytest.approx(expected)
    lines = [json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()]
    answered = [sample for sample in lines if sample.get("prompt") == "the cat"]
    assert [sample["step"] for sample in answered] == [0, 1, 2]
    main(["generate", str(tmp_path / "run"), "--prompt", "the cat", "--max-new-tokens", "6", "--out", "out.jsonl"])
    assert json.loads(Path("out.jsonl").read_text())["completion"] == answered[-1]["text"]
    message = told(recipe.__name__, [*settings[:-3], "evaluate.tasks=[chioce]", "evaluate.prompts=none.txt"])
    assert "evaluate.tasks: " in message and "'chioce'" in message and "none.txt: there is no such file" in message


def no_template(tmp_path, checkpoint):
    model = shutil.copytree(checkpoint, tmp_path / "base")
    (model / "chat_template.jinja").unlink()
    return [str(model), "--tasks", "choice", "--apply-chat-template"]


def not_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval.tasks", None)
    return ["--tasks", "choice"]


def file_of(tmp_path, body):
    write_task(tmp_path, "mine", [{"q": "the cat"}], body)
    return ["--include-path", str(tmp_path), "--tasks", "mine"]


GENERATES = 'output_type: generate_until\ndoc_to_text: "{{q}}"\ndoc_to_target: "{{q}}"\ngeneration_kwargs: {%s}\n'
ON_HUB = "task: far\ndataset_path: nobody/nothing\ntest_split: test\noutput_type: multiple_choice\n"
WRONG = {
    "unknown task": (["--tasks", "choise"], "'choise'. Did you mean 'choice'?"),
    "its data are on the hub": ("far", "tasks: far cannot be used", "run it once with network", "include_path"),
    "not installed": (not_installed, "pip install 'tune-recipes[eval]'"),
    "a share of a file": (["--data", "prompts.jsonl", "--limit", "0.5"], "limit: 0.5 is a share"),
    "no rows": (["--tasks", "choice", "--limit", "0"], "limit: 0 is not a positive number"),
    "no examples": (["--tasks", "choice", "--num-fewshot", "-1"], "num_fewshot: -1 is not a non-negative integer"),
    "empty batches": (["--tasks", "choice", "--batch-size", "0"], "batch_size: 0 is not a positive integer"),
    "nothing": ([], "there is nothing to evaluate on", "--data FILE"),
    "nothing to answer": (["--score", "my_scores:length"], "score: "),
    "nowhere to write": (["--tasks", "choice", "--log-samples"], "log_samples", "out=results.json"),
    "no folder of tasks": (["--tasks", "choice", "--include-path", "nowhere"], "include_path: nowhere is not a folder"),
    "misspelled option": (["--task", "choice"], "--task: is not an option. Did you mean '--tasks'?"),
    "no such column": (('output_type: multiple_choice\ndoc_to_text: "{{question}"\n',), "tasks: mine cannot be used: "),
    "beams": ((GENERATES % "num_beams: 4",), "generation_kwargs: num_beams is not supported"),
    "too long an answer": ((GENERATES % "max_gen_toks: 512",), "a task generates 512 tokens, but max_length=512"),
    "no template": (no_template, "has no chat template"),
    "too few examples": (["--tasks", "choice", "--num-fewshot", "13"], "tasks: choice cannot be used"),
    "out is a folder": (["--tasks", "choice", "--out", "."], "out: . cannot be written: it is a folder"),
    "out is in a file": (["--tasks", "choice", "--out", "prompts.jsonl/out"], "out: prompts.jsonl/out cannot be"),
    "no model": (["./nowhere", "--tasks", "choice"], "nowhere"),
    "no data": (["--data", "nowhere.jsonl"], "nowhere.jsonl"),
    "a score that fails": (
        ["--data", "prompts.jsonl", "--score", "my_scores:fails"],
        "score: fails fails on",
        "no such row",
    ),
    "a score of rows": (["--data", "prompts.jsonl", "--score", "my_scores:alone"], "score: invalid arguments for "),
    "no such score": (["--data", "prompts.jsonl", "--score", "my_scores:lenght"], "Did you mean 'length'?"),
    "another type": (["--tasks", "choice", "--dtype", "fp8"], "dtype: 'fp8' is not one of bf16, fp16, fp32"),
}


@pytest.mark.parametrize("name", ["rows.json", "out_samples_choice.jsonl", "list.json"])
def test_results_do_not_replace_other_files(name, checkpoint, folder, tmp_path, capsys):
    file = tmp_path / name
    file.write_text({"rows.json": '{"prompt": "a"}', "list.json": "[1]"}.get(name, '{"prompt": "a"}\n'))
    out = tmp_path / "out.json" if "samples" in name else file
    before = file.read_bytes()
    asked = ["--tasks", "choice", "--include-path", str(folder), "--log-samples", "--out", str(out)]
    with pytest.raises(SystemExit) as end:
        main(["eval", str(checkpoint), *asked])
    assert end.value.code == 2 and str(file) in capsys.readouterr().err and file.read_bytes() == before


@pytest.mark.slow
@pytest.mark.parametrize(
    "more", [["--data", "nowhere.jsonl"], ["--data", "no_prompts.jsonl", "--score", "my_scores:length"], ["--out", "."]]
)
def test_errors_come_before_weights_are_read(more, checkpoint, folder, prompts, tmp_path, monkeypatch):
    (tmp_path / "no_prompts.jsonl").write_text('{"text": "the cat"}\n')
    monkeypatch.setattr("tune.peft.OpenedModel.load", lambda *_, **__: pytest.fail("weights are read"))
    with pytest.raises(SystemExit) as end:
        main(["eval", str(checkpoint), "--tasks", "choice", "--include-path", str(folder), *more])
    assert end.value.code == 2


@pytest.mark.parametrize(
    ("body", "setting", "message"),
    [
        (GENERATES % "repetition_penalty: 1.1", "seed=0", "generation_kwargs: repetition_penalty is not supported"),
        (GENERATES % "max_gen_toks: 512", "seed=0", "a task generates 512 tokens, but max_length=512"),
    ],
)
def test_errors_come_before_training(body, setting, message, checkpoint, chats, tmp_path, run_recipe, capsys):
    write_task(tmp_path, "mine", [{"q": "the cat"}], body)
    settings = [
        f"model.path={checkpoint}", f"dataset.path={chats}", f"output_dir={tmp_path / 'run'}", "max_steps=1",
        "device=cpu", "compute.dtype=fp32", "max_seq_len=128", "evaluate.tasks=[mine]",
        f"evaluate.include_path={tmp_path}",
    ]  # fmt: skip
    assert run_recipe([*settings, "evaluate.include_path=nowhere"]) == 2
    assert "evaluate.include_path: nowhere is not a folder" in capsys.readouterr().err
    assert run_recipe([*settings, setting]) == 2
    assert f"evaluate.tasks: mine cannot be used: {message}" in capsys.readouterr().err
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


@pytest.mark.parametrize(
    "name",
    # An unknown task reads all task files to suggest similar names.
    [pytest.param(name, marks=pytest.mark.slow if name == "unknown task" else ()) for name in WRONG],
)
def test_wrong_inputs(name, checkpoint, folder, prompts, tmp_path, capsys, monkeypatch):
    arguments, *messages = WRONG[name]
    if arguments == "far":
        (tmp_path / "far.yaml").write_text(ON_HUB)
        arguments = ["--include-path", str(tmp_path), "--tasks", "far"]
    elif isinstance(arguments, tuple):
        arguments = file_of(tmp_path, *arguments)
    elif callable(arguments):
        arguments = arguments(monkeypatch) if arguments is not_installed else arguments(tmp_path, checkpoint)
    if not arguments or arguments[0].startswith("--"):
        arguments = [str(checkpoint), *arguments]
    if "--tasks" in arguments and "--include-path" not in arguments:
        arguments += ["--include-path", str(folder)]
    with pytest.raises(SystemExit) as end:
        main(["eval", *arguments, "device=cpu", "generation.max_new_tokens=3"])
    shown = capsys.readouterr().err
    assert end.value.code == 2, shown
    assert "Traceback" not in shown
    for text in messages:
        assert text in shown


@pytest.mark.parametrize(
    ("value", "way", "names"),
    [
        (torch.nan, "loss", ["chats/loss", "chats/perplexity"]),
        (1e4, "loss", ["chats/perplexity"]),  # a loss whose exponential overflows
        (torch.nan, "tasks", ["NaN"]),  # would otherwise count as wrong answers
        (torch.nan, "score", ["NaN"]),
    ],
)
def test_model_with_non_finite_outputs(value, way, names, checkpoint, chats, folder, prompts, tmp_path, capsys):
    model, out = tmp_path / "model", tmp_path / "out.json"
    shutil.copytree(checkpoint, model)
    tensors = load_file(model / "model.safetensors")
    tensors["model.norm.weight"].mul_(value)
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    options = {
        "loss": ["--data", str(chats), "--limit", "2"],
        "tasks": ["--tasks", "choice", "--include-path", str(folder), "--limit", "2"],
        "score": ["--data", str(prompts), "--limit", "2", "--score", "my_scores:length"],
    }[way]
    with pytest.raises(SystemExit) as end:
        main(["eval", str(model), *options, "--out", str(out), "--device", "cpu", "--dtype", "fp32"])
    shown = capsys.readouterr().err
    assert end.value.code == 2 and "Traceback" not in shown
    assert all(name in shown for name in names)
    assert out.exists() == (way == "loss")  # finite results are kept


def test_wrong_limit_during_training(checkpoint, chats, tmp_path, run_recipe, capsys):
    common = [f"model.path={checkpoint}", f"dataset.path={chats}", f"output_dir={tmp_path / 'run'}"]
    assert run_recipe([*common, "evaluate.limit=-2", "evaluate.tasks=choice"]) == 2
    shown = capsys.readouterr().err
    assert "evaluate.limit: -2 is not" in shown and "evaluate.tasks: 'choice' is not a list" in shown
