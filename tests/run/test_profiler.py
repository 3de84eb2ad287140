import json
from pathlib import Path

import pytest
import torch
from helpers import run_processes

from tune import distributed
from tune.run import profile

TRACED = Path(__file__).with_name("traced.py")


class Recorder:
    def __init__(self, calls):
        self.calls, self.step = calls, 0

    def __enter__(self):
        self.calls.append(("start", self.step))

    def __exit__(self, *error):
        self.calls.append(("stop", self.step))

    def export_chrome_trace(self, path):
        Path(path).write_text('{"traceEvents": []}')


@pytest.mark.parametrize(
    ("start", "steps", "calls", "file"),
    [
        (2, 3, [("start", 2), ("stop", 4)], "steps-2-to-4.json"),
        (5, 3, [("start", 5), ("stop", 6)], "steps-5-to-7.json"),  # the run ends before
        (9, 1, [], None),
        (None, 1, [], None),
    ],
)
def test_steps_that_are_traced(start, steps, calls, file, monkeypatch, tmp_path):
    found = []
    recorder = Recorder(found)
    monkeypatch.setattr(torch.profiler, "profile", lambda **options: recorder)

    def batches():
        for recorder.step in range(1, 7):
            yield recorder.step, "batch"

    assert len(list(profile(batches(), tmp_path / "profile", distributed.init("cpu"), start, steps))) == 6
    assert found == calls
    assert [each.name for each in tmp_path.glob("profile/*")] == ([file] if file else [])


@pytest.mark.parametrize("hosts", ["one", "several"])
@pytest.mark.slow
def test_ranks_are_rows_of_one_timeline(hosts, tmp_path):
    run_processes(TRACED, 3, str(tmp_path / "profile"), hosts)
    (file,) = tmp_path.glob("profile/*")
    trace = json.loads(file.read_text())
    events = trace["traceEvents"]
    names = {each["pid"]: each["args"]["name"] for each in events if each["name"] == "process_name"}
    assert names == {0: "rank 0", 1: "rank 1", 2: "rank 2"}
    rows = {(each["pid"], each["tid"]) for each in events if each["name"] == "thread_name"}
    assert {(each["pid"], each["tid"]) for each in events if each["ph"] != "M"} == rows
    arrows = [each["id"] for each in events if each["ph"] == "s"]
    assert len(arrows) == len(set(arrows)) > 3
    # All begin what follows a barrier at nearly the same time, whatever their clocks say.
    after = {each["pid"]: each["ts"] for each in events if each["name"] == "after the barrier"}
    assert after.keys() == names.keys()
    assert max(after.values()) - min(after.values()) < 60e6  # microseconds; the clocks are hours apart
    doubts = [each["args"]["labels"] for each in events if each["name"] == "process_labels"]
    assert ["aligned" in each for each in doubts] == ([False] * 3 if hosts == "one" else [False, True, True])


def test_an_error_leaves_each_ranks_own_file(tmp_path):
    steps = profile(((step, "batch") for step in (1, 2)), tmp_path / "profile", distributed.init("cpu"), 1, 2)
    next(steps)
    steps.close()  # as the end of a loop does
    assert [each.name for each in tmp_path.glob("profile/*")] == ["steps-1-to-2.rank-00000.json"]
