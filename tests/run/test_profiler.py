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
        (5, 3, [("start", 5), ("stop", 6)], "steps-5-to-7.json"),  # the run ends early
        (9, 1, [], None),
        (None, 1, [], None),
    ],
)
def test_traced_steps(start, steps, calls, file, monkeypatch, tmp_path):
    events = []
    recorder = Recorder(events)
    monkeypatch.setattr(torch.profiler, "profile", lambda **options: recorder)

    def batches():
        for recorder.step in range(1, 7):
            yield recorder.step, "batch"

    assert len(list(profile(batches(), tmp_path / "profile", distributed.init("cpu"), start, steps))) == 6
    assert events == calls
    assert [path.name for path in tmp_path.glob("profile/*")] == ([file] if file else [])


@pytest.mark.parametrize("hosts", ["one", "several"])
@pytest.mark.slow
def test_ranks_share_one_timeline(hosts, tmp_path):
    run_processes(TRACED, 3, str(tmp_path / "profile"), hosts)
    (file,) = tmp_path.glob("profile/*")
    trace = json.loads(file.read_text())
    events = trace["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names == {0: "rank 0", 1: "rank 1", 2: "rank 2"}
    rows = {(event["pid"], event["tid"]) for event in events if event["name"] == "thread_name"}
    assert {(event["pid"], event["tid"]) for event in events if event["ph"] != "M"} == rows
    arrows = [event["id"] for event in events if event["ph"] == "s"]
    assert len(arrows) == len(set(arrows)) > 3
    # All ranks start the event after a barrier at nearly the same time, whatever their clocks show.
    after = {event["pid"]: event["ts"] for event in events if event["name"] == "after the barrier"}
    assert after.keys() == names.keys()
    assert max(after.values()) - min(after.values()) < 60e6  # microseconds; the clocks are hours apart
    doubts = [event["args"]["labels"] for event in events if event["name"] == "process_labels"]
    assert ["aligned" in event for event in doubts] == ([False] * 3 if hosts == "one" else [False, True, True])


def test_error_leaves_the_trace_of_each_rank(tmp_path):
    steps = profile(((step, "batch") for step in (1, 2)), tmp_path / "profile", distributed.init("cpu"), 1, 2)
    next(steps)
    steps.close()  # as at the end of a loop
    assert [path.name for path in tmp_path.glob("profile/*")] == ["steps-1-to-2.rank-00000.json"]
