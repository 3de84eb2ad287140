"""run.json and report.html of a run, however it ends."""

import json
import os
import re
from pathlib import Path

import full_finetune
import lora_finetune
import preference_finetune
import pytest
from browser import Browser
from records.test_report import curves, needs_browser, shown  # noqa: F401
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from tune import cli, distributed, records
from tune.cli import watch
from tune.datasets import progress
from tune.files import lock
from tune.loggers import sinks
from tune.run.hardware import size_in_words

DEMO = Path(__file__).parents[2] / ".demo" / "run"


@pytest.mark.slow
def test_continued_run(inputs, run_recipe):
    settings = inputs.settings("schedule._component_=tune.optimizers.constant", "optimizer.lr=1e-3")
    assert run_recipe([*settings, f"output_dir={inputs.folder / 'new'}", "max_steps=1"], lora_finetune) == 0
    assert run_recipe([*settings, f"output_dir={inputs.folder / 'new'}", "max_steps=3"], lora_finetune) == 0
    run = records.read(inputs.folder / "new")
    assert (run.state, run.facts["recipe"], run.facts["steps"]) == ("done", "lora_finetune", 3)
    assert [start["step"] for start in run.facts["starts"]] == [0, 1]
    assert run.facts["command"][-1] == "max_steps=3" and run.facts["processes"] == 1
    page = (inputs.folder / "new" / "report.html").read_text()
    for part in ("optimizer.lr", "0.0002", "0.001", "<mark>"):
        assert part in page, part


@pytest.mark.slow
def test_shown_figures_match_the_run_files(inputs, run_recipe, capsys):
    """Check the console, `tune preview`, `watch` and `runs`, and the report."""
    run = inputs.folder / "new"
    more = ["max_steps=3", "evaluate.every=2", f"dataset.validation={inputs.rows}", f"output_dir={run}"]
    assert run_recipe(inputs.settings(*more)) == 0
    console = capsys.readouterr().out
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    *lines, measured = [line for line in console.splitlines() if line.startswith("step ")]
    assert len(lines) == len(steps) == 3
    assert measured == f"step 3/3 | validation_loss {steps[-1]['validation_loss']:.4f}"  # after the last checkpoint
    for line, step in zip(lines, steps, strict=True):
        parts = dict(part.rsplit(" ", 1) for part in line.split(" | ") if "/" not in part and "GiB" not in part)
        assert {name: float(value) for name, value in parts.items()} == {
            name: float(f"{step[name]:{sinks.SHOWN[name]}}")
            for name in sinks.SHOWN
            if name in step and not (step["step"] == 3 and name.startswith("validation"))
        }
        assert f"step {step['step']}/3 | " in line and f"| {step['tokens_per_second']:,.0f} tokens/s |" in line
    data = json.loads((run / "data.json").read_text())
    settings = ["full_finetune", *inputs.settings(*more)]
    cli.main(["preview", *settings])
    previewed = capsys.readouterr().out
    for name in ("rows", "kept", "tokens", "supervised_tokens"):
        assert re.search(rf"\b{data[name]:,}\b", previewed), name
    first, last = steps[0], steps[-1]
    cli.main(["watch", str(run)])
    watched = capsys.readouterr().out.replace("\N{NO-BREAK SPACE}", " ")
    cli.main(["runs", str(inputs.folder)])
    listed = next(line for line in capsys.readouterr().out.splitlines() if line.startswith(str(run)))
    page = (run / "report.html").read_text()
    for name in ("loss", "validation_loss"):
        figure = records.number(last[name])
        assert figure in watched and figure in listed and f"<strong>{figure}</strong>" in page, name
    assert f"at first {records.number(first['loss'])}" in page
    assert f"<strong>{sum(step['tokens'] for step in steps):,}</strong>" in page
    speed = sum(step["tokens_per_second"] for step in steps) / 3
    assert f"<strong>{records.number(speed)}</strong>" in page


PLANNED = {
    "AdamW": (full_finetune, []),
    "Muon": (full_finetune, ["optimizer._component_=tune.optimizers.Muon", "packed=true"]),
    "SGD": (
        full_finetune,
        ["optimizer._component_=torch.optim.SGD", "optimizer.momentum=0.9", "compute.master_dtype=bf16"],
    ),
    "adapters on NF4": (lora_finetune, ["model.quantization=nf4", "compute.dtype=bf16", "adapter.dora=true"]),
    "labelled answers": (preference_finetune, ["loss._component_=tune.losses.KTO", "dataset.kind=labelled"]),
}


