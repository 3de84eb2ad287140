import contextlib
import errno
import io
import json
import math
import pathlib
import pickle
import shutil
import threading
import uuid

import pytest
import torch
import torch.distributed.checkpoint as dcp
from helpers import HANGS, run_processes
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import MetadataIndex
from torchao import optim as low_bit

from tune import distributed
from tune.checkpointers import Checkpointer, checkpointer
from tune.checkpointers.disk import sampled_digest
from tune.errors import TuneError


class Position:
    """A small state: the current step."""

    def __init__(self, step=0):
        self.step = step

    def state_dict(self):
        return {"step": self.step}

    def load_state_dict(self, state):
        self.step = state["step"]


def make(folder, optimizer_class=torch.optim.AdamW, size=3, groups=1, **options):
    torch.manual_seed(0)
    model = torch.nn.Linear(size, size)
    parameters = list(model.parameters())
    optimizer = optimizer_class([{"params": parameters[index::groups]} for index in range(groups)])
    return Checkpointer(
        folder,
        distributed.init("cpu"),
        model=model,
        optimizer=optimizer,
        schedule=Position(),
        data=Position(),
        **options,
    )


def train(checkpointer, step):
    checkpointer.model(torch.ones(checkpointer.model.in_features)).square().sum().backward()
    checkpointer.optimizer.step()
    checkpointer.optimizer.zero_grad()
    checkpointer.small["data"].step = step


@pytest.mark.parametrize("async_", [False, True])
def test_saved_and_restored(tmp_path, async_):
    first = make(tmp_path, every=2, async_=async_)
    for step in (1, 2, 3):
        train(first, step)
        first.step(step)
        if step == 2:
            saved = first.model.weight.clone()
    first.wait()
    second = make(tmp_path)
    assert second.resume("auto") == 2
    assert torch.equal(second.model.weight, saved) and second.small["data"].step == 2
    train(second, 3)
    assert torch.equal(second.model.weight, first.model.weight)


def test_ray_is_notified_of_checkpoints_on_shared_storage(tmp_path, monkeypatch):
    reports = []
    monkeypatch.setattr(checkpointer, "is_ray_worker", lambda: True)
    monkeypatch.setattr(checkpointer, "report", lambda step, metrics, *_: reports.append((step, metrics)))
    training = make(tmp_path / "checkpoints", every=1)
    for step in (1, 2, 3):
        train(training, step)
        if step == 3:  # at the end, a step is saved before it is measured
            training.save(step, wait=True)
        training.step(step, {"loss": step / 2})
    training.wait()
    (tmp_path / checkpointer.STORED).touch()  # from here on, each node uploads from its own disk
    train(training, 4)
    training.step(4)
    training.wait()
    assert reports == [(1, {"loss": 0.5}), (2, {"loss": 1.0}), (3, {"loss": 1.5})]


class Average(Position):
    """A nested state with tensors and a number."""

    def __init__(self, names=("a", "b")):
        self.tensors = {name: torch.zeros(2, dtype=torch.float64) for name in names}
        self.step = 0

    def state_dict(self):
        return {"tensors": self.tensors, "numbers": {"step": self.step}}

    def load_state_dict(self, state):
        self.tensors, self.step = state["tensors"], state["numbers"]["step"]


def test_folders_with_other_names_are_left_alone(tmp_path):
    first = make(tmp_path, every=1, keep=1, async_=False)
    (tmp_path / "step-junk").mkdir()
    for step in (1, 2):
        train(first, step)
        first.step(step)
        if step == 1:
            for name in ("step-mine", "step-00000001-good"):
                shutil.copytree(tmp_path / "step-00000001", tmp_path / name)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["step-00000001-good", "step-00000002", "step-junk", "step-mine"]
    assert make(tmp_path, every=1).resume("auto") == 2
    assert make(tmp_path / "new", every=1).resume(str(tmp_path / "step-mine")) == 1


