"""docs/changes.md, followed to the letter: each section is applied to a fresh copy of full_finetune and checked."""

import functools
import json
import math
import re
import runpy
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from docs_reader import ROOT, Reader
from helpers import slow_but, weekly_but
from safetensors.torch import load_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from tune.checkpointers import load_model
from tune.cli import main as tune
from tune.collators import Batch

PAGE = (ROOT / "docs" / "changes.md").read_text()
CHANGES = dict(section.split("\n", 1) for section in PAGE.split("\n## ")[1:])


@pytest.fixture
def reader(checkpoint, chats, tmp_path):
    return Reader(tmp_path, checkpoint, chats)


@pytest.fixture
def run(reader):
    """Return a function that runs a reader's mine.py with extra settings and returns the run folder."""
    common = [
        "model.path=SmolLM2-135M-Instruct", "dataset.path=chats.jsonl", "dataset.validation=chats.jsonl",
        "device=cpu", "compute.dtype=fp32", "max_seq_len=128", "global_batch_size=8", "micro_batch_size=4",
        "optimizer.lr=1e-2", "max_steps=4", "checkpointer.every=1", "checkpointer.keep=null",
    ]  # fmt: skip

    def run(*settings: str, folder: str = "run") -> Path:
        with reader.at_work():
            tune(["run", "mine.py", *common, *settings, f"output_dir={folder}"])
        return reader.folder / folder

    return run


def follow(reader: Reader, change: str) -> None:
    reader.follow("```\ntune cp full_finetune mine.py\n```\n" + CHANGES[change])


