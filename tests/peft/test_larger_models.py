"""Adapters of a language model inside a multimodal one, exchanged with PEFT, which uses other names."""

import pytest
import torch
from models.test_families import GEMMA3, MISTRAL3, QWEN3_5, make_pair, random_tokens
from stacked_experts import NoTokenizer
from torch.testing import assert_close

from tune import distributed
from tune.checkpointers import load_model
from tune.peft import LoRA, add_adapters, export_adapter, load_adapter, merge
from tune.peft.files import read_adapter

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

TOKENS = random_tokens(2, 30) % 127
WHOLE, TEXT = transformers.AutoModelForImageTextToText, transformers.AutoModelForCausalLM
LARGER = {
    "gemma3": ("Gemma3Config", GEMMA3),
    "mistral3": ("Mistral3Config", MISTRAL3),
    "qwen3_5": ("Qwen3_5Config", QWEN3_5 | {"tie_word_embeddings": False}),
}


def make_larger(family, folder):
    config_class, fields = LARGER[family]
    return make_pair(getattr(transformers, config_class)(**fields), folder, WHOLE)


KINDS = {
    "patterns": {"target_modules": ["q_proj", "down_proj"], "rank_pattern": {"layers.1.mlp.down_proj": 4}},
    "dora": {"dora": True},
    "whole modules": {"modules_to_save": ["embed_tokens", "norm"]},
    "tokens": {"trainable_tokens": [3, 7]},
}


@pytest.mark.weekly
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", LARGER)
def test_our_adapter_in_peft_and_merged(family, kind, tmp_path, recwarn):
    base = tmp_path / "base"
    theirs, ours = make_larger(family, base)
    lora = LoRA(**{"rank": 2, "target_modules": ["q_proj"]} | KINDS[kind])
    add_adapters(ours, lora)
    for parameter in ours.parameters():
        if parameter.requires_grad:
            parameter.data += 0.1 * torch.randn_like(parameter)
    logits = ours(TOKENS)
    assert (logits - theirs(TOKENS).logits).abs().max() > 1e-3
    export_adapter(ours, tmp_path / "adapter", world=distributed.init("cpu"), base=str(base), tokenizer=NoTokenizer())
    recwarn.clear()
    adapted = peft.PeftModel.from_pretrained(WHOLE.from_pretrained(base), tmp_path / "adapter").eval()
    assert not any(
        "adapter keys" in str(warning.message) for warning in recwarn
    )  # PEFT expects none outside the language model
    assert_close(adapted(TOKENS).logits, logits, atol=1e-5, rtol=1e-5)
    merge(base, tmp_path / "adapter", tmp_path / "merged")
    assert_close(WHOLE.from_pretrained(tmp_path / "merged").eval()(TOKENS).logits, logits, atol=1e-5, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "auto"), [("gemma3", WHOLE), ("mistral3", WHOLE), ("qwen3_5", WHOLE), ("qwen3_5", TEXT)]
)
def test_peft_adapter_in_our_model_and_merged(family, auto, tmp_path):
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    make_larger(family, base)
    model = auto.from_pretrained(base)
    wanted = [name for name, _ in model.named_modules() if name.endswith(".1.self_attn.q_proj") and "visi" not in name]
    config = peft.LoraConfig(
        r=2, target_modules=rf"({wanted[0]}|.*language_model\.layers.*\.up_proj|model\.layers.*\.up_proj)",
        rank_pattern={wanted[0]: 3},
    )  # fmt: skip
    theirs = peft.get_peft_model(model, config).eval()
    for name, parameter in theirs.named_parameters():
        if "lora" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    theirs.save_pretrained(adapter)
    ours, logits = load_model(str(base)), theirs(TOKENS).logits
    assert (logits - ours(TOKENS)).abs().max() > 0.1
    add_adapters(ours, read_adapter(str(adapter)))
    load_adapter(ours, str(adapter))
    assert_close(ours(TOKENS), logits, atol=1e-5, rtol=1e-5)
    merge(base, adapter, tmp_path / "merged")
    assert_close(load_model(str(tmp_path / "merged"))(TOKENS), logits, atol=1e-5, rtol=1e-5)
