"""The metrics of each step follow their definitions, on a fake clock and in a fake world."""

import contextlib
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
from omegaconf import OmegaConf

from tune.errors import TuneError
from tune.loggers.sinks import NonFatal, Sink, WeightsAndBiases
from tune.run import Run
from tune.run import training_run as module


class Kept(Sink):
    def __init__(self):
        self.values = []

    def metrics(self, step, values):
        self.values.append(values)


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands still until a test moves it."""
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(module.time, "perf_counter", lambda: clock.now)
    return clock


@pytest.fixture
def run(clock, monkeypatch, tmp_path):
    """The run of the second of four processes, on a device with a known peak."""
    monkeypatch.setattr(module, "peak_flops", lambda device: 1e6)
    monkeypatch.setattr(module.run_folder, "require_shared", lambda path, world: None)  # the other three do not exist
    world = SimpleNamespace(
        rank=1,
        data_rank=1,
        size=4,
        is_main=False,
        device=torch.device("cpu"),
        timeout=timedelta(hours=1),
        broadcast=lambda value: value,
        of_main=lambda make: make(),
        any=bool,
    )
    run = Run("test", world, str(tmp_path), settings=OmegaConf.create())
    run.sinks, run.flops_per_token = [Kept()], 50.0
    return run


@pytest.mark.parametrize(
    ("tracker", "package"),
    [
        ({"_component_": "tune.loggers.WeightsAndBiases", "project": "mine"}, "wandb"),
        ("tune.loggers.TensorBoard", "tensorboard"),
    ],
)
def test_missing_logger_is_reported_first(tracker, package, run, monkeypatch):
    monkeypatch.setattr("tune.loggers.sinks.find_spec", lambda name: None if name == package else object())
    with pytest.raises(TuneError, match=rf"{package} is not installed. pip install 'tune-recipes\[{package}\]'"):
        Run("test", run.world, settings=OmegaConf.create(), trackers=[tracker])


def test_messages_contain_no_secrets(run):
    run.sinks[0].message = (messages := []).append
    run.info("continued from https://me:password@host/run")
    assert messages == run.messages == ["continued from https://host/run"]


def test_rates_are_per_device_over_the_step_time(run, clock):
    def batches():
        for _ in range(2):
            clock.now += 3  # waiting for data
            yield "batch"

    for step, _ in run.steps(enumerate(batches(), 1), total=2):
        clock.now += 5
        with run.pause():
            clock.now += 1000  # validation
        batch = SimpleNamespace(num_tokens=6400, num_supervised=1600)
        run.log(step, batch, {"loss": 0.5, "validation_loss": None})
        clock.now += 2  # a checkpoint, which counts toward the next step
    for values, seconds, saving in zip(run.sinks[0].values, (8, 10), (0, 2), strict=True):
        assert values["loss"] == 0.5 and "validation_loss" not in values
        assert (values["tokens"], values["supervised_tokens"]) == (6400, 1600)
        assert values["step_seconds"] == pytest.approx(seconds)
        assert values["data_seconds"] == pytest.approx(3) and values["save_seconds"] == pytest.approx(saving)
        assert values["tokens_per_second"] == pytest.approx(6400 / 4 / seconds)
        assert values["supervised_tokens_per_second"] == pytest.approx(1600 / 4 / seconds)
        assert values["mfu"] == pytest.approx(6400 / 4 / seconds * 50 / 1e6)


@pytest.mark.parametrize(
    ("error", "exit_code"), [(None, 0), (RuntimeError, 1), (SystemExit, 1), (KeyboardInterrupt, 1)]
)
def test_sinks_are_closed_on_every_exit(run, error, exit_code):
    """W&B receives the exit code of the run."""
    calls, wandb = [], object.__new__(WeightsAndBiases)
    wandb.run = SimpleNamespace(finish=lambda exit_code: calls.append(exit_code))
    run.sinks = [NonFatal(wandb, print)]
    run.world.finish = lambda: calls.append("all processes end")
    with pytest.raises(error) if error else contextlib.nullcontext(), run:
        if error:
            raise error
    assert calls == ([exit_code] if error else ["all processes end", 0])


def test_step_without_supervised_tokens_is_reported(run, clock):
    run.sinks[0].message = (messages := []).append
    run.step_began, run.data_seconds = 0.0, 0.0
    for step, (supervised, metrics) in enumerate([(3, {}), (0, {"dead_groups": 2.0}), (0, {"loss": 0.0})], 1):
        clock.now += 1
        run.log(step, SimpleNamespace(num_tokens=10, num_supervised=supervised), metrics)
    assert messages == [
        "warning: nothing was learned in step 2: all groups are dead or were cut",
        "warning: nothing was learned in step 3: no token is supervised",
    ]


def test_metrics_that_become_nan_or_infinite_are_reported_once_each_time(run, clock):
    run.sinks[0].message = (messages := []).append
    run.step_began, run.data_seconds = 0.0, 0.0
    nan, inf = float("nan"), float("inf")
    values = [(1.0, 1.0), (nan, 1.0), (nan, inf), (1.0, 1.0), (nan, None)]
    for step, (general_kl, validation_loss) in enumerate(values, 1):
        clock.now += 1
        metrics = {"general_kl": general_kl, "validation_loss": validation_loss}
        run.log(step, SimpleNamespace(num_tokens=10, num_supervised=3), metrics)
    assert [message.partition(". ")[0] for message in messages] == [
        "warning: step 2: general_kl is nan",
        "warning: step 3: validation_loss is inf",
        "warning: step 5: general_kl is nan",
    ]
    assert ["general_kl" in logged for logged in run.sinks[0].values] == [True, False, False, True, False]
    clock.now += 1
    run.log(6, SimpleNamespace(num_tokens=10, num_supervised=0), {"router_loss": nan})
    assert not any("router_loss" in message for message in messages)  # a mean over no tokens


@pytest.mark.parametrize(
    ("tp", "cp", "ep", "warned"),
    [
        (4, 1, 1, [("tp 4", "parallel.tp to a divisor of 2")]),
        (1, 4, 1, [("cp 4", "parallel.cp to a divisor of 2")]),
        (1, 1, 4, [("ep 4", "parallel.ep to a divisor of 2")]),
        (2, 2, 1, [("cp 2", "it to 1")]),
        (2, 1, 2, [("ep 2", "it to 1")]),
        (1, 2, 1, []),
        (1, 1, 2, []),
        (1, 1, 1, []),  # pipeline stages may be on other nodes
        (2, 1, 1, []),
    ],
)
def test_axes_that_communicate_within_blocks_across_nodes(tp, cp, ep, warned):
    expected = [f"{axis} spans nodes of 2 processes, whose links are slow. Set {most}" for axis, most in warned]
    assert [*module.over_slow_links({"tp": tp, "cp": cp}, ep, here=2)] == expected


def test_last_step_is_saved_when_data_ends_early(run):
    saved = []

    def save(number, wait):
        saved.append(number)

    waits, ends = (lambda: max([2, *saved])), (lambda: None)
    run.checkpointer = SimpleNamespace(wait=waits, save=save, finish=ends, unwritten="", updates=3)
    run.step, run.total = 3, 5
    run.finish()
    run.finish()
    assert saved == [3]


def test_interrupted_run_without_a_checkpointer_reports_nothing_saved(run):
    run.step, run.interrupt = 3, SimpleNamespace(requested=True)
    with pytest.raises(SystemExit):
        run.finish()
    assert "step 3" in run.messages[-1] and run.again not in run.messages[-1]


def test_step_that_skipped_its_save_is_saved_on_interrupt(run, monkeypatch):
    """`continue` in a copied loop skips the rest of the iteration, including `checkpointer.step`."""
    saved = []

    def save(number, wait=False):
        saved.append(number)

    waits = lambda: max([0, *saved])  # noqa: E731
    checkpointer = SimpleNamespace(
        resume=lambda how: 0, unmeasured=False, wait=waits, save=save, is_over=lambda: False, keep=None
    )
    with pytest.raises(SystemExit) as end:
        for number, _ in run.steps([(1, "a"), (2, "b"), (3, "c")], checkpointer):
            if number == 2:
                run.interrupt = SimpleNamespace(requested=True)
            continue
    assert end.value.code == 130 and saved == [2]


@pytest.mark.parametrize(
    ("settings", "folder"),
    [
        ({"place": "PATH", "output_dir": None}, "output_dir=PATH"),
        ({"seed": 1, "place": "PATH"}, "place=PATH"),
        ({"seed": 1}, "the folder PATH"),
    ],
)
def test_way_back_names_the_setting_of_the_run_folder(settings, folder, run, tmp_path):
    path = str(tmp_path / "other")
    settings = {name: path if value == "PATH" else value for name, value in settings.items()}
    world = SimpleNamespace(**vars(run.world))
    again = Run("test", world, path, settings=OmegaConf.create(settings)).again
    assert again.split(" with ")[1].split(" resume")[0] == folder.replace("PATH", path)


def test_measurements_after_the_last_step_are_left_to_finish():
    """A finished run that is started again would otherwise make them twice."""
    made = []
    run = object.__new__(Run)
    run.evaluator = SimpleNamespace(due=lambda step: made.append(step) or {"validation_loss": 1.0})
    run.checkpointer = SimpleNamespace(unmeasured=True, step=lambda *_: None)
    run.info = run.record = lambda *_: None
    for run.step, run.total in ((2, 4), (4, 4)):
        run._measure_before()
    assert made == [2]
