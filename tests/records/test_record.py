"""The facts in a run folder, however the run ended and with damaged files."""

import fcntl
import functools
import json
import math
import subprocess
import sys

import numpy as np
import pytest
from run_folders import write_run

from tune import records
from tune.errors import TuneError
from tune.secrets import REMOVED

HOLD = """
import fcntl, sys
log = open(sys.argv[1], "a")
fcntl.lockf(log, fcntl.LOCK_EX)
print("locked", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def make_run(tmp_path):
    return functools.partial(write_run, tmp_path)


@pytest.mark.parametrize(
    ("error", "state", "message"),
    [
        (None, "done", None),
        (SystemExit(0), "done", None),
        (SystemExit(130), "interrupted", None),
        (KeyboardInterrupt(), "interrupted", None),
        (TuneError("loss is nan"), "failed", "loss is nan"),
        (ValueError("at https://me:word@host/x"), "failed", "ValueError: at https://host/x"),
    ],
)
def test_how_a_run_ended(error, state, message, tmp_path):
    records.start(tmp_path, 0, recipe="mine", steps=3)
    records.start(tmp_path, 2, recipe="mine", steps=5)
    assert records.read(tmp_path).state == "killed"  # no process holds its log
    records.end(tmp_path, error)
    run = records.read(tmp_path)
    assert (run.state, run.facts.get("error")) == (state, message)
    assert [start["step"] for start in run.facts["starts"]] == [0, 2]
    assert run.facts["steps"] == 5


def test_run_is_running_while_its_log_is_locked(make_run):
    folder = make_run(state="running")
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, folder / ".lock"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout.readline() == "locked\n"
        assert records.read(folder).state == "running"
    finally:
        holder.communicate("")
    assert records.read(folder).state == "killed"
    with (folder / ".lock").open("a") as log:  # reading it did not prevent resuming the run
        fcntl.lockf(log, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_run_from_before_run_json(make_run):
    folder = make_run(state=None)
    assert records.read(folder).state == "killed"
    (folder / "adapter").mkdir()
    assert records.read(folder).state == "done"


def test_metrics_with_other_keys_after_a_restart_and_damaged_lines(make_run):
    folder = make_run(steps=3)
    with (folder / "metrics.jsonl").open("a") as lines:
        lines.write('{"step": 3, "loss": 7, "time": 1}\n{"step": 4, "reward": 0.5, "name": "text"}\n')
        lines.write(
            'not JSON\n[1, 2]\n{"loss": 1}\n{"step": 5, "loss": NaN}\n{"step": 6, "loss": Infinity}\n{"step": 7, "lo'
        )
    run = records.read(folder)
    assert run.columns["step"].tolist() == [1, 2, 3, 4, 5, 6]
    np.testing.assert_array_equal(run.columns["loss"], [2, 1, 7, math.nan, math.nan, math.inf])
    np.testing.assert_array_equal(run.columns["reward"], [math.nan] * 3 + [0.5] + [math.nan] * 2)
    assert run.last("reward") == 0.5 and math.isnan(run.last("missing")) and "name" not in run.columns
    assert run.problems == ["3 lines of metrics.jsonl are ignored: they are not the metrics of a step"]


def test_tail_of_long_metrics(make_run):
    folder = make_run(steps=500)
    whole, tail = records.read(folder), records.read(folder, tail=2000)
    assert tail.columns["step"].tolist() == whole.columns["step"][-len(tail.columns["step"]) :].tolist()
    assert 3 < len(tail.columns["step"]) < 20 and not tail.problems


def test_other_folders_are_not_run_folders(tmp_path, make_run):
    with pytest.raises(TuneError, match="missing does not exist"):
        records.read(tmp_path / "missing")
    (tmp_path / "empty").mkdir()
    with pytest.raises(TuneError, match=r"is not a run folder: .* Give the output_dir of a run"):
        records.read(tmp_path / "empty")
    make_run("all/one")
    make_run("all/two")
    with pytest.raises(TuneError, match=r"`tune runs .*/all` lists the 2 in it"):
        records.read(tmp_path / "all")
    assert [folder.name for folder in records.find(tmp_path)] == ["one", "two"]


@pytest.mark.parametrize("damaged", ["{", "[]", "\x00\x01", ""])
def test_unreadable_files_are_reported(damaged, make_run):
    folder = make_run()
    for name in ("run.json", "data.json", "config.yaml"):
        (folder / name).write_text(damaged)
    run = records.read(folder)
    assert (run.facts, run.data, run.settings, run.state) == ({}, {}, {}, "killed")
    assert any("config.yaml" in problem for problem in run.problems)
    assert run.last("loss") == pytest.approx(2 / 12)


def test_secrets_in_settings_are_masked(make_run):
    folder = make_run()
    (folder / "config-2.yaml").write_text("hub:\n  hf_token: abcdef\n")
    assert records.read(folder).settings == {"hub.hf_token": REMOVED}
    assert json.loads((folder / "run.json").read_text())["state"] == "done"


@pytest.mark.slow
def test_starts_are_bounded(tmp_path):
    for step in range(0, 250):
        records.start(tmp_path, step)
    facts = json.loads((tmp_path / "run.json").read_text())
    assert [start["step"] for start in facts["starts"]] == [0, *range(150, 250)]
    assert facts["number_of_starts"] == 250


def test_values_are_those_of_the_exported_weights(make_run, tmp_path):
    """keep_best exported step 8 of 12; `grad_norm` was measured at all steps, `validation_loss` at 4, 8 and 12."""
    run = records.read(make_run(exported_step=8))
    assert run.exported_step == 8 and run.result("validation_loss") == (8, 2.1 / 8)
    assert run.result("loss") == (8, 2 / 8) and run.shown("loss") == "0.25 (step 8)"
    assert (run.last("loss"), run.last("step")) == (2 / 12, 12)
    assert records.read(make_run("odd", exported_step=7)).result("validation_loss") == (4, 2.1 / 4)
    early = records.read(make_run("early", exported_step=3))
    assert early.result("validation_loss")[0] is None and early.shown("validation_loss") == ""
    for state, name in (("failed", "b"), ("interrupted", "c")):  # nothing was exported
        stopped = records.read(make_run(name, state=state, exported_step=8))
        assert stopped.exported_step is None and stopped.result("loss") == (12, 2 / 12)
    plain = records.read(make_run("plain"))
    assert plain.exported_step == 12 and plain.result("loss") == (12, 2 / 12)


def test_last_weights_may_be_exported_although_there_is_a_best_checkpoint(make_run):
    """As when the loop changed frozen weights. Runs of earlier versions did not record the exported step."""
    for name, facts, step in (("last", {"exported_step": 12}, 12), ("earlier", {}, 8)):
        folder = make_run(name, **facts)
        for saved in (8, 12):
            (folder / f"checkpoints/step-{saved:08d}").mkdir(parents=True)
            (folder / f"checkpoints/step-{saved:08d}/state.json").write_text('{"best": {"step": 8}}')
        run = records.read(folder)
        assert run.best == 8 and run.exported_step == step and run.result("validation_loss") == (step, 2.1 / step)


def test_tail_without_the_exported_step_is_not_enough(make_run):
    folder = make_run(steps=200, exported_step=4)
    assert records.read(folder, tail=2000).result("validation_loss") == (4, 2.1 / 4)
    last = make_run("last", steps=200)
    assert len(records.read(last, tail=2000).columns["step"]) < 20


def test_end_records_the_exported_step(tmp_path):
    records.start(tmp_path, 0, recipe="mine", steps=3)
    records.end(tmp_path, None, 2)
    assert json.loads((tmp_path / "run.json").read_text())["exported_step"] == 2
    records.end(tmp_path, None)
    assert json.loads((tmp_path / "run.json").read_text())["exported_step"] is None