@pytest.mark.parametrize("async_", [False, True])
def test_checkpoint_of_another_training_is_not_replaced(tmp_path, async_):
    first, messages = make(tmp_path), []
    train(first, 3)
    first.save(3, wait=True)
    other = make(tmp_path, async_=async_, tell=messages.append)
    train(other, 3)
    other.save(3, wait=True)
    assert "step-00000003 is there" in messages[0] and "space" not in messages[0]
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000003"]
    with pytest.raises(TuneError, match="another training"):
        make(tmp_path, async_=async_, on_error="stop").save(3, wait=True)
    (tmp_path / "file").touch()
    with pytest.raises(TuneError, match=r"folder: .*file"):
        make(tmp_path / "file")


@pytest.mark.parametrize("async_", [False, True])
def test_custom_state_is_saved_and_restored(tmp_path, async_):
    def with_average(*names):
        average = Average(names)
        return average, make(tmp_path, async_=async_, extra={"average": average, "counter": Position()})

    average, first = with_average("a", "b")
    train(first, 1)
    first.small["counter"].step = 7
    average.tensors["b"] += torch.tensor([1 / 3, 2.0], dtype=torch.float64)
    average.step = 5
    first.save(1)
    average.tensors["b"] += 1  # training continues during the write
    average.step = first.small["counter"].step = 100
    first.wait()
    average, second = with_average("a", "b")
    assert second.resume("auto") == 1
    assert average.tensors["b"].tolist() == [1 / 3, 2.0] and average.tensors["a"].tolist() == [0.0, 0.0]
    assert (average.step, second.small["counter"].step) == (5, 7)
    with pytest.raises(TuneError, match=r"has a different state:\n  not known: average\.tensors\.b"):
        with_average("a")[1].resume("auto")
    with pytest.raises(TuneError, match=r"has a different state:\n  missing: average\.tensors\.c"):
        with_average("a", "b", "c")[1].resume("auto")
    with pytest.raises(TuneError, match="has states of average, counter, data, schedule, this run of data, schedule"):
        make(tmp_path).resume("auto")


@pytest.mark.parametrize("async_", [False, True])
def test_another_process_may_create_the_folder_first(tmp_path, monkeypatch, async_):
    """Each process creates the folder if it is missing: rank 0 must not require being the first."""
    attempt = uuid.uuid4()
    monkeypatch.setattr(uuid, "uuid4", lambda: attempt)
    (tmp_path / f".step-00000001.{attempt.hex[:8]}").mkdir()
    checkpointer = make(tmp_path, async_=async_)
    train(checkpointer, 1)
    checkpointer.save(1)
    checkpointer.wait()
    assert checkpointer.newest() == tmp_path / "step-00000001"


@pytest.mark.parametrize("async_", [False, True])
@pytest.mark.parametrize("optimizer_class", [low_bit.AdamW8bit, low_bit.AdamW4bit, low_bit.AdamWFp8])
def test_low_bit_optimizer_states_are_saved_unchanged(tmp_path, optimizer_class, async_):
    with torch.compiler.set_stance("force_eager"):
        first = make(tmp_path, optimizer_class, size=64, async_=async_)
        for step in (1, 2, 3):
            train(first, step)  # training continues while the second step is written
            if step == 2:
                saved = inner(first)
                first.save(2)
        first.wait()
        second = make(tmp_path, optimizer_class, size=64)
        assert second.resume("auto") == 2
        torch.testing.assert_close(inner(second), saved, rtol=0, atol=0)
        train(second, 3)
        torch.testing.assert_close(inner(second), inner(first), rtol=0, atol=0)
        assert torch.equal(second.model.weight, first.model.weight)


def inner(checkpointer):
    """Return copies of the codes and scales of both moments of the weight."""
    state = checkpointer.optimizer.state[checkpointer.model.weight]
    moments = {name: state[name] for name in ("exp_avg", "exp_avg_sq")}
    return {
        f"{name}.{part}": getattr(moment, part).clone()
        for name, moment in moments.items()
        for part in moment.__tensor_flatten__()[0]
    }


