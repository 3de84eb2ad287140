"""`tune sweep`, with a test recipe whose loss is known."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from evaluation.task_files import write_tasks
from helpers import HANGS
from run_folders import write_run

from tune import cli, config
from tune.checkpointers.best import more_is_better
from tune.cli.sweep import compare, direction, name_of, ranked, row, swept, told_by_tasks, value_of
from tune.errors import TuneError

RECIPE = """\
import json, signal, sys, time
from pathlib import Path

from tune import config, records

@config.entrypoint("defaults.yaml")
def main(cfg):
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(130))
    folder = Path(cfg.output_dir)
    records.start(folder, 0)
    try:
        with (folder / "metrics.jsonl").open("a", buffering=1) as metrics:
            for step in range(1, 31):
                metrics.write(json.dumps({"step": step, "loss": cfg.lr * cfg.rank + 1 / step}) + "\\n")
                time.sleep(0.2)
    except BaseException as error:
        records.end(folder, error)
        raise
    records.end(folder, None)

main()
"""


def read_table(text: str, metric: str) -> list[dict[str, str]]:
    """Return the rows of the table that a sweep prints, by column names."""
    lines = text.splitlines()
    start = next(number for number, line in enumerate(lines) if metric in line.split())
    names = lines[start].split()
    places = [lines[start].index(f" {name}") + 1 if number else 0 for number, name in enumerate(names)]
    cells = [
        [line[place:end].strip() for place, end in zip(places, [*places[1:], None], strict=True)]
        for line in lines[start + 1 :]
        if "report.html" not in line
    ]
    return [dict(zip(names, row, strict=True)) for row in cells if row[-1].startswith("/")]


def require_figures_of_files(table: list[dict[str, str]], rows: list[dict], metric: str) -> None:
    """Compare every cell and sweep.json with metrics.jsonl and run.json of the run."""
    assert [row["run"] for row in table] == [row["folder"] for row in rows]
    for shown, kept in zip(table, rows, strict=True):
        steps = [json.loads(line) for line in (Path(shown["run"]) / "metrics.jsonl").read_text().splitlines()]
        measured = [step for step in steps if metric in step][-1:]
        late = f" (step {measured[0]['step']})" if measured and measured[0] != steps[-1] else ""
        assert shown[metric] == (f"{measured[0][metric]}{late}" if measured else ""), shown
        assert int(shown["steps"]) == kept["steps"] == steps[-1]["step"]
        assert shown["state"] == kept["state"]
        assert kept["value"] == (measured[0][metric] if measured else None)
        state = json.loads((Path(shown["run"]) / "run.json").read_text())["state"]
        assert state == "done" if kept["state"] == "done" else kept["state"] in ("failed", "ended early")
        assert {name: shown[name] for name in kept["settings"]} == kept["settings"]


@pytest.mark.parametrize("metric", ["validation_loss", "validation_reward"])
def test_sweep_figures_match_the_files(metric: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In both directions: one run was measured before its last step, one never, one ended early, and one failed."""
    runs = [{"optimizer.lr": value} for value in ("1", "2", "3", "4", "5", "6")]
    values = {"1": 0.30000000004, "2": 0.3, "3": None, "4": 0.5, "5": 0.4, "6": 0.45}
    steps = {"1": 12, "2": 12, "3": 12, "4": 6, "5": 12, "6": 10}
    of_states = {"4": "running", "5": "failed"}
    for lr, value in values.items():
        folder = write_run(tmp_path, f"lr={lr}", steps=steps[lr], lr=float(lr), state=of_states.get(lr, "done"))
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        lines = [{name: value for name, value in line.items() if name != "validation_loss"} for line in lines]
        for line in lines[: 8 if lr == "6" else None] if value else ():
            line[metric] = value + 0.001 * (len(lines) - line["step"])
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    more = metric == "validation_reward"
    assert compare(tmp_path, runs, metric, more, ["lr=5"])
    shown = capsys.readouterr().out
    rows = json.loads((tmp_path / "sweep.json").read_text())
    table = read_table(shown, metric)
    require_figures_of_files(table, rows, metric)
    best_first = ["4", "6", "1", "2"] if more else ["2", "1", "6", "4"]
    assert [row["optimizer.lr"] for row in table] == [*best_first, "3", "5"]
    assert ("highest" if more else "lowest") in shown.splitlines()[-1]
    assert [row["state"] for row in rows if row["settings"]["optimizer.lr"] in "45"] == (["ended early", "failed"])


