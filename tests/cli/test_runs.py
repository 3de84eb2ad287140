"""`tune runs`, `checkpoints`, `diff`, `report`, and `watch` on realistic run folders."""

import fcntl
import functools
import io
import json
import os
import pty
import select
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest
from helpers import HANGS
from rich.console import Console
from run_folders import write_run

from tune.cli import main, runs, watch
from tune.cli.output import gib
from tune.records import read
from tune.records.page import uses


@pytest.fixture
def make_run(tmp_path):
    return functools.partial(write_run, tmp_path)


@pytest.fixture
def running_run(make_run):
    """Yield a run folder locked by a running process, and the process."""
    folder = make_run(steps=6, state="running")
    (folder / "run.json").write_text((folder / "run.json").read_text().replace('"steps": 6', '"steps": 20'))
    hold = "import fcntl, sys; f = open(sys.argv[1], 'a'); fcntl.lockf(f, fcntl.LOCK_EX); print(1, flush=True); input()"
    process = subprocess.Popen(
        [sys.executable, "-c", hold, folder / ".lock"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    process.stdout.readline()
    yield folder, process
    process.kill()
    process.wait()


def shown(capsys, *arguments: str) -> list[list[str]]:
    main([*arguments])
    return [line.split() for line in capsys.readouterr().out.splitlines()]


def test_figures_match_the_files(make_run, tmp_path, capsys):
    """Losses are NaN from step 9 on, so metrics.jsonl omits them: the figures name step 8."""
    folders = [make_run(name) for name in ("one", "two")]
    for folder, loss in zip(folders, (2.34561, 2.34639), strict=True):
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        for line in lines:
            line["loss"] = loss
            if line["step"] > 8:
                del line["loss"]
            line["grad_norm"] = 0.123456
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    one, two = folders
    table = shown(capsys, "runs", str(tmp_path))
    assert [row[3:7] for row in table[1:]] == [["12", "2.346", "(step", "8)"]] * 2
    difference = {row[0]: row[1:] for row in shown(capsys, "diff", str(one), str(two)) if row}
    assert difference == {
        "settings": ["and", "data:", "no", "difference"],
        "loss": ["2.34561", "2.34639"],
        "result": [],
    } | {str(one): [str(two)]}
    main(["watch", str(one)])
    text = capsys.readouterr().out.replace("\N{NO-BREAK SPACE}", " ")
    for figure in ("loss: 2.346 (step 8), ", "grad_norm 0.1235", "step 12 of 12", "validation_loss 0.175"):
        assert figure in text, text
    main(["report", str(one), str(two), "--out", str(tmp_path / "report.html")])
    page = (tmp_path / "report.html").read_text()
    assert page.count("<td>2.346 (step 8)</td>") == 2 and page.count("<td>0.175</td>") == 2


def test_figures_are_those_of_the_exported_weights(make_run, tmp_path, capsys):
    """keep_best exported step 4 of one run; the other run exported its last step, and is worse there."""
    one, two = make_run("one", exported_step=4), make_run("two", exported_step=12)
    for folder, losses in ((one, {4: 2.9, 8: 3.1, 12: 3.3}), (two, {4: 3.4, 8: 3.2, 12: 3.0})):
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        for line in lines:
            if line["step"] in losses:
                line["validation_loss"] = losses[line["step"]]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    table = [row[3:] for row in shown(capsys, "runs", str(tmp_path))[1:]]
    assert table[0][:7] == ["12", "0.5", "(step", "4)", "2.9", "(step", "4)"] and table[1][:3] == ["12", "0.1667", "3"]
    main(["runs", str(tmp_path), "--json"])
    described = {Path(run["path"]).name: run for run in json.loads(capsys.readouterr().out)}
    assert {name: run["exported_step"] for name, run in described.items()} == {"one": 4, "two": 12}
    metrics = described["one"]["metrics"]
    assert (metrics["validation_loss"], metrics["loss"], metrics["step"]) == (2.9, 0.5, 12)
    difference = {row[0]: row[1:] for row in shown(capsys, "diff", str(one), str(two)) if row}
    assert difference["validation_loss"] == ["2.9", "3"]
    assert shown(capsys, "diff", str(one), str(two))[-1] == ["exported", "step", "4", "12"]
    main(["watch", str(one)])
    assert "validation_loss 2.9 (step 4)" in capsys.readouterr().out.replace("\N{NO-BREAK SPACE}", " ")
    main(["report", str(one), str(two), "--out", str(tmp_path / "report.html")])
    page = (tmp_path / "report.html").read_text()
    assert page.count("<td>2.9 (step 4)</td>") == 1 and page.count("<td>3</td>") == 1


@pytest.mark.parametrize("columns", [1, 2, 3, 10])
def test_watch_works_in_a_narrow_terminal(columns, make_run, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", str(columns))
    main(["watch", str(make_run())])
    assert "d" in capsys.readouterr().out


def test_list_of_runs(make_run, tmp_path, capsys):
    make_run("second", state="failed", starts=[{"step": 0, "time": 2e9}])
    make_run("sweep/first", steps=4)
    (make_run("third", steps=0, starts=[{"step": 0, "time": 3e9}]) / "model").mkdir()
    (tmp_path / "third" / "model" / "weights").write_bytes(bytes(2**24))
    rows = shown(capsys, "runs", str(tmp_path))
    assert rows[0] == ["run", "state", "recipe", "step", "loss", "validation", "loss", "GiB", "began"]
    assert [row[:4] for row in rows[1:3]] == [
        [str(tmp_path / "sweep/first"), "done", "full_finetune", "4"],
        [str(tmp_path / "second"), "failed", "full_finetune", "12"],
    ]
    assert rows[1][4:7] == ["0.5", "0.525", "0.00"]
    assert rows[3][:4] == [str(tmp_path / "third"), "done", "full_finetune", "0.02"]  # no step yet


def test_runs_with_rewards_show_a_reward_column(make_run, tmp_path, capsys):
    make_run("one", steps=1)
    with (make_run("two", steps=1, recipe="grpo") / "metrics.jsonl").open("w") as lines:
        lines.write('{"step": 1, "time": 2000, "reward": 0.75}\n')
    rows = shown(capsys, "runs", str(tmp_path))
    assert rows[0][4:9] == ["loss", "validation", "loss", "reward", "GiB"]
    assert rows[1][4] == "2" and rows[2][3:5] == ["1", "0.75"]


def test_size_of_a_run_that_is_removing_files(tmp_path, monkeypatch):
    (tmp_path / "stays").write_bytes(bytes(2**27))
    (tmp_path / "gone").symlink_to("removed")  # listed, but gone when its size is read
    monkeypatch.setattr("pathlib.Path.is_file", lambda self: True)
    assert gib(tmp_path) == "0.12"


def test_list_of_checkpoints(make_run, capsys):
    folder = make_run()
    for name in ("step-00000004", "step-00000012", ".step-00000008.abc", "notes"):
        (folder / "checkpoints" / name).mkdir(parents=True)
    (folder / "checkpoints/step-00000012/state.json").write_text('{"step": 12, "best": {"step": 4}}')
    assert shown(capsys, "checkpoints", str(folder)) == [
        ["checkpoint", "GiB", "loss", "validation_loss"],
        ["step-00000004", "0.00", "best", "0.5", "0.525"],
        [".step-00000008.abc", "0.00", "unfinished", "0.25", "0.2625"],
        ["step-00000012", "0.00", "complete", "0.1667", "0.175"],
    ]
    (folder / "checkpoints/step-00000012/digests.json").write_text('{".metadata": "0"}')
    assert shown(capsys, "checkpoints", str(folder))[-1][2] == "complete"  # all bytes are read only with --verify
    assert shown(capsys, "checkpoints", str(folder), "--verify")[-1][2] == "damaged"


def test_checkpoints_show_task_metrics_and_the_keep_best_metric(make_run, capsys):
    folder = make_run(steps=0)
    with (folder / "config.yaml").open("a") as settings:
        settings.write("evaluate: {tasks: [mine/choice.yaml, mmlu]}\ncheckpointer: {keep_best: mmlu_law/acc}\n")
    values = {"loss": 2.5, "rewards/margins": 7, "choice/brier_score": 0.5, "mmlu/acc": 0.25, "mmlu_law/acc": 0.125}
    (folder / "metrics.jsonl").write_text(json.dumps({"step": 4, "mmlu_art/acc": 0.75} | values) + "\n")
    (folder / "checkpoints/step-00000004").mkdir(parents=True)
    assert shown(capsys, "checkpoints", str(folder)) == [
        ["checkpoint", "GiB", "loss", "choice/brier_score", "mmlu/acc", "mmlu_law/acc"],
        ["step-00000004", "0.00", "complete", "2.5", "0.5", "0.25", "0.125"],
    ]


def test_watch_ends_its_last_line_outside_a_terminal(make_run, capsys):
    main(["watch", str(make_run("one"))])
    assert capsys.readouterr().out.endswith("\n")


def test_watch_shows_the_same_facts_as_the_page(make_run, capsys):
    folder = make_run("one")
    (folder / "model").mkdir()
    answers = {0: "no\nidea", 12: "yes"}
    lines = [json.dumps({"step": step, "prompt": "why?", "text": text}) for step, text in answers.items()]
    (folder / "samples.jsonl").write_text("\n".join(lines))
    main(["watch", str(folder)])
    lines = capsys.readouterr().out.splitlines()
    (validation,) = (line for line in lines if line.startswith("validation_loss  "))
    assert validation.split()[-2:] == ["█▃▁", "0.175"]
    others = ("grad_norm  ", "lr  ", "tokens_per_second ")
    assert [line.split()[0] for line in lines if line.startswith(others)] == [name.strip() for name in others]
    shown = " ".join(" ".join(lines).split())
    for part in (
        "time: training 0:00:15, waiting for data 0:00:06, saving 0:00:03, evaluation 0:00:11",
        "rows 50", "supervised tokens 300", "dropped, nothing to learn 2", "optimizer.lr: 0.001 (default: 2e-05)",
        "the first row: <|user|>why? <|assistant|>⟦because ⟧<b>", "prompt: why? first: no idea last: yes",
    ):  # fmt: skip
        assert part in shown, shown
    ((sentence, commands),) = uses(read(folder))
    assert f"{sentence} {' '.join(commands)}".replace(" ", "").replace("\n", "") in shown.replace(" ", "")


@pytest.mark.parametrize("state", ["running", "done"])
def test_watch_fits_the_terminal_height_while_a_run_continues(state, running_run, monkeypatch):
    """Lines that do not fit are dropped from the end. The final output is complete."""
    folder, _ = running_run
    (folder / "run.json").write_text((folder / "run.json").read_text().replace("running", state))
    monkeypatch.setattr(watch.time, "sleep", lambda _: (_ for _ in ()).throw(KeyboardInterrupt))
    for height, fits in ((24, state == "done"), (60, True)):
        screen = Console(file=io.StringIO(), force_terminal=True, width=80, height=height)
        monkeypatch.setattr(watch, "Console", lambda screen=screen, **_: screen)
        main(["watch", str(folder)])
        assert "grad_norm " in screen.file.getvalue()
        assert ("optimizer.lr" in screen.file.getvalue()) == fits
        assert "..." not in screen.file.getvalue()  # rich's placeholder for lines that do not fit


def test_diff_of_two_runs(make_run, capsys):
    one, other = make_run("one"), make_run("two", steps=8, lr=0.01)
    data = json.loads((other / "data.json").read_text())
    (other / "data.json").write_text(json.dumps(data | {"rows": 40}))
    rows = shown(capsys, "diff", str(one), str(other))
    assert rows[0] == [str(one), str(other)]
    assert rows[1:6] == [
        ["settings", "and", "data"], ["optimizer.lr", "0.001", "0.01"], ["max_steps", "12", "8"],
        ["data:", "rows", "50", "40"], ["result"],
    ]  # fmt: skip
    assert ["loss", "0.1667", "0.25"] in rows and ["lr", "0.001", "0.01"] in rows
    rows = shown(capsys, "diff", str(one), str(one))
    assert [" ".join(row) for row in rows[1:]] == ["settings and data: no difference", "result: no difference"]


def test_diff_prints_values_as_in_settings(make_run, capsys):
    one, other = make_run("one"), make_run("two")
    for run, value in ((one, "null"), (other, "true")):
        (run / "config.yaml").write_text((run / "config.yaml").read_text() + f"\ncompile: {value}\n")
    assert ["compile", "null", "true"] in shown(capsys, "diff", str(one), str(other))


def test_diff_of_two_recipes(make_run, capsys):
    one, other = make_run("one"), make_run("two", steps=8, recipe="grpo")
    (other / "config.yaml").write_text((other / "config.yaml").read_text() + "\ngroup_size: 4\n")
    rows = shown(capsys, "diff", str(one), str(other))
    assert rows[1] == ["recipe", "full_finetune", "grpo"] and ["max_steps", "12", "8"] in rows
    assert ["group_size", "-", "4"] in rows


def test_report_output_paths(make_run, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_run("one")
    make_run("two")
    assert shown(capsys, "report", "one")[0][1] == "one/report.html"
    assert shown(capsys, "report", "one", "two")[0][1] == "report.html"
    assert shown(capsys, "report", "one", "one", "--out", "new/page.html")[0][1] == "new/page.html"
    assert "<title>one</title>" in (tmp_path / "new/page.html").read_text()
    assert "<title>one, two</title>" in (tmp_path / "report.html").read_text()


def spoiled(folder, file, text):
    (folder / file).write_text(text)


# The arguments and the expected message.
WRONG = {
    "empty": (["report", "empty"], "empty is not a run folder: it has none of run.json, config.yaml, metrics.jsonl"),
    "missing": (["watch", "mising"], "mising does not exist"),
    "a file": (["checkpoints", "one/log.txt"], "one/log.txt is not a run folder"),
    "a folder of runs": (["report", "."], "`tune runs .` lists the 2 in it"),
    "no runs": (["runs", "empty"], "there are no run folders in empty"),
    "a run itself": (["runs", "one"], "tune watch one"),
    "no folder": (["runs", "mising"], "mising does not exist"),
    "one of two is none": (["diff", "one", "empty"], "empty is not a run folder"),
    "one of three is none": (["report", "one", "two", "empty"], "empty is not a run folder"),
    "no checkpoints": (["checkpoints", "one"], "one has no checkpoints yet"),
    "out is a folder": (["report", "one", "--out", "two"], "two cannot be written: Is a directory"),
    "out is in a file": (["report", "one", "--out", "one/log.txt/x.html"], "x.html cannot be written"),
    "out is somebody's work": (["report", "one", "--out", "one/log.txt"], "this file exists and is not a report"),
}


@pytest.mark.parametrize("case", WRONG)
def test_mistakes_end_in_one_message(case, make_run, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_run("one")
    make_run("two")
    (tmp_path / "empty").mkdir()
    arguments, message = WRONG[case]
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    output = capsys.readouterr()
    assert (stopped.value.code, output.out) == (2, "")
    assert output.err.startswith("error: ") and message in output.err and output.err.count("\n") == 1


DAMAGED = {
    "half of the last line": ("metrics.jsonl", '{"step": 1, "loss": 3.0}\n{"step": 2, "lo', "3"),
    "no metrics": ("metrics.jsonl", "", "0.00"),
    "a line of something else": ("metrics.jsonl", 'hello\n{"step": 1, "loss": 3.0}\n', "3"),
    "other metrics after a restart": ("metrics.jsonl", '{"step": 1, "loss": 3.0}\n{"step": 2, "reward": 1}\n', "3"),
    "infinite": ("metrics.jsonl", '{"step": 1, "loss": Infinity}\n{"step": 2, "loss": NaN}\n', "inf"),
    "settings that are no YAML": ("config.yaml", "a: [", "0.1667"),
    "settings that are a list": ("config.yaml", "- 1", "0.1667"),
    "half of run.json": ("run.json", '{"state": "do', "0.1667"),
    "half of data.json": ("data.json", '{"rows": 5', "0.1667"),
    "samples without a text": ("samples.jsonl", '{"step": 1}\n[]\nx', "0.1667"),
    "bytes": ("log.txt", "\x00\x1b[31m", "0.1667"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_files_do_not_hide_other_facts(case, make_run, tmp_path, capsys):
    folder, (file, content, loss) = make_run(), DAMAGED[case]
    (folder / file).write_text(content)
    row = shown(capsys, "runs", str(tmp_path))[1]
    assert loss in row and row[1] == ("killed" if file == "run.json" else "done")
    for verb in ("report", "watch"):
        main([verb, str(folder)])
    capsys.readouterr()
    main(["diff", str(folder), str(folder)])
    assert ("config.yaml" in capsys.readouterr().err) == (file == "config.yaml")
    warned = "is not YAML" in (page := (folder / "report.html").read_text()) or "must have" in page
    assert warned == (file == "config.yaml")
    assert ("1 lines of metrics.jsonl" in page) == (case == "a line of something else")


class Terminal:
    """`tune watch` in a terminal of 80 columns."""

    def __init__(self, folder):
        self.outer, inner = pty.openpty()
        termios.tcsetwinsize(inner, (40, 80))
        environment = {**os.environ, "TERM": "xterm"}
        command = [sys.executable, "-m", "tune.cli", "watch", str(folder)]
        self.process = subprocess.Popen(
            command, stdin=inner, stdout=inner, stderr=inner, env=environment, start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )  # fmt: skip
        os.close(inner)
        self.text = ""

    def read_until(self, *wanted: str) -> None:
        deadline, start = time.monotonic() + HANGS, len(self.text)
        while not all(text in self.text[start:] for text in wanted):
            assert time.monotonic() < deadline, self.text
            if select.select([self.outer], [], [], 1)[0]:
                try:
                    self.text += os.read(self.outer, 1 << 16).decode(errors="replace")
                except OSError:  # the process has ended
                    assert all(text in self.text[start:] for text in wanted), self.text
                    return

    def type(self, text: str) -> None:
        os.write(self.outer, text.encode())


@pytest.mark.slow
def test_watch_follows_a_run_to_its_end(running_run):
    folder, process = running_run
    terminal = Terminal(folder)
    terminal.read_until("running", "step 6 of 20", "left, last step", "0.3333 now", "█", "the data are few")
    with (folder / "metrics.jsonl").open("a") as lines:
        lines.write('{"step": 7, "time": 1021.0, "loss": 0.125}\n')
    terminal.read_until("step 7 of 20", "0.125 now")
    (folder / "run.json").write_text((folder / "run.json").read_text().replace('"running"', '"done"'))
    terminal.read_until("done", "the first row: <|user|>why?", "There is no model.", "lr  ")
    assert terminal.process.wait(HANGS) == 0
    assert process.poll() is None


@pytest.mark.slow
def test_ctrl_c_ends_watching_alone(running_run):
    folder, process = running_run
    terminal = Terminal(folder)
    terminal.read_until("step 6 of 20")
    terminal.type("\x03")
    terminal.read_until("\x1b[?25h")  # the cursor is back
    assert terminal.process.wait(HANGS) == 0
    assert "Traceback" not in terminal.text and process.poll() is None
    process.send_signal(signal.SIGKILL)
    process.wait()
    main(["watch", str(folder)])


def test_runs_as_json(make_run, tmp_path, capsys):
    folder = make_run(steps=6)
    main(["runs", str(tmp_path), "--json"])
    (run,) = json.loads(capsys.readouterr().out)
    assert (run["path"], run["state"], run["metrics"]["step"]) == (str(folder), "done", 6)
    assert run["metrics"]["loss"] == read(folder).last("loss")


def test_runs_reads_only_what_it_shows(make_run, tmp_path, monkeypatch, capsys):
    """Settings are slow to read: 2,000 of them take most of the time."""
    for name in ("one", "two"):
        make_run(name)
    opened = []

    def noted(function):
        def call(file, *how, **options):
            if file.is_relative_to(tmp_path):
                opened.append(file.name)
            return function(file, *how, **options)

        return call

    monkeypatch.setattr(Path, "open", noted(Path.open))
    monkeypatch.setattr(Path, "read_bytes", noted(Path.read_bytes))
    monkeypatch.setattr(Path, "read_text", noted(Path.read_text))
    monkeypatch.setattr("tune.config.saved", lambda folder: opened.append("settings") or {})
    for options in ([], ["--json"]):
        opened.clear()
        main(["runs", str(tmp_path), *options])
        assert {*opened} == {"run.json", "metrics.jsonl"}
    capsys.readouterr()


def test_runs_prints_its_progress(make_run, tmp_path, monkeypatch, capsys):
    for name in ("one", "two", "three"):
        make_run(name)
    monkeypatch.setattr(runs, "TELL", 0)
    main(["runs", str(tmp_path)])
    assert "2 of 3 runs" in capsys.readouterr().err


@pytest.mark.slow
def test_checkpoints_imports_no_torch(make_run):
    folder = make_run()
    (folder / "checkpoints" / "step-00000004").mkdir(parents=True)
    code = "import sys; from tune.cli import main; main(sys.argv[1:]); print('torch' in sys.modules)"
    shown = subprocess.run(
        [sys.executable, "-c", code, "checkpoints", folder], capture_output=True, text=True, check=True
    )
    assert "step-00000004" in shown.stdout and shown.stdout.endswith("False\n")