class Code:
    """An object that creates a file when it is unpickled."""

    def __init__(self, file):
        self.file = file

    def __reduce__(self):
        return pathlib.Path.touch, (self.file,)


def put_into_metadata(checkpoint, code):
    file = checkpoint / ".metadata"
    metadata = pickle.loads(file.read_bytes())
    metadata.planner_data["code"] = code
    file.write_bytes(pickle.dumps(metadata))


def put_instead_of_metadata(checkpoint, code):
    (checkpoint / ".metadata").write_bytes(pickle.dumps(code))


def put_for_one_rank(checkpoint, code):
    """Write the file that DCP reads when it cannot read the global metadata."""
    (checkpoint / ".metadata").write_bytes(b"")
    (checkpoint / "__0.metadata").write_bytes(pickle.dumps(code))


def put_into_values(checkpoint, code):
    """Replace an optimizer's number, which is not a tensor."""
    data, metadata = next(checkpoint.glob("*.distcp")), pickle.loads((checkpoint / ".metadata").read_bytes())
    place = metadata.storage_data[MetadataIndex("optimizer.weight.count")]
    content = io.BytesIO()
    torch.save(code, content)
    place.offset, place.length = data.stat().st_size, len(content.getvalue())
    with data.open("ab") as file:
        file.write(content.getvalue())
    (checkpoint / ".metadata").write_bytes(pickle.dumps(metadata))


class CountingInState(torch.optim.SGD):
    """Keeps a plain number for each parameter."""

    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["count"] = self.state[parameter].get("count", 0) + 1


