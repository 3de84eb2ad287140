"""The three kinds of a reference: the adapter switched off, a kept copy of what is trained, and a second model."""

import shutil

import pytest
import torch
from helpers import make_adapter, save_checkpoint
from torch.testing import assert_close

from tune import checkpointers, distributed
from tune.checkpointers import Pretrained, load_model
from tune.collators import Batch
from tune.errors import TuneError
from tune.models import build
from tune.peft import LoRA, Reference, adapter, add_adapters, load_or_initialize
from tune.tokenizers import Tokenizer

TOKENS = torch.arange(5, 85).view(2, 40)


def logits(hidden, weight, batch):
    return hidden @ weight.T


def of_recipe(checkpoint, lora, path=None):
    """Return a model and its reference, made in the order of a recipe."""
    world, tokenizer = distributed.init("cpu"), Tokenizer(str(checkpoint))
    with torch.device("meta"):
        model = build(str(checkpoint))
    weights = Pretrained(str(checkpoint), model)
    if lora:
        add_adapters(model, lora)
    distributed.parallelize(model, world, dtype="fp32")
    reference = Reference(model, lora, path, tokenizer=tokenizer)
    weights.load(model)
    load_or_initialize(model, lora, 0)
    reference.load("fp32")
    return model, reference


def train(model):
    """Change all that is trained."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    assert trained
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in trained:
            parameter += 0.05 * torch.randn(parameter.shape, generator=generator)


@pytest.fixture
def continued(checkpoint, tmp_path):
    return adapter(path=str(make_adapter(checkpoint, tmp_path / "adapter", 1)))


KINDS = {
    "switched off": (LoRA(rank=4), 0),
    "switched off, by its name": (LoRA(rank=4), 0),
    "kept: an adapter of a file": ("continued", "all"),
    "kept: a module that is trained whole": (LoRA(rank=4, modules_to_save=["norm"]), "all"),
    "kept: rows of tokens": (LoRA(rank=4, trainable_tokens=[7, 9]), "any"),
    "second model": (None, 0),
}


@pytest.mark.parametrize("kind", KINDS)
def test_reference_stays_the_model_before_the_first_step(kind, checkpoint, continued):
    lora, kept = KINDS[kind]
    lora = continued if lora == "continued" else lora
    model, reference = of_recipe(checkpoint, lora, "adapter_off" if "by its name" in kind else None)
    batch = Batch.of(TOKENS)
    model.eval()
    before = model(batch, logits).detach()
    assert_close(reference(batch, logits), before)
    train(model)
    after = model(batch, logits).detach()
    assert (after - before).abs().max() > 1e-3
    assert_close(reference(batch, logits), before)  # twice: a kept copy is put back
    assert_close(reference(batch, logits), before)
    assert_close(model(batch, logits).detach(), after, rtol=0, atol=0)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    assert len(reference.kept) == (0 if kept == 0 else len(trained)) or (kept == "any")
    assert (reference.frozen is not None) == (kind == "second model")
    assert not reference(batch, logits).requires_grad


def test_reference_in_training_has_no_dropout_and_leaves_the_mode(checkpoint):
    for lora in (LoRA(rank=4, dropout=0.5), LoRA(rank=4, dropout=0.5, modules_to_save=["norm"])):
        model, reference = of_recipe(checkpoint, lora)
        model.train()
        assert_close(reference(Batch.of(TOKENS), logits), load_model(str(checkpoint))(Batch.of(TOKENS), logits))
        assert model.training


@pytest.mark.parametrize("lora", [None, LoRA(rank=4)])
def test_folder_of_another_model(lora, checkpoint, tmp_path):
    other = save_checkpoint(tmp_path / "other", num_hidden_layers=2)
    _, reference = of_recipe(checkpoint, lora, str(other))
    expected = load_model(str(other))(Batch.of(TOKENS), logits)
    assert_close(reference(Batch.of(TOKENS), logits), expected.detach())


def test_its_problems_are_found_before_weights_are_read(checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr(checkpointers.DiskTensor, "read", lambda *_: pytest.fail("weights were read"))
    model, tokenizer = load_meta(checkpoint), Tokenizer(str(checkpoint))
    with pytest.raises(TuneError, match=r"reference: .*nowhere"):
        Reference(model, None, str(tmp_path / "nowhere"), tokenizer=tokenizer)
    other = shutil.copytree(checkpoint, tmp_path / "other")
    text = (other / "tokenizer.json").read_text()
    (other / "tokenizer.json").write_text(text.replace('"<|im_start|>"', '"<|other|>"'))
    with pytest.raises(TuneError, match="reference"):
        Reference(model, None, str(other), tokenizer=tokenizer)


def load_meta(checkpoint):
    with torch.device("meta"):
        return build(str(checkpoint))
