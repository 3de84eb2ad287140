"""MLflow and Trackio, run locally, and the common behavior of all trackers in `trackers`."""

import json
import sys
import types
from typing import ClassVar

import full_finetune
import pytest

from tune import config, records
from tune.errors import TuneError
from tune.loggers import MLflow, Sink, Trackio
from tune.loggers.sinks import NonFatal

SETTINGS = {"seed": 3, "optimizer": {"lr": 1e-3, "betas": [0.9, 0.95]}, "adapter": {}, "path": "x" * 900}
VALUES = {"loss": 1 / 3, "validation_loss/my chats": 2.0, "odd#name": 1.0}


@pytest.fixture
def tracking(tmp_path, monkeypatch):
    """Use MLflow's file store, which needs neither a server nor a database."""
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    uri = (tmp_path / "mlruns").as_uri()
    return uri, mlflow.MlflowClient(uri)


@pytest.mark.slow
def test_mlflow(tracking, tmp_path):
    uri, client = tracking
    folder = tmp_path / "run"
    folder.mkdir()
    for start in (0, 2):  # the second start resumes after step 2
        sink = MLflow("tests", uri=uri)
        sink.open(folder, SETTINGS | {"seed": 3 + start})
        records.start(folder, start)
        sink.start(start, 4)
        for step in (start + 1, start + 2):
            sink.metrics(step, {name: value * step for name, value in VALUES.items()})
        sink.close()
    (run,) = client.search_runs([client.get_experiment_by_name("tests").experiment_id])
    assert run.info.run_name == "run" and run.info.status == "FINISHED"
    assert run.data.params == {
        "seed": "3", "optimizer.lr": "0.001", "optimizer.betas": "[0.9, 0.95]", "adapter": "{}", "path": "x" * 500
    }  # fmt: skip
    losses = client.get_metric_history(run.info.run_id, "loss")
    assert sorted((metric.step, metric.value) for metric in losses) == [(step, step / 3) for step in (1, 2, 3, 4)]
    assert run.data.metrics["validation_loss/my chats"] == 8.0 and run.data.metrics["odd_name"] == 4.0
    assert records.identity(folder) in run.data.tags.values()


@pytest.mark.slow
def test_mlflow_distinguishes_runs_of_one_name_and_records_their_end(tracking, tmp_path):
    uri, client = tracking
    for parent in ("a", "b"):
        (folder := tmp_path / parent / "test").mkdir(parents=True)
        sink = MLflow("tests", name="mine", uri=uri)
        sink.open(folder, {})
        try:
            if parent == "b":
                raise KeyboardInterrupt
        except KeyboardInterrupt:
            sink.close()
        else:
            sink.close()
    runs = client.search_runs([client.get_experiment_by_name("tests").experiment_id])
    assert sorted((run.info.run_name, run.info.status) for run in runs) == [("mine", "FAILED"), ("mine", "FINISHED")]


def test_trackio(tmp_path, monkeypatch):
    pytest.importorskip("trackio")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    for name in [name for name in sys.modules if name.partition(".")[0] == "trackio"]:
        monkeypatch.delitem(sys.modules, name)  # it reads its folder at import
    folder = tmp_path / "run"
    folder.mkdir()
    for start in (0, 2):
        sink = Trackio("tests")
        sink.open(folder, SETTINGS)
        records.start(folder, start)
        for step in (start + 1, start + 2):
            sink.metrics(step, {"loss": step / 3})
        sink.close()
    import trackio
    from trackio.sqlite_storage import SQLiteStorage

    (run,) = trackio.Api().runs("tests")
    assert run.name == f"run-{records.identity(folder)[:8]}" and run.config["seed"] == 3
    logged = SQLiteStorage.get_logs("tests", run.name)
    assert [(row["step"], row["loss"]) for row in logged] == [(step, pytest.approx(step / 3)) for step in (1, 2, 3, 4)]


@pytest.mark.parametrize("sink", [lambda: MLflow("tests"), lambda: Trackio("tests")], ids=["mlflow", "trackio"])
def test_failing_service_is_disabled(sink, tmp_path, monkeypatch):
    def fails(*args, **kwargs):
        raise ConnectionError("no network to https://me:password@host")

    for name in ("mlflow", "mlflow.entities", "trackio"):
        module = types.SimpleNamespace(MlflowClient=fails, init=fails, Param=None, Metric=None, __spec__=object())
        monkeypatch.setitem(sys.modules, name, module)
    tracker = NonFatal(sink(), print)
    with pytest.warns(UserWarning, match="no network to https://host"):
        tracker.open(tmp_path, {})
    tracker.start(0, 1)
    tracker.metrics(1, VALUES)
    tracker.close()


class Kept(Sink):
    """Records all calls."""

    kept: ClassVar[list] = []

    def __init__(self, label="none"):
        self.label = label

    def open(self, folder, settings):
        self.kept.append((self.label, folder, settings))

    def message(self, text):
        self.kept.append(text)

    def metrics(self, step, values):
        self.kept.append((step, values["loss"]))

    def close(self):
        self.kept.append("closed")