@pytest.mark.parametrize("harm", ["truncated", "changed", "a bit", "missing", "digests"])
def test_damaged_checkpoint_is_set_aside_and_the_previous_one_is_used(tmp_path, harm):
    first = make(tmp_path, size=400, every=1, keep=3, async_=False)
    for step in (1, 2, 3):
        train(first, step)
        first.step(step)
    file = next((tmp_path / "step-00000003").glob("*.distcp"))
    content = bytearray(file.read_bytes())
    match harm:
        case "truncated":
            file.write_bytes(file.read_bytes()[:-1])
        case "changed":
            file.write_bytes(bytes(len(file.read_bytes())))
        case "a bit":  # outside the samples that earlier versions computed digests of
            at = next(
                at
                for at in range(len(content))
                if all(at - len(content) * i // 64 not in range(4096) for i in range(64))
            )
            content[at] ^= 1
            file.write_bytes(content)
        case "missing":
            file.unlink()
        case "digests":
            (tmp_path / "step-00000003" / "digests.json").write_text('{"a')
    messages = []
    with pytest.raises(TuneError, match=r"step-00000003 is damaged: .* Use an earlier checkpoint"):
        make(tmp_path, size=400).resume(str(tmp_path / "step-00000003"))
    again = make(tmp_path, size=400, every=1, async_=False, tell=messages.append)
    assert again.resume("auto") == 2
    what = "digests.json cannot be read" if harm == "digests" else file.name
    assert what in messages[0] and "is damaged" in messages[0] and len(messages) == 1
    train(again, 3)
    again.step(3)  # replaces the damaged one
    assert make(tmp_path, size=400).resume("auto") == 3
    assert len([*tmp_path.glob("damaged-step-00000003.*")]) == 1


TWO = """\
import json, sys
from pathlib import Path
import torch
from torch.distributed.fsdp import fully_shard
from tune import distributed
from tune.checkpointers import Checkpointer
from tune.errors import TuneError

world = distributed.init("cpu")
folder = Path(sys.argv[1])
def make(**options):
    model = fully_shard(torch.nn.Linear(400, 400), mesh=world.shards)
    optimizer = torch.optim.SGD(model.parameters())
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    parts = {"model": model, "optimizer": optimizer, "schedule": schedule, "data": schedule}
    return Checkpointer(folder, world, **parts, **{"every": 1, **options})
for step in (1, 2):
    make().save(step, wait=True)
if world.is_main:
    names = {*json.loads((folder / "step-00000002/digests.json").read_text())}
    assert {".metadata", "state.json", "__0_0.distcp", "__1_0.distcp"} <= names, names
    file = folder / "step-00000002/__1_0.distcp"
    content = bytearray(file.read_bytes())
    content[len(content) // 2 + 5000] ^= 1
    file.write_bytes(content)
world.barrier()
assert make().resume("auto") == 1

write = Path.write_text
def full(file, text, **keywords):
    if file.name == "state.json":
        raise OSError("No space left on device")
    return write(file, text, **keywords)
Path.write_text = full  # on rank 0, the only writer: no other process may wait for a step that rank 0 does not reach
again = make()
again.save(3, wait=True)
Path.write_text = write
again.save(4, wait=True)
assert make().resume("auto") == 4

messages = []
last = make(keep_best="accuracy", higher_is_better=True, tell=messages.append)
last.step(5, {"accuracy": 0.5})
last.wait()
with torch.no_grad():
    saved = [parameter.to_local().clone() for parameter in last.model.parameters()]
    for parameter in last.model.parameters():
        parameter += 1
Path.write_text = full
last.step(6, {"accuracy": 0.9}, now=True)  # the best, and its checkpoint fails on rank 0 alone
last.finish()
assert all(map(torch.equal, saved, (parameter.to_local() for parameter in last.model.parameters())))
assert last.unwritten == "the checkpoint of step 6" and (last.best.step, last.saved) == (5, 5)
stops = make(on_error="stop")
try:
    stops.save(7, wait=True)
    raise AssertionError("it goes on")
except TuneError as error:  # on all of them
    assert "the checkpoint of step 7 could not be written" in str(error)
"""


@pytest.mark.slow
def test_two_processes_share_digests_and_verification(tmp_path):
    (tmp_path / "script.py").write_text(
        f"import sys; sys.path.insert(0, {str(pathlib.Path(__file__).parent)!r})\n{TWO}"
    )
    output = run_processes(tmp_path / "script.py", 2, str(tmp_path / "checkpoints"))
    assert "step-00000002 is damaged: __1_0.distcp does not match its digest" in output
    assert output.count("the checkpoint of step 3 could not be written: No space left on device") == 1


VALUES = [0.5, 0.9, 0.7, 0.1]


def train_with_damaged_best(folder, harm):
    """Train so that step 2 is the best and step 3 the next best; return the weights by step."""
    first, weights = make(folder, every=1, keep=4, keep_best="accuracy", higher_is_better=True, async_=False), {}
    for step, value in enumerate(VALUES, 1):
        train(first, step)
        weights[step] = first.model.weight.detach().clone()
        first.step(step, {"accuracy": value})
    file = next((folder / "step-00000002").glob("*.distcp"))
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 64
    file.write_bytes(content[:-2000] if harm == "cut short" else content)
    return weights


@pytest.mark.parametrize("harm", ["a bit", "cut short", "gone"])
def test_damaged_best_checkpoint_falls_back_to_the_next_best(tmp_path, harm):
    weights, messages = train_with_damaged_best(tmp_path, harm), []
    if harm == "gone":
        shutil.rmtree(tmp_path / "step-00000002")
    for attempt in (1, 2):
        again = make(tmp_path, every=1, keep=4, keep_best="accuracy", higher_is_better=True, tell=messages.append)
        assert again.resume("auto") == 4
        again.finish()
        assert torch.equal(again.model.weight, weights[3]) and "0.7 at step 3" in messages[-1]
        if attempt == 1:
            assert "highest accuracy" in messages[0]
            assert [("step-00000002" in message or "step 2" in message) for message in messages[1:]] == [True, False]
    assert json.loads((tmp_path / "step-00000004" / "state.json").read_text())["best"]["step"] == 3


def test_rollback_skips_damaged_checkpoints(tmp_path):
    messages = []
    first = make(tmp_path, every=1, keep=4, on_nan="rollback", async_=False, tell=messages.append)
    for step in (1, 2, 3):
        train(first, step)
        first.step(step)
        if step == 2:
            weights = first.model.weight.detach().clone()
    file = next((tmp_path / "step-00000003").glob("*.distcp"))
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    assert not first.accepts(4, {"loss": math.nan}, [0])
    assert torch.equal(first.model.weight, weights)
    assert "step-00000003 is damaged" in messages[0] and "restored from step 2" in messages[-1]
    for step in (1, 2):
        file = next((tmp_path / f"step-{step:08d}").glob("*.distcp"))
        file.write_bytes(file.read_bytes()[:-1] + b"x")
    with pytest.raises(TuneError, match="no intact checkpoint to roll back to"):
        first.accepts(5, {"loss": math.nan}, [0])


def test_rollback_to_the_folder_that_training_resumed_from(tmp_path):
    first = make(tmp_path / "first", every=1, keep=4, async_=False)
    for step in (1, 2):
        train(first, step)
        first.step(step)
    again = make(tmp_path / "again", on_nan="rollback")
    assert again.resume(str(tmp_path / "first")) == 2
    train(again, 3)
    assert not again.accepts(4, {"loss": math.nan}, [0])
    assert torch.equal(again.model.weight, first.model.weight)


@pytest.mark.parametrize("kept", ["there", "gone"])
def test_best_of_another_folder_is_copied_or_determined_again(tmp_path, kept):
    options = {"every": 1, "keep": 1, "keep_best": "accuracy", "higher_is_better": True}
    first, weights, messages = make(tmp_path / "first", **options), {}, []
    for step, value in enumerate([0.9, 0.1], 1):
        train(first, step)
        weights[step] = first.model.weight.detach().clone()
        first.step(step, {"accuracy": value})
    first.wait()
    if kept == "gone":
        shutil.rmtree(tmp_path / "first" / "step-00000001")
    again = make(tmp_path / "again", **options, tell=messages.append)
    assert again.resume(str(tmp_path / "first")) == 2
    for step, value in enumerate([0.5, 0.3], 3):
        train(again, step)
        weights[step] = again.model.weight.detach().clone()
        again.step(step, {"accuracy": value})
    again.wait()
    best = 1 if kept == "there" else 3
    there = sorted(path.name for path in (tmp_path / "again").iterdir())
    assert there == [f"step-{best:08d}", "step-00000004"]
    warned = ["step 1" in message and "missing" in message for message in messages[1:]]  # after the direction
    assert warned == ([] if kept == "there" else [True])
    shutil.rmtree(tmp_path / "first")
    last = make(tmp_path / "again", **options)
    assert last.resume("auto") == 4
    last.finish()
    assert torch.equal(last.model.weight, weights[best])


def test_digests_from_earlier_versions_are_verified(tmp_path):
    first = make(tmp_path, every=1, keep=3, async_=False)
    for step in (1, 2):
        train(first, step)
        first.step(step)
        folder = tmp_path / f"step-{step:08d}"
        (folder / "digests.json").unlink()
        digests = {file.name: sampled_digest([], [file]) for file in folder.iterdir()}
        (folder / "digests.json").write_text(json.dumps(digests))
    assert make(tmp_path).resume("auto") == 2
    file = tmp_path / "step-00000002" / "__0_0.distcp"
    file.write_bytes(file.read_bytes()[:-1])
    assert make(tmp_path).resume("auto") == 1


def test_best_step_is_recorded_without_invalidating_the_checkpoint(tmp_path):
    """At the end, a step is saved before it is validated."""
    first = make(tmp_path, every=1, keep_best="validation_loss")
    train(first, 1)
    first.save(1, wait=True)
    first.step(1, {"validation_loss": 0.5}, now=True)
    first.wait()
    again = make(tmp_path, keep_best="validation_loss")
    assert again.resume("auto") == 1 and again.best.step == 1


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("resume", ["auto", "path"])
@pytest.mark.parametrize(
    "put", [put_into_metadata, put_instead_of_metadata, put_for_one_rank, put_into_values], ids=lambda put: put.__name__
)
def test_checkpoints_cannot_run_code(tmp_path, put, resume):
    def optimizer_class(parameters):
        return CountingInState(parameters, lr=0.1)

    first = make(tmp_path, optimizer_class, async_=False)
    train(first, 1)
    first.save(1)
    again = make(tmp_path, optimizer_class)
    assert again.resume("auto") == 1
    assert again.optimizer.state[again.model.weight]["count"] == 1
    (tmp_path / "step-00000001" / "digests.json").unlink()  # as an attacker would
    put(tmp_path / "step-00000001", Code(tmp_path / "it-ran"))
    with pytest.raises(TuneError, match=r"could run code|is damaged"):
        make(tmp_path, optimizer_class).resume("auto" if resume == "auto" else str(tmp_path))
    assert not (tmp_path / "it-ran").exists()


@pytest.mark.parametrize("async_", [False, True])
@pytest.mark.parametrize("what", ["tensors", "small state"])
def test_failed_checkpoint_is_reported_in_the_next_step_and_retried(tmp_path, monkeypatch, async_, what):
    def full(*arguments, **keywords):
        raise OSError(errno.ENOSPC, "No space left on device")

    messages = []
    checkpointer = make(tmp_path, every=2, async_=async_, tell=messages.append)
    for step in range(1, 7):
        train(checkpointer, step)
        with monkeypatch.context() as patch:
            if step == 4:
                patch.setattr(*((dcp, "save", full) if what == "tensors" else (pathlib.Path, "write_text", full)))
            checkpointer.step(step)
            if checkpointer.pending:
                checkpointer.pending.exception()  # waits, and does not raise
        assert len(messages) == (step >= 4 + async_)
    assert "the checkpoint of step 4 could not be written" in messages[0] and "continues after step 2" in messages[0]
    assert checkpointer.wait() == 6
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "step-00000005",
        "step-00000006",
    ]  # retried soon, and when due

    train(checkpointer, 7)
    with monkeypatch.context() as patch:
        patch.setattr(dcp, "save", full)
        checkpointer.save(7, wait=True)
        checkpointer.step(7, now=True)
        checkpointer.wait()
    assert len(messages) == 2 and "of step 7 could not be written" in messages[1]  # once

    stopping = make(tmp_path / "new", every=2, async_=async_, on_error="stop")
    train(stopping, 1)
    monkeypatch.setattr(dcp, "save", full)
    with pytest.raises(TuneError, match=r"the checkpoint of step 8 could not be written: .*No earlier one. Free space"):
        stopping.step(8)
        stopping.pending.exception()
        stopping.step(9)


