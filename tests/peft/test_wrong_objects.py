"""Components called with the wrong objects raise a TuneError that names the argument."""

import pytest
from torch import nn

from tune.checkpointers import Pretrained, export
from tune.errors import TuneError
from tune.peft import LoRA, add_adapters, export_adapter, load_adapter


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([nn.Linear(4, 4)])
        self.norm = nn.LayerNorm(4)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda folder: add_adapters(folder, LoRA()), "model: "),
        (lambda folder: add_adapters(Mixed(), 8), "lora: "),
        (lambda folder: add_adapters(Mixed(), nn.Linear(2, 2)), "lora: Linear "),
        (lambda folder: add_adapters(Mixed(), LoRA(target_modules=["norm"])), "adapter.target_modules: 'norm' is a"),
        (lambda folder: Pretrained(Mixed(), folder), "path: "),
        (lambda folder: export(Mixed(), None, f"{folder}/out", source=f"{folder}/none"), "source: "),
        (lambda folder: export(Mixed(), folder, f"{folder}/out", source=folder), "tokenizer: "),
        (lambda folder: export_adapter(folder, f"{folder}/out"), "model: "),
    ],
)  # fmt: skip
def test_wrong_object_is_named(call, says, tmp_path):
    with pytest.raises(TuneError) as error:
        call(str(tmp_path))
    assert str(error.value).startswith(says) and not [*tmp_path.iterdir()]


def test_adapter_needs_a_model_with_adapters(tmp_path):
    model = Mixed()
    add_adapters(model, LoRA(rank=2, target_modules=["0"]))
    export_adapter(model, tmp_path / "adapter")
    with pytest.raises(TuneError, match="add_adapters"):
        load_adapter(Mixed(), tmp_path / "adapter")
