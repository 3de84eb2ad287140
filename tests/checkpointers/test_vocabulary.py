"""New tokens: transformers reads the same model with the same ids, and nothing else changes."""

import json

import pytest
import torch
from helpers import save_checkpoint
from torch.testing import assert_close

from tune.checkpointers import add_tokens
from tune.cli import main
from tune.errors import TuneError

transformers = pytest.importorskip("transformers")
NEW = ["<|tool_call|>", "<|end_of_call|>"]
TOKENS = torch.arange(50)[None]


@pytest.mark.parametrize(
    "settings", [{}, {"tie_word_embeddings": True}, {"vocab_size": 320}], ids=["untied", "tied", "rows in reserve"]
)
def test_new_tokens(tmp_path, settings):
    base = save_checkpoint(tmp_path / "base", **settings)
    known = len(transformers.AutoTokenizer.from_pretrained(base))
    ids = add_tokens(base, tmp_path / "out", NEW)
    assert ids == [known, known + 1]
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.encode(f"a{NEW[0]}b{NEW[1]}", add_special_tokens=False)[1::2] == ids
    assert tokenizer.decode(ids, skip_special_tokens=True) == ""

    before = transformers.AutoModelForCausalLM.from_pretrained(base)
    after = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert (
        after.config.vocab_size == len(after.get_input_embeddings().weight) == max(known + 2, before.config.vocab_size)
    )
    assert_close(after(TOKENS).logits[..., :known], before(TOKENS).logits[..., :known])
    for old, new in (
        (before.get_input_embeddings(), after.get_input_embeddings()),
        (before.get_output_embeddings(), after.get_output_embeddings()),
    ):
        assert_close(new.weight[ids], old.weight[:known].mean(dim=0).expand(2, -1))


def test_existing_tokens_are_rejected(checkpoint, tmp_path):
    with pytest.raises(TuneError, match=r"already has '<\|im_end\|>' in its vocabulary"):
        add_tokens(checkpoint, tmp_path / "out", ["<|im_end|>", "<new>"])
    assert not (tmp_path / "out").exists()


def test_add_tokens_command(checkpoint, tmp_path, capsys):
    main(["add-tokens", str(checkpoint), str(tmp_path / "out"), *NEW])
    vocab_size = json.loads((tmp_path / "out" / "config.json").read_text())["vocab_size"]
    assert f"'adapter.trainable_tokens=[{vocab_size - 2},{vocab_size - 1}]'" in capsys.readouterr().out