def test_failed_sweep_has_no_best_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path, "lr=1", state="failed")
    assert compare(tmp_path, [{"lr": "1"}, {"lr": "2"}], "loss", False, ["lr=1", "lr=2"])
    shown = capsys.readouterr().out
    assert "best" not in shown.replace(str(tmp_path), "") and "report.html" in shown
    rows = read_table(shown, "loss")
    assert [(row["loss"], row["steps"], row["state"]) for row in rows] == [
        (str(2 / 12), "12", "failed"), ("", "0", "failed"),
    ]  # fmt: skip
    (tmp_path / "none").mkdir()
    assert compare(tmp_path / "none", [{"lr": "1"}], "loss", False, ["lr=1"])
    assert "best" not in capsys.readouterr().out.replace(str(tmp_path), "")
    assert not (tmp_path / "none" / "report.html").exists()


@pytest.mark.weekly
def test_asha_ends_weak_runs_early_and_ranks_the_best_first(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(RECIPE)
    (tmp_path / "defaults.yaml").write_text("lr: 1\nrank: 1\noutput_dir: null\n")
    command = [
        sys.executable, "-m", "tune.cli", "sweep", "mine.py", "--over", "lr=1,2,4,8", "rank=1,2", "--schedule", "asha",
        "--grace", "5", "--out", "out",
    ]  # fmt: skip
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=HANGS)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = json.loads((tmp_path / "out" / "sweep.json").read_text())
    assert len(rows) == 8
    assert rows[0]["settings"] == {"lr": "1", "rank": "1"} and rows[0]["state"] == "done" and rows[0]["steps"] == 30
    early = [row for row in rows if row["state"] == "ended early"]
    assert early and all(5 <= row["steps"] < 30 for row in early)
    assert done.stdout.splitlines()[-10].split()[:3] == ["lr", "rank", "loss"]
    require_figures_of_files(read_table(done.stdout, "loss"), rows, "loss")
    assert (tmp_path / "out" / "report.html").exists()


@pytest.mark.weekly
def test_metric_that_no_run_has(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(RECIPE.replace("0.2", "0.01"))
    (tmp_path / "defaults.yaml").write_text("lr: 1\nrank: 1\noutput_dir: null\n")
    command = [sys.executable, "-m", "tune.cli", "sweep", "mine.py", "--over", "lr=1,2", "--metric", "los"]
    unknown = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=HANGS)
    assert unknown.returncode == 2 and "--metric los: " in unknown.stderr and "'loss'" in unknown.stderr
    assert not (tmp_path / "runs").exists()  # before any run
    command += ["--higher-is-better", "false"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=HANGS)
    assert (
        done.returncode == 2 and "--metric los: no run has this metric. Did you mean 'loss'? They have " in done.stderr
    )
    assert "tune report " in done.stderr.splitlines()[-1]


@pytest.mark.slow
def test_direction_of_a_metric_in_a_sweep() -> None:
    """As in keep_best: it is stated, known, or refused."""
    kept = [
        config.load("full_finetune", [
            "model.path=m", "dataset.path=d", "dataset.validation=v", "evaluate.every=1",
            "checkpointer.keep_best=validation_wer", f"checkpointer.higher_is_better={stated}",
        ]) for stated in ("false", "true")
    ]  # fmt: skip
    assert direction("validation_wer", None, kept[:1]) is False and direction("validation_wer", None, kept[1:]) is True
    assert direction("wer", "false", []) is False and direction("wer", "true", []) is True
    assert direction("loss", None, []) is False and direction("reward", None, kept) is True
    for found in (kept, []):  # two directions, or none
        with pytest.raises(TuneError, match=r"--metric validation_wer.* --higher-is-better"):
            direction("validation_wer", None, found)