def settings(checkpoint, chats, *more):
    return [
        f"model.path={checkpoint}", f"dataset.path={chats}", "device=cpu", "compute.dtype=fp32", "max_seq_len=128",
        "max_steps=1", "checkpointer.every=null", *more,
    ]  # fmt: skip


@pytest.mark.slow
def test_run_opens_its_trackers_without_sending_secrets(checkpoint, chats, tmp_path, monkeypatch):
    monkeypatch.setattr(Kept, "kept", [])
    trackers = f"trackers=[{__name__}.Kept,{{_component_: {__name__}.Kept, label: second}}]"
    overrides = settings(
        checkpoint, chats, trackers, f"output_dir={tmp_path / 'run'}", "optimizer._component_=test_secrets.sgd",
        "optimizer.api_key=sesame",
    )  # fmt: skip
    full_finetune.main(config.load("full_finetune", overrides))
    opened = [call for call in Kept.kept if isinstance(call, tuple) and len(call) == 3]
    assert [(label, folder) for label, folder, _ in opened] == [
        ("none", tmp_path / "run"),
        ("second", tmp_path / "run"),
    ]
    assert opened[0][2]["max_steps"] == 1 and "sesame" not in repr(Kept.kept)
    logged = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert Kept.kept.count((1, logged["loss"])) == Kept.kept.count("closed") == 2
    assert any(isinstance(call, str) and call.startswith("done") for call in Kept.kept)


class Unclosable(Kept):
    def close(self):
        raise ConnectionError("no network")


@pytest.mark.slow
def test_tracker_that_cannot_be_closed_ends_no_run(checkpoint, chats, tmp_path, monkeypatch):
    """log.txt is still open for its warning, and the other trackers are closed."""
    monkeypatch.setattr(Kept, "kept", [])
    trackers = f"trackers=[{__name__}.Kept,{__name__}.Unclosable]"
    overrides = settings(checkpoint, chats, trackers, f"output_dir={tmp_path / 'run'}")
    with pytest.warns(UserWarning, match="Unclosable.*no network"):
        full_finetune.main(config.load("full_finetune", overrides))
    assert "Unclosable" in (tmp_path / "run" / "log.txt").read_text() and Kept.kept[-1] == "closed"


def no_sink():
    """A component that does not return a sink."""
    return "a text"


@pytest.mark.parametrize(
    ("trackers", "message"),
    [
        ("[tune.loggers.MLflow]", "experiment"),
        ("[{_component_: tune.loggers.MLflow, experiment: 3}]", "experiment"),
        ("[{_component_: tune.loggers.MLflow, experiment: a, api_key: b}]", "api_key"),
        ("[{_component_: tune.loggers.Trackio}]", "project"),
        ("[tune.loggers.Wandb]", "Wandb"),
        ("[nowhere.Tracker]", "nowhere"),
        (f"[{__name__}.no_sink]", "str"),
        ("[3]", "3"),
        ("[{experiment: a}]", "_component_"),
        ("mlflow", "trackers"),
        ("{a: b}", "trackers"),
    ],
)
def test_invalid_trackers_end_a_run_before_it_starts(trackers, message, checkpoint, chats, tmp_path, monkeypatch):
    monkeypatch.setattr("tune.loggers.sinks.find_spec", lambda name: object())
    with pytest.raises(TuneError, match=r"(?s)trackers.*") as error:
        overrides = settings(checkpoint, chats, f"trackers={trackers}", f"output_dir={tmp_path / 'run'}")
        full_finetune.main(config.load("full_finetune", overrides))
    assert message in str(error.value) and not (tmp_path / "run" / "log.txt").exists()


@pytest.mark.parametrize(("tracker", "package"), [("MLflow, experiment", "mlflow"), ("Trackio, project", "trackio")])
def test_missing_tracker_is_reported(tracker, package, checkpoint, chats, tmp_path, monkeypatch):
    monkeypatch.setattr("tune.loggers.sinks.find_spec", lambda name: None)
    with pytest.raises(TuneError, match=rf"trackers\[0\]: {package} is not installed.*\[{package}\]"):
        setting = f"trackers=[{{_component_: tune.loggers.{tracker}: mine}}]"
        full_finetune.main(config.load("full_finetune", settings(checkpoint, chats, setting)))


@pytest.mark.slow
def test_console_among_the_trackers_replaces_the_usual_one(checkpoint, chats, tmp_path, capsys):
    def lines_of(name, *more):
        overrides = settings(checkpoint, chats, "max_steps=4", "epochs=2", *more, f"output_dir={tmp_path / name}")
        full_finetune.main(config.load("full_finetune", overrides))
        return [line.split("/")[0] for line in capsys.readouterr().out.splitlines() if line.startswith("step ")]

    assert lines_of("usual") == ["step 1", "step 2", "step 3", "step 4"]
    every = "{_component_: tune.loggers.Console, every: 3}"
    assert lines_of("fewer", f"trackers=[{every}]") == ["step 3"]
    assert lines_of("both", f"trackers=[{every},{{_component_: tune.loggers.Console, every: 2}}]") == [
        "step 2",
        "step 4",
    ]
    for name in ("usual", "fewer", "both"):  # each step is in the file
        assert len((tmp_path / name / "metrics.jsonl").read_text().splitlines()) == 4
