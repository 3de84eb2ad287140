"""docs/changes.md, followed to the letter: each section on a fresh copy of full_finetune, then what it promises."""

import functools
import importlib.util
import json
import math
import re
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from tune import config
from tune.checkpointers import load_model
from tune.cli import main as tune
from tune.collators import Batch

PAGE = Path(__file__).parents[2] / "docs" / "changes.md"


def follow(section: str) -> None:
    """Copy the recipe to the current folder and do what the section says."""
    tune(["cp", "full_finetune", "mine.py"])
    text = PAGE.read_text().split(f"\n## {section}\n")[1].split("\n## ")[0]
    for kind, block in re.findall(r"```(\w+)\n(.*?)```", text, re.DOTALL):
        if kind == "python":
            Path(re.match(r"# (\w+\.py)\n", block)[1]).write_text(block)
        elif kind == "yaml":
            Path("mine.yaml").write_text(Path("mine.yaml").read_text() + block)
        else:
            assert kind == "diff"
            lines = re.sub(r"  # noqa.*", "", Path("mine.py").read_text()).splitlines()
            for hunk in block.split("@@\n"):
                lines = changed(lines, hunk.splitlines())
            Path("mine.py").write_text("\n".join(lines) + "\n")


def changed(lines: list[str], hunk: list[str]) -> list[str]:
    before, after = ([line[1:] for line in hunk if line[0] in kinds] for kinds in (" -", " +"))
    places = [at for at in range(len(lines)) if lines[at : at + len(before)] == before]
    assert len(places) == 1, (len(places), before)
    return lines[: places[0]] + after + lines[places[0] + len(before) :]


@pytest.fixture
def run(checkpoint, chats, tmp_path, monkeypatch):
    """Runs mine.py with settings on top; returns its run folder, whose metrics `logged` reads."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    common = [
        f"model.path={checkpoint}", f"dataset.path={chats}", f"validation_dataset.path={chats}", "device=cpu",
        "dtype=fp32", "max_seq_len=128", "global_batch_size=8", "micro_batch_size=4", "optimizer.lr=1e-2",
        "max_steps=4", "checkpointer.every=1", "checkpointer.keep=null",
    ]  # fmt: skip

    def run(*settings: str, folder: str = "run") -> Path:
        for name in ("ema", "patience", "my_losses"):
            sys.modules.pop(name, None)
        spec = importlib.util.spec_from_file_location("mine", "mine.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        module.main(config.load("mine.yaml", [*common, *settings, f"output_dir={tmp_path / folder}"]))
        return tmp_path / folder

    return run


def logged(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def exported(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model" / "model.safetensors")


def saved_weights(folder: Path, step: int) -> dict[str, torch.Tensor]:
    dcp_to_torch_save(folder / "checkpoints" / f"step-{step:08d}", folder / "state.pt")
    return torch.load(folder / "state.pt", weights_only=True)["model"]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])  # without FSDP, and with it
def test_average(run, checkpoint, dtype):
    follow("An average of the weights")
    whole = run("ema_decay=0.5", f"dtype={dtype}", folder="whole")
    average = {name: weight.detach() for name, weight in load_model(str(checkpoint)).named_parameters()}
    for step in (1, 2, 3, 4):
        weights = saved_weights(whole, step)
        average = {name: 0.5 * average[name] + 0.5 * weight for name, weight in weights.items()}
    ours = dict(load_model(str(whole / "model")).named_parameters())
    torch.testing.assert_close({name: weight.detach() for name, weight in ours.items()}, average, rtol=1e-6, atol=1e-7)
    resumed = run("ema_decay=0.5", f"dtype={dtype}", f"resume={whole / 'checkpoints' / 'step-00000002'}")
    torch.testing.assert_close(exported(resumed), exported(whole), rtol=0, atol=0)


def test_early_stopping_stays_stopped(run):
    follow("Early stopping")
    settings = ["patience=2", "validate_every=1", "optimizer.lr=0", "max_steps=6"]  # which learns nothing
    folder = run(*settings)
    first = exported(folder)
    for _ in range(2):
        assert [line["step"] for line in logged(folder)] == [1, 2, 3]
        assert sorted(path.name for path in (folder / "checkpoints").iterdir())[-1] == "step-00000003"
        run(*settings)
    torch.testing.assert_close(exported(folder), first, rtol=0, atol=0)
    learning = run("patience=2", "validate_every=1", folder="learning")
    assert [line["step"] for line in logged(learning)] == [1, 2, 3, 4]


def test_frozen_layers(run, checkpoint):
    follow("The first layers frozen")
    folder = run("frozen_layers=2")
    before, after = load_file(checkpoint / "model.safetensors"), exported(folder)
    same = {name for name in before if torch.equal(before[name], after[name])}
    assert same == {name for name in before if re.match(r"model\.layers\.[01]\.", name)}
    resumed = run("frozen_layers=2", f"resume={folder / 'checkpoints' / 'step-00000002'}", folder="resumed")
    torch.testing.assert_close(exported(resumed), after, rtol=0, atol=0)


def test_learning_rate_of_each_layer(run):
    follow("A learning rate for each layer")
    for line in logged(run("layer_decay=0.5")):
        rates = [line["lr/embedding"], *(line[rf"lr/blocks\.{index}\."] for index in range(3)), line["lr"]]
        assert rates == pytest.approx([line["lr"] * share for share in (1 / 8, 1 / 4, 1 / 2, 1, 1)])


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_samples_leave_the_training_alone(run, dtype):
    follow("Samples on the way")
    sampled, plain = (run(f"sample_every={every}", f"dtype={dtype}", folder=str(every)) for every in (2, 100))
    log = (sampled / "log.txt").read_text()
    assert re.findall(r"^step (\d): ", log, re.MULTILINE) == ["2", "4"], log
    assert [line["loss"] for line in logged(sampled)] == [line["loss"] for line in logged(plain)]


SMOOTHED = functools.partial(F.cross_entropy, label_smoothing=0.2, reduction="sum")


def with_z(logits, labels):
    return F.cross_entropy(logits, labels, reduction="sum") + 0.01 * logits.exp().sum(dim=-1).log().pow(2).sum()


@pytest.mark.parametrize(
    ("settings", "reference"),
    [
        (["loss._component_=my_losses.LabelSmoothing", "loss.smoothing=0.2"], SMOOTHED),
        (["loss._component_=my_losses.ZLoss", "loss.z_weight=0.01"], with_z),
    ],
)
def test_losses(run, settings, reference):
    follow("Another loss")
    folder = run(*settings, "max_steps=2", "memory.loss_chunk_tokens=5")
    assert len(logged(folder)) == 2
    import my_losses

    kind, value = settings[0].rpartition(".")[2], float(settings[1].partition("=")[2])
    loss_fn = getattr(my_losses, kind)(value, chunk_tokens=5)
    hidden, weight = torch.randn(2, 8, 16, requires_grad=True), torch.randn(30, 16, requires_grad=True)
    labels = torch.randint(0, 30, (2, 8)).masked_fill(torch.rand(2, 8) < 0.2, -100)
    ours = loss_fn(hidden, weight, Batch.of(torch.zeros(2, 8), labels=labels))
    theirs = reference((hidden @ weight.T)[labels != -100], labels[labels != -100])
    assert math.isclose(ours.item(), theirs.item(), rel_tol=1e-6)
    for one, other in zip(*(torch.autograd.grad(loss, (hidden, weight)) for loss in (ours, theirs)), strict=True):
        torch.testing.assert_close(one, other)
