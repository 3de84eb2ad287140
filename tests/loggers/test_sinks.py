import errno
import io
import json
import resource
import sys
from types import SimpleNamespace

import pytest

from tune import records
from tune.loggers.sinks import Console, Files, NonFatal, Sink, TensorBoard, WeightsAndBiases, lines_after

VALUES = {"loss": 1 / 3, "lr": 1e-5, "grad_norm": 2.0, "tokens_per_second": 1234.5, "peak_memory_gib": 0.5}


def written(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_metrics_keep_full_precision(tmp_path):
    sink = Files(tmp_path)
    sink.start(0, 1)
    sink.metrics(1, VALUES)
    (line,) = written(tmp_path / "metrics.jsonl")
    assert line == {"step": 1, "time": line["time"], **VALUES}


def test_resumed_run_has_each_step_once(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps({"step": step, "loss": 1.0}) + "\n" for step in range(1, 6)) + '{"step": 6, "lo')
    sink = Files(path.parent)
    sink.start(3, 10)
    sink.metrics(4, {"loss": 2.0})
    assert [(line["step"], line["loss"]) for line in written(path)] == [(1, 1.0), (2, 1.0), (3, 1.0), (4, 2.0)]


def test_files_are_closed_even_before_the_first_step(tmp_path):
    """After an error between opening the folder and the first step: nothing may hide that error."""
    sink = Files(tmp_path)
    sink.message("opened")
    sink.close()
    assert (tmp_path / "log.txt").read_text() == "opened\n"


def test_lines_that_do_not_fit_on_a_full_disk_are_written_later(tmp_path):
    sink, (_, hard) = Files(tmp_path), resource.getrlimit(resource.RLIMIT_FSIZE)
    sink.message("one")
    resource.setrlimit(resource.RLIMIT_FSIZE, (6, hard))  # bytes in a file
    try:
        sink.message("two")
        sink.metrics(1, VALUES)
        sink.append("samples.jsonl", "a", "b" * 9)
        assert (tmp_path / "log.txt").read_text() == "one\ntw"
        for part in ("1 lines of log.txt", "1 lines of metrics.jsonl", "lines of samples.jsonl", "File too large"):
            assert part in sink.unwritten()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    sink.message("three")
    assert sink.unwritten() == ""
    assert (tmp_path / "log.txt").read_text() == "one\ntwo\nthree\n"
    assert [line["step"] for line in written(tmp_path / "metrics.jsonl")] == [1]
    assert (tmp_path / "samples.jsonl").read_text() == "a\nbbbbbbbbb\n"
    sink.close()


def test_console_prints_plain_lines(capsys):
    console = Console(every=2)
    console.start(0, 4)
    for step in range(1, 5):
        console.metrics(step, VALUES | ({"slowest_rank": 3.0, "slowest_excess": 0.24} if step == 4 else {}))
    console.close()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" | ")[0] for line in lines] == ["step 2/4", "step 4/4"]
    assert "loss 0.3333" in lines[0] and "1,234 tokens/s" in lines[0] and "0.50 GiB" in lines[0]
    assert "rank" not in lines[0] and lines[1].endswith("0.50 GiB | rank 3 takes 24% longer")


class Disk(io.RawIOBase):
    """A file on a disk that can be full."""

    taken, is_full = b"", True

    def writable(self):
        return True

    def write(self, data):
        if self.is_full:
            raise OSError(errno.ENOSPC, "No space left on device")
        self.taken += bytes(data)
        return len(data)


def test_console_output_to_a_file_on_a_full_disk(monkeypatch):
    disk = Disk()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(io.BufferedWriter(disk), encoding="utf-8"))
    console = Console(every=1)
    console.message("one")
    disk.is_full = False
    console.message("two")
    assert disk.taken == b"one\ntwo\n"


def test_console_on_a_terminal_has_a_progress_bar(monkeypatch, capsys):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    console = Console(every=1)
    console.start(1, 3)
    console.metrics(2, VALUES)
    console.message("[not markup]")
    console.close()
    output = capsys.readouterr().out
    assert "2/3" in output and "loss 0.3333" in output and "[not markup]" in output


class Broken(Sink):
    calls = 0

    def metrics(self, step, values):
        Broken.calls += 1
        raise ConnectionError("no network to https://me:password@host")


