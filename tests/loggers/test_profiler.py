from types import SimpleNamespace

import pytest
import torch

from tune.loggers import profile


class Recorder:
    def __init__(self, calls):
        self.calls, self.step = calls, 0

    def __enter__(self):
        self.calls.append(("start", self.step))

    def __exit__(self, *error):
        self.calls.append(("stop", self.step))

    def export_chrome_trace(self, path):
        self.calls.append(("written", path.rpartition("/")[2]))


@pytest.mark.parametrize(
    ("start", "steps", "calls"),
    [
        (2, 3, [("start", 2), ("stop", 4), ("written", "steps-2-to-4.json")]),
        (5, 3, [("start", 5), ("stop", 6), ("written", "steps-5-to-7.json")]),  # the run ends before
        (9, 1, []),
        (None, 1, []),
    ],
)
def test_steps_that_are_traced(start, steps, calls, monkeypatch, tmp_path):
    found = []
    recorder = Recorder(found)
    monkeypatch.setattr(torch.profiler, "profile", lambda **options: recorder)
    world = SimpleNamespace(is_main=True, device=torch.device("cpu"))

    def batches():
        for recorder.step in range(1, 7):
            yield recorder.step, "batch"

    assert len(list(profile(batches(), tmp_path / "profile", world, start, steps))) == 6
    assert found == calls