def test_slow_disk_blocks_training_only_at_the_next_checkpoint(tmp_path, monkeypatch, request):
    """The disk writes nothing until the checkpointer waits for it."""
    waits, create = threading.Event(), FileSystem.create_stream
    request.addfinalizer(waits.set)

    @contextlib.contextmanager
    def slow(files, path, mode):
        with create(files, path, mode) as stream:
            assert waits.wait(HANGS)
            yield stream

    monkeypatch.setattr(FileSystem, "create_stream", slow)
    checkpointer = make(tmp_path, every=2)
    for step in (1, 2):
        train(checkpointer, step)
        checkpointer.step(step)
    saved, pending = checkpointer.model.weight.detach().clone(), checkpointer.pending
    train(checkpointer, 3)
    checkpointer.step(3)
    assert not pending.done() and checkpointer.newest() is None  # a partly written checkpoint is never used
    train(checkpointer, 4)
    assert not torch.equal(checkpointer.model.weight, saved)
    result = pending.result
    monkeypatch.setattr(pending, "result", lambda: waits.set() or result())
    checkpointer.step(4)
    assert waits.is_set() and checkpointer.saved >= 2
    assert checkpointer.wait() == 4
    second = make(tmp_path / "new")
    assert second.resume(str(tmp_path / "step-00000002")) == 2
    assert torch.equal(second.model.weight, saved)