@pytest.mark.slow
def test_best_run_of_a_sweep_is_first(checkpoint: Path, tmp_path: Path) -> None:
    """Tasks define whether higher is better, whatever the metric's name."""
    pytest.importorskip("lm_eval")
    folder = write_tasks(tmp_path)
    tasks = json.dumps([str(folder / f"{name}.yaml") for name in ("choice", "rolling")])
    cfg = config.load("full_finetune", [f"model.path={checkpoint}", "dataset.path=d", f"evaluate.tasks={tasks}"])
    for metric, more in {
        "choice/acc": True, "choice/acc_norm": True, "rolling/bits_per_byte": False, "loss": False, "reward": True,
        "kl": False,
    }.items():  # fmt: skip
        assert more_is_better(metric, told_by_tasks(metric, [cfg])) == more, metric
    both = [  # a sweep over tasks
        config.load("full_finetune", ["model.path=" + str(checkpoint), "dataset.path=d", f"evaluate.tasks=[{task}]"])
        for task in json.loads(tasks)
    ]
    assert told_by_tasks("choice/acc", both) == told_by_tasks("choice/acc", [cfg])
    rows = [
        {"run": name, "state": state, "value": value, "step": 9, "steps": 9}
        for name, state, value in (
            ("worst", "done", 0.1), ("none", "done", None), ("best", "done", 0.9), ("bad", "failed", 1.0)
        )
    ]  # fmt: skip
    assert [row["run"] for row in ranked(rows, True)] == ["best", "worst", "none", "bad"]
    assert [row["run"] for row in ranked(rows, False)] == ["worst", "best", "none", "bad"]
    assert value_of(rows[0]) == "0.1" and value_of(rows[0] | {"step": 4}) == "0.1 (step 4)"


def test_out_folder_with_other_contents_is_rejected(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "sweep.json").write_text("mine")
    sweep = ["sweep", "full_finetune", "--over", "seed=1,2", f"model.path={checkpoint}", "dataset.path=none"]
    with pytest.raises(SystemExit, match="2"):
        cli.main([*sweep, "--out", str(tmp_path)])
    assert str(tmp_path) in capsys.readouterr().err
    assert [file.name for file in tmp_path.iterdir()] == ["sweep.json"]


def test_component_arguments_are_checked_before_runs_start(
    checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = ["--over", "optimizer.lrr=1,2", f"model.path={checkpoint}", "dataset.path=none"]
    with pytest.raises(SystemExit, match="2"):
        cli.main(["sweep", "full_finetune", *wrong])
    assert "optimizer.lrr: is not a setting. Did you mean 'optimizer.lr'?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("over", "message"),
    [
        (["lr"], "'lr' is not KEY=A,B"),
        (["lr=1"], "lr=1 has one value. List several with commas: lr=A,B"),
        (["lr=1,2", "lr=3,4"], "lr occurs twice"),
        (["lr=1,2,1"], "lr has the value 1 twice"),
    ],
)
def test_invalid_values_are_rejected(over: list[str], message: str) -> None:
    with pytest.raises(TuneError, match=message):
        swept(over, [])


def test_settings_after_the_values_go_to_the_recipe() -> None:
    values, settings = swept(["lr=1,2", "tasks=[a,b],[c]", "model.path=x", "seed=1"], ["compute.dtype=fp32"])
    assert values == {"lr": ["1", "2"], "tasks": ["[a,b]", "[c]"]}
    assert settings == ["model.path=x", "seed=1", "compute.dtype=fp32"]


def test_run_that_wrote_nothing(tmp_path: Path) -> None:
    facts = row(tmp_path / "none", {"lr": "1"}, "loss", True)
    assert (facts["state"], facts["value"], facts["steps"]) == ("failed", None, 0)


def test_runs_are_ranked_by_what_they_exported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The run whose last value is better exported worse weights: perplexity 19.37 against 18.83."""
    runs = [{"lr": "1"}, {"lr": "2"}]
    for run, exported, values in zip(runs, (12, 4), ({4: 19.9, 12: 19.37}, {4: 18.83, 12: 25.0}), strict=True):
        folder = write_run(tmp_path, name_of(run), exported_step=exported)
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        for line in lines:
            line.pop("validation_loss", None)
            if line["step"] in values:
                line["validation_perplexity"] = values[line["step"]]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert not compare(tmp_path, runs, "validation_perplexity", False, [])
    rows = json.loads((tmp_path / "sweep.json").read_text())
    assert [(row["settings"]["lr"], row["value"], row["step"], row["steps"]) for row in rows] == [
        ("2", 18.83, 4, 12),
        ("1", 19.37, 12, 12),
    ]
    assert [line.split()[:2] for line in capsys.readouterr().out.splitlines()[1:3]] == [["2", "18.83"], ["1", "19.37"]]