def logged(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def exported(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model" / "model.safetensors")


def saved_weights(folder: Path, step: int) -> dict[str, torch.Tensor]:
    dcp_to_torch_save(folder / "checkpoints" / f"step-{step:08d}", folder / "state.pt")
    return torch.load(folder / "state.pt", weights_only=True)["model"]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", slow_but(["fp32"], ["fp32", "bf16"]))  # without and with FSDP
def test_average(reader, run, checkpoint, dtype):
    follow(reader, "An average of the weights")
    whole = run("ema_decay=0.5", f"compute.dtype={dtype}", folder="whole")
    average = {name: weight.detach() for name, weight in load_model(str(checkpoint)).named_parameters()}
    for step in (1, 2, 3, 4):
        weights = saved_weights(whole, step)
        average = {name: 0.5 * average[name] + 0.5 * weight for name, weight in weights.items()}
    ours = dict(load_model(str(whole / "model")).named_parameters())
    torch.testing.assert_close({name: weight.detach() for name, weight in ours.items()}, average, rtol=1e-6, atol=1e-7)
    resumed = run("ema_decay=0.5", f"compute.dtype={dtype}", f"resume={whole / 'checkpoints' / 'step-00000002'}")
    torch.testing.assert_close(exported(resumed), exported(whole), rtol=0, atol=0)


@pytest.mark.slow
def test_stop(reader, run):
    follow(reader, "A stop of your own")
    folder = run("good_enough=100", "evaluate.every=2")
    assert [step["step"] for step in logged(folder)] == [1, 2]
    before = exported(folder)
    assert [step["step"] for step in logged(run("good_enough=100", "evaluate.every=2"))] == [1, 2]
    torch.testing.assert_close(exported(folder), before, rtol=0, atol=0)


@pytest.mark.slow
def test_schedule_that_reads_the_validation_loss(reader, run):
    """Almost nothing is learned at this rate, so that the rate is halved at each validation."""
    follow(reader, "A schedule that reads the validation loss")
    settings = ["optimizer.lr=1e-7", "schedule.patience=0", "evaluate.every=1"]
    whole = logged(run(*settings, folder="whole"))
    assert [step["lr"] for step in whole] == [1e-7, 1e-7, 0.5e-7, 0.25e-7]
    resumed = logged(run(*settings, f"resume={reader.folder}/whole/checkpoints/step-00000002", folder="resumed"))
    assert [step["lr"] for step in resumed] == [0.5e-7, 0.25e-7]


@pytest.mark.slow
def test_noise(reader, run):
    follow(reader, "Noise on the embeddings")
    plain, whole = run("noise_alpha=0", folder="plain"), run("noise_alpha=50", folder="whole")
    assert logged(plain)[0]["loss"] != pytest.approx(logged(whole)[0]["loss"], rel=1e-3)
    again = run("noise_alpha=50", f"resume={whole / 'checkpoints' / 'step-00000002'}", folder="again")
    torch.testing.assert_close(exported(again), exported(whole), rtol=0, atol=0)


@pytest.mark.slow
def test_frozen_layers(reader, run, checkpoint):
    follow(reader, "The first layers frozen")
    folder = run("frozen_layers=2")
    before, after = load_file(checkpoint / "model.safetensors"), exported(folder)
    same = {name for name in before if torch.equal(before[name], after[name])}
    assert same == {name for name in before if re.match(r"model\.layers\.[01]\.", name)}
    resumed = run("frozen_layers=2", f"resume={folder / 'checkpoints' / 'step-00000002'}", folder="resumed")
    torch.testing.assert_close(exported(resumed), after, rtol=0, atol=0)


@pytest.mark.slow
def test_learning_rate_per_layer(reader, run):
    follow(reader, "A learning rate for each layer")
    for line in logged(run("layer_decay=0.5")):
        rates = [line["lr/embedding"], *(line[rf"lr/blocks\.{index}\."] for index in range(3)), line["lr"]]
        assert rates == pytest.approx([line["lr"] * share for share in (1 / 8, 1 / 4, 1 / 2, 1, 1)])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", slow_but(["fp32"], ["fp32", "bf16"]))
def test_samples_do_not_change_training(reader, run, dtype):
    follow(reader, "Samples on the way")
    sampled, plain = (
        run(f"sample_every={every}", f"compute.dtype={dtype}", folder=f"every_{every}") for every in (2, 100)
    )
    log = (sampled / "log.txt").read_text()
    assert re.findall(r"^step (\d): ", log, re.MULTILINE) == ["2", "4"], log
    assert [line["loss"] for line in logged(sampled)] == [line["loss"] for line in logged(plain)]


@pytest.mark.slow
def test_updates_in_the_backward(reader, run):
    """Losses and weights equal a step after backward, bitwise. Runs resume either way; `max_grad_norm` is removed."""
    reader.follow("```\ntune cp full_finetune mine.py\n```\n")
    plain = run("max_grad_norm=null", "micro_batch_size=8", folder="plain")
    for name in ("mine.py", "mine.yaml"):
        (reader.folder / name).unlink()
    follow(reader, "Update each parameter in the backward")
    changed = run("micro_batch_size=8", folder="changed")
    resumed = run("micro_batch_size=8", f"resume={plain / 'checkpoints' / 'step-00000002'}", folder="resumed")
    losses = [[line["loss"] for line in logged(folder)] for folder in (plain, changed, resumed)]
    assert losses[1] == losses[0] and losses[2] == losses[0][2:]
    for folder in (changed, resumed):
        torch.testing.assert_close(exported(folder), exported(plain), rtol=0, atol=0)
    with pytest.raises(SystemExit):
        run("micro_batch_size=8", "max_grad_norm=1", folder="clipped")


SMOOTHED = functools.partial(F.cross_entropy, label_smoothing=0.2, reduction="sum")


def with_z(logits, labels):
    return F.cross_entropy(logits, labels, reduction="sum") + 0.01 * logits.exp().sum(dim=-1).log().pow(2).sum()


@pytest.mark.weekly
@pytest.mark.parametrize(
    ("settings", "reference"),
    weekly_but(
        [(["loss._component_=my_losses.ZLoss", "loss.z_weight=0.01"], with_z)],
        [
            (["loss._component_=my_losses.LabelSmoothing", "loss.smoothing=0.2"], SMOOTHED),
            (["loss._component_=my_losses.ZLoss", "loss.z_weight=0.01"], with_z),
        ],
    ),
)
def test_losses(reader, run, settings, reference):
    follow(reader, "Another loss")
    assert len(logged(run(*settings, "max_steps=2", "loss.chunk_tokens=5"))) == 2
    kind, value = settings[0].rpartition(".")[2], float(settings[1].partition("=")[2])
    loss_fn = runpy.run_path(str(reader.folder / "my_losses.py"))[kind](value, chunk_tokens=5)
    hidden, weight = torch.randn(2, 8, 16, requires_grad=True), torch.randn(30, 16, requires_grad=True)
    labels = torch.randint(0, 30, (2, 8)).masked_fill(torch.rand(2, 8) < 0.2, -100)
    ours = loss_fn(hidden, weight, Batch.of(torch.zeros(2, 8, dtype=torch.long), labels=labels))
    theirs = reference((hidden @ weight.T)[labels != -100], labels[labels != -100])
    assert math.isclose(ours.item(), theirs.item(), rel_tol=1e-6)
    for one, other in zip(*(torch.autograd.grad(loss, (hidden, weight)) for loss in (ours, theirs)), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.slow
def test_another_preference_loss(reader):
    follow(reader, "Another loss of preferences")
    rows = [{"instruction": f"the cat {n}", "chosen": "sat", "rejected": "ran on"} for n in range(8)]
    (reader.folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with reader.at_work():
        tune(
            [
                "run", "preference_finetune", "model.path=SmolLM2-135M-Instruct", "dataset.path=pairs.jsonl",
                "device=cpu", "compute.dtype=fp32", "max_seq_len=128", "global_batch_size=8", "optimizer.lr=1e-3",
                "loss._component_=my_preferences.Hinge", "loss.beta=0.05", "schedule.warmup=0", "output_dir=run",
                "epochs=3",
            ]
        )  # fmt: skip
    first, *_, last = logged(reader.folder / "run")
    assert (first["loss"], first["rewards/margins"]) == (1, 0)
    assert math.isclose(last["loss"], 1 - last["rewards/margins"], rel_tol=1e-5) and last["rewards/margins"] > 0


@pytest.mark.slow
def test_feed_forwards_in_chunks(reader, run):
    """The same losses and gradients, also with recomputed blocks."""
    with reader.at_work():
        tune(["cp", "full_finetune", "mine.py"])
    plain = run("max_steps=2", folder="plain")
    for name in ("mine.py", "mine.yaml"):
        (reader.folder / name).unlink()
    follow(reader, "Feed-forwards in chunks")
    text = (reader.folder / "mine.py").read_text()
    (reader.folder / "mine.py").write_text(text.replace("split(2048", "split(24"))
    for settings in ([], ["compute.activation_checkpointing=full"]):
        chunked = run("max_steps=2", *settings, folder=f"chunked {len(settings)}")
        for step, expected in zip(logged(chunked), logged(plain), strict=True):
            assert step["loss"] == pytest.approx(expected["loss"], rel=1e-6)
            assert step["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-5)
