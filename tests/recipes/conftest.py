import gc
import importlib.util
import json
import random
import shutil
import signal
import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import full_finetune
import pytest
import torch
from helpers import WORDS
from safetensors.torch import load_file, save_file

from tune import peft


@dataclass(frozen=True)
class Inputs:
    """A copy of a model, rows and a finished run, for a test to modify; `run` is the run folder."""

    folder: Path

    @property
    def model(self) -> Path:
        return self.folder / "model"

    @property
    def rows(self) -> Path:
        return self.folder / "chats.jsonl"

    @property
    def run(self) -> Path:
        return self.folder / "run"

    def settings(self, *overrides: str) -> list[str]:
        return [
            f"model.path={self.model}", f"dataset.path={self.rows}", f"output_dir={self.run}", "max_seq_len=128",
            "device=cpu", "compute.dtype=fp32", "global_batch_size=4", "max_steps=2", "checkpointer.every=1",
            *overrides,
        ]  # fmt: skip

    def change_json(self, name: str, **changes) -> None:
        file = self.model / name
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    def change_tensors(self, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
        tensors = load_file(self.model / "model.safetensors")
        change(tensors)
        save_file(tensors, self.model / "model.safetensors")

    def make_overflow(self) -> None:
        """Scale the output head: the weights stay finite, but a step overflows."""
        self.change_tensors(lambda tensors: tensors["lm_head.weight"].mul_(1e37))

    def write_rows(self, *rows: object, name: str = "rows.jsonl") -> list[str]:
        file = self.folder / name
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return [f"dataset.path={file}"]


@pytest.fixture(scope="session")
def run_recipe():
    """Function that runs a recipe's command line in this process and returns its exit code."""

    def run(settings: list[str], recipe=full_finetune) -> int:
        handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", [recipe.__name__, *settings])
            try:
                recipe.main()
            except SystemExit as end:
                return end.code
            finally:
                for number, handler in handlers.items():
                    signal.signal(number, handler)
        return 0

    return run


@pytest.fixture(scope="session")
def pairs(tmp_path_factory):
    """16 preference rows, some with two rejected answers; the text shows which answers were chosen."""
    draw = random.Random(3)
    file = tmp_path_factory.mktemp("pairs") / "pairs.jsonl"

    def text(most):
        return " ".join(draw.choices(WORDS, k=draw.randint(1, most)))

    rows = [
        {"instruction": text(9), "chosen": text(6), "rejected": [f"{text(9)}.", *[text(5)] * (number % 3 == 0)]}
        for number in range(16)
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.fixture(scope="session")
def contents():
    def read(folder: Path) -> dict[Path, bytes]:
        return {file.relative_to(folder): file.read_bytes() for file in folder.rglob("*") if file.is_file()}

    return read


@pytest.fixture(scope="session")
def killing():
    """The module benchmarks/kill_and_resume.py."""
    script = Path(__file__).parents[2] / "benchmarks" / "kill_and_resume.py"
    spec = importlib.util.spec_from_file_location("kill_and_resume", script)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def finished(checkpoint, chats, run_recipe, tmp_path_factory):
    """A folder with everything that `Inputs` names, including the finished run."""
    inputs = Inputs(tmp_path_factory.mktemp("finished"))
    shutil.copytree(checkpoint, inputs.model)
    shutil.copyfile(chats, inputs.rows)
    assert run_recipe(inputs.settings()) == 0
    return inputs.folder


@pytest.fixture
def inputs(finished, tmp_path):
    return Inputs(shutil.copytree(finished, tmp_path / "inputs"))


@pytest.fixture
def frozen_in_steps(monkeypatch):
    """Per step, whether the frozen model is still in memory. Garbage collection is off."""
    references, alive = [], []
    shard, step = peft.OpenedModel.shard, torch.optim.AdamW.step

    def loaded(*args, **kwargs):
        frozen = shard(*args, **kwargs)
        references.append(weakref.ref(frozen.blocks[0]))
        return frozen

    def stepped(*args, **kwargs):
        alive.append(references[0]() is not None)
        return step(*args, **kwargs)

    monkeypatch.setattr(peft.OpenedModel, "shard", loaded)
    monkeypatch.setattr(torch.optim.AdamW, "step", stepped)
    gc.disable()
    yield alive
    gc.enable()