@pytest.mark.weekly
@pytest.mark.parametrize("name", PLANNED)
def test_plan_figures_match_the_run(name, inputs, run_recipe, capsys):
    """All rows have the maximum length, as a plan assumes."""
    recipe, more = PLANNED[name]
    text, folder = "the cat sat on a mat " * 60, inputs.folder / "new"
    data = [{"text": f"cat {number} {text}"} for number in range(12)]
    if recipe is preference_finetune:
        data = [{"prompt": f"cat {number + 10}", "completion": text, "label": number % 2 == 0} for number in range(12)]
    rows = inputs.write_rows(*data)
    settings = inputs.settings(*rows, "dataset.too_long=truncate", f"output_dir={folder}", *more)
    assert run_recipe(settings, recipe) == 0
    capsys.readouterr()
    cli.main(["plan", recipe.__name__, *settings, "--device", "cpu", "--json"])
    plan = json.loads(capsys.readouterr().out)
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [step["tokens"] for step in steps] == [plan["tokens_per_step"]] * 2
    assert plan["tokens"] == sum(step["tokens"] for step in steps)
    assert plan["steps"] == json.loads((folder / "run.json").read_text())["steps"] == len(steps)
    sizes = {"model": 0, "optimizer": 0}
    saved = FileSystemReader(folder / "checkpoints" / "step-00000002").read_metadata().state_dict_metadata
    for key, tensor in saved.items():
        if isinstance(tensor, TensorStorageMetadata):
            sizes[key.partition(".")[0]] += tensor.size.numel() * tensor.properties.dtype.itemsize
    planned = {part: plan["memory_gib"][part] * 2**30 for part in ("weights", "gradients", "optimizer", "checkpoint")}
    assert planned["gradients"] == sizes["model"] and planned["weights"] >= sizes["model"]
    assert recipe is lora_finetune or planned["weights"] == sizes["model"]
    assert planned["optimizer"] == pytest.approx(sizes["optimizer"], rel=1e-4)
    kept = sum(sizes.values())
    assert plan["checkpoint_gib"] * 2**30 == pytest.approx(kept, rel=1e-4)
    assert planned["checkpoint"] == pytest.approx(kept, rel=1e-4)  # on a CPU, its copy is in the same memory
    cli.main(["plan", recipe.__name__, *settings, "--device", "cpu"])
    assert f"a checkpoint {size_in_words(plan['checkpoint_gib'] * 2**30)}" in capsys.readouterr().out


def test_failed_run(inputs, run_recipe):
    inputs.make_overflow()
    assert run_recipe(inputs.settings(f"output_dir={inputs.folder / 'new'}", "max_grad_norm=null")) == 2
    run = records.read(inputs.folder / "new")
    assert run.state == "failed" and " at step 1, in a batch" in run.facts["error"]
    assert "The run has failed: " in (inputs.folder / "new" / "report.html").read_text()


@pytest.mark.slow
def test_interrupted_run(inputs, run_recipe, monkeypatch):
    monkeypatch.setattr(distributed.Interrupt, "requested", True)
    assert run_recipe(inputs.settings(f"output_dir={inputs.folder / 'new'}")) == 130
    assert records.read(inputs.folder / "new").state == "interrupted"
    assert "The run was interrupted" in (inputs.folder / "new" / "report.html").read_text()


@pytest.mark.slow
def test_failed_report_is_logged(inputs, run_recipe, monkeypatch):
    def fail(folders, out):
        raise ZeroDivisionError("of the template")

    monkeypatch.setattr(records, "write_report", fail)
    assert run_recipe(inputs.settings(f"output_dir={inputs.folder / 'new'}")) == 0
    log = (inputs.folder / "new" / "log.txt").read_text()
    assert "ZeroDivisionError" in log.splitlines()[-1] and "of the template" in log.splitlines()[-1]
    assert (inputs.folder / "new" / "model" / "model.safetensors").exists()


@pytest.mark.parametrize("setting", ["dataset.path=nowhere.jsonl", "adapter.target_modules=[none]"])
def test_refused_start_leaves_no_folder(setting, inputs, run_recipe):
    assert run_recipe(inputs.settings(f"output_dir={inputs.folder / 'new'}", setting), lora_finetune) == 2
    assert not (inputs.folder / "new").exists()


@pytest.mark.parametrize("made", ["model", "adapter", None])
def test_run_folder_given_as_the_model(made, inputs, run_recipe, capfd):
    run = inputs.folder / "earlier"
    (run / (made or "checkpoints")).mkdir(parents=True)
    (run / "config.yaml").write_text("seed: 0")
    assert run_recipe(inputs.settings(f"output_dir={inputs.folder / 'new'}", f"model.path={run}")) == 2
    message = capfd.readouterr().err
    assert f"{run} is a run folder" in message and f"with output_dir={run}" in message
    assert (
        {"model": f"Use its result: {run}/model.", "adapter": f"adapter.path={run}/adapter"}.get(made) or ""
    ) in message


def test_adapter_given_as_the_model(inputs, run_recipe, capfd):
    (inputs.folder / "lora").mkdir()
    (inputs.folder / "lora" / "adapter_config.json").write_text("{}")
    assert run_recipe(inputs.settings(f"model.path={inputs.folder / 'lora'}")) == 2
    message = capfd.readouterr().err
    assert "lora is an adapter" in message and f"adapter.path={inputs.folder / 'lora'}" in message


@pytest.mark.parametrize("setting", ["model.path=nowhere", "optimizer.lrr=1"])
def test_refused_start_keeps_the_record_of_an_earlier_run(setting, inputs, run_recipe):
    before = (inputs.run / "run.json").read_text(), (inputs.run / "report.html").stat().st_mtime_ns
    assert json.loads(before[0])["state"] == "done"
    assert run_recipe(inputs.settings(setting)) == 2
    assert ((inputs.run / "run.json").read_text(), (inputs.run / "report.html").stat().st_mtime_ns) == before