@pytest.mark.parametrize("async_", [False, True])
def test_failed_best_checkpoint_keeps_the_previous_best(tmp_path, monkeypatch, async_):
    def full(*arguments, **keywords):
        raise OSError(errno.ENOSPC, "No space left on device")

    messages, weights = [], {}
    options = {
        "every": 1, "keep": 1, "keep_best": "validation_accuracy", "higher_is_better": True, "async_": async_,
        "tell": messages.append,
    }  # fmt: skip
    checkpointer = make(tmp_path, **options)
    for step, value in enumerate([0.5, 0.9, 0.1, 0.1], 1):
        train(checkpointer, step)
        weights[step] = checkpointer.model.weight.detach().clone()
        with monkeypatch.context() as patch:
            if step == 2:
                patch.setattr(dcp, "save", full)
            checkpointer.step(step, {"validation_accuracy": value})
            if checkpointer.pending:
                checkpointer.pending.exception()
    assert checkpointer.wait() == 4
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001", "step-00000004"]
    again = make(tmp_path, **options)
    assert again.resume("auto") == 4
    again.finish()
    assert torch.equal(again.model.weight, weights[1])
    assert messages[-1] == "using the weights with the best validation_accuracy, 0.5 at step 1"

    checkpointer.step(
        5, {"validation_accuracy": 0.8}
    )  # below the value that could not be written, above the one that was
    checkpointer.wait()
    assert checkpointer.best.kept == (0.8, 5)


