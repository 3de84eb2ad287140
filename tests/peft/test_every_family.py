"""Adapters of every family match PEFT: the same logits with the adapter and after merging it."""

import pytest
import torch
from helpers import save_checkpoint, weekly_but
from models.test_families import VARIANTS
from torch.testing import assert_close

from tune import distributed
from tune.checkpointers import load_model
from tune.peft import LoRA, add_adapters, export_adapter, merge
from tune.tokenizers import Tokenizer

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

FAMILIES = {name.partition("-")[0]: variant for name, variant in reversed(VARIANTS.items())}
TOKENS = torch.arange(5, 85).view(2, 40)


@pytest.mark.weekly
@pytest.mark.parametrize("family", weekly_but([*FAMILIES][::4], FAMILIES))
def test_adapter_of_every_family_matches_peft(family, tmp_path):
    config_class, changes = FAMILIES[family]
    folder = save_checkpoint(tmp_path / "base", config_class, **{"pad_token_id": None} | changes)
    model, lora = load_model(str(folder)), LoRA(rank=4, alpha=8, modules_to_save=["norm"])
    base_logits = model(TOKENS)
    add_adapters(model, lora)
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += 0.05 * torch.randn(parameter.shape, generator=generator)
    logits = model(TOKENS)
    assert (logits - base_logits).abs().max() > 1e-3

    world, adapter = distributed.init("cpu"), tmp_path / "adapter"
    export_adapter(model, adapter, world=world, base=str(folder), tokenizer=Tokenizer(str(folder)))
    base = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    theirs = peft.PeftModel.from_pretrained(base, adapter).eval()
    assert_close(theirs(TOKENS).logits, logits, atol=1e-5, rtol=1e-5)
    merge(folder, adapter, tmp_path / "merged")
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged", attn_implementation="eager").eval()
    assert_close(merged(TOKENS).logits, logits, atol=1e-5, rtol=1e-5)
