"""What a copied recipe may do besides: draws, a stop of its own, norms by block; on one process and on two."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tune import cli

START = ["device=cpu", "dtype=fp32", "max_seq_len=128", "global_batch_size=4", "micro_batch_size=1", "max_steps=4"]
CONSTANT = "schedule._component_=tune.optimizers.constant"


@pytest.fixture
def here(checkpoint: Path, chats: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("model").symlink_to(checkpoint)
    Path("chats.jsonl").symlink_to(chats)
    cli.main(["cp", "full_finetune", "mine.py"])
    return tmp_path


def change(line: str, instead: str) -> None:
    """A line of the copy, which is there once, becomes other lines."""
    text = Path("mine.py").read_text()
    assert text.count(line) == 1, line
    Path("mine.py").write_text(text.replace(line, instead))


def train(output_dir: str, *settings: str, processes: int = 1) -> list[dict[str, float]]:
    """The metrics of each step. Run as a user would."""
    start = ["-m", "torch.distributed.run", "--nproc-per-node", str(processes)] if processes > 1 else []
    given = ["model.path=model", "dataset.path=chats.jsonl", f"output_dir={output_dir}", *START, *settings]
    done = subprocess.run([sys.executable, *start, "mine.py", *given], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in Path(output_dir, "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_draws_are_the_same_again_and_after_a_resume(here: Path) -> None:
    change("loss = model(micro_batch, loss_fn) /", "loss = (1 + 0.5 * torch.rand(())) * model(micro_batch, loss_fn) /")
    losses = [step["loss"] for step in train("one", CONSTANT)]
    assert losses == [step["loss"] for step in train("again", CONSTANT)]
    train("parts", CONSTANT, "max_steps=2")
    train("parts", CONSTANT)
    one, other = (load_file(f"{run}/model/model.safetensors") for run in ("one", "parts"))
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_a_stop_of_ones_own_is_kept(processes: int, here: Path) -> None:
    step = "            checkpointer.step(step, metrics, now=run.is_end(step))\n"
    change(step, f"            if step == 2:\n                checkpointer.stop()\n{step}")
    assert len(train("run", processes=processes)) == 2
    before = load_file("run/model/model.safetensors")
    assert len(train("run", processes=processes)) == 2
    after = load_file("run/model/model.safetensors")
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.slow
def test_norms_by_block_on_two_processes(here: Path) -> None:
    line = "                **evaluation.routing(model, world),\n"
    norms = "{f'norm/{index}': torch.nn.utils.get_total_norm([each.grad for each in block.parameters()])"
    change(line, f"                **{norms} for index, block in enumerate(model.blocks)}},\n{line}")
    one, two = train("one"), train("two", processes=2)
    names = [name for name in one[0] if name.startswith("norm/")]
    assert names
    for step, other in zip(one, two, strict=True):
        assert {name: other[name] for name in names} == pytest.approx({name: step[name] for name in names}, rel=1e-4)


MATRICES = "[group | {'params': [each for each in group['params'] if each.ndim > 1]} for group in groups]"
SECOND = "    second = torch.optim.AdamW([each for each in model.parameters() if each.ndim == 1], lr=1e-3)\n"
FIRST = f"    optimizer = instantiate(cfg.optimizer, {MATRICES})\n"


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_two_optimizers(processes: int, here: Path) -> None:
    """Plain code, with the second one as `extra`: it continues as if it had not stopped."""
    change(
        "    optimizer = instantiate(cfg.optimizer, groups)\n",
        FIRST + SECOND,
    )
    change("tell=run.info, tasks=evaluator.tasks,", 'tell=run.info, tasks=evaluator.tasks, extra={"second": second},')
    change("                optimizer.step()\n", "                optimizer.step()\n                second.step()\n")
    change("            optimizer.zero_grad()\n", "            optimizer.zero_grad()\n            second.zero_grad()\n")
    train("one", CONSTANT, processes=processes)
    train("parts", CONSTANT, "max_steps=2", processes=processes)
    train("parts", CONSTANT, processes=processes)
    one, other = (load_file(f"{run}/model/model.safetensors") for run in ("one", "parts"))
    assert all(torch.equal(one[name], other[name]) for name in one)