def test_keep_best_of_an_unknown_metric_is_rejected_at_first_validation(tmp_path):
    checkpointer = make(tmp_path, keep_best="validation_los", higher_is_better=False)
    checkpointer.step(1, {"loss": 1.0})
    with pytest.raises(TuneError, match="does not measure validation_los, only validation_loss, validation_accuracy"):
        checkpointer.step(2, {"loss": 1.0, "validation_loss": 2.0, "validation_accuracy": 0.5})
    assert make(tmp_path, keep_best="validation_loss").resume("auto") == 2  # nothing is lost


class Counting(torch.optim.SGD):
    """Keeps an extra number in its parameter groups, as Prodigy and others do."""

    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1


def test_checkpoint_keeps_changed_group_values_but_not_settings(tmp_path):
    first = make(tmp_path, lambda parameters: Counting(parameters, lr=0.1, momentum=0.9), async_=False)
    for step in (1, 2):
        train(first, step)
    first.save(2)
    second = make(tmp_path, lambda parameters: Counting(parameters, lr=0.1, momentum=0.5))
    second.resume("auto")
    (group,) = second.optimizer.param_groups
    assert (group["count"], group["momentum"]) == (2, 0.5)
    with pytest.raises(TuneError, match="has 1 parameter groups, not 2"):
        make(tmp_path, lambda parameters: Counting(parameters, lr=0.1, momentum=0.5), groups=2).resume("auto")


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_nonfinite_value_stops_training(tmp_path, value):
    checkpointer = make(tmp_path)
    assert checkpointer.accepts(1, {"loss": 1.0, "grad_norm": 2.0}, [3, 4])
    with pytest.raises(TuneError, match=r"grad_norm is (nan|inf) at step 7, .* rows 3, 4.*on_nan=skip"):
        checkpointer.accepts(7, {"loss": 1.0, "grad_norm": value}, [3, 4])


