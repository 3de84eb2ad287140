"""A custom model, as shown in docs/components.md."""

import json
import shutil
from pathlib import Path

import full_finetune
import lora_finetune
import pytest
import torch
from helpers import curve_steps, run_processes
from safetensors.torch import load_file, save_file

from tune import config

RUN_VARIANTS = Path(__file__).with_name("run_variants.py")
PAGE = Path(__file__).parents[2] / "docs" / "components.md"


@pytest.fixture
def folder(checkpoint, tmp_path, monkeypatch):
    """A folder with weights and a tokenizer; the module `mine` has the code of the page."""
    section = PAGE.read_text().split("## Your own model")[1]
    (tmp_path / "mine.py").write_text(section.split("```python\n")[1].split("```")[0])
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{Path(config.__file__).parents[2]}")
    import mine

    torch.manual_seed(0)
    folder = tmp_path / "model"
    folder.mkdir()
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copyfile(checkpoint / file, folder / file)
    model = mine.build(str(folder))
    save_file(model.state_dict(), folder / "model.safetensors")
    return folder


def losses(run):
    return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize(
    "recipe", [full_finetune, pytest.param(lora_finetune, marks=pytest.mark.slow)], ids=lambda recipe: recipe.__name__
)
def test_custom_model_trains_and_is_exported(recipe, folder, chats, tmp_path):
    common = [
        "model._component_=mine.build", f"model.path={folder}", f"dataset.path={chats}", "max_seq_len=128",
        "global_batch_size=8", "micro_batch_size=2", "compute.dtype=fp32", "device=cpu", "optimizer.lr=1e-2",
        f"max_steps={curve_steps()}", "checkpointer.every=2",
    ]  # fmt: skip
    run = tmp_path / "run"
    recipe.main(config.load(recipe.__name__, [*common, f"output_dir={run}"]))
    assert losses(run)[-1] < losses(run)[0]
    if recipe is full_finetune:
        before, after = (load_file(place / "model.safetensors") for place in (folder, run / "model"))
        assert {name: tensor.shape for name, tensor in after.items()} == {
            n: weight.shape for n, weight in before.items()
        }
        assert all(not torch.equal(after[name], tensor) for name, tensor in before.items())
    run_processes(RUN_VARIANTS, 2, recipe.__name__, str(tmp_path / "two"), json.dumps(common), json.dumps({"run": []}))
    assert losses(tmp_path / "two" / "run") == pytest.approx(losses(run), rel=1e-5)
