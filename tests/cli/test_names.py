"""Every command reads and writes folders and files under any name."""

import json
import shutil
from pathlib import Path

import pytest
from helpers import make_adapter, run_verbs
from run_folders import write_run

from tune.cli.eval import dotted, names_in
from tune.cli.sweep import name_of, separated

NAMES = [
    "run #2", "a,b", "a=b", "12:30", "~", "~x", "{a", "{a: 1}", "[a]", "2024", "007", "-x", "--to", "null", "true",
    "it's", "ünï-日本", "a: b",
]  # fmt: skip


@pytest.fixture
def here(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return tmp_path


def argument_for(name: str) -> str:
    """Return the name as a user must write it, so that it is not read as an option, the home folder, or null."""
    return f"./{name}" if name.startswith(("-", "~")) or name == "null" else name


def succeeded(*commands: list[str]) -> list[str]:
    done = run_verbs(*commands)
    for result in done:
        assert not result.returncode, (result.args, result.stderr[-2000:])
    return [result.stdout for result in done]


@pytest.mark.slow
@pytest.mark.parametrize("names", [NAMES[::6], pytest.param(NAMES, marks=pytest.mark.slow)])
def test_models_and_outputs(names: list[str], checkpoint: Path, chats: Path, here: Path) -> None:
    row = chats.read_text().splitlines()[0]
    adapter = make_adapter(checkpoint, here / "adapter", seed=1)
    commands = []
    for name in names:
        place, out = argument_for(name), f"--out=out/{name}"
        shutil.copytree(checkpoint, here / name)
        shutil.copytree(adapter, here / "adapters" / name)
        (here / f"{name}.jsonl").write_text(f"{row}\n{row}\n")
        data = [f"--data={place}.jsonl", f"{out}.json"]
        commands += [
            ["eval", place, "--adapter", f"adapters/{name}", *data],
            ["generate", place, "--adapter", f"adapters/{name}", f"--prompts={place}.jsonl", f"{out}.jsonl",
             "--max-new-tokens", "2"],
            ["preview", "full_finetune", f"model.path={place}", f"dataset.path={place}.jsonl",
             f"--html=out/{name}.html"],
        ]  # fmt: skip
    commands += [
        command
        for name in names[::5]
        for command in (
            ["merge", argument_for(name), f"adapters/{name}", f"out/merged {name}"],
            ["quantize", argument_for(name), "--to", "int8", f"--out=out/small {name}"],
            ["export", f"adapters/{name}", "--to", "hf", f"--out=out/hf {name}"],
            ["add-tokens", argument_for(name), f"out/larger {name}", "<|new|>"],
        )
    ]
    before = {*here.iterdir()}
    succeeded(*commands)
    assert {*here.iterdir()} - before == {here / "out"}
    for name in names:
        assert [*json.loads((here / "out" / f"{name}.json").read_text())["results"]] == [name]
        assert (here / "out" / f"{name}.jsonl").exists() and (here / "out" / f"{name}.html").exists(), name
    for name in names[::5]:
        for kind in ("merged", "small", "hf", "larger"):
            assert (here / "out" / f"{kind} {name}" / "config.json").exists(), (kind, name)


@pytest.mark.slow
def test_runs_in_folders_with_any_name(checkpoint: Path, chats: Path, here: Path) -> None:
    """A run in a folder with a number sign does not continue another run."""
    (here / "home").mkdir()
    common = [f"model.path={checkpoint}", f"dataset.path={chats}", "max_seq_len=64", "device=cpu", "compute.dtype=fp32",
              "max_steps=1", "global_batch_size=2", "checkpointer.every=1"]  # fmt: skip
    names = ["run", "run #2", "2024", "~/mine", "a, {b}: c=d"]
    (here / "mine.yaml").write_text("output_dir: ~/mine\n")
    folders = [["--config", "mine.yaml"] if name.startswith("~") else [f"output_dir={name}"] for name in names]
    succeeded(*[["run", "full_finetune", *common, *folder] for folder in folders])
    for name in names:
        folder = Path(name).expanduser()
        facts = json.loads((folder / "run.json").read_text())
        assert (facts["state"], len(facts["starts"])) == ("done", 1), name
        assert (folder / "model" / "model.safetensors").exists()
    assert not (here / "~").exists()
    run = names[-1]
    succeeded(
        ["report", run, "2024", "--out=x #.html"],
        ["export", run, "--step", "1", "--to", "hf", "--out=step #1"],
        ["eval", "run #2", f"--data={chats}", "limit=2"],
    )
    assert (here / "x #.html").exists() and (here / "step #1" / "config.json").exists()


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["runs", "diff", "report", "checkpoints", "watch"])
def test_commands_that_read_runs(verb: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from tune.cli import main

    for name in NAMES:
        run, place = write_run(here, name), argument_for(name)
        if verb == "checkpoints":
            (run / "checkpoints" / "step-00000004").mkdir(parents=True)
        main({"runs": ["runs", "."], "diff": ["diff", place, place]}.get(verb, [verb, place]))
        shown = capsys.readouterr().out
        assert verb == "checkpoints" or name in shown
        assert verb != "report" or (run / "report.html").exists()


def test_sweep_values() -> None:
    assert separated("1e-5,2e-5") == ["1e-5", "2e-5"]
    assert separated("[a,b],[c]") == ["[a,b]", "[c]"]
    assert separated('"a,b.jsonl",run #2.jsonl,"007"') == ["a,b.jsonl", "run #2.jsonl", "007"]
    assert separated("{a: 1, b: 2},{a: 3}") == ["{a: 1, b: 2}", "{a: 3}"]
    for name in NAMES:
        assert separated(f"{json.dumps(name, ensure_ascii=False)},x") == [name, "x"]
    folders = [name_of({"dataset.path": name}) for name in [*NAMES, "a b", "a_b", "a/b", "x" * 300, "x" * 301]]
    assert len({*folders}) == len(folders)
    assert all(len(folder) < 200 and "/" not in folder for folder in folders)
    assert name_of({"optimizer.lr": "1e-5", "adapter.rank": "8"}) == "lr=1e-5,rank=8"


def test_scores_and_tasks(here: Path) -> None:
    assert dotted("my_scores:is_right") == "my_scores.is_right"
    assert dotted("{_component_: judge.Judge, path: 'a:b'}") == "{_component_: judge.Judge, path: 'a:b'}"
    assert names_in("arc_easy,mmlu_*") == ["arc_easy", "mmlu_*"]
    (here / "my,task.yaml").touch()
    assert names_in("my,task.yaml") == ["my,task.yaml"]