@pytest.mark.slow
def test_commands_in_the_report_work(inputs, run_recipe, monkeypatch, capsys):
    assert run_recipe(inputs.settings(f"output_dir={inputs.folder / 'new'}"), lora_finetune) == 0
    page = (inputs.folder / "new" / "report.html").read_text()
    commands = re.findall(r'<pre class="command">tune (.*?)</pre>', page)
    assert [command.split()[0] for command in commands] == ["merge", "generate", "eval", "export"]
    for command in commands:
        cli.main(command.replace("FILE", str(inputs.rows)).split())
    assert (inputs.folder / "new" / "merged" / "config.json").exists()
    assert (inputs.folder / "new" / "model.gguf").exists()


@needs_browser
@pytest.mark.weekly
def test_pages_of_real_runs_in_a_browser(checkpoint, chats, pairs, tmp_path, run_recipe, shown):  # noqa: F811
    """Show a supervised run, a preference run, and both on one page. The pages fit on a phone, too."""
    (tmp_path / "prompts.txt").write_text("the cat\nit was\n")
    common = [
        f"model.path={checkpoint}", "device=cpu", "compute.dtype=fp32", "max_seq_len=128", "global_batch_size=8",
        "max_steps=3", "evaluate.every=2", f"evaluate.prompts={tmp_path}/prompts.txt", "evaluate.max_new_tokens=5",
    ]  # fmt: skip
    runs = {"supervised": (full_finetune, chats), "preferences": (preference_finetune, pairs)}
    for name, (recipe, data) in runs.items():
        of_data = [f"dataset.path={data}", f"dataset.validation={data}", f"output_dir={tmp_path / name}"]
        assert run_recipe([*common, *of_data], recipe) == 0
        steps = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        for width in (1400, 400):
            browser = shown(tmp_path / name, width=width)
            drawn = curves(browser)
            losses = {str(step["step"]): pytest.approx(step["loss"], rel=1e-5) for step in steps if "loss" in step}
            assert {str(at): value for at, value in drawn["Loss"]["loss"].items()} == losses
            assert {"validation_loss"} < drawn["Loss"].keys() and all(drawn.values())
            assert ("Rewards of the answers" in drawn) == (recipe is preference_finetune)
            assert "it was" in browser.ask("document.body.innerText")  # the samples before and after
            assert browser.ask("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    drawn = curves(shown(*(tmp_path / name for name in runs)))
    assert all(len(drawn[title]) >= 2 for title in ("Loss", "Gradient norm", "Learning rate"))


@needs_browser
@pytest.mark.slow
@pytest.mark.skipif(
    "DEMO_IS_NEW" not in os.environ, reason="`.ci/run` sets it after `make demo`, and .demo/run may be old"
)
@pytest.mark.parametrize("width", [1400, 400])
def test_page_of_the_demo(width):
    """Check the page as written by the demo's run."""
    with Browser(width=width) as browser:
        browser.open(DEMO / "report.html")
        losses = curves(browser)["Loss"]["loss"]
        assert browser.ask("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
        fetched = [url for url in browser.requests if not url.startswith(("file:", "data:"))]
    assert (browser.errors, fetched) == ([], [])
    steps = [json.loads(line) for line in (DEMO / "metrics.jsonl").read_text().splitlines()]
    assert losses == {step["step"]: pytest.approx(step["loss"], rel=1e-5) for step in steps if "loss" in step}
    assert (DEMO / "report.html").stat().st_size < 3 * 2**20


@pytest.mark.slow
def test_preparation_of_data_is_followed_from_its_first_line(
    checkpoint, tmp_path, chats, run_recipe, monkeypatch, capsys
):
    """log.txt says how far a long preparation is, also if it fails. `tune watch` shows it."""
    monkeypatch.setattr(progress, "TELL", 0.0)
    rows, folder = tmp_path / "rows.jsonl", tmp_path / "run"
    rows.write_text(chats.read_text() + "{}\n")
    settings = [f"model.path={checkpoint}", f"dataset.path={rows}", f"output_dir={folder}", "device=cpu", "max_steps=1"]
    assert run_recipe([*settings, "dataset.workers=1"]) == 2
    assert f"preparing {rows}: " in (folder / "log.txt").read_text()
    run = records.read(folder)
    assert run.state == "preparing"  # this process holds the lock until it ends
    assert any(f"preparing {rows}: " in str(part) for part in watch.view(run, 80))
    lock.release(folder)
    capsys.readouterr()
    cli.main(["watch", str(folder)])
    assert f"preparing {rows}: " not in capsys.readouterr().out and records.read(folder).state == "killed"
    rows.write_text(chats.read_text())
    assert run_recipe([*settings, "dataset.workers=1"]) == 0
    log = (folder / "log.txt").read_text()
    assert log.index(f"preparing {rows}: ") < log.index("1 optimizer step") and records.read(folder).state == "done"