def test_failing_sink_warns_once_and_is_disabled():
    sink = NonFatal(Broken(), print)
    with pytest.warns(
        UserWarning, match="Broken is turned off after an error: ConnectionError: no network to https://host"
    ):
        sink.metrics(1, VALUES)
    sink.metrics(2, VALUES)
    sink.close()
    assert Broken.calls == 1


class Careless(Sink):
    """Changes what it gets, and exits."""

    closed = 0

    def open(self, folder, settings):
        settings["optimizer"].clear()

    def metrics(self, step, values):
        values.clear()
        sys.exit("bye")

    def close(self):
        self.closed += 1
        raise ConnectionError("no network")


def test_sink_changes_nothing_for_others_and_is_closed_after_a_failure(tmp_path):
    careless, settings, values = Careless(), {"optimizer": {"lr": 1}}, dict(VALUES)
    sink = NonFatal(careless, print)
    sink.open(tmp_path, settings)
    with pytest.warns(UserWarning, match="SystemExit: bye"):
        sink.metrics(1, values)
    sink.close()
    assert settings == {"optimizer": {"lr": 1}} and values == VALUES and careless.closed == 1


def test_sink_that_cannot_be_opened_warns(tmp_path):
    class Unavailable(Broken):
        def open(self, folder, settings):
            raise ConnectionError("no network")

    sink = NonFatal(Unavailable(), print)
    with pytest.warns(UserWarning, match="Unavailable is turned off"):
        sink.open(tmp_path, {})
    sink.metrics(1, VALUES)


def test_tensorboard(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for start in (0, 1):  # the second start resumes after step 1 and logs step 2 again
        sink = NonFatal(TensorBoard(), print)
        sink.open(tmp_path, {})
        sink.start(start, 4)
        for step in range(start + 1, 4 - start):
            sink.metrics(step, {"loss": step + start / 3})
        sink.close()
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(1, 1), (2, pytest.approx(2 + 1 / 3))]


def test_weights_and_biases(tmp_path, monkeypatch):
    """Offline: data that would be sent is written to the run folder."""
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    sink = WeightsAndBiases("tests")
    sink.open(tmp_path, {"seed": 3})
    sink.metrics(1, VALUES)
    assert sink.run.name == tmp_path.name
    assert sink.run.config["seed"] == 3
    sink.close()
    assert list(tmp_path.glob("wandb/offline-run-*/*.wandb"))


def test_runs_with_the_same_name_are_distinct(tmp_path, monkeypatch):
    """Folders with the same last name get different ids, which a resumed run keeps."""
    calls = []
    init = SimpleNamespace(init=lambda **settings: calls.append(settings), __spec__=object())
    monkeypatch.setitem(sys.modules, "wandb", init)
    for parent in ("a", "b", "a"):
        (folder := tmp_path / parent / "test").mkdir(parents=True, exist_ok=True)
        WeightsAndBiases("tests").open(folder, {})
        records.start(folder, 0)
    first, second, again = [settings["id"] for settings in calls]
    assert first == again != second and {settings["name"] for settings in calls} == {"test"}


def test_resumed_file_keeps_whole_lines_with_any_text(tmp_path):
    """A killed process leaves part of a line, which may end like a whole one; texts contain other separators."""
    samples = tmp_path / "samples.jsonl"
    whole = [json.dumps({"step": step, "text": "a\u2028b\x85c"}, ensure_ascii=False) + "\n" for step in (1, 2)]
    samples.write_text("".join(whole) + '{"step": 3, "row": {"text": ""}', encoding="utf-8")
    sink = Files(tmp_path)
    sink.start(2, 5)
    sink.close()
    assert samples.read_text(encoding="utf-8") == "".join(whole)


def test_long_file_is_resumed_without_reading_all_of_it(tmp_path, monkeypatch):
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text("".join(json.dumps({"step": step}) + "\n" for step in range(1000)))
    before = metrics.read_bytes()
    read = []
    json_object = records.json_object
    monkeypatch.setattr(records, "json_object", lambda line: read.append(line) or json_object(line))
    end, steps = lines_after(metrics, 996)
    assert steps == [997, 998, 999] and len(read) == 4
    assert json_object(before[:end].splitlines()[-1]) == {"step": 996}
    assert lines_after(metrics, 999) == (len(before), [])
    assert lines_after(metrics, 0) == (0, [*range(1000)])  # from the beginning: step 0 is logged again too
    assert lines_after(tmp_path / "nowhere", 3) == (0, [])