@pytest.mark.parametrize("async_", [False, True])
def test_rollback_to_the_last_checkpoint(tmp_path, async_):
    """Weights and optimizer states come from the checkpoint; schedule and data continue."""
    messages = []
    checkpointer = make(tmp_path, every=2, async_=async_, on_nan="rollback", tell=messages.append)
    with pytest.raises(TuneError, match=r"at step 1, .* no checkpoint to roll back to yet") as stopped:
        checkpointer.accepts(1, {"loss": math.nan}, [0])
    assert "on_nan" not in str(stopped.value)  # it is set already
    for step in (1, 2, 3):
        train(checkpointer, step)
        checkpointer.step(step)
        if step == 2:
            weights = checkpointer.model.weight.detach().clone()
            state = checkpointer.optimizer.state[checkpointer.model.weight]
            moments = {name: value.clone() for name, value in state.items()}
    checkpointer.optimizer.param_groups[0]["lr"] = 7.0
    assert not checkpointer.accepts(4, {"loss": math.nan}, [5, 6])
    assert (
        "loss is nan at step 4, in a batch of dataset rows 5, 6. The weights are restored from step 2" in messages[-1]
    )
    assert torch.equal(checkpointer.model.weight, weights)
    state = checkpointer.optimizer.state[checkpointer.model.weight]
    assert all(torch.equal(state[name], value) for name, value in moments.items())
    assert checkpointer.small["data"].step == 3 and checkpointer.optimizer.param_groups[0]["lr"] == 7.0


def test_ten_consecutive_nonfinite_steps_stop_training(tmp_path):
    checkpointer = make(tmp_path, on_nan="skip")
    train(checkpointer, 1)
    before = checkpointer.model.weight.detach().clone()
    assert not any(checkpointer.accepts(step, {"loss": math.inf}, [0]) for step in range(1, 10))
    assert checkpointer.accepts(10, {"loss": 1.0}, [0])
    assert not any(checkpointer.accepts(step, {"loss": math.inf}, [0]) for step in range(11, 20))
    assert torch.equal(checkpointer.model.weight, before)
    with pytest.raises(TuneError, match=r"loss is inf at step 20, .* the tenth such step in a row"):
        checkpointer.accepts(20, {"loss": math.inf}, [0])


class OfARun:
    """What a checkpointer needs of a run; its last step is 5."""

    def __init__(self, path):
        self.path, self.world, self.messages = path, distributed.init("cpu"), []
        self.higher_is_better = {}

    def info(self, message):
        self.messages.append(message)

    def is_end(self, step):
        return step == 5


def parts(**options):
    model = torch.nn.Linear(3, 3)
    return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1), "data": Position(), **options}


def test_checkpointer_of_a_run_saves_in_its_folder_and_its_last_step(tmp_path):
    run = OfARun(tmp_path / "run")
    ours = Checkpointer(run, **parts(every=2, keep=None, keep_best="validation_loss", async_=False))
    assert ours.folder == run.path / "checkpoints" and ours.world is run.world
    assert any("validation_loss" in message for message in run.messages)
    for step in range(1, 6):
        ours.step(step)
    assert [path.name for path in sorted(ours.folder.glob("step-*"))] == [f"step-0000000{step}" for step in (2, 4, 5)]
    again = Checkpointer(run, **parts(every=2, keep_best="validation_loss", async_=False))
    assert again.resume() == 5 and again.unmeasured  # of the last step nothing is measured before it is saved
    ours.step(5, {"validation_loss": 1.0}, now=True)
    state = json.loads((ours.folder / "step-00000005" / "state.json").read_text())
    assert state["best"]["step"] == 5


@pytest.mark.parametrize("kind", [str, pathlib.Path])
def test_checkpointer_of_a_path_saves_there_and_knows_no_end(kind, tmp_path):
    messages = []
    ours = Checkpointer(
        kind(tmp_path / "states"), distributed.init("cpu"), tell=messages.append,
        **parts(every=2, keep=None, keep_best="validation_loss", async_=False),
    )  # fmt: skip
    assert ours.folder == tmp_path / "states" and len(messages) == 1
    for step in range(1, 6):
        ours.step(step)
    ours.step(7, now=True)
    assert [path.name for path in sorted(ours.folder.glob("step-*"))] == [f"step-0000000{step}" for step in (2, 4, 7)]
