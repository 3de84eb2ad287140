"""A folder with the files of a model and of an adapter is refused by all verbs in the same way."""

import shutil
from pathlib import Path

import pytest
import torch
from helpers import make_adapter, save_checkpoint
from torch.testing import assert_close

from tune.checkpointers import load_model
from tune.cli import main
from tune.errors import TuneError
from tune.files import is_adapter
from tune.models import build, hf
from tune.peft import merge, open_model

TOKENS = torch.arange(5, 85).view(2, 40)


@pytest.fixture(scope="module")
def folders(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders with an adapter, with another model, and with the files of both."""
    folder = tmp_path_factory.mktemp("folders")
    adapter = make_adapter(checkpoint, folder / "adapter", 1)
    other = save_checkpoint(folder / "other", initializer_range=0.1)
    both = Path(shutil.copytree(other, folder / "both"))
    shutil.copytree(adapter, both, dirs_exist_ok=True)
    return {"adapter": adapter, "other": other, "both": both, "base": checkpoint}


def command_lines(both: str, base: str, chats: str, out: str) -> dict[str, list[str]]:
    run = [f"model.path={both}", f"dataset.path={chats}", f"output_dir={out}", "device=cpu", "max_steps=1"]
    return {
        "run": ["run", "full_finetune", *run],
        "run with an adapter": ["run", "lora_finetune", *run],
        "run of a reference": ["run", "preference_finetune", *run[1:], f"model.path={base}", f"reference={both}"],
        "validate": ["validate", "full_finetune", *run],
        "validate with an adapter": ["validate", "lora_finetune", *run],
        "plan": ["plan", "lora_finetune", *run[:2], "--device", "h100"],
        "eval": ["eval", both, "--data", chats],
        "generate": ["generate", both, "--prompt", "a"],
        "generate with an adapter": ["generate", both, "--adapter", both, "--prompt", "a"],
        "chat": ["chat", both],
        "chat --compare": ["chat", base, "--compare", both],
        "quantize": ["quantize", both, "--to", "int8", "--out", out],
        "export": ["export", both, "--to", "gguf", "--out", out],
        "export to hf": ["export", both, "--to", "hf", "--out", out],
        "export of the adapter": ["export", both, "--to", "gguf-lora", "--out", out],
        "merge": ["merge", both, both, out],
        "add-tokens": ["add-tokens", both, out, "<|one|>"],
        "verify": ["verify", both, "--against", base],
        "verify --against": ["verify", base, "--against", both],
        "push": ["push", both, "someone/model"],
    }


@pytest.mark.parametrize("verb", command_lines("", "", "", ""))
def test_every_verb_refuses_both(
    verb: str, folders: dict[str, Path], chats: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = command_lines(str(folders["both"]), str(folders["base"]), str(chats), str(tmp_path / "out"))[verb]
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code in (1, 2)
    shown = " ".join("".join(capsys.readouterr()).split())
    for fact in (folders["both"], "model.safetensors", "adapter_config.json", folders["base"]):
        assert str(fact) in shown
    assert "Traceback" not in shown and not (tmp_path / "out").exists()


@pytest.mark.slow
@torch.no_grad()
def test_adapter_is_taken_where_only_an_adapter_fits(folders: dict[str, Path], tmp_path: Path) -> None:
    base, both = folders["base"], folders["both"]
    expected = open_model(folders["adapter"]).load()(TOKENS)
    merge(base, both, tmp_path / "out")
    for logits in (open_model(base, [both]).load()(TOKENS), load_model(tmp_path / "out")(TOKENS)):
        assert_close(logits, expected, atol=1e-5, rtol=1e-5)


def test_components_refuse_both(folders: dict[str, Path]) -> None:
    for call in (build, hf, load_model, open_model):
        with pytest.raises(TuneError, match=r"adapter_config\.json"):
            call(str(folders["both"]))


def test_copy_of_the_config_of_its_base_leaves_an_adapter(folders: dict[str, Path], tmp_path: Path) -> None:
    """Axolotl and Unsloth save one with adapters."""
    folder = Path(shutil.copytree(folders["adapter"], tmp_path / "adapter"))
    shutil.copy(folders["base"] / "config.json", folder)
    assert is_adapter(folder) and open_model(folder).folders.base == folders["base"]
    for call in (build, load_model):
        with pytest.raises(TuneError, match=rf"{folder} is an adapter.*adapter.path={folder}"):
            call(str(folder))


def test_adapter_with_other_tensors_is_an_adapter(folders: dict[str, Path], tmp_path: Path) -> None:
    """transformers reads weights only next to a config.json."""
    adapter = Path(shutil.copytree(folders["adapter"], tmp_path / "adapter"))
    shutil.copyfile(adapter / "adapter_model.safetensors", adapter / "optimizer.safetensors")
    assert is_adapter(adapter)
    assert open_model(adapter).folders.adapters == (adapter,)
